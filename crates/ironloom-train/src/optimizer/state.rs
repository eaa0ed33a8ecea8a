//! What optimizers remember of a parameter, and how it is saved.

use std::collections::BTreeMap;

use super::adamw_8bit::BLOCK;
use crate::{Error, Result, SavedTensor, SavedValues};

pub(crate) const FIRST: &str = "first_moment";
pub(crate) const SECOND: &str = "second_moment";
pub(crate) const FIRST_CODES: &str = "first_moment_codes";
pub(crate) const FIRST_ABSMAX: &str = "first_moment_absmax";
pub(crate) const SECOND_CODES: &str = "second_moment_codes";
pub(crate) const SECOND_ABSMAX: &str = "second_moment_absmax";
pub(crate) const MOMENTUM: &str = "momentum";

/// What is remembered of one parameter.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum State {
    None,
    Moments(Moments),
    Moments8bit(Moments8bit),
    Momentum(Vec<f32>),
}

/// Adam's two moments.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Moments {
    pub(super) first: Vec<f32>,
    pub(super) second: Vec<f32>,
}

/// Adam's two moments in a byte each, with one scale per block.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Moments8bit {
    pub(super) first: Vec<u8>,
    pub(super) first_absmax: Vec<f32>,
    pub(super) second: Vec<u8>,
    pub(super) second_absmax: Vec<f32>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum StateKind {
    None,
    Moments,
    Moments8bit,
    Momentum,
}

impl StateKind {
    /// What it takes for a parameter of so many elements.
    pub(crate) fn bytes(self, elements: usize) -> u64 {
        let elements = elements as u64;
        match self {
            Self::None => 0,
            Self::Moments => elements.saturating_mul(8),
            Self::Moments8bit => elements.saturating_mul(2).saturating_add(elements.div_ceil(BLOCK as u64) * 8),
            Self::Momentum => elements.saturating_mul(4),
        }
    }
}

impl State {
    /// The state before the first step: all zeros.
    pub(super) fn new(kind: StateKind, elements: usize) -> Self {
        let blocks = elements.div_ceil(BLOCK);
        match kind {
            StateKind::None => Self::None,
            StateKind::Moments => Self::Moments(Moments { first: vec![0.0; elements], second: vec![0.0; elements] }),
            // With an absmax of 0, every code stands for 0.
            StateKind::Moments8bit => Self::Moments8bit(Moments8bit {
                first: vec![0; elements],
                first_absmax: vec![0.0; blocks],
                second: vec![0; elements],
                second_absmax: vec![0.0; blocks],
            }),
            StateKind::Momentum => Self::Momentum(vec![0.0; elements]),
        }
    }

    fn kind(&self) -> StateKind {
        match self {
            Self::None => StateKind::None,
            Self::Moments(_) => StateKind::Moments,
            Self::Moments8bit(_) => StateKind::Moments8bit,
            Self::Momentum(_) => StateKind::Momentum,
        }
    }

    /// Whether this is what a parameter of `elements` needs: a restored state may be of another model or configuration.
    pub(super) fn check(&self, kind: StateKind, name: &str, elements: usize, optimizer: &'static str) -> Result<()> {
        if self.kind() != kind {
            return Err(self.foreign(name, optimizer));
        }
        let length = |part: &str, found: usize, expected: usize| {
            if found == expected {
                return Ok(());
            }
            Err(Error::StateLength { tensor: format!("{name}.{part}"), expected, found })
        };
        let blocks = elements.div_ceil(BLOCK);
        match self {
            Self::None => Ok(()),
            Self::Moments(moments) => {
                length(FIRST, moments.first.len(), elements)?;
                length(SECOND, moments.second.len(), elements)
            }
            Self::Moments8bit(moments) => {
                length(FIRST_CODES, moments.first.len(), elements)?;
                length(FIRST_ABSMAX, moments.first_absmax.len(), blocks)?;
                length(SECOND_CODES, moments.second.len(), elements)?;
                length(SECOND_ABSMAX, moments.second_absmax.len(), blocks)
            }
            Self::Momentum(momentum) => length(MOMENTUM, momentum.len(), elements),
        }
    }

