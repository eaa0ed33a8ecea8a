//! A moving average of the weights.
//!
//! ```text
//! average ← average + (1 - decay) · (weights - average)
//! ```
//!
//! after each step, from the first weights seen (Polyak and Juditsky, 1992; the exponential form as in Tarvainen and Valpola,
//! "Mean teachers", 2017). [`WeightAverage::swap`] puts the average where the weights were, to evaluate or save it, and a second
//! swap puts the weights back.

use std::collections::BTreeMap;

use ironloom_core::Threads;

use crate::{
    Error, Result, SavedTensor, SavedValues,
    pieces::{PIECE, for_each},
};

/// A moving average of weights, by name.
#[derive(Clone, Debug)]
pub struct WeightAverage {
    decay: f64,
    averages: BTreeMap<String, Vec<f32>>,
}

impl WeightAverage {
    /// An average that forgets with this decay, such as 0.999: about the last `1 / (1 - decay)` steps count.
    ///
    /// # Errors
    /// A decay outside of 0 to below 1.
    pub fn new(decay: f64) -> Result<Self> {
        if !(0.0..1.0).contains(&decay) {
            return Err(Error::InvalidOption { option: "average_decay", value: decay, limits: "from 0 to below 1" });
        }
        Ok(Self { decay, averages: BTreeMap::new() })
    }

    /// Takes a parameter's weights into its average. The first ones are the average.
    ///
    /// # Errors
    /// The parameter had another number of elements before.
    pub fn update(&mut self, threads: &Threads, name: &str, weights: &[f32]) -> Result<()> {
        let Some(average) = self.averages.get_mut(name) else {
            self.averages.insert(name.to_owned(), weights.to_vec());
            return Ok(());
        };
        check_length(name, average.len(), weights.len())?;
        let part = (1.0 - self.decay) as f32;
        for_each(threads, average.chunks_mut(PIECE).zip(weights.chunks(PIECE)), |_, (average, weights)| {
            for (average, &weight) in average.iter_mut().zip(weights) {
                *average += part * (weight - *average);
            }
        });
        Ok(())
    }

    /// Exchanges a parameter's weights and its average. A parameter without an average stays as it is.
    ///
    /// # Errors
    /// The average has another number of elements.
    pub fn swap(&mut self, name: &str, weights: &mut [f32]) -> Result<()> {
        let Some(average) = self.averages.get_mut(name) else {
            return Ok(());
        };
        check_length(name, average.len(), weights.len())?;
        average.swap_with_slice(weights);
        Ok(())
    }

    /// The averages for a checkpoint, each by its parameter's name.
    pub fn save(&self) -> Vec<SavedTensor<'_>> {
        let tensor = |(name, average): (&String, _)| SavedTensor { name: name.clone(), values: average };
        self.averages.iter().map(|(name, average)| (name, SavedValues::F32(average.into()))).map(tensor).collect()
    }

    /// Takes what [`WeightAverage::save`] gave in place of everything held.
    ///
    /// # Errors
    /// A tensor that isn't single precision.
    pub fn restore<'a>(&mut self, tensors: impl IntoIterator<Item = SavedTensor<'a>>) -> Result<()> {
        let averages = tensors.into_iter().map(|SavedTensor { name, values }| match values {
            SavedValues::F32(values) => Ok((name, values.into_owned())),
            SavedValues::U8(_) => Err(Error::ForeignState { tensor: name, owner: "the average of weights" }),
        });
        self.averages = averages.collect::<Result<_>>()?;
        Ok(())
    }
}

fn check_length(name: &str, expected: usize, found: usize) -> Result<()> {
    if expected == found {
        return Ok(());
    }
    Err(Error::StateLength { tensor: name.to_owned(), expected: found, found: expected })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_average_of_steady_weights_comes_to_them_as_a_geometric_series() {
        let (threads, mut average) = (Threads::new(2), WeightAverage::new(0.9).unwrap());
        average.update(&threads, "w", &[1.0, -2.0]).unwrap();
        for _ in 0..10 {
            average.update(&threads, "w", &[2.0, 0.0]).unwrap();
        }
        let mut weights = [2.0, 0.0];
        average.swap("w", &mut weights).unwrap();
        let left = 0.9f64.powi(10);
        assert!((f64::from(weights[0]) - (2.0 - left)).abs() < 1e-6);
        assert!((f64::from(weights[1]) + 2.0 * left).abs() < 1e-6);
        average.swap("w", &mut weights).unwrap();
        assert_eq!(weights, [2.0, 0.0]);
    }

    #[test]
    fn a_restored_average_goes_on_bit_for_bit() {
        let (threads, mut one) = (Threads::new(1), WeightAverage::new(0.97).unwrap());
        let weights = |step: usize| (0..1000).map(|i| ((i * 31 + step * 17) % 101) as f32 / 7.0).collect::<Vec<f32>>();
        (0..5).for_each(|step| one.update(&threads, "w", &weights(step)).unwrap());
        let mut two = WeightAverage::new(0.97).unwrap();
        two.restore(
            one.save()
                .into_iter()
                .map(|tensor| SavedTensor::from_bytes(tensor.name.clone(), tensor.dtype(), tensor.bytes()).unwrap()),
        )
        .unwrap();
        for step in 5..9 {
            one.update(&threads, "w", &weights(step)).unwrap();
            two.update(&Threads::new(3), "w", &weights(step)).unwrap();
        }
        assert_eq!(one.averages, two.averages);
    }

    #[test]
    fn another_length_is_refused() {
        let (threads, mut average) = (Threads::new(1), WeightAverage::new(0.5).unwrap());
        average.update(&threads, "w", &[1.0]).unwrap();
        assert!(matches!(average.update(&threads, "w", &[1.0, 2.0]), Err(Error::StateLength { .. })));
        assert!(matches!(average.swap("w", &mut [1.0, 2.0]), Err(Error::StateLength { .. })));
        assert!(WeightAverage::new(1.0).is_err());
    }
}
