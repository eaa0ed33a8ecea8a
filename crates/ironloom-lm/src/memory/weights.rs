//! How the matrices of a checkpoint are held, by names, shapes and types alone: what the loader follows, and plans count.
//!
//! On a graphics card a matrix has the form that [`DeviceFormat::of`] tells. Kernels of routed experts read tiles, of one form
//! for gate and up and for all experts of a layer: stacks of experts that are not so are held as bfloat16.

use ironloom_core::DType;
use ironloom_kernels::lasting_bytes;
use ironloom_quant::{DeviceFormat, WeightFormat};
use ironloom_weights::Checkpoint;

use crate::{
    Architecture, Config, Error, Result,
    filled_up::inner_on_card,
    names::{Naming, Part},
};

/// Matrices of one shape and form on a graphics card: one, or a stack of all experts'.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Held {
    pub(crate) part: Part,
    pub(crate) layer: usize,
    /// `[rows, cols]`, zeros behind and below among them.
    pub(crate) shape: [usize; 2],
    /// How many lie one after the other.
    pub(crate) count: usize,
    pub(crate) format: DeviceFormat,
    /// Bytes of the card.
    pub(crate) bytes: usize,
}

/// Bytes of the processor's memory: what is stored, or by the bits of a weight.
pub(crate) fn on_processor(config: &Config, checkpoint: &Checkpoint, format: WeightFormat) -> u64 {
    let parameters = config.parameters();
    match format {
        WeightFormat::Keep => checkpoint.tensors().map(|info| info.bytes().unwrap_or(0) as u64).sum(),
        WeightFormat::F32 => 4 * parameters,
        WeightFormat::Bf16 => 2 * parameters,
        WeightFormat::Int8 => parameters,
        // Half a byte a weight, and four bytes for each block of 64.
        WeightFormat::Int4 | WeightFormat::Nf4 => parameters * 9 / 16,
    }
}

/// The matrices as a graphics card holds them that are loaded as `format`, from tensors whose types `stored` tells by name.
/// What it knows nothing of is left out: the loader says what is missing.
///
/// # Errors
/// A type holds no weights, or a size overflows.
pub(crate) fn on_card(
    config: &Config,
    naming: Naming,
    stored: impl Fn(&str) -> Option<DType>,
    format: WeightFormat,
) -> Result<Vec<Held>> {
    let fuses = matches!(naming, Naming::HuggingFace { architecture: Architecture::InternLm2, .. });
    let experts = config.experts.as_ref().map_or(0, |experts| experts.count);
    let (mut all, mut readable) = (Vec::new(), [true; 3]);
    for (part, layer, [mut rows, mut cols]) in tables(config).into_iter().chain(config.linear_parts()) {
        let (format, count) = match expert(part) {
            Some((_, 1..)) => continue,
            Some((stack, _)) => {
                if stack == 0 {
                    readable = ExpertForms::stored(naming, layer, experts, format, &stored)?.readable();
                }
                (if readable[stack] { format } else { WeightFormat::Bf16 }, experts)
            }
            None if matches!(part, Part::Router | Part::SharedRouter) => (WeightFormat::Keep, 1),
            None => (format, 1),
        };
        match part {
            Part::Gate | Part::Up | Part::SharedGate | Part::SharedUp | Part::ExpertGate(_) | Part::ExpertUp(_) => {
                rows = inner_on_card(rows);
            }
            Part::Down | Part::SharedDown | Part::ExpertDown(_) => cols = inner_on_card(cols),
            _ => {}
        }
        let stored_as = if fuses && matches!(part, Part::Q | Part::K | Part::V) { Part::FusedQkv } else { part };
        let tensor = format!("{}.weight", naming.name(stored_as, layer));
        let Some(dtype) = stored(&tensor) else { continue };
        let sized = DeviceFormat::of(dtype, format).and_then(|format| {
            let bytes = format.bytes_for(rows, cols)?.checked_mul(count);
            Ok((format, bytes.ok_or(ironloom_core::Error::SizeOverflow)?))
        });
        let (format, bytes) = sized.map_err(|source| Error::Pack { tensor, source })?;
        all.push(Held { part, layer, shape: [rows, cols], count, format, bytes: lasting_bytes(bytes) });
    }
    Ok(all)
}

