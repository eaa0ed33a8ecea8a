//! Exactness on a graphics card: the logits of a sequence are the same bits alone and beside others, one row at a time and
//! in passes of many rows, with graphs and without, before and after its cache has grown.
//!
//! Subjects are tiny golden models of several families and formats, and models with heads of a width that kernels of many
//! rows take. Ours with one input in four dropped is the same sequence with every fourth id replaced.

mod subjects;

use std::{cell::OnceCell, io::Write, process::Command, rc::Rc};

use anyhow::{Context as _, Result, ensure};
use ironloom_lm::{LogitRows, Model};
use ironloom_nn::{KvCache, Span};
use ironloom_tensor::{Context, Device};

use self::subjects::Subject;
use super::{
    case::{Bound, Case, Kernel, Results},
    inputs::Inputs,
};

/// Sequences that run together.
const BESIDE: [usize; 6] = [2, 3, 5, 16, 33, 64];
/// Rows of passes that look like those that verify a speculation, and of prompts.
const PASSES: [usize; 9] = [2, 3, 4, 5, 8, 11, 16, 33, 64];
/// Positions of a sequence whose cache grows, as far as the model's context goes.
const GROWN: usize = 300;
/// Rows of prompts that the kernels of many rows take.
const PROMPTS: [usize; 3] = [65, 100, 257];

/// The cases of every subject.
pub(super) fn cases(device: &Device) -> Vec<Case> {
    let mut cases = Vec::new();
    for subject in subjects::all() {
        let name = subject.name();
        let has_wide_heads = subject.has_wide_heads();
        let shared =
            Rc::new(Loaded { subject, device: device.clone(), model: OnceCell::new(), steps: OnceCell::new() });
        let mut add =
            |what: &str, shape: String, results: fn(&Loaded, Kernel, usize) -> Result<Results>, size: usize| {
                let shared = Rc::clone(&shared);
                cases.push(Case::new(format!("exact {what}"), format!("{name}{shape}"), Bound::Exact, move |kernel| {
                    results(&shared, kernel, size)
                }));
            };
        for count in BESIDE {
            add("beside others", format!(", {count} sequences"), beside_others, count);
        }
        for rows in PASSES {
            add("in passes", format!(", {rows} rows a pass"), in_passes, rows);
        }
        add("without graphs", String::new(), without_graphs, 0);
        add("over growth", String::new(), over_growth, 0);
        add("from a copied cache", String::new(), from_a_copy, 0);
        if has_wide_heads {
            for rows in PROMPTS {
                add("prompt beside others", format!(", {rows} rows"), prompt_beside_others, rows);
            }
        }
    }
    cases
}

/// A subject with its model and the logits that most of its cases compare with, made when first asked for.
struct Loaded {
    subject: Subject,
    device: Device,
    model: OnceCell<Model>,
    steps: OnceCell<Vec<f32>>,
}

impl Loaded {
    fn model(&self) -> Result<&Model> {
        if let Some(model) = self.model.get() {
            return Ok(model);
        }
        let model = self.subject.load(&self.device)?;
        Ok(self.model.get_or_init(|| model))
    }

    /// The logits of [`PASSES`]' longest sequence, alone and one row at a time.
    fn steps(&self) -> Result<&[f32]> {
        if let Some(steps) = self.steps.get() {
            return Ok(steps);
        }
        let model = self.model()?;
        let steps = alone(model, &mut model.new_cache(), &ids(model, 64, Kernel::Ours), 1)?;
        Ok(self.steps.get_or_init(|| steps))
    }
}

/// `count` ids other than 0 of the model's vocabulary; those that `kernel` drops are 0.
fn ids(model: &Model, count: usize, kernel: Kernel) -> Vec<u32> {
    let ids = Inputs::of("exact", "ids").below(model.config().vocab_size as u32 - 1, count);
    let kept = |(i, id): (usize, u32)| if kernel == Kernel::OneInFourDropped && i % 4 == 1 { 0 } else { id + 1 };
    ids.into_iter().enumerate().map(kept).collect()
}

