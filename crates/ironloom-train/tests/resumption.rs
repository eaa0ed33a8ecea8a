//! Runs as a whole: the same bits however they are cut and on any number of threads, whole checkpoints however they end, and what a
//! run does when its losses are refused.

use std::{
    fs,
    ops::ControlFlow,
    path::{Path, PathBuf},
};

use ironloom_lm::{Config, DenseShape, ExpertsConfig, LoadOptions, Model, SharedExpertConfig, export::TextFiles};
use ironloom_quant::WeightFormat;
use ironloom_tensor::Device;
use ironloom_train::{
    Checkpoints, Error, Occasion, Run, Schedule, SpikeGuardOptions, Trainer, TrainerOptions,
    data::{
        Batch, Cursor, Document, DocumentsBuilder, Loader, LoaderOptions, OnePass, Order, Overlong, Packing, Place,
        Share,
    },
    log::entries,
    resume,
    run::{self, EndReason, Ended, Event, RunOptions, checkpoints},
};

const VOCABULARY: usize = 61;

fn dense() -> Config {
    let config = Config::dense(DenseShape {
        vocab_size: VOCABULARY,
        width: 32,
        layers: 2,
        heads: 4,
        kv_heads: 2,
        head_width: 8,
        inner_width: 48,
    });
    Config { context_length: 32, ..config }
}

fn routed() -> Config {
    let shared = Some(SharedExpertConfig { width: 16, gated: false });
    Config::routed(dense(), 1, ExpertsConfig { count: 4, per_row: 2, width: 16, normalize: true, shared })
}

fn loader(seed: u64) -> Loader {
    let mut builder = DocumentsBuilder::new("numbers", VOCABULARY);
    let place = Place { path: "numbers".into(), line: None };
    for number in 0..40_u32 {
        let ids = (0..20 + number % 7).map(|place| (place * (number % 5 + 1) + number) % VOCABULARY as u32).collect();
        builder.push(&Document { ids, learned: None }, &place).unwrap();
    }
    let shares = vec![Share { documents: builder.finish().unwrap(), weight: 1.0 }];
    Loader::new(shares, &loader_options(seed)).unwrap()
}

fn loader_options(seed: u64) -> LoaderOptions {
    LoaderOptions {
        sequence_length: 16,
        rows: 2,
        packing: Packing::Continuous,
        overlong: Overlong::Split,
        order: Order::Shuffled,
        seed,
        vocab_size: VOCABULARY,
    }
}

fn held_out() -> Vec<Batch> {
    let mut builder = DocumentsBuilder::new("held out", VOCABULARY);
    let document = Document { ids: (0..40).map(|id| id * 3 % VOCABULARY as u32).collect(), learned: None };
    builder.push(&document, &Place { path: "held out".into(), line: None }).unwrap();
    OnePass::new(&builder.finish().unwrap(), &loader_options(0)).unwrap().map(Result::unwrap).collect()
}

fn options() -> TrainerOptions {
    TrainerOptions {
        steps: 12,
        learning_rate: 1e-2,
        schedule: Schedule::WarmupCosine { warmup_steps: 3, final_ratio: 0.1 },
        average_decay: Some(0.9),
        ..TrainerOptions::default()
    }
}

fn run_options() -> RunOptions {
    RunOptions { batches_per_step: 2, evaluate_every: 4, checkpoint_every: 4, keep: 2, ..RunOptions::default() }
}

fn begin(folder: &Path, config: &Config, threads: usize, options: TrainerOptions) -> Run {
    let model = Model::untrained(config, &Device::cpu(threads), 7).unwrap();
    let trainer = Trainer::new(model, options).unwrap();
    Run::begin(folder, trainer, loader(3), TextFiles::default(), run_options()).unwrap().with_held_out(held_out())
}

fn resumed(folder: &Path, threads: usize) -> Run {
    let last = checkpoints(folder, &run_options()).latest().unwrap().unwrap();
    let resumed = resume(&last, &Device::cpu(threads), options()).unwrap();
    let run = Run::resume(folder, resumed, loader(3), TextFiles::default(), run_options());
    run.unwrap().with_held_out(held_out())
}

/// Goes until so many steps are done, and stops there as Ctrl-C does.
fn go(run: Run, until: u64) -> Ended {
    run.go(&mut |event| match event {
        Event::Step { report, .. } if report.step >= until => ControlFlow::Break(()),
        _ => ControlFlow::Continue(()),
    })
    .unwrap()
}

