//! The configuration of `ironloom train`: a TOML file as structures, and errors that say where in the file.
//!
//! Paths are relative to the file's folder, so that a configuration means the same wherever the command is given. A key that nothing
//! reads is an error: left out silently, a misspelt option would train another model.

use std::path::{Component, Path, PathBuf};

use anyhow::{Context, Result, bail};
use ironloom_lm::{Config, DenseShape, ExpertsConfig, SharedExpertConfig, text::TrainOptions};
use ironloom_train::{
    TrainerOptions,
    data::{Answers, EndToken, HeldOut, LoaderOptions, Order, Overlong, Packing, Source, SourceFormat},
};
use serde::{Deserialize, Serialize};
use serde_json::json;

/// A training run.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct TrainConfig {
    /// Where the run's files go.
    pub(crate) output: PathBuf,
    pub(crate) model: ModelTable,
    #[serde(default)]
    pub(crate) tokenizer: Option<TokenizerTable>,
    pub(crate) data: Vec<DataTable>,
    #[serde(default)]
    pub(crate) held_out: Option<HeldOutTable>,
    pub(crate) batch: BatchTable,
    /// The trainer's options, as the library has them.
    #[serde(default)]
    pub(crate) training: TrainerOptions,
    #[serde(default)]
    pub(crate) checkpoints: CheckpointsTable,
}

/// Which model: a preset, one to go on from, or dimensions.
#[derive(Debug, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct ModelTable {
    preset: Option<Preset>,
    pub(crate) from: Option<PathBuf>,
    width: Option<usize>,
    layers: Option<usize>,
    heads: Option<usize>,
    kv_heads: Option<usize>,
    head_width: Option<usize>,
    inner_width: Option<usize>,
    context_length: Option<usize>,
    tied_embeddings: Option<bool>,
    experts: Option<ExpertsTable>,
}

#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
enum Preset {
    #[serde(rename = "moe-55m")]
    Moe55m,
    #[serde(rename = "dense-102m")]
    Dense102m,
}

/// Routed experts in all layers but the first ones.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct ExpertsTable {
    count: usize,
    per_row: usize,
    width: usize,
    /// The inner width of an expert that every row goes to.
    shared_width: usize,
    /// How many of the first layers stay dense.
    #[serde(default)]
    dense_layers: usize,
}

/// How text becomes ids, for a new model.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct TokenizerTable {
    pub(crate) path: Option<PathBuf>,
    /// The token that ends a text, where the file at `path` has one of an unusual name.
    pub(crate) end_token: Option<String>,
    pub(crate) train: Option<TrainTokenizerTable>,
}

#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct TrainTokenizerTable {
    vocab_size: usize,
    #[serde(default = "min_frequency")]
    min_frequency: u64,
}

/// Files of one kind of data, and their part of the mix.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct DataTable {
    paths: Vec<PathBuf>,
    /// Told by names and first lines where it isn't given.
    format: Option<Format>,
    #[serde(default = "one")]
    pub(crate) weight: f64,
    #[serde(default)]
    endings: Vec<String>,
    separator: Option<String>,
    field: Option<String>,
    answers: Option<Answers>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
enum Format {
    Text,
    JsonText,
    Chat,
    Completion,
    Tokens,
}

/// What the loss is measured on.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct HeldOutTable {
    fraction: f64,
    /// Which part of each source.
    #[serde(default)]
    from: HeldOutFrom,
    seed: Option<u64>,
    /// Steps between measurements; 0: only after the last.
    #[serde(default = "evaluate_every")]
    pub(crate) every: u64,
    /// The most batches of each source that are measured; all where it isn't given.
    pub(crate) batches: Option<usize>,
}

#[derive(Clone, Copy, Debug, Default, Deserialize)]
#[serde(rename_all = "kebab-case")]
enum HeldOutFrom {
    #[default]
    Documents,
    Tail,
}