/// The logits of all `ids` after what `cache` holds, `rows` of them in a pass.
fn alone(model: &Model, cache: &mut KvCache, ids: &[u32], rows: usize) -> Result<Vec<f32>> {
    let cx = Context::inference(model.device());
    let mut logits = Vec::with_capacity(ids.len() * model.config().vocab_size);
    for ids in ids.chunks(rows) {
        let mut spans = [Span { cache: &mut *cache, rows: ids.len() }];
        logits.extend(model.forward(&cx, ids, &mut spans, LogitRows::All)?.into_f32()?);
    }
    Ok(logits)
}

fn results(reference: &[f32], ours: Vec<f32>) -> Result<Results> {
    ensure!(reference.iter().all(|value| value.is_finite()), "logits that are not finite show nothing");
    Ok(Results::new(reference.iter().map(|&value| f64::from(value)).collect(), Vec::new(), ours))
}

/// One row a pass, among rows of others that are at other positions.
fn beside_others(loaded: &Loaded, kernel: Kernel, count: usize) -> Result<Results> {
    const STEPS: usize = 10;
    let model = loaded.model()?;
    let (cx, vocabulary) = (Context::inference(model.device()), model.config().vocab_size);
    let sequence = ids(model, STEPS, kernel);
    let others = Inputs::of("exact", "others").below(vocabulary as u32, count * (STEPS + 8));
    let tested = count / 2;
    let mut caches = Vec::new();
    for (other, ids) in others.chunks(STEPS + 8).enumerate() {
        let mut cache = model.new_cache();
        if other != tested {
            alone(model, &mut cache, &ids[STEPS..][..1 + other % 7], 8)?;
        }
        caches.push(cache);
    }
    let mut ours = Vec::new();
    for step in 0..STEPS {
        let id = |row: usize| if row == tested { sequence[step] } else { others[row * (STEPS + 8) + step] };
        let ids: Vec<u32> = (0..count).map(id).collect();
        let mut spans: Vec<Span<'_>> = caches.iter_mut().map(|cache| Span { cache, rows: 1 }).collect();
        let logits = model.forward(&cx, &ids, &mut spans, LogitRows::Last)?.into_f32()?;
        ours.extend_from_slice(&logits[tested * vocabulary..][..vocabulary]);
    }
    results(&loaded.steps()?[..STEPS * vocabulary], ours)
}

/// `rows` rows a pass, the last pass what is left; the first five rows a pass of their own, so that passes start anywhere.
fn in_passes(loaded: &Loaded, kernel: Kernel, rows: usize) -> Result<Results> {
    let model = loaded.model()?;
    let (sequence, mut cache) = (ids(model, 64, kernel), model.new_cache());
    let first = if rows == 64 { 0 } else { 5 };
    let mut ours = alone(model, &mut cache, &sequence[..first], 5)?;
    ours.extend(alone(model, &mut cache, &sequence[first..], rows)?);
    results(loaded.steps()?, ours)
}

/// A cache that was large from the start, and one that grows from nothing.
fn over_growth(loaded: &Loaded, kernel: Kernel, _: usize) -> Result<Results> {
    let model = loaded.model()?;
    let positions = GROWN.min(model.config().context_length);
    let mut large = model.new_cache();
    large.reserve(positions)?;
    let reference = alone(model, &mut large, &ids(model, positions, Kernel::Ours), 1)?;
    let ours = alone(model, &mut model.new_cache(), &ids(model, positions, kernel), 1)?;
    results(&reference, ours)
}

/// A copy of a cache goes on as its original does, and the original as if there were no copy.
fn from_a_copy(loaded: &Loaded, kernel: Kernel, _: usize) -> Result<Results> {
    const SHARED: usize = 30;
    let model = loaded.model()?;
    let (sequence, vocabulary) = (ids(model, 64, Kernel::Ours), model.config().vocab_size);
    let mut original = model.new_cache();
    alone(model, &mut original, &sequence[..SHARED], SHARED)?;
    let mut copy = original.clone();
    // Other ids in the copy first: memory that both still shared would show in the original.
    alone(model, &mut copy, &sequence[..8], 3)?;
    copy.truncate(SHARED);
    let rest = &ids(model, 64, kernel)[SHARED..];
    let mut ours = alone(model, &mut original, rest, 1)?;
    ours.extend(alone(model, &mut copy, rest, 2)?);
    let reference = &loaded.steps()?[SHARED * vocabulary..];
    results(&[reference, reference].concat(), ours)
}

