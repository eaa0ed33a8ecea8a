//! Where what is learnt lies on a graphics card: every parameter in one piece of memory, in single precision, with its rounded
//! copy and its gradient at the same places of two others.
//!
//! So an optimizer's step is one kernel over everything, the norm of the gradient is one sum, and weights that read the same
//! input and lie one behind the other (q, k, v; gate, up) are one matrix to a product.

use ironloom_core::Shape;
use ironloom_kernels::{self as kernels, Buffer, Form, Gpu, Slice};

use crate::{Device, Error, Gradients, Result, Tensor};

/// Elements that each parameter begins at a multiple of: the blocks of 8-bit moments.
pub const ARENA_ALIGNMENT: usize = 256;

/// The parameters of a model on a graphics card. Gaps between them hold zeros.
#[derive(Debug)]
pub struct Arena {
    gpu: Gpu,
    values: Buffer,
    operands: Buffer,
    gradients: Buffer,
    places: Vec<ArenaPlace>,
    parameters: Vec<Tensor>,
    elements: usize,
}

/// Where a parameter lies in an [`Arena`], in elements.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ArenaPlace {
    /// Its first element.
    pub start: usize,
    /// How many it has.
    pub elements: usize,
    /// Whether weight decay is for it: those it is for come first.
    pub decays: bool,
}

const NAME: &str = "the parameters";

impl Arena {
    /// Room for parameters of these shapes, each with whether weight decay is for it. Matrices are as wide as products on a card
    /// read them: a multiple of 8.
    ///
    /// # Errors
    /// The device is the processor or has no room, or a matrix has another width.
    pub fn new(device: &Device, parameters: &[(Shape, bool)]) -> Result<Self> {
        let gpu = device.card(NAME)?.gpu().clone();
        let mut places = vec![ArenaPlace { start: 0, elements: 0, decays: false }; parameters.len()];
        let mut elements = 0usize;
        for decays in [true, false] {
            for (place, (shape, _)) in places.iter_mut().zip(parameters).filter(|(_, (_, wanted))| *wanted == decays) {
                let width = shape.dims().last().copied().unwrap_or(1);
                if shape.rank() > 1 && !width.is_multiple_of(8) {
                    return Err(Error::Width { operation: "training on a graphics card", multiple: 8, found: width });
                }
                *place = ArenaPlace { start: elements, elements: shape.elements()?, decays };
                let end = elements.checked_add(place.elements).ok_or(ironloom_core::Error::SizeOverflow)?;
                elements = end.next_multiple_of(ARENA_ALIGNMENT);
            }
        }
        let cleared = |bytes| gpu.allocate_cleared(bytes, NAME);
        let (values, operands, gradients) = (cleared(4 * elements)?, cleared(2 * elements)?, cleared(4 * elements)?);
        let parameters = places
            .iter()
            .zip(parameters)
            .map(|(place, (shape, _))| {
                Tensor::on_cuda(&gpu, values.clone(), Form::F32, *shape)
                    .starting_at(place.start)
                    .with_twin(operands.clone())
            })
            .collect();
        Ok(Self { gpu, values, operands, gradients, places, parameters, elements })
    }

    /// Parameter `number`, in the order of [`Arena::new`].
    ///
    /// # Errors
    /// There are fewer.
    pub fn parameter(&self, number: usize) -> Result<&Tensor> {
        let expected = self.parameters.len();
        self.parameters.get(number).ok_or(Error::Count {
            operation: NAME,
            what: "the number of parameters",
            expected,
            found: number + 1,
        })
    }

    /// Sets parameter `number`; [`Arena::round`] comes after the last.
    ///
    /// # Errors
    /// There are fewer, or its size is another.
    pub fn set(&self, number: usize, values: &[f32]) -> Result<()> {
        let expected = self.parameter(number)?.shape().elements()?;
        crate::error::expect_count(NAME, "the elements of a parameter", expected, values.len())?;
        let place = self.values.part(4 * self.places[number].start, 4 * expected)?;
        Ok(self.gpu.write(place, bytemuck::cast_slice(values))?)
    }

    /// Rounds all parameters for products, after they were set.
    ///
    /// # Errors
    /// The device fails.
    pub fn round(&self) -> Result<()> {
        let (rows, width) = (self.elements / ARENA_ALIGNMENT, ARENA_ALIGNMENT);
        Ok(kernels::convert(&self.gpu, self.values.slice(), self.operands.slice(), Form::Bf16, rows, width)?)
    }

    /// Gives the gradients of all parameters their places.
    pub fn attach(&self, gradients: &mut Gradients) {
        for (parameter, place) in self.parameters.iter().zip(&self.places) {
            let gradient = Tensor::on_cuda(&self.gpu, self.gradients.clone(), Form::F32, *parameter.shape());
            gradients.keep_in(parameter, gradient.starting_at(place.start));
        }
    }

    /// Sets to zero the gradients of parameters that had none in this step.
    ///
    /// # Errors
    /// The device fails.
    pub fn clear_unwritten(&self, gradients: &Gradients) -> Result<()> {
        for (parameter, place) in self.parameters.iter().zip(&self.places) {
            if !gradients.is_written(parameter) {
                self.gpu.clear(self.gradients.part(4 * place.start, 4 * place.elements)?)?;
            }
        }
        Ok(())
    }

    /// The card.
    pub fn gpu(&self) -> &Gpu {
        &self.gpu
    }

    /// Where the parameters lie, in the order of [`Arena::new`].
    pub fn places(&self) -> &[ArenaPlace] {
        &self.places
    }

    /// Elements of each of the three pieces of memory, a multiple of [`ARENA_ALIGNMENT`].
    pub fn elements(&self) -> usize {
        self.elements
    }

    /// All parameters, in single precision.
    pub fn values(&self) -> Slice<'_> {
        self.values.slice()
    }

    /// All parameters as bfloat16.
    pub fn operands(&self) -> Slice<'_> {
        self.operands.slice()
    }

    /// All gradients, in single precision.
    pub fn gradients(&self) -> Slice<'_> {
        self.gradients.slice()
    }
}