/// What a step reads.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct BatchTable {
    pub(crate) sequence_length: usize,
    pub(crate) rows: usize,
    /// Batches whose gradients a step sums.
    #[serde(default = "one_batch")]
    pub(crate) accumulate: usize,
    #[serde(default)]
    pub(crate) packing: Packing,
    /// What becomes of a document that is longer than a row, where rows are packed of whole documents.
    pub(crate) overlong: Option<Overlong>,
    #[serde(default)]
    pub(crate) order: Order,
    #[serde(default)]
    pub(crate) seed: u64,
    /// What follows a text: "auto", "none", or `{ id = 2 }`.
    #[serde(default)]
    pub(crate) end: EndToken,
}

/// When checkpoints are written.
#[derive(Debug, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub(crate) struct CheckpointsTable {
    /// Steps between them; 0: only after the last.
    pub(crate) every: u64,
    /// How many stay.
    pub(crate) keep: usize,
}

impl Default for CheckpointsTable {
    fn default() -> Self {
        Self { every: 500, keep: 2 }
    }
}

fn min_frequency() -> u64 {
    TrainOptions::default().min_frequency
}

fn one() -> f64 {
    1.0
}

fn one_batch() -> usize {
    1
}

fn evaluate_every() -> u64 {
    100
}

impl TrainConfig {
    /// Reads the file, and makes its paths those of this process.
    ///
    /// # Errors
    /// The file can't be read, or is not a configuration: the error names file, line and key.
    pub(crate) fn read(path: &Path) -> Result<Self> {
        let text = std::fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()))?;
        let mut config = Self::parse(&text, &path.display().to_string())?;
        config.resolve(path.parent().unwrap_or(Path::new("")));
        Ok(config)
    }

    fn parse(text: &str, name: &str) -> Result<Self> {
        let config: Self = toml::from_str(text).map_err(|error| {
            let before = &text[..error.span().map_or(0, |span| span.start.min(text.len()))];
            let line = before.matches('\n').count();
            let quoted = text.lines().nth(line).unwrap_or_default().trim();
            anyhow::anyhow!("{name}:{}: {}, in `{quoted}`", line + 1, error.message().trim())
        })?;
        config.check().with_context(|| name.to_owned())?;
        Ok(config)
    }

    /// What no single value shows.
    fn check(&self) -> Result<()> {
        self.model.check()?;
        match (&self.model.from, &self.tokenizer) {
            (Some(_), Some(_)) => bail!("[tokenizer] is of no use with model.from: the model brings its own"),
            (None, None) => bail!(
                "a new model needs a [tokenizer]: name one (path = \"tokenizer.json\"), or train one \
                 (train = {{ vocab_size = 4096 }})"
            ),
            (None, Some(TokenizerTable { path, train, .. })) if path.is_some() == train.is_some() => {
                bail!("[tokenizer] needs either path or train")
            }
            _ => {}
        }
        if self.data.is_empty() {
            bail!("there is no [[data]] to train on");
        }
        if self.batch.accumulate == 0 {
            bail!("batch.accumulate is 0: a step needs 1 batch or more");
        }
        if self.training.steps == 0 {
            bail!("training.steps is 0: a run needs 1 step or more");
        }
        if self.batch.overlong.is_some() && self.batch.packing == Packing::Continuous {
            bail!(
                "batch.overlong means nothing with continuous packing, which cuts all text: add packing = \"documents\""
            );
        }
        match &self.held_out {
            Some(HeldOutTable { seed: Some(_), from: HeldOutFrom::Tail, .. }) => {
                bail!("held_out.seed means nothing with from = \"tail\": the end of a source is no draw")
            }
            Some(HeldOutTable { batches: Some(0), .. }) => {
                bail!("held_out.batches is 0: nothing would be measured. Leave [held_out] out to hold nothing out")
            }
            _ => Ok(()),
        }
    }

    /// What a run that goes on takes from its checkpoint, or goes on with in another way than before.
    pub(crate) fn notes(&self) -> serde_json::Value {
        let BatchTable { rows, accumulate, .. } = self.batch;
        json!({
            "model": self.model,
            "tokenizer": self.tokenizer,
            "batch": { "rows": rows, "accumulate": accumulate },
        })
    }

    fn resolve(&mut self, folder: &Path) {
        let join = |path: &mut PathBuf| *path = below(folder, path);
        join(&mut self.output);
        self.model.from.iter_mut().for_each(join);
        self.tokenizer.iter_mut().filter_map(|table| table.path.as_mut()).for_each(join);
        self.data.iter_mut().flat_map(|table| &mut table.paths).for_each(join);
    }
}