/// Bytes of a graphics card that these matrices and the model's vectors, in single precision, take.
pub(crate) fn taken(config: &Config, held: &[Held]) -> u64 {
    let elements = |(_, _, [rows, cols]): (Part, usize, [usize; 2])| (rows * cols) as u64;
    let matrices: u64 = tables(config).into_iter().chain(config.linear_parts()).map(elements).sum();
    let vectors = config.parameters().saturating_sub(matrices) * size_of::<f32>() as u64;
    held.iter().map(|held| held.bytes as u64).fold(vectors, u64::saturating_add)
}

/// The embedding, and the head where it is another matrix.
fn tables(config: &Config) -> Vec<(Part, usize, [usize; 2])> {
    let parts: &[Part] = if config.tied_embeddings { &[Part::Embedding] } else { &[Part::Embedding, Part::Head] };
    parts.iter().map(|&part| (part, 0, [config.vocab_size, config.width])).collect()
}

/// Which stack a part is of, and its number there.
fn expert(part: Part) -> Option<(usize, usize)> {
    match part {
        Part::ExpertGate(number) => Some((0, number)),
        Part::ExpertUp(number) => Some((1, number)),
        Part::ExpertDown(number) => Some((2, number)),
        _ => None,
    }
}

/// The form of an expert's matrix on a graphics card.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ExpertForm {
    /// Its name, such as `Q4_K`.
    pub(crate) name: &'static str,
    pub(crate) has_tiles: bool,
}

/// The forms of a layer's experts: of their gates, ups and downs.
#[derive(Debug)]
pub(crate) struct ExpertForms(pub(crate) [Vec<ExpertForm>; 3]);

impl ExpertForms {
    /// What `count` experts have whose stored types `stored` tells by name, loaded as `format`.
    ///
    /// # Errors
    /// A type holds no weights.
    pub(crate) fn stored(
        naming: Naming,
        layer: usize,
        count: usize,
        format: WeightFormat,
        stored: impl Fn(&str) -> Option<DType>,
    ) -> Result<Self> {
        let mut forms = [const { Vec::new() }; 3];
        let parts: [fn(usize) -> Part; 3] = [Part::ExpertGate, Part::ExpertUp, Part::ExpertDown];
        for (forms, part) in forms.iter_mut().zip(parts) {
            for expert in 0..count {
                let tensor = format!("{}.weight", naming.name(part(expert), layer));
                let Some(dtype) = stored(&tensor) else { continue };
                let held = DeviceFormat::of(dtype, format).map_err(|source| Error::Pack { tensor, source })?;
                forms.push(ExpertForm { name: held.name(), has_tiles: matches!(held, DeviceFormat::Tiles(_)) });
            }
        }
        Ok(Self(forms))
    }

    /// Which stacks kernels read as they are: tiles of one form, the same for gate and up.
    pub(crate) fn readable(&self) -> [bool; 3] {
        let [gate, up, down] = &self.0;
        let is_one = |forms: &[&[ExpertForm]]| {
            let mut forms = forms.iter().copied().flatten();
            forms.next().is_none_or(|first| first.has_tiles && forms.all(|form| form == first))
        };
        let gate_and_up = is_one(&[gate, up]);
        [gate_and_up, gate_and_up, is_one(&[down])]
    }

    /// The types in stacks that kernels do not read, which are held as bfloat16.
    pub(crate) fn widened(&self) -> Vec<&'static str> {
        let unreadable = self.0.iter().zip(self.readable()).filter(|(_, readable)| !readable);
        unreadable.flat_map(|(forms, _)| forms).map(|form| form.name).filter(|name| *name != BF16).collect()
    }
}

/// The name of the form that the others are held in.
const BF16: &str = "BF16";

#[cfg(test)]
mod tests {
    use std::path::{Path, PathBuf};

    use ironloom_core::Threads;
    use ironloom_quant::TileFormat;
    use ironloom_weights::Checkpoint;

    use super::*;
    use crate::export::{ExportOptions, to_gguf};

    fn golden(name: &str) -> PathBuf {
        Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden/models").join(name)
    }

    fn held(checkpoint: &Checkpoint, format: WeightFormat) -> (Config, Vec<Held>) {
        let config = Config::from_checkpoint(checkpoint).unwrap();
        let naming = Naming::of(checkpoint, config.architecture);
        let all = on_card(&config, naming, |name| checkpoint.info(name).map(|info| info.dtype), format).unwrap();
        (config, all)
    }

    fn of(all: &[Held], part: Part) -> (DeviceFormat, usize) {
        let found = all.iter().find(|held| held.part == part).unwrap();
        (found.format, found.bytes)
    }

