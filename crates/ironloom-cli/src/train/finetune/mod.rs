//! `ironloom finetune MODEL --data FILE`: goes on with a model on other data, by adapters beside it or all of it.
//!
//! It is `ironloom train` with the configuration made of arguments and of what suits a fine-tune: documents whole in their rows,
//! loss on the answers alone, a rate for what is trained. Adapters are trained beside a base that is frozen and held in few bits
//! where that is asked for; at the end they are written in PEFT's layout, and with `--merge` the model with them added, after
//! telling how far the merging moved its logits.

mod options;

use std::path::{Path, PathBuf};

use anyhow::{Result, bail};
use ironloom_core::DType;
use ironloom_lm::{Model, export::TextFiles};
use ironloom_quant::WeightFormat;
use ironloom_tensor::Device;
use ironloom_train::{
    FrozenWeights, Run, RunSize, Trainer, adapter_memory,
    data::Loader,
    lora::{LoraAdapter, LoraOptions},
    resume, resume_adapters,
    run::{self, EndReason, Ended},
};
use serde::Serialize;
use serde_json::json;

use self::options::{AdapterOptions, Chosen, DataOptions, StepOptions};
use super::{
    Shown,
    config::{BatchTable, TrainConfig},
    go, load, outcome,
    prepare::Prepared,
    progress,
    progress::Follower,
    reason, refuse_own_folders,
    resumption::{Beginning, Resumed, notes, now},
    run_options, show_plan, summary,
};
use crate::{
    console::Console,
    failure::Outcome,
    figures::counted,
    interrupt,
    loading::{self, Weights},
    machine::MachineOptions,
    merging::{self, Merged},
};

const EXAMPLES: &str = "\
Examples:
  ironloom finetune SmolLM2-135M-Instruct/ --data facts.jsonl --epochs 20 --merge
  ironloom finetune model.gguf --data notes.txt --base nf4 --rank 32 --targets q_proj,v_proj
  ironloom finetune Qwen2.5-7B/ --data chats.jsonl --base nf4 --device cuda
  ironloom finetune Qwen2.5-0.5B/ --data chats.jsonl --full --learning-rate 1e-5 --held-out 0.05 --device cuda
  ironloom finetune SmolLM2-135M-Instruct/ --data facts.jsonl --dry-run

JSONL lines are {\"messages\": [{\"role\": …, \"content\": …}, …]}, {\"prompt\": …, \"completion\": …} or {\"text\": …}; other files are
plain text. Of messages the assistant's are learned, and of the second form the completion. The output folder gets log.jsonl,
loss.svg, checkpoints/ and at the end adapter/, which `ironloom export --adapter` and peft read, or model/. Ctrl-C saves and ends.";

const ADVICE: &str =
    "use fewer --batch-rows (with --accumulate), --checkpointing, --base nf4, or adapters instead of --full";

/// Train a model further on your data: adapters beside it (LoRA), or all of it
#[derive(clap::Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Arguments {
    /// The model: a GGUF file or a Hugging Face folder
    model: PathBuf,
    /// The output folder [default: the model's name with -finetuned]
    #[arg(short, long, value_name = "FOLDER")]
    output: Option<PathBuf>,
    /// Train all weights, in 32 bits, instead of adapters
    #[arg(long)]
    full: bool,
    /// Write the model with its adapters added too, as a folder that `ironloom run` and transformers read
    #[arg(long, conflicts_with = "full")]
    merge: bool,
    /// Go on from the last checkpoint in the output folder
    #[arg(long, conflicts_with = "overwrite")]
    resume: bool,
    /// Remove the run that is in the output folder
    #[arg(long)]
    overwrite: bool,
    /// Print what the run would do and take, and end
    #[arg(long)]
    dry_run: bool,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    data: DataOptions,
    #[command(flatten)]
    adapters: AdapterOptions,
    #[command(flatten)]
    steps: StepOptions,
    #[command(flatten)]
    machine: MachineOptions,
}

/// What `--json` prints at the end.
#[derive(Serialize)]
struct Report<'a> {
    reason: &'static str,
    steps: u64,
    loss: Option<f64>,
    held_out_loss: Option<f64>,
    /// Of this process, not of those before a resumption.
    tokens: u64,
    tokens_per_second: Option<f64>,
    /// MFU, where all weights are trained.
    utilization: Option<f64>,
    peak_memory_bytes: Option<u64>,
    device_memory_bytes: Option<u64>,
    checkpoint: &'a Path,
    adapter: Option<&'a Path>,
    model: Option<&'a Path>,
    merging: Option<&'a Merged>,
}

