//! Reads `tests/golden/training/operations` and holds an operation's output and gradients to them.
//!
//! A file has several cases of one operation: inputs, the output, the output's gradient and, computed in double precision,
//! the gradient of each input (`tests/golden/README.md` lists them). A test says how the operation is called; the rest is the
//! same for all, in [`check`].
//!
//! **The bound** is 2e-5 of a result's root mean square. Single precision rounds to 6e-8, and the largest error of a thousand
//! elements lies in rows whose terms cancel: 9.5e-6 is the most that was seen, in one row of attention over 149 keys, while
//! all others there stay under 2e-6. Where PyTorch's own single-precision pass is further off (the file tells: 9e-6 with
//! logits in the tens), three times its error is allowed, the house rule for gradients. A term left out is an error of the order of 1.

use std::{cell::RefCell, collections::BTreeMap, path::Path};

use ironloom_core::{DType, Shape};
use ironloom_tensor::{Context, Device, Gradients, Tape, Tensor, Weight};
use ironloom_weights::Checkpoint;
use serde_json::Value;

/// The largest error of an element, over the root mean square of all.
const BOUND: f64 = 2e-5;
/// How many times PyTorch's single-precision error ours may be.
const FACTOR: f64 = 3.0;

/// One case of an operation.
pub(crate) struct Case<'a> {
    checkpoint: &'a Checkpoint,
    name: &'a str,
    options: &'a Value,
}

impl Case<'_> {
    fn stored(&self, name: &str, dtype: DType) -> (Shape, Vec<[u8; 4]>) {
        let data = self.checkpoint.tensor(&format!("{}.{name}", self.name)).unwrap();
        assert_eq!(data.dtype, dtype, "{name}");
        (data.shape, data.bytes.as_chunks::<4>().0.to_vec())
    }

    /// The numbers of a tensor.
    pub(crate) fn floats(&self, name: &str) -> Vec<f32> {
        self.stored(name, DType::F32).1.into_iter().map(f32::from_le_bytes).collect()
    }

    /// A tensor that no gradient is asked of.
    pub(crate) fn tensor(&self, name: &str) -> Tensor {
        Tensor::from_f32(self.floats(name), self.stored(name, DType::F32).0).unwrap()
    }

    /// Whole numbers: ids, chosen experts, marks.
    pub(crate) fn ids(&self, name: &str) -> Vec<u32> {
        self.stored(name, DType::I32).1.into_iter().map(u32::from_le_bytes).collect()
    }

    /// Targets, of which some are negative.
    pub(crate) fn targets(&self, name: &str) -> Vec<i64> {
        self.stored(name, DType::I32).1.into_iter().map(|bytes| i64::from(i32::from_le_bytes(bytes))).collect()
    }

    /// Whether the case has this input.
    pub(crate) fn has(&self, name: &str) -> bool {
        self.checkpoint.contains(&format!("{}.{name}", self.name))
    }

    /// A number among the options.
    pub(crate) fn number(&self, option: &str) -> f32 {
        self.options[option].as_f64().unwrap() as f32
    }

    /// A count among the options.
    pub(crate) fn count(&self, option: &str) -> usize {
        self.options[option].as_u64().unwrap() as usize
    }

    /// A count that is not always there.
    pub(crate) fn optional_count(&self, option: &str) -> Option<usize> {
        self.options[option].as_u64().map(|count| count as usize)
    }

    /// Counts among the options.
    pub(crate) fn counts(&self, option: &str) -> Vec<usize> {
        self.options[option].as_array().unwrap().iter().map(|count| count.as_u64().unwrap() as usize).collect()
    }

    /// A yes or no among the options.
    pub(crate) fn flag(&self, option: &str) -> bool {
        self.options[option].as_bool().unwrap()
    }

    /// A word among the options.
    pub(crate) fn word(&self, option: &str) -> &str {
        self.options[option].as_str().unwrap()
    }

    fn bound(&self, result: &str) -> f64 {
        BOUND.max(FACTOR * self.options["float32_error"][result].as_f64().unwrap())
    }

    /// Names of the inputs that have a gradient in the file.
    fn gradients(&self) -> Vec<String> {
        let results = self.options["float32_error"].as_object().unwrap();
        results.keys().filter_map(|name| name.strip_suffix("_gradient")).map(str::to_owned).collect()
    }
}

/// Inputs whose gradients are asked for. They outlive a pass, as parameters do.
#[derive(Default)]
struct Leaves(RefCell<BTreeMap<String, Vec<Tensor>>>);

/// One run of a case's operation under a tape.
pub(crate) struct Pass<'a> {
    /// What is run.
    pub(crate) case: &'a Case<'a>,
    /// Where, and under which tape.
    pub(crate) cx: Context<'a>,
    /// The tape of `cx`.
    pub(crate) tape: &'a Tape,
    leaves: &'a Leaves,
}

