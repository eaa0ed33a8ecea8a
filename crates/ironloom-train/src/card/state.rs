//! What an optimizer remembers on a card, and its step there.
//!
//! Parameters that lie one behind the other and are treated alike are a run, which one kernel moves. Muon works on whole matrices, so
//! that each of its matrices is a run of its own.

use std::ops::Range;

use ironloom_kernels::{self as kernels, Buffer, Gpu, ParameterRange, Slice};
use ironloom_tensor::{ARENA_ALIGNMENT, Arena, CudaDevice};

use super::{NAME, Named, cleared};
use crate::{
    Error, Result,
    optimizer::{
        AdamWOptions, FIRST, FIRST_ABSMAX, FIRST_CODES, MOMENTUM, MuonOptions, OptimizerOptions, ParameterRole, SECOND,
        SECOND_ABSMAX, SECOND_CODES, StateKind,
    },
};

/// Parameters that follow each other and are treated alike.
#[derive(Debug)]
pub(super) struct StateRun {
    pub(super) start: usize,
    elements: usize,
    decays: bool,
    pub(super) state: CardState,
}

/// What is remembered of a run.
#[derive(Debug)]
pub(super) enum CardState {
    None,
    Moments([Buffer; 2]),
    /// Codes and largest values of the first moments, and of the second.
    Moments8bit([Buffer; 4]),
    Momentum(Buffer),
    /// Muon's, of a matrix or a stack of matrices of these rows and columns.
    MatrixMomentum(Buffer, [usize; 2]),
}

/// What a part of a state holds for each element, or for each block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum PartKind {
    Numbers,
    Codes,
    Largest,
}

impl PartKind {
    pub(super) fn bytes(self) -> usize {
        if self == Self::Codes { 1 } else { 4 }
    }

    /// Where the numbers for `elements` elements from `start` on are, and how many.
    pub(super) fn range(self, start: usize, elements: usize) -> (usize, usize) {
        const BLOCK: usize = kernels::AdamW8bit::BLOCK;
        match self {
            Self::Numbers | Self::Codes => (start, elements),
            Self::Largest => (start / BLOCK, elements.div_ceil(BLOCK)),
        }
    }
}

impl CardState {
    fn new(gpu: &Gpu, kind: StateKind, sides: Option<[usize; 2]>, elements: usize) -> Result<Self> {
        let blocks = elements.div_ceil(kernels::AdamW8bit::BLOCK);
        if let Some(sides) = sides {
            return Ok(Self::MatrixMomentum(cleared(gpu, 4 * elements)?, sides));
        }
        Ok(match kind {
            StateKind::None => Self::None,
            StateKind::Moments => Self::Moments([cleared(gpu, 4 * elements)?, cleared(gpu, 4 * elements)?]),
            StateKind::Moments8bit => Self::Moments8bit([
                cleared(gpu, elements)?,
                cleared(gpu, 4 * blocks)?,
                cleared(gpu, elements)?,
                cleared(gpu, 4 * blocks)?,
            ]),
            StateKind::Momentum => Self::Momentum(cleared(gpu, 4 * elements)?),
        })
    }

    /// The names of its parts as they are saved.
    pub(super) fn parts(&self) -> Vec<(&'static str, &Buffer, PartKind)> {
        match self {
            Self::None => Vec::new(),
            Self::Moments([first, second]) => {
                vec![(FIRST, first, PartKind::Numbers), (SECOND, second, PartKind::Numbers)]
            }
            Self::Moments8bit([first, first_largest, second, second_largest]) => vec![
                (FIRST_CODES, first, PartKind::Codes),
                (FIRST_ABSMAX, first_largest, PartKind::Largest),
                (SECOND_CODES, second, PartKind::Codes),
                (SECOND_ABSMAX, second_largest, PartKind::Largest),
            ],
            Self::Momentum(momentum) | Self::MatrixMomentum(momentum, _) => {
                vec![(MOMENTUM, momentum, PartKind::Numbers)]
            }
        }
    }
}

