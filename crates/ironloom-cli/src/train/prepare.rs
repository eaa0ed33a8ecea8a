//! From a configuration to everything a run needs but its model's weights: description, tokenizer, data, plan.
//!
//! What cannot work is found here, before anything large is allocated: a source without text, a row longer than the context, a
//! plan that does not fit in memory.

use std::{
    fmt,
    path::{Path, PathBuf},
};

use anyhow::{Context, Result, bail};
use ironloom_core::{MemoryPlan, grouped};
use ironloom_lm::{
    Config,
    export::TextFiles,
    text::{ChatTemplate, Tokenizer, TrainOptions, train_bpe},
};
use ironloom_tensor::Device;
use ironloom_train::{
    RunSize,
    data::{
        Batch, CutDocuments, EndToken, Loader, OnePass, Overlong, Packing, Share, Source, SourceFormat, Tokenization,
    },
    training_memory,
};
use ironloom_weights::Checkpoint;
use serde::Serialize;

use super::config::{TokenizerTable, TrainConfig};
use crate::{
    console::Console,
    figures::{counted, short_count},
    loading,
};

/// All of a run but its weights.
pub(super) struct Prepared {
    pub(super) config: Config,
    /// What the weights are read from; none for a new model.
    pub(super) checkpoint: Option<Checkpoint>,
    pub(super) text: TextFiles,
    pub(super) loader: Loader,
    pub(super) held_out: Vec<Batch>,
    pub(super) plan: Plan,
    pub(super) memory: MemoryPlan,
}

/// What a run is going to do.
#[derive(Serialize)]
pub(super) struct Plan {
    architecture: &'static str,
    parameters: u64,
    active_parameters: u64,
    vocab_size: usize,
    context_length: usize,
    sources: Vec<SourcePlan>,
    held_out_predictions: usize,
    /// What is trained beside a frozen model.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) adapters: Option<String>,
    pub(super) steps: u64,
    tokens_per_step: usize,
    pub(super) epochs: f64,
    pub(super) memory: Vec<(String, u64)>,
    output: PathBuf,
}

#[derive(Serialize)]
struct SourcePlan {
    name: String,
    weight: f64,
    documents: usize,
    tokens: usize,
    rows: usize,
    /// Documents that are longer than a row and end where it ends.
    cut_documents: usize,
    /// Those of which nothing is learned, as what they have to learn begins past the row.
    left_out_documents: usize,
}

/// Text and its ids.
struct Text {
    tokenizer: Tokenizer,
    template: Option<ChatTemplate>,
    files: TextFiles,
}

impl Prepared {
    /// Prepares a run on `device` that begins anew, or goes on from `resumed`. Templates that write the date write that of `begun`,
    /// in seconds since 1970: a run that goes on another day learns the same.
    ///
    /// # Errors
    /// An option means nothing, or the model, the tokenizer or the data can't be read or don't fit each other.
    pub(super) fn new(
        config: &TrainConfig,
        resumed: Option<&Path>,
        begun: u64,
        device: &Device,
        console: &Console,
    ) -> Result<Self> {
        config.training.check().context("[training]")?;
        let checkpoint = match (resumed, &config.model.from) {
            (Some(path), _) => Some(loading::open(path)?),
            (None, Some(path)) => Some(loading::open(path)?),
            (None, None) => None,
        };
        let sources = config.data.iter().map(|table| table.source()).collect::<Result<Vec<Source>>>()?;
        let text = match (&checkpoint, &config.tokenizer) {
            (Some(checkpoint), _) => Text {
                tokenizer: loading::tokenizer(checkpoint)?,
                template: loading::template(checkpoint)?.map(|template| template.at_time(begun)),
                files: TextFiles::from_checkpoint(checkpoint)?,
            },
            (None, Some(table)) => Text::new(table, &sources, console)?,
            (None, None) => bail!("a new model needs a [tokenizer]"),
        };
        let described = match &checkpoint {
            Some(checkpoint) => Config::from_checkpoint(checkpoint)
                .with_context(|| format!("cannot train {}", checkpoint.path().display()))?,
            None => config.model.describe(text.tokenizer.vocab_size(), config.batch.sequence_length)?,
        };
        if config.batch.sequence_length > described.context_length {
            bail!(
                "batch.sequence_length is {}, and the model has {} positions: make rows shorter",
                config.batch.sequence_length,
                described.context_length
            );
        }
        let (loader, held_out, sources) = load(config, &sources, &text, described.vocab_size)?;
        let batch_tokens = config.batch.sequence_length * config.batch.rows;
        let size = RunSize { tokens: batch_tokens, batches: config.batch.accumulate };
        let memory = training_memory(&described, device, &config.training, size);
        let tokens_per_step = batch_tokens * config.batch.accumulate;
        let epoch_rows: usize = loader.rows_in_epoch().iter().sum();
        let plan = Plan {
            architecture: described.architecture.name(),
            parameters: described.parameters(),
            active_parameters: described.active_parameters(),
            vocab_size: described.vocab_size,
            context_length: described.context_length,
            sources,
            held_out_predictions: ironloom_train::data::counted(&held_out),
            adapters: None,
            steps: config.training.steps,
            tokens_per_step,
            epochs: config.training.steps as f64 * (config.batch.rows * config.batch.accumulate) as f64
                / epoch_rows.max(1) as f64,
            memory: memory.parts().to_vec(),
            output: config.output.clone(),
        };
        Ok(Self { config: described, checkpoint, text: text.files, loader, held_out, plan, memory })
    }
}