impl Pass<'_> {
    fn parts(&self, name: &str, make: impl FnOnce() -> Vec<Tensor>) -> Vec<Tensor> {
        let parts = self.leaves.0.borrow_mut().entry(name.to_owned()).or_insert_with(make).clone();
        parts.iter().for_each(|part| self.tape.watch(part));
        parts
    }

    /// An input whose gradient is asked for.
    pub(crate) fn leaf(&self, name: &str) -> Tensor {
        self.parts(name, || vec![self.case.tensor(name)]).remove(0)
    }

    /// The same as a trainable weight.
    pub(crate) fn weight(&self, name: &str) -> Weight {
        Weight::dense(self.leaf(name)).unwrap()
    }

    /// An input `[count, rows, cols]` as `count` trainable weights.
    pub(crate) fn weights(&self, name: &str) -> Vec<Weight> {
        let parts = self.parts(name, || {
            let (shape, values) = (*self.case.tensor(name).shape(), self.case.floats(name));
            let [_, rows, cols] = shape.dims().try_into().unwrap();
            values
                .chunks_exact(rows * cols)
                .map(|part| Tensor::from_f32(part.to_vec(), [rows, cols]).unwrap())
                .collect()
        });
        parts.into_iter().map(|part| Weight::dense(part).unwrap()).collect()
    }

    /// The operation made `out`, which is the file's `out`.
    pub(crate) fn made(&self, out: Tensor) -> Made {
        let found = out.as_f32().unwrap().to_vec();
        Made { out, gradient: self.case.tensor("out_gradient"), found, expected: self.case.floats("out") }
    }
}

/// What a pass made.
pub(crate) struct Made {
    /// Where the backward pass starts.
    pub(crate) out: Tensor,
    /// The gradient of `out`.
    pub(crate) gradient: Tensor,
    /// Values of the forward pass.
    pub(crate) found: Vec<f32>,
    /// What they should be.
    pub(crate) expected: Vec<f32>,
}

/// Numbers by the names of the inputs they belong to.
type Found = BTreeMap<String, Vec<f32>>;

fn collect(leaves: &Leaves, gradients: &Gradients) -> Found {
    let of = |part: &Tensor| match gradients.get(part.id()) {
        Some(gradient) => {
            assert_eq!(gradient.shape(), part.shape());
            gradient.as_f32().unwrap().to_vec()
        }
        // Nothing reached it: an expert without rows.
        None => vec![0.0; part.shape().elements().unwrap()],
    };
    leaves.0.borrow().iter().map(|(name, parts)| (name.clone(), parts.iter().flat_map(of).collect())).collect()
}

fn bits(found: &Found) -> Vec<u32> {
    found.values().flatten().map(|value| value.to_bits()).collect()
}

/// Runs every case of `operation` as `call` says and holds the output and all gradients to the file; `frozen` inputs are not
/// asked for one. Besides: the bits are the same on one and three threads, a second pass adds its gradients to the first's, and
/// after `begin_step` a pass gives the bits of the first.
pub(crate) fn check(operation: &str, frozen: &[&str], call: impl Fn(&Pass<'_>) -> Made) {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden/training/operations");
    let checkpoint = ironloom_weights::open(folder.join(format!("{operation}.safetensors"))).unwrap();
    let cases: Value = serde_json::from_str(checkpoint.metadata().required_string("cases").unwrap()).unwrap();
    for (name, options) in cases.as_object().unwrap() {
        let case = Case { checkpoint: &checkpoint, name, options };
        let label = format!("{operation} {name}");
        let per_thread_count = [1, 3].map(|threads| {
            let (device, leaves, mut gradients) = (Device::cpu(threads), Leaves::default(), Gradients::new());
            let pass = |gradients: &mut Gradients| {
                let tape = Tape::new();
                let cx = Context::training(&device, &tape);
                let made = call(&Pass { case: &case, cx, tape: &tape, leaves: &leaves });
                compare(&label, "out", &made.found, &made.expected, case.bound("out"));
                tape.backward(&made.out, made.gradient, gradients).unwrap();
                collect(&leaves, gradients)
            };
            let (once, twice) = (pass(&mut gradients), pass(&mut gradients));
            gradients.begin_step();
            assert_eq!(bits(&pass(&mut gradients)), bits(&once), "{label}: a new step does not start anew");
            (once, twice)
        });
        let [(once, twice), (of_three, _)] = per_thread_count;
        assert_eq!(bits(&once), bits(&of_three), "{label}: the bits depend on the threads");
        let wanted = case.gradients();
        for name in wanted.iter().filter(|name| !frozen.contains(&name.as_str())) {
            let result = format!("{name}_gradient");
            let (expected, bound) = (case.floats(&result), case.bound(&result));
            let doubled: Vec<f32> = expected.iter().map(|value| 2.0 * value).collect();
            compare(&label, &result, &once[name], &expected, bound);
            compare(&label, &format!("{result} of two passes"), &twice[name], &doubled, bound);
        }
        assert!(once.keys().all(|name| wanted.contains(name)), "{label}: the file has no gradient of an input");
    }
}

/// Where all of `expected` is zero, the bound is absolute: outputs' gradients are about 1.
fn compare(label: &str, result: &str, found: &[f32], expected: &[f32], bound: f64) {
    assert_eq!(found.len(), expected.len(), "{label}: {result}");
    let squares: f64 = expected.iter().map(|value| f64::from(*value).powi(2)).sum();
    let size = match (squares / expected.len() as f64).sqrt() {
        0.0 => 1.0,
        size => size,
    };
    for (at, (found, expected)) in found.iter().zip(expected).enumerate() {
        let error = (f64::from(*found) - f64::from(*expected)).abs() / size;
        assert!(
            error <= bound,
            "{label}: {result}[{at}] is {found}, not {expected}: {error:.1e} of the whole, over {bound:.1e}"
        );
    }
}