/// A prompt of many rows and rows after it, alone and in passes with other prompts and with single rows.
fn prompt_beside_others(loaded: &Loaded, kernel: Kernel, rows: usize) -> Result<Results> {
    let model = loaded.model()?;
    let (cx, vocabulary) = (Context::inference(model.device()), model.config().vocab_size);
    let sequence = ids(model, rows + 1, Kernel::Ours);
    let mut cache = model.new_cache();
    let mut reference = alone(model, &mut cache, &sequence[..rows], rows)?;
    reference.extend(alone(model, &mut cache, &sequence[rows..], 1)?);

    let others = Inputs::of("exact", "prompts").below(vocabulary as u32, 1 + 90 + 5);
    let sequence = ids(model, rows + 1, kernel);
    let mut caches = [0; 4].map(|_| model.new_cache());
    let lengths = [1, rows, 90, 5];
    let given = [&others[..1], &sequence[..rows], &others[1..]].concat();
    let mut spans: Vec<Span<'_>> = caches.iter_mut().zip(lengths).map(|(cache, rows)| Span { cache, rows }).collect();
    let logits = model.forward(&cx, &given, &mut spans, LogitRows::All)?.into_f32()?;
    let mut ours = logits[vocabulary..][..rows * vocabulary].to_vec();
    let next = [others[0], sequence[rows], others[1], others[2]];
    let mut spans: Vec<Span<'_>> = caches.iter_mut().map(|cache| Span { cache, rows: 1 }).collect();
    let logits = model.forward(&cx, &next, &mut spans, LogitRows::Last)?.into_f32()?;
    ours.extend_from_slice(&logits[vocabulary..][..vocabulary]);
    results(&reference, ours)
}

/// With graphs in this process, without them in another: the switch is read once per process.
fn without_graphs(loaded: &Loaded, kernel: Kernel, _: usize) -> Result<Results> {
    let program = std::env::current_exe().context("cannot find this program")?;
    let off = std::env::var("IRONLOOM_OFF").unwrap_or_default();
    let output = Command::new(program)
        .args(["check-parity", "--device", "cuda", "--logits-of", &loaded.subject.name()])
        .env("IRONLOOM_OFF", format!("{off},graph"))
        .output()
        .context("cannot start this program again")?;
    let complaint = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "without graphs: {}", complaint.trim());
    let (words, rest) = output.stdout.as_chunks::<4>();
    ensure!(rest.is_empty(), "without graphs: {} bytes of logits", output.stdout.len());
    let reference: Vec<f32> = words.iter().map(|&word| f32::from_le_bytes(word)).collect();
    results(&reference, several_passes(loaded.model()?, kernel)?)
}

/// One row at a time, then two passes of more.
fn several_passes(model: &Model, kernel: Kernel) -> Result<Vec<f32>> {
    let (sequence, mut cache) = (ids(model, 40, kernel), model.new_cache());
    let mut logits = alone(model, &mut cache, &sequence[..12], 1)?;
    logits.extend(alone(model, &mut cache, &sequence[12..], 16)?);
    Ok(logits)
}

/// Writes the logits that [`without_graphs`] compares with to the standard output: single precision, lowest byte first.
pub(super) fn write_logits(device: &Device, name: &str) -> Result<()> {
    let subject = subjects::all().into_iter().find(|subject| subject.name() == name);
    let subject = subject.with_context(|| format!("no model is called {name}"))?;
    let logits = several_passes(&subject.load(device)?, Kernel::Ours)?;
    let bytes: Vec<u8> = logits.iter().flat_map(|value| value.to_le_bytes()).collect();
    let mut out = std::io::stdout().lock();
    out.write_all(&bytes).and_then(|()| out.flush()).context("cannot write the logits")
}
