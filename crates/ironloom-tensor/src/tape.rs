//! Reverse-mode differentiation over fused operations.
//!
//! An operation that runs under a tape adds one node: what it read, what it wrote, and a closure that turns the gradients
//! of its outputs into gradients of its inputs. [`Tape::backward`] walks the nodes once, last to first. Gradients are
//! single precision; a tensor's first writer sets its gradient and later ones add to it, so nothing is zeroed first.

use std::{
    cell::RefCell,
    collections::HashMap,
    sync::atomic::{AtomicU64, Ordering},
};

use crate::{Result, Tensor, error::expect_shape};

/// What a tape knows a tensor by; unique in the process.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct TensorId(u64);

impl TensorId {
    pub(crate) fn next() -> Self {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        Self(NEXT.fetch_add(1, Ordering::Relaxed))
    }
}

type Backward = Box<dyn Fn(&Tensor) -> Result<Vec<Tensor>>>;

struct Node {
    output: TensorId,
    inputs: Vec<TensorId>,
    backward: Backward,
}

/// The record of a forward pass.
#[derive(Default)]
pub struct Tape {
    nodes: RefCell<Vec<Node>>,
}

/// The gradients that a backward pass found.
pub type Gradients = HashMap<TensorId, Tensor>;

impl Tape {
    /// An empty tape.
    pub fn new() -> Self {
        Self::default()
    }

    /// Records an operation: `backward` gets the output's gradient and returns one gradient per input.
    pub(crate) fn record(
        &self,
        output: &Tensor,
        inputs: &[&Tensor],
        backward: impl Fn(&Tensor) -> Result<Vec<Tensor>> + 'static,
    ) {
        let inputs = inputs.iter().map(|tensor| tensor.id()).collect();
        self.nodes.borrow_mut().push(Node { output: output.id(), inputs, backward: Box::new(backward) });
    }

    /// The gradients of everything `output` was made from, where `gradient` is the gradient of `output`. Ends the tape.
    ///
    /// # Errors
    /// An operation's backward fails, or `gradient` has another shape than `output`.
    pub fn backward(&self, output: &Tensor, gradient: Tensor) -> Result<Gradients> {
        expect_shape("backward", "the gradient", *output.shape(), gradient.shape())?;
        let mut gradients = Gradients::from([(output.id(), gradient)]);
        for node in self.nodes.take().into_iter().rev() {
            let Some(gradient) = gradients.get(&node.output) else { continue };
            for (input, gradient) in node.inputs.iter().zip((node.backward)(gradient)?) {
                let total = match gradients.remove(input) {
                    None => gradient,
                    Some(earlier) => {
                        let shape = *earlier.shape();
                        let mut sum = earlier.into_f32()?;
                        sum.iter_mut().zip(gradient.as_f32()?).for_each(|(sum, term)| *sum += term);
                        Tensor::from_f32(sum, shape)?
                    }
                };
                gradients.insert(*input, total);
            }
        }
        Ok(gradients)
    }
}

impl std::fmt::Debug for Tape {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Tape({} operations)", self.nodes.borrow().len())
    }
}