/// The data, what is held out of them, and what there is of each source.
fn load(
    config: &TrainConfig,
    sources: &[Source],
    text: &Text,
    vocab_size: usize,
) -> Result<(Loader, Vec<Batch>, Vec<SourcePlan>)> {
    let tokenization =
        Tokenization { tokenizer: &text.tokenizer, template: text.template.as_ref(), end: config.batch.end };
    let options = config.batch.options(vocab_size);
    let (mut shares, mut held_out, mut plans) = (Vec::new(), Vec::new(), Vec::new());
    for (source, table) in sources.iter().zip(&config.data) {
        let mut documents = source.load(&tokenization)?;
        if let Some(table) = &config.held_out {
            let (training, measured) = documents.split(table.part())?;
            for batch in OnePass::new(&measured, &options)?.take(table.batches.unwrap_or(usize::MAX)) {
                held_out.push(batch?);
            }
            documents = training;
        }
        let (name, weight) = (source.name(), table.weight);
        let is_cut = (options.packing, options.overlong) == (Packing::Documents, Overlong::Cut);
        let cut = if is_cut { documents.cut_to(options.sequence_length) } else { CutDocuments::default() };
        let (cut_documents, left_out_documents) = (cut.shortened, cut.left_out);
        let (count, tokens) = (documents.len(), documents.tokens());
        plans.push(SourcePlan { name, weight, documents: count, tokens, rows: 0, cut_documents, left_out_documents });
        shares.push(Share { documents, weight });
    }
    let loader = Loader::new(shares, &options)?;
    plans.iter_mut().zip(loader.rows_in_epoch()).for_each(|(plan, rows)| plan.rows = rows);
    Ok((loader, held_out, plans))
}

impl Text {
    /// The tokenizer of a new model.
    fn new(table: &TokenizerTable, sources: &[Source], console: &Console) -> Result<Self> {
        let json = match (&table.train, &table.path) {
            (Some(train), _) => train_tokenizer(sources, &train.options(), console)?,
            (None, Some(path)) => {
                std::fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()))?
            }
            (None, None) => bail!("[tokenizer] needs either path or train"),
        };
        let tokenizer = Tokenizer::from_json(json.as_bytes()).context("cannot use the tokenizer")?;
        let named = table.end_token.as_deref();
        let end_id = match named {
            Some(token) => tokenizer.special_id(token),
            None => tokenizer.end_ids().first().copied(),
        };
        let end = end_id.and_then(|id| Some((tokenizer.token_text(id)?.to_owned(), id)));
        let Some((end_token, end_id)) = end else {
            bail!(
                "the tokenizer has no {}: name a special token that ends a text, as tokenizer.end_token",
                named
                    .map_or("token that is known to end a text".to_owned(), |token| format!("special token {token:?}"))
            );
        };
        Ok(Self { files: TextFiles::of_trained(&json, &end_token, end_id), tokenizer, template: None })
    }
}

/// Texts that a tokenizer is trained on: more change little, and all of them are held in memory.
const TOKENIZER_TEXT: usize = 256 << 20;

fn train_tokenizer(sources: &[Source], options: &TrainOptions, console: &Console) -> Result<String> {
    // A tokenizer of bytes reads every format, and its ids are the text again.
    let of_bytes = TrainOptions { vocab_size: 257, ..TrainOptions::default() };
    let bytes = Tokenizer::from_json(train_bpe(std::iter::empty::<&str>(), &of_bytes)?.as_bytes())?;
    let tokenization = Tokenization { tokenizer: &bytes, template: None, end: EndToken::None };
    let (mut texts, mut length) = (Vec::new(), 0);
    for source in sources {
        if source.format == SourceFormat::Tokens {
            bail!("{} holds token ids already: name the tokenizer they were made with", source.name());
        }
        source.read(&tokenization, &mut |document, _| {
            if length < TOKENIZER_TEXT {
                let text = bytes.decode(&document.ids);
                length += text.len();
                texts.push(text);
            }
            Ok(())
        })?;
    }
    console.note(format_args!("training a tokenizer on {} bytes of text", grouped(length as u64)));
    train_bpe(texts.iter().map(String::as_str), options).context("cannot train the tokenizer")
}

impl fmt::Display for Plan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let parameters = short_count(self.parameters);
        write!(f, "model     {}, {parameters} parameters", self.architecture)?;
        if self.active_parameters < self.parameters {
            write!(f, ", {} of them a token", short_count(self.active_parameters))?;
        }
        writeln!(f, ", {} token ids, {} positions", grouped(self.vocab_size as u64), self.context_length)?;
        for source in &self.sources {
            let (documents, tokens) = (counted(source.documents, "document"), counted(source.tokens, "token"));
            write!(f, "data      {}: {documents}, {tokens}", source.name)?;
            if self.sources.len() > 1 {
                write!(f, ", weight {}", source.weight)?;
            }
            if source.cut_documents > 0 {
                write!(f, ", {} of them cut to a row's length", source.cut_documents)?;
            }
            if source.left_out_documents > 0 {
                let left_out = source.left_out_documents;
                write!(f, ", {left_out} left out: their answers begin past a row's end (a longer row takes them)")?;
            }
            writeln!(f)?;
        }
        if self.held_out_predictions > 0 {
            writeln!(f, "held out  {}", counted(self.held_out_predictions, "prediction"))?;
        }
        if let Some(adapters) = &self.adapters {
            writeln!(f, "adapters  {adapters}")?;
        }
        let (steps, tokens) = (grouped(self.steps), grouped(self.tokens_per_step as u64));
        writeln!(f, "steps     {steps} of {tokens} tokens: the data {:.1} times", self.epochs)?;
        let memory = self.memory.iter().fold(MemoryPlan::new(), |plan, (part, bytes)| plan.with(part.clone(), *bytes));
        writeln!(f, "memory    about {}: {memory}", ironloom_core::format_bytes(memory.total()))?;
        write!(f, "output    {}", self.output.display())
    }
}