/// A path that is relative to `folder`, without the detours `folder/../` that can be left out.
fn below(folder: &Path, path: &Path) -> PathBuf {
    let (mut folder, mut path) = (folder, path);
    while let (Ok(rest), Some(Component::Normal(_)), Some(parent)) =
        (path.strip_prefix(".."), folder.components().next_back(), folder.parent())
        && !folder.is_symlink()
    {
        (folder, path) = (parent, rest);
    }
    let joined = folder.join(path);
    if joined.as_os_str().is_empty() { PathBuf::from(".") } else { joined }
}

impl ModelTable {
    /// A model to go on from.
    pub(crate) fn of_model(from: PathBuf) -> Self {
        Self { from: Some(from), ..Self::default() }
    }

    fn check(&self) -> Result<()> {
        let has_dimensions = self.width.is_some() || self.layers.is_some() || self.heads.is_some();
        let ways = [self.preset.is_some(), self.from.is_some(), has_dimensions];
        if ways.iter().filter(|&&given| given).count() != 1 {
            bail!("[model] needs one of preset, from (a model to go on from), or width, layers and heads");
        }
        if has_dimensions && (self.width.is_none() || self.layers.is_none() || self.heads.is_none()) {
            bail!("[model] needs width, layers and heads together");
        }
        let for_dimensions = [
            ("kv_heads", self.kv_heads.is_some()),
            ("head_width", self.head_width.is_some()),
            ("inner_width", self.inner_width.is_some()),
            ("context_length", self.context_length.is_some()),
            ("tied_embeddings", self.tied_embeddings.is_some()),
            ("experts", self.experts.is_some()),
        ];
        match for_dimensions.iter().find(|(_, given)| *given && !has_dimensions) {
            Some((key, _)) => bail!("model.{key} belongs to a model given by width, layers and heads"),
            None => Ok(()),
        }
    }

    /// The description of a new model.
    ///
    /// # Errors
    /// The dimensions contradict each other.
    pub(crate) fn describe(&self, vocab_size: usize, sequence_length: usize) -> Result<Config> {
        let config = match self.preset {
            Some(Preset::Moe55m) => Config { vocab_size, ..Config::moe_55m() },
            Some(Preset::Dense102m) => Config { vocab_size, ..Config::dense_102m() },
            None => self.of_dimensions(vocab_size, sequence_length)?,
        };
        config.validate().context("the [model] can't be")?;
        Ok(config)
    }

    fn of_dimensions(&self, vocab_size: usize, sequence_length: usize) -> Result<Config> {
        let (width, heads) = (self.width.unwrap_or_default(), self.heads.unwrap_or_default());
        let layers = self.layers.unwrap_or_default();
        if width == 0 || heads == 0 || layers == 0 {
            bail!("model.width, layers and heads must be 1 or more");
        }
        let head_width = match self.head_width {
            Some(head_width) => head_width,
            None if width.is_multiple_of(heads) => width / heads,
            None => bail!("model.width of {width} is not a multiple of {heads} heads: give head_width"),
        };
        // Three matrices of 8/3 widths have the weights of two of 4, as Llama's have.
        let inner_width = self.inner_width.unwrap_or_else(|| (width * 8).div_ceil(3).next_multiple_of(32));
        let kv_heads = self.kv_heads.unwrap_or(heads);
        let shape = DenseShape { vocab_size, width, layers, heads, kv_heads, head_width, inner_width };
        let mut config = Config::dense(shape);
        config.context_length = self.context_length.unwrap_or(sequence_length);
        config.tied_embeddings = self.tied_embeddings.unwrap_or(true);
        if let Some(ExpertsTable { count, per_row, width, shared_width, dense_layers }) = self.experts {
            if dense_layers >= layers {
                bail!("model.experts.dense_layers is {dense_layers}, and the model has {layers} layers: leave some");
            }
            if per_row == 1 {
                bail!(
                    "model.experts.per_row is 1: the weight of a single expert is always 1, so that nothing would teach the \
                     router. Take 2 or more"
                );
            }
            let shared = Some(SharedExpertConfig { width: shared_width, gated: false });
            let experts = ExpertsConfig { count, per_row, width, normalize: true, shared };
            config = Config::routed(config, dense_layers, experts);
        }
        Ok(config)
    }
}

