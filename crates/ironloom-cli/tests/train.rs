//! `ironloom train` as a person runs it: a tiny model from text to an answer, resumed, interrupted, refused.

mod card;

use std::{
    fs,
    path::Path,
    process::{Child, Command, Output, Stdio},
};

use serde_json::Value;

/// A folder with text and a configuration of a tiny model.
struct Bench {
    folder: tempfile::TempDir,
}

const CONFIG: &str = r#"
output = "out"
[model]
width = 32
layers = 2
heads = 2
experts = { count = 4, per_row = 2, width = 16, shared_width = 16, dense_layers = 1 }
[tokenizer]
train = { vocab_size = 300 }
[[data]]
paths = ["text"]
[held_out]
fraction = 0.2
from = "tail"
every = 3
[batch]
sequence_length = 16
rows = 2
accumulate = 2
[training]
steps = 6
learning_rate = 1e-2
average_decay = 0.5
[checkpoints]
every = 2
"#;

impl Bench {
    fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        fs::create_dir(folder.path().join("text")).unwrap();
        for name in ["one.txt", "two.md"] {
            let line = "The loom weaves iron thread, and the thread is text. ";
            fs::write(folder.path().join("text").join(name), format!("{name}\n{}", line.repeat(20))).unwrap();
        }
        let bench = Self { folder };
        bench.configure(|text| text);
        bench
    }

    /// Changes the configuration.
    fn configure(&self, change: impl FnOnce(String) -> String) {
        fs::write(self.path("config.toml"), change(CONFIG.to_owned())).unwrap();
    }

    fn path(&self, name: &str) -> std::path::PathBuf {
        self.folder.path().join(name)
    }

    fn start(&self, arguments: &[&str]) -> Child {
        // Another folder than the configuration's: its paths are its own folder's.
        Command::new(env!("CARGO_BIN_EXE_ironloom"))
            .args([&["train", self.path("config.toml").to_str().unwrap()], arguments].concat())
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap()
    }

    fn train(&self, arguments: &[&str]) -> (i32, String, String) {
        finished(self.start(arguments).wait_with_output().unwrap())
    }

    /// Waits until the log has so many lines: then as many steps were taken, but for those that were measured too.
    fn wait_for_lines(&self, lines: usize) {
        let log = self.path("out/log.jsonl");
        for _ in 0..60_000 {
            if fs::read_to_string(&log).is_ok_and(|text| text.lines().count() >= lines) {
                return;
            }
            std::thread::sleep(std::time::Duration::from_millis(1));
        }
        panic!("no {lines} lines in a minute");
    }

    /// What a run that must have gone well printed.
    fn ok(&self, arguments: &[&str]) -> String {
        let (code, out, errors) = self.train(arguments);
        assert_eq!(code, 0, "{errors}");
        out
    }

    /// Fails unless the run fails with one line that says all of `parts`.
    fn refused(&self, arguments: &[&str], parts: &[&str]) {
        let (code, out, errors) = self.train(arguments);
        assert_eq!(code, 1, "{out}{errors}");
        let line = errors.lines().find(|line| line.starts_with("error: ")).expect("an error line");
        parts.iter().for_each(|part| assert!(line.contains(part), "{part:?} is not in {line:?}"));
    }
}

fn finished(output: Output) -> (i32, String, String) {
    let errors = String::from_utf8(output.stderr).unwrap();
    assert!(!errors.contains("panicked"), "{errors}");
    (output.status.code().expect("ended by a signal"), String::from_utf8(output.stdout).unwrap(), errors)
}

fn answer(model: &Path) -> String {
    let run = ["run", model.to_str().unwrap(), "The loom", "-n", "8", "--temperature", "0", "--json", "--ignore-eos"];
    let (code, out, errors) = finished(Command::new(env!("CARGO_BIN_EXE_ironloom")).args(run).output().unwrap());
    assert_eq!(code, 0, "{errors}");
    serde_json::from_str::<Value>(&out).unwrap()["ids"].to_string()
}

