//! Dropout: `out_i = x_i / (1 - p)` with probability `1 - p`, 0 otherwise (Srivastava et al., JMLR 15, 2014).
//!
//! Element `i` is kept when number `4 * first + i` of a Philox stream is at least `p * 2^32`. So the mask is a function of the key and the
//! element's place: the backward pass, or a second run of a checkpointed part, makes it again instead of keeping it.

use ironloom_core::Philox;

use super::for_rows;
use crate::{Context, CpuDevice, Error, Result, Tensor, lanes::per_level};

/// Which stream of random numbers a dropout draws from. Each place in a model and each step has its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct DropoutKey {
    /// The run's seed.
    pub seed: u64,
    /// The stream's number.
    pub stream: u64,
    /// The block of four numbers that the first elements meet.
    pub first: u64,
}

const NAME: &str = "dropout";

/// `x` with elements dropped with `probability` and the rest scaled so that the mean stays; writes into `x` when nothing else
/// shares it. Has a gradient. A probability of 0 gives `x` itself.
///
/// # Errors
/// The probability is not in `[0, 1)`, or the device is not the processor.
pub fn dropout(cx: &Context, x: Tensor, probability: f32, key: DropoutKey) -> Result<Tensor> {
    if !(0.0..1.0).contains(&probability) {
        let (what, expected, found) = ("the probability", "a number from 0 up to, but not including, 1", probability);
        return Err(Error::Setting { operation: NAME, what, expected, found: f64::from(found) });
    }
    if probability == 0.0 {
        return Ok(x);
    }
    let (cpu, slots, shape) = (cx.cpu(NAME)?, cx.slots([&x]), *x.shape());
    let mut out = x.into_f32()?;
    drop_elements(cpu, &mut out, probability, key);
    let out = Tensor::from_f32(out, shape)?;
    if let Some((tape, [Some(slot)])) = slots {
        let cpu = cpu.clone();
        tape.record(&out, move |gradient, gradients| {
            let mut back = gradient.as_f32()?.to_vec();
            drop_elements(&cpu, &mut back, probability, key);
            gradients.add(&slot, Tensor::from_f32(back, shape)?)
        });
    }
    Ok(out)
}

/// Elements that a task masks at a time; a multiple of a block of random numbers.
const GROUP: usize = 64;

fn drop_elements(cpu: &CpuDevice, values: &mut [f32], probability: f32, key: DropoutKey) {
    let threshold = (f64::from(probability) * 4_294_967_296.0) as u32;
    let scale = (1.0 / (1.0 - f64::from(probability))) as f32;
    let whole = values.len() / GROUP * GROUP;
    let (groups, rest) = values.split_at_mut(whole);
    for_rows(cpu, groups, GROUP, |range, values| {
        mask(cpu.level, values, key.first + (range.start * GROUP / 4) as u64, threshold, scale, key)
    });
    mask(cpu.level, rest, key.first + (whole / 4) as u64, threshold, scale, key);
}

per_level! {
    /// Masks `values`, the first of which meets the first number of block `first`.
    fn mask(values: &mut [f32], first: u64, threshold: u32, scale: f32, key: DropoutKey) {
        let halves = [key.seed as u32, (key.seed >> 32) as u32];
        for (block, values) in values.chunks_mut(4).enumerate() {
            let numbers = Philox::block_at(halves, key.stream, first + block as u64);
            for (value, number) in values.iter_mut().zip(numbers) {
                *value = if number >= threshold { *value * scale } else { 0.0 };
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Device, Gradients, Tape};

    const KEY: DropoutKey = DropoutKey { seed: 0x1234_5678_9ABC_DEF0, stream: 7, first: 0 };

    fn numbers(count: usize, seed: u64) -> Vec<f32> {
        let mut draws = Philox::new(seed, 0);
        (0..count).map(|_| draws.next_normal()).collect()
    }

    fn run(threads: usize, x: &[f32], width: usize, probability: f32, key: DropoutKey) -> [Vec<f32>; 2] {
        let (device, tape, mut gradients) = (Device::cpu(threads), Tape::new(), Gradients::new());
        let x = Tensor::from_f32(x.to_vec(), [x.len() / width, width]).unwrap();
        tape.watch(&x);
        let out = dropout(&Context::training(&device, &tape), x.clone(), probability, key).unwrap();
        let ones = Tensor::from_f32(vec![1.0; x.shape().elements().unwrap()], *x.shape()).unwrap();
        tape.backward(&out, ones, &mut gradients).unwrap();
        [out.into_f32().unwrap(), gradients.get(x.id()).unwrap().clone().into_f32().unwrap()]
    }

    #[test]
    fn elements_and_gradients_follow_the_stream() {
        for (count, width) in [(1, 1), (3, 3), (64, 8), (65, 13), (7 * 4001, 4001)] {
            let x = numbers(count, 1);
            let probability = 0.3;
            let mut draws = Philox::new(KEY.seed, KEY.stream);
            let factors: Vec<f64> = (0..count)
                .map(|_| if f64::from(draws.next_u32()) < f64::from(0.3f32) * 2f64.powi(32) { 0.0 } else { 1.0 / 0.7 })
                .collect();
            let [out, gradient] = run(1, &x, width, probability, KEY);
            for (((out, gradient), x), factor) in out.iter().zip(&gradient).zip(&x).zip(&factors) {
                assert!((f64::from(*out) - factor * f64::from(*x)).abs() <= 1e-6 * f64::from(x.abs()));
                assert!((f64::from(*gradient) - factor).abs() <= 1e-6);
            }
            assert!([2, 3].iter().all(|threads| run(*threads, &x, width, probability, KEY) == [&*out, &*gradient]));
        }
    }

    #[test]
    fn the_share_dropped_is_the_probability_and_streams_differ() {
        let x = vec![1.0; 200_000];
        for probability in [0.05f32, 0.5, 0.9] {
            let [out, _] = run(2, &x, 1000, probability, KEY);
            let dropped = out.iter().filter(|out| **out == 0.0).count() as f64 / x.len() as f64;
            let deviation = (f64::from(probability) * f64::from(1.0 - probability) / x.len() as f64).sqrt();
            assert!((dropped - f64::from(probability)).abs() < 4.0 * deviation, "{dropped} {probability}");
            assert_ne!(run(2, &x, 1000, probability, DropoutKey { stream: 8, ..KEY })[0], out);
            assert_ne!(run(2, &x, 1000, probability, DropoutKey { seed: 8, ..KEY })[0], out);
            // The rows behind the first four.
            assert_eq!(run(2, &x[4000..], 1000, probability, DropoutKey { first: 1000, ..KEY })[0], out[4000..]);
        }
    }

    #[test]
    fn nothing_is_dropped_at_0_and_wrong_probabilities_are_refused() {
        let device = Device::cpu(1);
        let x = Tensor::from_f32(numbers(5, 2), [5]).unwrap();
        let same = dropout(&Context::inference(&device), x.clone(), 0.0, KEY).unwrap();
        assert_eq!((same.id(), same.as_f32().unwrap()), (x.id(), x.as_f32().unwrap()));
        for wrong in [-0.1, 1.0, 1.5, f32::NAN, f32::INFINITY] {
            let error = dropout(&Context::inference(&device), x.clone(), wrong, KEY).unwrap_err();
            assert!(error.to_string().starts_with("dropout: the probability is "), "{error}");
        }
    }
}