/// Fine-tunes.
pub(crate) fn run(arguments: &Arguments, console: &Console) -> Result<Outcome> {
    interrupt::install()?;
    let lora = if arguments.full { None } else { Some(arguments.adapters.lora()?) };
    let Chosen { mut config, length, model } = options::choose(arguments)?;
    if let Some(lora) = lora.as_ref().filter(|_| arguments.machine.device.is_card()) {
        lora.check_for_card(&model)?;
    }
    refuse_own_folders(&config.output, Some(&arguments.model))?;
    let mut options = run_options(&config, loading::name(&arguments.model));
    let beginning = Beginning::asked(arguments.resume, arguments.overwrite || arguments.dry_run);
    let resumed = Resumed::find(beginning, &config.output, &options, console)?;
    let (begun, settings) =
        (resumed.as_ref().and_then(Resumed::begun).unwrap_or_else(now), settings(arguments, &config));
    options.notes = notes(begun, &settings);
    let device = arguments.machine.open()?;
    // A checkpoint of adapters has no model: theirs is read again.
    let mut prepared = Prepared::new(&config, None, begun, &device, console)?;
    length.set(&mut config, &mut prepared);
    if let Some(lora) = &lora {
        plan_adapters(arguments, lora, &config, &device, &mut prepared)?;
    }
    if let Some(resumed) = &resumed {
        // The schedule is made for the steps.
        resumed.compare(&config.training, &["schedule"], &settings, console)?;
    }
    let resumed = resumed.map(|resumed| resumed.path);
    let available = arguments.machine.device.available(&device)?;
    let shown = if arguments.dry_run { Shown::Result { json: arguments.json } } else { Shown::Note };
    show_plan(&prepared, shown, available, ADVICE, console)?;
    if arguments.dry_run {
        return Ok(Outcome::Done);
    }
    let (text, probe) = (prepared.text.clone(), probe(&prepared.loader)?);
    let Prepared { checkpoint: Some(checkpoint), loader, held_out, .. } = prepared else {
        bail!("a fine-tune needs a model");
    };
    let training = config.training.clone();
    let base = |device: &Device| load(&checkpoint, device, arguments.adapters.base.into(), console);
    let run = match (&lora, resumed.as_deref()) {
        (None, Some(last)) => {
            Run::resume(&config.output, resume(last, &device, training)?, loader, text.clone(), options)?
        }
        (Some(_), Some(last)) => {
            let goes_on = resume_adapters(last, base(&device)?, training)?;
            Run::resume(&config.output, goes_on, loader, text.clone(), options)?
        }
        (lora, None) => {
            let trainer = match lora {
                Some(lora) => {
                    let (model, name) = (base(&device)?, arguments.model.display().to_string());
                    let adapter = LoraAdapter::new(&model, lora.clone(), Some(name), training.seed)?;
                    Trainer::with_adapters(model, &adapter, training)?
                }
                None => {
                    let mut model = load(&checkpoint, &device.processor(), WeightFormat::F32, console)?;
                    model.make_trainable()?;
                    Trainer::new(model, training)?.to_device(&device)?
                }
            };
            if arguments.overwrite {
                run::remove(&config.output)?;
            }
            Run::begin(&config.output, trainer, loader, text.clone(), options)?
        }
    };
    let (ended, follower) = go(run.with_held_out(held_out), config.training.steps, console)?;
    let merges = arguments.merge && ended.reason == EndReason::Done;
    let merging = Merging { base: &|| base(&device.processor()), text, probe };
    finish(arguments, &config, ended, &follower, merges.then_some(&merging), console)
}

/// What is needed to make, to judge and to write a merged model.
struct Merging<'a> {
    /// Loads the frozen model on the processor.
    base: &'a dyn Fn() -> Result<Model>,
    text: TextFiles,
    probe: Vec<u32>,
}

/// Makes the plan that of adapters.
fn plan_adapters(
    arguments: &Arguments,
    lora: &LoraOptions,
    config: &TrainConfig,
    device: &Device,
    prepared: &mut Prepared,
) -> Result<()> {
    let Some(checkpoint) = &prepared.checkpoint else { return Ok(()) };
    let layers = prepared.config.linear_layers();
    let selected = lora.select(layers.iter().map(|(name, _)| name.as_str()))?.len();
    let is_half = match arguments.adapters.base {
        Weights::Keep => {
            checkpoint.tensors().filter(|info| info.shape.rank() > 1).all(|info| info.dtype == DType::BF16)
        }
        other => other == Weights::Bf16,
    };
    let bytes = prepared.config.weight_bytes(checkpoint, device, arguments.adapters.base.into())?;
    let frozen = FrozenWeights { bytes, unpacked: !is_half };
    let size = RunSize { tokens: config.batch.sequence_length * config.batch.rows, batches: config.batch.accumulate };
    let mut memory = adapter_memory(&prepared.config, device, frozen, lora, &config.training, size)?;
    if let (true, Device::Cpu(_)) = (arguments.merge, device) {
        // Beside the frozen weights, what training held having gone, all of the model in 32 bits.
        let merging = bytes + 4 * prepared.config.parameters();
        if let Some(more) = merging.checked_sub(memory.total()).filter(|&more| more > 0) {
            memory = memory.with("merging at the end, beyond that", more);
        }
    }
    prepared.memory = memory;
    prepared.plan.memory = prepared.memory.parts().to_vec();
    let held = match arguments.adapters.base {
        Weights::Keep => "as it is stored".to_owned(),
        other => format!("as {}", format!("{other:?}").to_lowercase()),
    };
    let mut line = format!(
        "rank {}, alpha {}, on {}; the model is frozen, held {held}",
        lora.rank,
        lora.alpha,
        counted(selected, "layer")
    );
    if prepared.config.tied_embeddings {
        line.push_str("; its head is its embedding, and stays so");
    }
    prepared.plan.adapters = Some(line);
    Ok(())
}