#[test]
fn a_run_makes_a_model_that_answers_and_goes_on_to_the_same_bits() {
    let straight = Bench::new();
    let report: Value = serde_json::from_str(&straight.ok(&["--json", "--threads", "1"])).unwrap();
    assert_eq!((report["reason"].as_str(), report["steps"].as_u64()), (Some("done"), Some(6)));
    assert_eq!(report["tokens"].as_u64(), Some(6 * 2 * 2 * 16));
    assert!(report["held_out_loss"].as_f64().unwrap() > 0.0);
    let model = straight.path("out/model");
    assert_eq!(report["model"].as_str(), model.to_str());
    for name in ["out/log.jsonl", "out/loss.svg", "out/model/tokenizer.json", "out/checkpoints/step-00000006"] {
        assert!(straight.path(name).exists(), "{name}");
    }

    // In two parts, the second with other threads.
    let parts = Bench::new();
    parts.ok(&["--steps", "6", "--output", parts.path("other").to_str().unwrap()]);
    fs::remove_dir_all(parts.path("other/checkpoints/step-00000006")).unwrap();
    let (code, out, errors) =
        parts.train(&["--resume", "--threads", "2", "--output", parts.path("other").to_str().unwrap()]);
    assert_eq!(code, 0, "{errors}");
    assert!(errors.contains("going on after step 4"), "{errors}");
    assert!(errors.contains("ironloom run ") && out.contains("held-out loss"), "{out}{errors}");
    assert!(!errors.contains("warning"), "{errors}");
    let weights = |path: std::path::PathBuf| fs::read(path.join("model.safetensors")).unwrap();
    assert!(weights(parts.path("other/model")) == weights(model.clone()));
    // The model has averaged weights, the checkpoint those of the last step.
    let last = straight.path("out/checkpoints/step-00000006");
    assert!(weights(last.clone()) != weights(model.clone()));
    assert_eq!(answer(&model).matches(',').count(), 7);
    answer(&last);

    straight.refused(&[], &["holds a run of 6 steps", "--resume", "--overwrite"]);
    straight.ok(&["--overwrite", "--steps", "2"]);
    assert!(!last.exists() && straight.path("out/checkpoints/step-00000002").exists());
}

/// The plan of the run on a card, if there is one.
fn plan_on_a_card(bench: &Bench) -> Option<String> {
    let (code, plan, errors) = bench.train(&["--device", "cuda", "--dry-run"]);
    if card::is_missing(code, &errors) {
        return None;
    }
    assert_eq!(code, 0, "{errors}");
    let small = ["--device", "cuda", "--memory-budget", "1000", "--output", "small"];
    bench.refused(&small, &["weights in bfloat16", "activations", "batch.rows"]);
    Some(plan)
}

#[test]
fn a_dry_run_tells_the_plan_of_a_card() {
    let Some(plan) = plan_on_a_card(&Bench::new()) else { return };
    for part in ["weights in bfloat16", "gradients", "moments", "averaged weights", "activations of", "workspaces"] {
        assert!(plan.contains(part), "{part} is not in {plan}");
    }
}

/// A run on a card, cut and whole; and one that was begun on the processor.
#[test]
fn a_run_on_a_card_goes_on_to_the_same_bits() {
    let bench = Bench::new();
    if plan_on_a_card(&bench).is_none() {
        return;
    }
    let run = |folder: &str, more: &[&str]| -> Value {
        let folder = bench.path(folder);
        let arguments = [&["--json", "--output", folder.to_str().unwrap()], more].concat();
        serde_json::from_str(&bench.ok(&arguments)).unwrap()
    };
    let report = run("straight", &["--device", "cuda"]);
    assert!(report["device_memory_bytes"].as_u64().unwrap() > 0);
    for first in ["cuda", "cpu"] {
        run(first, &["--device", first]);
        fs::remove_dir_all(bench.path(first).join("checkpoints/step-00000006")).unwrap();
        assert_eq!(run(first, &["--device", "cuda", "--resume"])["steps"], 6);
    }
    let weights = |folder: &str| fs::read(bench.path(folder).join("model/model.safetensors")).unwrap();
    assert!(weights("straight") == weights("cuda"));
    answer(&bench.path("straight/model"));
    answer(&bench.path("cpu/model"));
}

#[test]
fn a_model_is_trained_on_and_its_tokenizer_kept() {
    let first = Bench::new();
    first.ok(&["--quiet"]);
    let second = Bench::new();
    let from = first.path("out/model");
    second.configure(|text| {
        let (before, after) = text.split_once("[model]").unwrap();
        let (_, after) = after.split_once("[[data]]").unwrap();
        format!("{before}[model]\nfrom = {:?}\n[[data]]{after}", from.to_str().unwrap())
    });
    second.ok(&[]);
    let file = |bench: &Bench| fs::read(bench.path("out/model/tokenizer.json")).unwrap();
    assert!(file(&first) == file(&second));
    answer(&second.path("out/model"));
}