/// Goes until so many steps are done, and is killed there: nothing is written any more.
fn kill(run: Run, at: u64) {
    let killed = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
        run.go(&mut |event| {
            if let Event::Step { report, .. } = event
                && report.step == at
            {
                std::panic::resume_unwind(Box::new("killed"));
            }
            ControlFlow::Continue(())
        })
    }));
    assert!(killed.is_err());
}

/// Every file of a checkpoint or a model.
fn contents(folder: &Path) -> Vec<(PathBuf, Vec<u8>)> {
    let mut files: Vec<_> = fs::read_dir(folder)
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .map(|path| (path.file_name().unwrap().into(), fs::read(&path).unwrap()))
        .collect();
    files.sort();
    assert!(files.len() >= 2, "{}", folder.display());
    files
}

/// What the log says, but for the time that steps took.
fn logged(folder: &Path) -> Vec<(u64, String)> {
    let mut lines = entries(folder.join("log.jsonl")).unwrap();
    lines.iter_mut().for_each(|(_, line)| drop(line.remove("seconds")));
    lines.into_iter().map(|(step, line)| (step, serde_json::to_string(&line).unwrap())).collect()
}

/// Everything that must be the same of two runs that ended.
fn assert_same(one: &Path, other: &Path) {
    assert_eq!(logged(one), logged(other));
    assert!(contents(&one.join("model")) == contents(&other.join("model")), "the models differ");
    let last = |folder: &Path| checkpoints(folder, &run_options()).latest().unwrap().unwrap();
    assert_eq!(last(one).file_name(), last(other).file_name());
    assert!(contents(&last(one)) == contents(&last(other)), "the checkpoints differ");
}

#[test]
fn a_run_gives_the_same_bits_however_it_is_cut_and_on_any_number_of_threads() {
    for config in [dense(), routed()] {
        let folders = tempfile::tempdir().unwrap();
        let folder = |name: &str| folders.path().join(name);
        let straight = go(begin(&folder("straight"), &config, 1, options()), u64::MAX);
        assert_eq!(straight.reason, EndReason::Done);
        assert_eq!(straight.trainer.steps_done(), 12);

        // Stopped after 5 steps, then resumed with other threads.
        let stopped = go(begin(&folder("stopped"), &config, 2, options()), 5);
        assert_eq!((stopped.reason, stopped.model), (EndReason::Stopped, None));
        assert!(stopped.checkpoint.ends_with("step-00000005"));
        go(resumed(&folder("stopped"), 1), u64::MAX);
        assert_same(&folder("straight"), &folder("stopped"));

        // Killed after 7 steps, one of them past a checkpoint by three: those are done again.
        kill(begin(&folder("killed"), &config, 1, options()), 7);
        go(resumed(&folder("killed"), 2), u64::MAX);
        assert_same(&folder("straight"), &folder("killed"));

        let losses: Vec<f64> = entries(folder("straight").join("log.jsonl"))
            .unwrap()
            .iter()
            .filter_map(|(_, line)| line.get("loss")?.as_f64())
            .collect();
        assert_eq!(losses.len(), 12);
        assert!(losses[11] < losses[0] - 0.5, "{losses:?}");
        let has_loads =
            fs::read_to_string(folder("straight").join("log.jsonl")).unwrap().contains("largest_expert_load");
        assert_eq!(has_loads, config.experts.is_some());
        assert!(fs::read_to_string(folder("straight").join("loss.svg")).unwrap().contains("held out"));
    }
}

#[test]
fn whatever_an_end_leaves_half_the_last_checkpoint_is_whole_and_the_run_goes_on() {
    let folders = tempfile::tempdir().unwrap();
    let folder = |name: &str| folders.path().join(name);
    go(begin(&folder("straight"), &dense(), 1, options()), u64::MAX);

    let ended = folder("ended");
    kill(begin(&ended, &dense(), 1, options()), 6);
    // A checkpoint that was being written: each file of one, cut anywhere, under the name of unfinished ones.
    let last = checkpoints(&ended, &run_options()).latest().unwrap().unwrap();
    assert!(last.ends_with("step-00000004"));
    let half = ended.join("checkpoints/step-00000006.unfinished");
    fs::create_dir(&half).unwrap();
    for (name, bytes) in contents(&last) {
        fs::write(half.join(name), &bytes[..bytes.len() / 2]).unwrap();
    }
    // A line of the log that was being written, and a finished model that was.
    let log = ended.join("log.jsonl");
    let mut bytes = fs::read(&log).unwrap();
    bytes.extend_from_slice(b"{\"step\":7,\"loss\":3.");
    fs::write(&log, bytes).unwrap();
    fs::create_dir(ended.join("model.unfinished")).unwrap();
    fs::write(ended.join("model.unfinished/config.json"), "{").unwrap();

    assert_eq!(checkpoints(&ended, &run_options()).latest().unwrap().unwrap(), last);
    go(resumed(&ended, 1), u64::MAX);
    assert_same(&folder("straight"), &ended);
    let mut left: Vec<_> = fs::read_dir(ended.join("checkpoints")).unwrap().map(|e| e.unwrap().file_name()).collect();
    left.sort();
    assert_eq!(left, ["step-00000008", "step-00000012"]);
    assert!(!ended.join("model.unfinished").exists());
}