impl TrainTokenizerTable {
    pub(crate) fn options(&self) -> TrainOptions {
        let Self { vocab_size, min_frequency } = *self;
        TrainOptions { vocab_size, min_frequency, ..TrainOptions::default() }
    }
}

impl DataTable {
    /// Files whose kind is told by their names and first lines.
    pub(crate) fn of_files(paths: Vec<PathBuf>, answers: Option<Answers>) -> Self {
        let (format, separator, field, endings) = (None, None, None, Vec::new());
        Self { paths, format, weight: 1.0, endings, separator, field, answers }
    }

    /// The source that the table describes.
    ///
    /// # Errors
    /// A key does not belong to the format, or the format can't be told.
    pub(crate) fn source(&self) -> Result<Source> {
        let Self { paths, endings, separator, field, answers, .. } = self;
        let Some(first) = paths.first() else { bail!("a [[data]] has no paths") };
        let guessed = match self.format {
            Some(_) => None,
            None => {
                let format = Source::guess(first)?.format;
                for path in &paths[1..] {
                    if Source::guess(path)?.format != format {
                        bail!(
                            "{} and {} are of different kinds: give each a [[data]] of its own, or a format",
                            first.display(),
                            path.display()
                        );
                    }
                }
                Some(format)
            }
        };
        let kind = match (&self.format, &guessed) {
            (Some(format), _) => *format,
            (None, Some(SourceFormat::JsonText { .. })) => Format::JsonText,
            (None, Some(SourceFormat::Chat { .. })) => Format::Chat,
            (None, Some(SourceFormat::Completion)) => Format::Completion,
            (None, Some(SourceFormat::Tokens)) => Format::Tokens,
            (None, Some(SourceFormat::Text { .. }) | None) => Format::Text,
        };
        let of_others = [
            ("separator", separator.is_some() && kind != Format::Text),
            ("field", field.is_some() && kind != Format::JsonText),
            ("answers", answers.is_some() && kind != Format::Chat),
        ];
        if let Some((key, _)) = of_others.iter().find(|(_, wrong)| *wrong) {
            bail!("`{key}` means nothing for the data of {}: its format is another", first.display());
        }
        let format = match kind {
            Format::Text => SourceFormat::Text { separator: separator.clone() },
            Format::JsonText => SourceFormat::JsonText { field: field.clone().unwrap_or_else(|| "text".to_owned()) },
            Format::Chat => SourceFormat::Chat { answers: (*answers).unwrap_or_default() },
            Format::Completion => SourceFormat::Completion,
            Format::Tokens => SourceFormat::Tokens,
        };
        Ok(Source { paths: paths.clone(), format, endings: endings.clone() })
    }
}

impl HeldOutTable {
    /// A part of the documents; of plain text, which may be one document, the end.
    pub(crate) fn of_format(format: &SourceFormat, fraction: f64, every: u64) -> Self {
        let is_text = matches!(format, SourceFormat::Text { .. } | SourceFormat::Tokens);
        let from = if is_text { HeldOutFrom::Tail } else { HeldOutFrom::Documents };
        Self { fraction, from, seed: None, every, batches: None }
    }

    pub(crate) fn part(&self) -> HeldOut {
        let Self { fraction, seed, .. } = *self;
        match self.from {
            HeldOutFrom::Documents => HeldOut::Documents { fraction, seed: seed.unwrap_or_default() },
            HeldOutFrom::Tail => HeldOut::Tail { fraction },
        }
    }
}

impl BatchTable {
    pub(crate) fn options(&self, vocab_size: usize) -> LoaderOptions {
        let Self { sequence_length, rows, packing, overlong, order, seed, .. } = *self;
        let overlong = overlong.unwrap_or_default();
        LoaderOptions { sequence_length, rows, packing, overlong, order, seed, vocab_size }
    }
}

#[cfg(test)]
mod tests;