#[test]
fn a_dry_run_tells_the_plan_and_leaves_nothing() {
    let bench = Bench::new();
    let text = bench.ok(&["--dry-run"]);
    for part in ["ernie4_5_moe", "2 documents", "6 of 64 tokens", "moments", "held out"] {
        assert!(text.contains(part), "{part} is not in {text}");
    }
    let plan: Value = serde_json::from_str(&bench.ok(&["--dry-run", "--json"])).unwrap();
    assert_eq!(plan["tokens_per_step"], 64);
    bench.configure(|text| text.replace("every = 3", "every = 3\nbatches = 1"));
    let less: Value = serde_json::from_str(&bench.ok(&["--dry-run", "--json"])).unwrap();
    assert!(less["held_out_predictions"].as_u64().unwrap() < plan["held_out_predictions"].as_u64().unwrap());
    bench.configure(|text| text);
    assert!(!bench.path("out").exists());
    bench.refused(&["--memory-budget", "1000"], &["weights", "activations", "batch.rows", "checkpointing"]);
    assert!(!bench.path("out").exists());
}

#[test]
fn what_cannot_work_is_refused_before_anything_is_written() {
    let bench = Bench::new();
    for (from, to, parts) in [
        ("rows = 2", "rows = 0", &["rows", "1 or more"][..]),
        ("steps = 6", "stepps = 6", &["config.toml:", "stepps"]),
        ("paths = [\"text\"]", "paths = [\"texts\"]", &["texts"]),
        ("heads = 2", "heads = 3", &["head_width"]),
        ("vocab_size = 300", "vocab_size = 100", &["tokenizer"]),
        ("learning_rate = 1e-2", "learning_rate = -1.0", &["learning_rate", "above 0"]),
        ("heads = 2", "heads = 2\ncontext_length = 8", &["sequence_length", "8 positions"]),
        ("heads = 2", "heads = 4\nkv_heads = 3", &["[model]", "kv heads", "divisor"]),
        ("per_row = 2", "per_row = 1", &["experts.per_row", "router"]),
        ("per_row = 2", "per_row = 5", &["experts a token"]),
        ("accumulate = 2", "accumulate = 0", &["batch.accumulate", "1 batch or more"]),
        ("steps = 6", "steps = 0", &["training.steps", "1 step or more"]),
        ("steps = 6", "steps = 6\nz_loss = nan", &["[training]", "z_loss", "finite"]),
        ("steps = 6", "steps = 6\nbalance_loss = -0.01", &["balance_loss", "from 0 on"]),
        ("steps = 6", "steps = 6\nmax_gradient_norm = 0.0", &["max_gradient_norm", "above 0"]),
        ("average_decay = 0.5", "average_decay = 1.0", &["average_decay", "below 1"]),
        ("accumulate = 2", "accumulate = 2\noverlong = \"cut\"", &["batch.overlong", "packing"]),
        ("every = 3", "every = 3\nseed = 5", &["held_out.seed", "tail"]),
        ("every = 3", "every = 3\nbatches = 0", &["held_out.batches"]),
    ] {
        bench.configure(|text| text.replace(from, to));
        bench.refused(&[], parts);
        bench.refused(&["--dry-run"], parts);
        assert!(!bench.path("out").exists(), "{to}");
    }
    bench.configure(|text| text);
    bench.ok(&["--dry-run", "--steps", "18446744073709551615"]);
    // No machine has so many cards.
    bench.configure(|text| text);
    bench.refused(&["--device", "cuda:99"], &["CUDA", "CPU"]);
    assert!(!bench.path("out").exists());
}

/// What a run has made is there until the next one is known to be able to begin.
#[test]
fn a_run_that_cannot_begin_leaves_the_one_before() {
    let bench = Bench::new();
    bench.ok(&[]);
    let model = bench.path("out/model");
    bench.configure(|text| text.replace("accumulate = 2", "accumulate = 0"));
    bench.refused(&["--overwrite"], &["batch.accumulate"]);
    bench.configure(|text| {
        let (before, after) = text.split_once("[model]").unwrap();
        let (_, after) = after.split_once("[[data]]").unwrap();
        format!("{before}[model]\nfrom = \"out/model\"\n[[data]]{after}")
    });
    bench.refused(&["--overwrite"], &["out/model", "another output"]);
    fs::remove_dir_all(bench.path("out/checkpoints")).unwrap();
    bench.configure(|text| text);
    bench.refused(&[], &["out/model", "another folder"]);
    answer(&model);
}