/// Ids that a merged model is held against its adapters on: the beginning of the data's first row.
fn probe(loader: &Loader) -> Result<Vec<u32>> {
    let batch = loader.clone().next_batch()?;
    let first = batch.documents.first().copied().unwrap_or_default();
    Ok(batch.ids[..first.min(merging::PROBE)].to_vec())
}

/// What a run that goes on takes from its checkpoint, or goes on with in another way than before.
fn settings(arguments: &Arguments, config: &TrainConfig) -> serde_json::Value {
    let BatchTable { rows, accumulate, .. } = config.batch;
    let batch = json!({ "rows": rows, "accumulate": accumulate });
    let model = arguments.model.canonicalize().unwrap_or_else(|_| arguments.model.clone());
    if arguments.full {
        return json!({ "model": model, "batch": batch });
    }
    json!({ "base": { "model": model, "held": arguments.adapters.base }, "adapters": arguments.adapters, "batch": batch })
}

/// Merges where that was asked for, and says how the run ended.
fn finish(
    arguments: &Arguments,
    config: &TrainConfig,
    ended: Ended,
    follower: &Follower<'_>,
    merging: Option<&Merging<'_>>,
    console: &Console,
) -> Result<Outcome> {
    let Ended { reason: why, trainer, checkpoint, model: written } = ended;
    let steps = trainer.steps_done();
    let (mut adapter, mut model, mut merged) = (None, written, None);
    if !arguments.full {
        adapter = model.take();
        if let Some(merging) = merging {
            let folder = config.output.join("model");
            merged = Some(merge(trainer, &folder, merging)?);
            model = Some(folder);
        }
    }
    if arguments.json {
        console.print_json(&Report {
            reason: reason(why),
            steps,
            loss: follower.last.as_ref().map(|report| report.loss),
            held_out_loss: follower.held_out_loss,
            tokens: follower.tokens,
            tokens_per_second: follower.tokens_per_second(),
            utilization: follower.utilization(),
            peak_memory_bytes: progress::peak_bytes(),
            device_memory_bytes: follower.device_bytes(),
            checkpoint: &checkpoint,
            adapter: adapter.as_deref(),
            model: model.as_deref(),
            merging: merged.as_ref(),
        })?;
        return Ok(outcome(why));
    }
    let shown = model.as_ref().or(adapter.as_ref()).unwrap_or(&checkpoint).display();
    console.print(format_args!("{shown}: {}", summary(steps, follower)))?;
    if let Some(merged) = &merged {
        console.note(format_args!("merged:     {merged}"));
    }
    let base = arguments.model.display();
    match (&model, &adapter) {
        (Some(model), _) => {
            console.note(format_args!("run it:     ironloom run {} \"…\"", model.display()));
            console.note(format_args!("export it:  ironloom export {} model.gguf --type q8_0", model.display()));
        }
        (None, Some(adapter)) => {
            let adapter = adapter.display();
            console.note(format_args!("export it:  ironloom export {base} model.gguf --type q8_0 --adapter {adapter}"));
        }
        (None, None) => console.note("go on with: the same command and --resume"),
    }
    Ok(outcome(why))
}

/// Adds the adapters to the model and writes it. What was trained on a card is merged on the processor.
fn merge(trainer: Trainer, folder: &Path, merging: &Merging<'_>) -> Result<Merged> {
    let mut model = match (trainer.model().device(), trainer.adapter()?) {
        (Device::Cuda(_), Some(adapter)) => {
            drop(trainer);
            let mut model = (merging.base)()?;
            adapter.attach(&mut model)?;
            model
        }
        _ => trainer.into_model(),
    };
    let merged = merging::merge(&mut model, &merging.probe)?;
    merging::write_folder(&model, folder, &merging.text)?;
    Ok(merged)
}