    const BF16_TILES: DeviceFormat = DeviceFormat::Tiles(TileFormat::Bf16);

    #[test]
    fn experts_without_tiles_are_counted_as_they_are_held() {
        let folder = tempfile::tempdir().unwrap();
        let out = folder.path().join("model.gguf");
        let options = ExportOptions { threads: Threads::new(2), ..ExportOptions::new(DType::Q5_0) };
        to_gguf(&ironloom_weights::open(golden("mixtral")).unwrap(), &out, &options).unwrap();
        let checkpoint = ironloom_weights::open(&out).unwrap();
        let (config, all) = held(&checkpoint, WeightFormat::Keep);
        // 32 rows of a block of 22 bytes, in pieces of 256.
        assert_eq!(of(&all, Part::Q), (DeviceFormat::Plain(DType::Q5_0), 768));
        assert_eq!(of(&all, Part::Router), (DeviceFormat::Plain(DType::F32), 4 * 32 * 4));
        // Four experts of 40 rows of 32 weights and 32 rows of 40, each row filled up to 64.
        assert_eq!(of(&all, Part::ExpertGate(0)), (BF16_TILES, 4 * 40 * 64 * 2));
        assert_eq!(of(&all, Part::ExpertDown(0)), (BF16_TILES, 4 * 32 * 64 * 2));
        let stored: u64 = checkpoint.tensors().map(|info| info.bytes().unwrap() as u64).sum();
        assert!(taken(&config, &all) > 2 * stored, "{} of {stored} stored", taken(&config, &all));
        let (_, all) = held(&checkpoint, WeightFormat::F32);
        assert_eq!(of(&all, Part::ExpertUp(0)), (BF16_TILES, 4 * 40 * 64 * 2));
        assert_eq!(of(&all, Part::AttentionOut), (DeviceFormat::Plain(DType::F32), 32 * 32 * 4));
        let (_, all) = held(&checkpoint, WeightFormat::Nf4);
        assert_eq!(of(&all, Part::ExpertUp(0)).0, DeviceFormat::Tiles(TileFormat::Nf4));
        assert_eq!(of(&all, Part::Router).0, DeviceFormat::Plain(DType::F32));
    }

    #[test]
    fn stacks_that_kernels_do_not_read_are_widened_as_a_whole() {
        let form = |name, has_tiles| ExpertForm { name, has_tiles };
        let (q4, q8, slow) = (form("Q4_K", true), form("Q8_0", true), form("Q8_0", false));
        let readable = |gate: &[_], up: &[_], down: &[_]| {
            let forms = ExpertForms([gate.to_vec(), up.to_vec(), down.to_vec()]);
            (forms.readable(), forms.widened())
        };
        assert_eq!(readable(&[q4; 2], &[q4; 2], &[q8; 2]), ([true; 3], vec![]));
        assert_eq!(
            readable(&[q4; 2], &[q8; 2], &[q4; 2]),
            ([false, false, true], vec!["Q4_K", "Q4_K", "Q8_0", "Q8_0"])
        );
        // One expert with a code that has no tile.
        assert_eq!(readable(&[q4; 2], &[q4; 2], &[q8, slow]), ([true, true, false], vec!["Q8_0", "Q8_0"]));
        assert_eq!(readable(&[slow; 1], &[slow; 1], &[q8; 1]).0, [false, false, true]);
        let bf16 = form(BF16, true);
        assert_eq!(readable(&[bf16], &[q4], &[bf16]), ([false, false, true], vec!["Q4_K"]));
        assert_eq!(readable(&[], &[], &[]).0, [true; 3]);
    }

    #[test]
    fn every_matrix_of_a_model_is_counted_once() {
        for name in
            ["llama", "gemma3", "internlm2", "mixtral", "qwen2_moe", "qwen3_moe", "ernie4_5_moe", "ironloom_moe"]
        {
            let (config, all) = held(&ironloom_weights::open(golden(name)).unwrap(), WeightFormat::Bf16);
            let parts = tables(&config).into_iter().chain(config.linear_parts());
            let counted: Vec<_> =
                parts.filter(|&(part, ..)| expert(part).is_none_or(|(_, number)| number == 0)).collect();
            let found: Vec<_> = all.iter().map(|held| (held.part, held.layer)).collect();
            assert_eq!(found, counted.iter().map(|&(part, layer, _)| (part, layer)).collect::<Vec<_>>(), "{name}");
            assert!(taken(&config, &all) > 2 * config.parameters(), "{name}");
        }
    }
}