#[test]
fn a_run_begins_where_none_was_and_goes_on_where_one_was() {
    let folder = tempfile::tempdir().unwrap();
    let model = || Model::untrained(&dense(), &Device::cpu(1), 7).unwrap();
    let trainer = || Trainer::new(model(), options()).unwrap();
    let go_on = |trainer: Trainer, cursor: &Cursor, seed| {
        Run::resume(folder.path(), (trainer, cursor.clone()), loader(seed), TextFiles::default(), run_options())
            .map(drop)
    };
    let start = loader(3).cursor();
    assert!(matches!(go_on(trainer(), &start, 3), Err(Error::NoCheckpoint { step: 0, .. })));
    let last = go(begin(folder.path(), &dense(), 1, options()), 2).checkpoint;
    let again = Run::begin(folder.path(), trainer(), loader(3), TextFiles::default(), run_options());
    assert!(matches!(again, Err(Error::FolderInUse { .. })));
    assert!(matches!(go_on(trainer(), &start, 3), Err(Error::NoCheckpoint { .. })), "it has another step");
    let resumed = || resume(&last, &Device::cpu(1), options()).unwrap();
    let (at_two, cursor) = resumed();
    assert!(matches!(go_on(at_two, &cursor, 4), Err(Error::Data(_))), "another order of the data");
    go_on(resumed().0, &cursor, 3).unwrap();
    run::remove(folder.path()).unwrap();
    assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 0);
}

#[test]
fn refused_losses_lead_back_to_the_checkpoint_and_on_to_other_data() {
    let folder = tempfile::tempdir().unwrap();
    // After eight steps every loss is a spike: the first three rollbacks are granted, the fourth is not.
    let guard = SpikeGuardOptions { ratio: 1.000_001, decay: 0.0, patience: 1, settle_steps: 6 };
    let mut options = TrainerOptions { learning_rate: 1e-6, spike_guard: guard, steps: 400, ..options() };
    options.schedule = Schedule::Constant { warmup_steps: 0 };
    let (mut steps, mut rollbacks) = (Vec::new(), Vec::new());
    let ended = begin(folder.path(), &dense(), 1, options).go(&mut |event| {
        match event {
            Event::Step { report, .. } => steps.push((report.step, report.loss.to_bits())),
            Event::RolledBack { from, to } => rollbacks.push((*from, *to)),
            _ => {}
        }
        ControlFlow::Continue(())
    });
    assert!(matches!(ended, Err(Error::NoProgress { rollbacks: 3, .. })), "{ended:?}");
    assert!(rollbacks.len() >= 3);
    assert!(rollbacks.iter().all(|(from, to)| from > to && to % 4 == 0), "{rollbacks:?}");
    // Each time that a step was done again it was with other data.
    let mut losses = steps.clone();
    losses.sort_unstable();
    losses.dedup();
    assert_eq!(losses.len(), steps.len(), "{steps:?}");
    let last = checkpoints(folder.path(), &run_options()).latest().unwrap().unwrap();
    assert!(last.ends_with(format!("step-{:08}", rollbacks.last().unwrap().1)));
    let lines = entries(folder.path().join("log.jsonl")).unwrap();
    let logged: Vec<u64> = lines.iter().filter(|line| line.1.contains_key("loss")).map(|line| line.0).collect();
    let expected: Vec<u64> = (1..=*logged.last().unwrap()).collect();
    assert_eq!(logged, expected, "each step is in the log once");
}

