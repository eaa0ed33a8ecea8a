//! Holds some documents out of training, to measure the loss on.

use ironloom_core::Philox;
use serde::{Deserialize, Serialize};

use super::{DataError, Documents};
use crate::Result;

/// What is held out.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub enum HeldOut {
    /// Documents, each with this probability, drawn by its number: adding documents at the end moves none that were there.
    Documents {
        /// Above 0 and below 1.
        fraction: f64,
        /// Draws other documents.
        #[serde(default)]
        seed: u64,
    },
    /// The end: this part of all tokens, cutting a document in two if need be. For data of one or a few long documents.
    Tail {
        /// Above 0 and below 1.
        fraction: f64,
    },
}

/// The stream of random numbers that draws the documents.
const STREAM: u64 = 0xda04 << 48;

impl Documents {
    /// Splits the documents into those to train on and those held out, each with one or more.
    ///
    /// # Errors
    /// The fraction is not between 0 and 1, or there is too little to split.
    pub fn split(&self, held_out: HeldOut) -> Result<(Documents, Documents)> {
        let fraction = match held_out {
            HeldOut::Documents { fraction, .. } | HeldOut::Tail { fraction } => fraction,
        };
        if !(fraction > 0.0 && fraction < 1.0) {
            let limits = "above 0 and below 1";
            let option = "the fraction that is held out";
            return Err(DataError::Option { option, value: fraction.to_string(), limits }.into());
        }
        let (training, held_out) = match held_out {
            HeldOut::Documents { fraction, seed } => self.split_documents(fraction, seed)?,
            HeldOut::Tail { fraction } => self.split_tail(fraction)?,
        };
        let name = format!("{}, held out", self.name());
        Ok((self.chosen(self.name().to_owned(), training), self.chosen(name, held_out)))
    }

    fn split_documents(&self, fraction: f64, seed: u64) -> Result<(Ranges, Ranges)> {
        if self.len() < 2 {
            return Err(self.too_few());
        }
        let key = [seed as u32, (seed >> 32) as u32];
        let draw = |number: usize| Philox::block_at(key, STREAM, number as u64)[0];
        let limit = (fraction * 4_294_967_296.0) as u64;
        let mut is_held_out: Vec<bool> = (0..self.len()).map(|number| u64::from(draw(number)) < limit).collect();
        // Few documents may all fall on one side: the likeliest goes to the other.
        if is_held_out.iter().all(|&held_out| !held_out)
            && let Some(number) = (0..self.len()).min_by_key(|&number| draw(number))
        {
            is_held_out[number] = true;
        }
        if is_held_out.iter().all(|&held_out| held_out)
            && let Some(number) = (0..self.len()).max_by_key(|&number| draw(number))
        {
            is_held_out[number] = false;
        }
        let side = |wanted: bool| {
            (0..self.len()).filter(|&number| is_held_out[number] == wanted).map(|number| self.range(number)).collect()
        };
        Ok((side(false), side(true)))
    }

    fn split_tail(&self, fraction: f64) -> Result<(Ranges, Ranges)> {
        let tokens = self.tokens();
        let kept = tokens - (tokens as f64 * fraction) as usize;
        let (number, offset) = self.find(kept.min(tokens.saturating_sub(1)));
        // Of less than two tokens there is nothing to learn.
        if kept < 2 || tokens - kept < 2 {
            return Err(self.too_few());
        }
        let cut = self.range(number);
        let middle = cut.start + offset;
        let training = (0..number).map(|before| self.range(before)).chain(std::iter::once(cut.start..middle));
        let held_out = std::iter::once(middle..cut.end).chain((number + 1..self.len()).map(|after| self.range(after)));
        Ok((training.filter(|range| !range.is_empty()).collect(), held_out.collect()))
    }

    fn too_few(&self) -> crate::Error {
        DataError::TooFewToSplit { what: self.name().to_owned(), documents: self.len() }.into()
    }
}

type Ranges = Vec<std::ops::Range<usize>>;