#[test]
fn a_run_that_goes_on_with_other_settings_says_so() {
    let bench = Bench::new();
    bench.configure(|text| text.replace("steps = 6", "steps = 6\nmax_gradient_norm = inf"));
    bench.ok(&[]);
    bench.refused(&["--resume", "--steps", "4"], &["6 steps already", "--steps"]);
    let warnings = |change: &[(&str, &str)], steps: &str| -> Vec<String> {
        bench.configure(|text| change.iter().fold(text, |text, (from, to)| text.replace(from, to)));
        let (code, _, errors) = bench.train(&["--resume", "--steps", steps]);
        assert_eq!(code, 0, "{errors}");
        errors.lines().filter_map(|line| Some(line.strip_prefix("warning: ")?.to_owned())).collect()
    };
    let clipping = ("steps = 6", "steps = 6\nmax_gradient_norm = inf");
    assert_eq!(warnings(&[clipping], "8"), Vec::<String>::new());
    let changed = [clipping, ("width = 32", "width = 64"), ("rows = 2", "rows = 1"), ("1e-2", "2e-2")];
    let told = warnings(&changed, "9");
    let expected = [
        "training.learning_rate is 0.02 now and was 0.01: from here on the new one counts",
        "model.width is 64 now and was 32: the run keeps what it was begun with",
        "batch.rows is 1 now and was 2: from here on the new one counts",
    ];
    assert_eq!(told, expected);
}

#[cfg(unix)]
#[test]
fn ctrl_c_saves_and_ends_and_the_run_goes_on() {
    let bench = Bench::new();
    bench.configure(|text| text.replace("steps = 6", "steps = 1000000").replace("every = 2", "every = 0"));
    let child = bench.start(&["--json"]);
    bench.wait_for_lines(3);
    assert!(Command::new("kill").args(["-INT", &child.id().to_string()]).status().unwrap().success());
    let (code, out, errors) = finished(child.wait_with_output().unwrap());
    assert_eq!(code, 130, "{errors}");
    let report: Value = serde_json::from_str(&out).unwrap();
    let steps = report["steps"].as_u64().unwrap();
    assert_eq!((report["reason"].as_str(), report["model"].is_null()), (Some("stopped"), true));
    assert!(report["checkpoint"].as_str().unwrap().ends_with(&format!("step-{steps:08}")), "{report}");
    let report: Value =
        serde_json::from_str(&bench.ok(&["--resume", "--json", "--steps", &(steps + 2).to_string()])).unwrap();
    assert_eq!((report["reason"].as_str(), report["steps"].as_u64()), (Some("done"), Some(steps + 2)));
    assert_eq!(report["tokens"].as_u64(), Some(2 * 64));
}

#[test]
fn a_run_that_is_killed_again_and_again_ends_as_one_that_was_not() {
    // A checkpoint a step: most kills come while one is written.
    let steps = |text: String| text.replace("steps = 6", "steps = 60").replace("every = 2", "every = 1");
    let (straight, killed) = (Bench::new(), Bench::new());
    [&straight, &killed].iter().for_each(|bench| bench.configure(steps));
    straight.ok(&[]);
    for lines in [7, 20, 31, 44, 58] {
        let mut child = killed.start(&["--resume"]);
        killed.wait_for_lines(lines);
        child.kill().unwrap();
        finished_by_signal(child);
    }
    let errors = killed.train(&["--resume"]).2;
    assert!(errors.contains("going on after step"), "{errors}");
    let file = |bench: &Bench, name: &str| fs::read(bench.path(name)).unwrap();
    for name in ["out/model/model.safetensors", "out/checkpoints/step-00000060/training.safetensors"] {
        assert!(file(&straight, name) == file(&killed, name), "{name}");
    }
    let losses = |bench: &Bench| {
        let log = String::from_utf8(file(bench, "out/log.jsonl")).unwrap();
        let line = |line: &str| serde_json::from_str::<Value>(line).unwrap();
        log.lines().map(line).map(|line| (line["step"].clone(), line["loss"].clone())).collect::<Vec<_>>()
    };
    assert_eq!(losses(&straight), losses(&killed));
}

fn finished_by_signal(child: Child) {
    let output = child.wait_with_output().unwrap();
    assert!(!output.status.success(), "it ended before it was killed");
}