/// A run that is told to stop among refused steps goes back to the checkpoint that it would have gone back to, and gives the same bits.
#[test]
fn a_stop_among_refused_steps_changes_nothing() {
    let guard = SpikeGuardOptions { ratio: 1.000_001, decay: 0.0, patience: 3, settle_steps: 6 };
    let schedule = Schedule::Constant { warmup_steps: 0 };
    let options = TrainerOptions { learning_rate: 1e-6, spike_guard: guard, steps: 40, schedule, ..options() };
    let (mut losses, mut back) = ([Vec::new(), Vec::new()], [Vec::new(), Vec::new()]);
    let mut go = |which: usize, run: Run, stops: bool| {
        let ended = run.go(&mut |event| match event {
            Event::Step { report, .. } => {
                losses[which].push((report.step, report.loss.to_bits()));
                if stops && !report.moved { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
            }
            Event::RolledBack { from, to } => {
                back[which].push((*from, *to));
                ControlFlow::Continue(())
            }
            _ => ControlFlow::Continue(()),
        });
        ended.map(|ended| (ended.reason, ended.trainer.steps_done())).map_err(|error| error.to_string())
    };
    let folders = tempfile::tempdir().unwrap();
    let folder = |name: &str| folders.path().join(name);
    let straight = go(0, begin(&folder("straight"), &dense(), 1, options.clone()), false);
    let stopped = go(1, begin(&folder("stopped"), &dense(), 1, options.clone()), true).unwrap();
    assert_eq!(stopped.0, EndReason::Stopped);
    let run_options = run_options();
    let last = checkpoints(&folder("stopped"), &run_options).latest().unwrap().unwrap();
    let resumed = resume(&last, &Device::cpu(1), options).unwrap();
    let run = Run::resume(folder("stopped"), resumed, loader(3), TextFiles::default(), run_options).unwrap();
    let resumed = go(1, run.with_held_out(held_out()), false);
    assert!(!back[0].is_empty() && back[0][0].1 < stopped.1, "{back:?} {stopped:?}");
    assert_eq!(back[0], back[1]);
    assert_eq!(losses[0], losses[1]);
    assert_eq!(straight, resumed);
    assert_eq!(logged(&folder("straight")), logged(&folder("stopped")));
}

/// Gemma's files hold norms less one, from which they come back only nearly.
#[test]
fn a_gemma_goes_on_with_the_bits_of_its_norms() {
    let folder = tempfile::tempdir().unwrap();
    let golden = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden/training/models/gemma3");
    let (device, load) = (Device::cpu(1), LoadOptions { format: WeightFormat::F32, ..LoadOptions::default() });
    let mut model = Model::load(&ironloom_weights::open(golden).unwrap(), &device, &load).unwrap();
    model.make_trainable().unwrap();
    // Norms below a half are those whose difference to one is rounded.
    model
        .update(|name, values| {
            if name.ends_with("norm.weight") {
                values.as_f32_mut()?.iter_mut().for_each(|value| *value *= 0.123);
            }
            Ok(())
        })
        .unwrap();
    let options = TrainerOptions { steps: 4, learning_rate: 1e-3, ..TrainerOptions::default() };
    let mut trainer = Trainer::new(model, options.clone()).unwrap();
    let batch = Batch { ids: vec![3, 4, 5, 6, 7], targets: vec![4, 5, 6, 7, 8], documents: vec![5] };
    trainer.step(std::slice::from_ref(&batch)).unwrap();
    let loader = loader(1);
    let path = Checkpoints::new(folder.path(), 1)
        .write(&trainer, &loader.cursor(), &TextFiles::default(), Occasion::Planned)
        .unwrap();
    let (mut resumed, _) = resume(&path, &device, options).unwrap();
    let bits = |trainer: &Trainer| -> Vec<Vec<u32>> {
        let parameters = trainer.model().parameters();
        let values = parameters.iter().map(|parameter| parameter.values.as_f32().unwrap());
        values.map(|values| values.iter().map(|value| value.to_bits()).collect()).collect()
    };
    assert!(bits(&trainer) == bits(&resumed), "as it was saved");
    for trainer in [&mut trainer, &mut resumed] {
        trainer.step(std::slice::from_ref(&batch)).unwrap();
    }
    assert!(bits(&trainer) == bits(&resumed), "a step later");
    let again = Checkpoints::new(folder.path(), 1);
    trainer.step(&[batch]).unwrap();
    again.write(&trainer, &loader.cursor(), &TextFiles::default(), Occasion::Planned).unwrap();
    let refused = again.write(&trainer, &loader.cursor(), &TextFiles::default(), Occasion::Planned).unwrap_err();
    assert!(matches!(refused, Error::FolderInUse { .. }), "a whole checkpoint is never written over");
}