impl StateRun {
    pub(super) fn holds(&self, start: usize) -> bool {
        (self.start..self.start + self.elements).contains(&start)
    }

    /// Moves its parameters, if the step is to be applied.
    pub(super) fn update(
        &self,
        cuda: &CudaDevice,
        arena: &Arena,
        optimizer: &OptimizerOptions,
        step: Slice<'_>,
    ) -> Result<()> {
        let (gpu, range) = (cuda.gpu(), self.range(arena, step, 0..self.elements)?);
        let decay = |weight_decay: f64| if self.decays { weight_decay } else { 0.0 };
        let adam = |options: &AdamWOptions| kernels::AdamWRule {
            beta1: options.beta1,
            beta2: options.beta2,
            epsilon: options.epsilon,
            weight_decay: decay(options.weight_decay),
        };
        let launched = match (optimizer, &self.state) {
            (
                OptimizerOptions::AdamW(o)
                | OptimizerOptions::AdamW8bit(o)
                | OptimizerOptions::Muon(MuonOptions { adamw: o, .. }),
                CardState::Moments([first, second]),
            ) => {
                let call = kernels::AdamW { range, first: first.slice(), second: second.slice(), rule: adam(o) };
                kernels::adamw(gpu, &call)
            }
            (OptimizerOptions::AdamW8bit(o), CardState::Moments8bit([first, first_absmax, second, second_absmax])) => {
                let call = kernels::AdamW8bit {
                    range,
                    first: first.slice(),
                    first_absmax: first_absmax.slice(),
                    second: second.slice(),
                    second_absmax: second_absmax.slice(),
                    rule: adam(o),
                };
                kernels::adamw_8bit(gpu, &call)
            }
            (OptimizerOptions::Sgd(o), CardState::None) => {
                let (mu, nesterov, weight_decay) = (o.momentum, o.nesterov, decay(o.weight_decay));
                kernels::sgd(gpu, &kernels::Sgd { range, momentum: None, mu, nesterov, weight_decay })
            }
            (OptimizerOptions::Sgd(o), CardState::Momentum(momentum)) => {
                let (momentum, mu, nesterov) = (Some(momentum.slice()), o.momentum, o.nesterov);
                kernels::sgd(gpu, &kernels::Sgd { range, momentum, mu, nesterov, weight_decay: decay(o.weight_decay) })
            }
            (OptimizerOptions::Lion(o), CardState::Momentum(momentum)) => {
                let call = kernels::Lion {
                    range,
                    momentum: momentum.slice(),
                    beta1: o.beta1,
                    beta2: o.beta2,
                    weight_decay: decay(o.weight_decay),
                };
                kernels::lion(gpu, &call)
            }
            (OptimizerOptions::Muon(o), CardState::MatrixMomentum(momentum, sides)) => {
                return self.update_matrices(cuda, arena, step, (o, momentum, *sides));
            }
            (_, state) => {
                let part = state.parts().first().map_or("state", |(part, ..)| part);
                return Err(Error::ForeignState { tensor: part.to_owned(), owner: optimizer.name() });
            }
        };
        Ok(launched?)
    }

    /// Muon's step of each matrix of a stack.
    fn update_matrices(
        &self,
        cuda: &CudaDevice,
        arena: &Arena,
        step: Slice<'_>,
        (options, momentum, [rows, cols]): (&MuonOptions, &Buffer, [usize; 2]),
    ) -> Result<()> {
        let (gpu, count) = (cuda.gpu(), rows * cols);
        let workspace = gpu.allocate(kernels::muon_workspace(rows, cols)?, NAME)?;
        for start in (0..self.elements).step_by(count.max(1)) {
            let call = kernels::Muon {
                range: self.range(arena, step, start..start + count)?,
                momentum: momentum.part(4 * start, 4 * count)?,
                workspace: workspace.slice(),
                rows,
                cols,
                mu: options.momentum,
                nesterov: options.nesterov,
                weight_decay: if self.decays { options.weight_decay } else { 0.0 },
            };
            kernels::muon(gpu, &call, |product| cuda.multiply(product))?;
        }
        Ok(())
    }

