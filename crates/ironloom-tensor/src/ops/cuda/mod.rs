//! The operations of a training pass on a graphics card, with their gradients.
//!
//! Rows of the residual stream and their gradients are single precision; activations and theirs are bfloat16; weights are held
//! twice, in single precision and rounded ([`Arena`](crate::Arena)), and their gradients are single precision. Who writes a
//! gradient of the residual stream writes it rounded too, so that no product waits for a conversion. Whatever changes between
//! steps lies on the card ([`Figures`]), so that a whole step can be captured and replayed.

pub(super) mod attention;
pub(super) mod cross_entropy;
mod expert_adapters;
pub(super) mod experts;
pub(super) mod figures;
pub(super) mod linear;
pub(super) mod rows;