    pub(super) fn foreign(&self, name: &str, optimizer: &'static str) -> Error {
        let part = match self {
            Self::None => "state",
            Self::Moments(_) => FIRST,
            Self::Moments8bit(_) => FIRST_CODES,
            Self::Momentum(_) => MOMENTUM,
        };
        Error::ForeignState { tensor: format!("{name}.{part}"), owner: optimizer }
    }

    pub(super) fn save(&self, name: &str) -> Vec<SavedTensor<'_>> {
        let f32s =
            |part: &str, values| SavedTensor { name: format!("{name}.{part}"), values: SavedValues::F32(values) };
        let codes =
            |part: &str, values| SavedTensor { name: format!("{name}.{part}"), values: SavedValues::U8(values) };
        match self {
            Self::None => Vec::new(),
            Self::Moments(Moments { first, second }) => vec![f32s(FIRST, first.into()), f32s(SECOND, second.into())],
            Self::Moments8bit(moments) => vec![
                codes(FIRST_CODES, (&moments.first).into()),
                f32s(FIRST_ABSMAX, (&moments.first_absmax).into()),
                codes(SECOND_CODES, (&moments.second).into()),
                f32s(SECOND_ABSMAX, (&moments.second_absmax).into()),
            ],
            Self::Momentum(momentum) => vec![f32s(MOMENTUM, momentum.into())],
        }
    }
}

/// The states of saved tensors, by parameter.
pub(super) fn restore<'a>(
    tensors: impl IntoIterator<Item = SavedTensor<'a>>,
    optimizer: &'static str,
) -> Result<BTreeMap<String, State>> {
    let mut parameters: BTreeMap<String, Parts> = BTreeMap::new();
    for SavedTensor { name, values } in tensors {
        let Some((parameter, part)) = name.rsplit_once('.') else {
            return Err(Error::ForeignState { tensor: name, owner: optimizer });
        };
        let parts = parameters.entry(parameter.to_owned()).or_default();
        match (part, values) {
            (FIRST, SavedValues::F32(values)) => parts.first = Some(values.into_owned()),
            (SECOND, SavedValues::F32(values)) => parts.second = Some(values.into_owned()),
            (FIRST_CODES, SavedValues::U8(values)) => parts.first_codes = Some(values.into_owned()),
            (FIRST_ABSMAX, SavedValues::F32(values)) => parts.first_absmax = Some(values.into_owned()),
            (SECOND_CODES, SavedValues::U8(values)) => parts.second_codes = Some(values.into_owned()),
            (SECOND_ABSMAX, SavedValues::F32(values)) => parts.second_absmax = Some(values.into_owned()),
            (MOMENTUM, SavedValues::F32(values)) => parts.momentum = Some(values.into_owned()),
            _ => return Err(Error::ForeignState { tensor: name, owner: optimizer }),
        }
    }
    let states = parameters.into_iter().map(|(parameter, parts)| Ok((parameter.clone(), parts.state(&parameter)?)));
    states.collect()
}

/// The saved tensors of one parameter.
#[derive(Default)]
struct Parts {
    first: Option<Vec<f32>>,
    second: Option<Vec<f32>>,
    first_codes: Option<Vec<u8>>,
    first_absmax: Option<Vec<f32>>,
    second_codes: Option<Vec<u8>>,
    second_absmax: Option<Vec<f32>>,
    momentum: Option<Vec<f32>>,
}

impl Parts {
    fn state(self, parameter: &str) -> Result<State> {
        let missing = |missing| Error::IncompleteState { parameter: parameter.to_owned(), missing };
        if let Some(momentum) = self.momentum {
            return Ok(State::Momentum(momentum));
        }
        if self.first.is_some() || self.second.is_some() {
            let first = self.first.ok_or_else(|| missing(FIRST))?;
            let second = self.second.ok_or_else(|| missing(SECOND))?;
            return Ok(State::Moments(Moments { first, second }));
        }
        Ok(State::Moments8bit(Moments8bit {
            first: self.first_codes.ok_or_else(|| missing(FIRST_CODES))?,
            first_absmax: self.first_absmax.ok_or_else(|| missing(FIRST_ABSMAX))?,
            second: self.second_codes.ok_or_else(|| missing(SECOND_CODES))?,
            second_absmax: self.second_absmax.ok_or_else(|| missing(SECOND_ABSMAX))?,
        }))
    }
}