    /// The elements `part` of it.
    fn range<'a>(&self, arena: &'a Arena, step: Slice<'a>, part: Range<usize>) -> Result<ParameterRange<'a>> {
        let (start, count) = (self.start + part.start, part.len());
        Ok(ParameterRange {
            weights: arena.values().part(4 * start, 4 * count)?,
            gradient: arena.gradients().part(4 * start, 4 * count)?,
            rounded: Some(arena.operands().part(2 * start, 2 * count)?),
            step,
            count,
        })
    }
}

/// Neighbours in the arena that decay alike and are remembered alike.
pub(super) fn runs(
    gpu: &Gpu,
    arena: &Arena,
    parameters: &[Named],
    optimizer: &OptimizerOptions,
) -> Result<Vec<StateRun>> {
    struct Found {
        elements: Range<usize>,
        alike: (bool, StateKind),
        /// Of a matrix that Muon moves.
        sides: Option<[usize; 2]>,
    }
    let mut order: Vec<usize> = (0..parameters.len()).collect();
    order.sort_by_key(|&number| arena.places()[number].start);
    let mut found: Vec<Found> = Vec::new();
    for number in order {
        let (place, Named { name, shape, role }) = (arena.places()[number], &parameters[number]);
        let kind = optimizer.state_kind(*role, place.elements);
        let end = place.start + place.elements;
        let (alike, mut elements) = ((place.decays, kind), place.start..end);
        let sides = match optimizer {
            OptimizerOptions::Muon(_) if *role == ParameterRole::Matrix => Some(muon_sides(name, shape)?),
            _ => None,
        };
        if sides.is_none() {
            // With the gap behind it, which holds zeros.
            elements.end = end.next_multiple_of(ARENA_ALIGNMENT);
        }
        match found.last_mut() {
            Some(last) if (last.alike, last.sides, sides) == (alike, None, None) => last.elements.end = elements.end,
            _ => found.push(Found { elements, alike, sides }),
        }
    }
    let runs = found.into_iter().map(|Found { elements, alike: (decays, kind), sides }| {
        let state = CardState::new(gpu, kind, sides, elements.len())?;
        Ok(StateRun { start: elements.start, elements: elements.len(), decays, state })
    });
    runs.collect()
}

/// Rows and columns of the matrix, or of each of a stack.
fn muon_sides(name: &str, shape: &[usize]) -> Result<[usize; 2]> {
    match *shape {
        [.., rows, cols] if rows.is_multiple_of(8) && cols.is_multiple_of(8) => Ok([rows, cols]),
        [.., _, _] => Err(Error::MuonSides { name: name.to_owned(), shape: shape.to_vec() }),
        _ => Err(Error::NotAMatrix { name: name.to_owned(), shape: shape.to_vec() }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn muon_takes_matrices_of_whole_eights() {
        assert_eq!(muon_sides("w", &[16, 8]).unwrap(), [16, 8]);
        assert_eq!(muon_sides("w", &[3, 16, 8]).unwrap(), [16, 8]);
        let message = muon_sides("model.layers.0.mlp.gate.weight", &[4, 8]).unwrap_err().to_string();
        for part in ["model.layers.0.mlp.gate.weight", "[4, 8]", "multiples of 8", "device cpu"] {
            assert!(message.contains(part), "{part} is not in {message}");
        }
        assert!(matches!(muon_sides("w", &[8]), Err(Error::NotAMatrix { .. })));
    }

    #[test]
    fn blocks_of_eight_bit_moments_are_found_by_their_elements() {
        assert_eq!(PartKind::Numbers.range(512, 300), (512, 300));
        assert_eq!(PartKind::Largest.range(512, 300), (2, 2));
    }
}
