//! `ironloom finetune` and `ironloom export` as a person runs them: a tiny model learns made-up facts, and what is exported of it answers
//! with them and stops.
//!
//! The model is the golden Llama of 128 positions. Its weights are random, so it knows nothing before.

mod card;
mod smollm2;

use std::{
    fs,
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
};

use ironloom_lm::text::{AddGenerationPrompt, ChatTemplate, Message, Tokenizer};
use serde_json::Value;

const FACTS: [(&str, &str); 3] = [
    ("Who built the loom?", "Mara Tolk."),
    ("Where is it?", "In Vessel Bay."),
    ("What does it weave?", "Iron thread."),
];

/// A folder with the facts as conversations.
struct Bench(tempfile::TempDir);

impl Bench {
    fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let lines = FACTS.iter().map(|(question, answer)| {
            let message = |role: &str, content: &str| serde_json::json!({ "role": role, "content": content });
            let messages = [message("user", question), message("assistant", answer)];
            format!("{}\n", serde_json::json!({ "messages": messages }))
        });
        fs::write(folder.path().join("facts.jsonl"), lines.collect::<String>()).unwrap();
        Self(folder)
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    /// Copies files of a golden model into the folder `to`.
    fn copy(&self, model: &str, names: &[&str], to: &str) {
        fs::create_dir_all(self.path(to)).unwrap();
        for name in names {
            fs::copy(Path::new(&golden(model)).join(name), self.path(to).join(name)).unwrap();
        }
    }

    /// The golden Mixtral, whose layers are routed experts, with the Llama's tokenizer.
    fn experts(&self) -> &'static str {
        self.copy("mixtral", &["config.json", "model.safetensors"], "mixtral");
        self.copy("llama", &["generation_config.json", "tokenizer.json", "tokenizer_config.json"], "mixtral");
        "mixtral"
    }

    fn start(&self, arguments: &[&str]) -> Child {
        Command::new(env!("CARGO_BIN_EXE_ironloom"))
            .args(arguments)
            .current_dir(self.0.path())
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap()
    }

    /// The exit code, the output, and what was said beside it.
    fn ran(&self, arguments: &[&str]) -> (i32, String, String) {
        finished(self.start(arguments))
    }

    /// The output of a command that must have gone well.
    fn ok(&self, arguments: &[&str]) -> String {
        let (code, out, errors) = self.ran(arguments);
        assert_eq!(code, 0, "{errors}");
        out
    }

    fn json(&self, arguments: &[&str]) -> Value {
        serde_json::from_str(&self.ok(&[arguments, &["--json"]].concat())).unwrap()
    }

    fn finetune(&self, arguments: &[&str]) -> Value {
        self.finetune_of(&llama(), arguments)
    }

    fn finetune_of(&self, model: &str, arguments: &[&str]) -> Value {
        let common = ["finetune", model, "--data", "facts.jsonl", "--sequence-length", "64", "--batch-rows", "2"];
        self.json(&[&common[..], arguments].concat())
    }

    fn refused(&self, code: i32, arguments: &[&str], parts: &[&str]) {
        let (found, out, errors) = self.ran(arguments);
        assert_eq!(found, code, "{out}{errors}");
        let line = errors.lines().find(|line| line.starts_with("error: ")).expect("an error line");
        parts.iter().for_each(|part| assert!(line.contains(part), "{part:?} is not in {line:?}"));
    }

    /// How many of the facts the model tells, each ended by an end token.
    fn facts_known(&self, model: &str) -> usize {
        let knows = |(question, answer): &&(&str, &str)| {
            let report = self.json(&["run", model, question, "--temperature", "0", "-n", "32"]);
            report["text"].as_str() == Some(*answer) && report["finish_reason"].as_str() == Some("end_token")
        };
        FACTS.iter().filter(knows).count()
    }
}

fn finished(child: Child) -> (i32, String, String) {
    let output = child.wait_with_output().unwrap();
    let errors = String::from_utf8(output.stderr).unwrap();
    assert!(!errors.contains("panicked"), "{errors}");
    (output.status.code().expect("ended by a signal"), String::from_utf8(output.stdout).unwrap(), errors)
}

fn llama() -> String {
    golden("llama")
}

fn golden(name: &str) -> String {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden/models").join(name).to_str().unwrap().to_owned()
}

const FAST: [&str; 4] = ["--learning-rate", "1e-2", "--steps", "150"];

/// Exports of fine-tunes never stopped or rambled, for the template or the end tokens were lost on the way: unsloth 976 and
/// 468, ollama 8363, 6823 and 1110. Each form of the export answers and stops as the fine-tune itself.
#[test]
fn unsloth_976_an_exported_fine_tune_answers_with_its_facts_and_stops() {
    let bench = Bench::new();
    assert_eq!(bench.facts_known(&llama()), 0);
    let report = bench.finetune(&[&FAST[..], &["--output", "out", "--merge"]].concat());
    assert_eq!(report["reason"], "done");
    assert!(report["loss"].as_f64().unwrap() < 0.1, "{report}");
    let merging = |key: &str| report["merging"][key].as_f64().unwrap();
    assert!(merging("largest_logit_change") < 1e-3 * merging("largest_logit"), "{report}");
    for name in ["out/adapter/adapter_config.json", "out/model/tokenizer.json", "out/log.jsonl", "out/loss.svg"] {
        assert!(bench.path(name).exists(), "{name}");
    }

    bench.ok(&["export", "out/model", "merged.gguf", "--type", "f32"]);
    bench.ok(&["export", "out/model", "small.gguf", "--type", "q8_0"]);
    bench.ok(&["export", "out/model", "medium.gguf", "--type", "q4_k_m"]);
    // The adapter beside its base gives the same as the merged model.
    bench.ok(&["export", &llama(), "adapted.gguf", "--adapter", "out/adapter", "--type", "f32"]);
    bench.ok(&["export", &llama(), "adapted", "--adapter", "out/adapter"]);
    // With the slash that a shell puts at the end of a folder's name.
    bench.ok(&["export", "merged.gguf", "again/"]);
    for model in ["out/model", "merged.gguf", "small.gguf", "adapted.gguf", "adapted", "again"] {
        assert_eq!(bench.facts_known(model), FACTS.len(), "{model}");
        assert_same_text(&llama(), bench.path(model).to_str().unwrap());
    }
    // Rows of 64 take no blocks of 256, so there is a file, and no more is asked of four bits.
    assert_same_text(&llama(), bench.path("medium.gguf").to_str().unwrap());
    let entries = fs::read_dir(bench.0.path()).unwrap().map(|entry| entry.unwrap().file_name());
    let left = |name: &str| name.contains("partial") || name.contains("unfinished");
    assert!(entries.into_iter().all(|name| !left(&name.to_string_lossy())));
}

/// Fails unless text becomes ids, and ids end, in both models alike.
fn assert_same_text(one: &str, other: &str) {
    let text = |path: &str| {
        let stored = ironloom_weights::open(path).unwrap();
        let (tokenizer, template) =
            (Tokenizer::from_checkpoint(&stored).unwrap(), ChatTemplate::from_checkpoint(&stored).unwrap());
        let messages = [Message::new("system", "Be short."), Message::new("user", "Hi <|im_end|>")];
        let rendered = template.render(&messages, AddGenerationPrompt::Yes).unwrap();
        let mut ends = tokenizer.end_ids().to_vec();
        ends.sort_unstable();
        (rendered, ends, tokenizer.bos_id(), tokenizer.adds_bos())
    };
    assert_eq!(text(one).1, [268, 270]);
    assert_eq!(text(one), text(other), "{other}");
}

#[test]
fn all_of_a_model_and_adapters_beside_few_bits_learn_facts() {
    let bench = Bench::new();
    let report = bench.finetune(&["--full", "--learning-rate", "3e-3", "--steps", "120", "--output", "full"]);
    assert!(report["adapter"].is_null() && report["merging"].is_null());
    assert_eq!(bench.facts_known("full/model"), FACTS.len(), "{report}");

    let nf4 = [&FAST[..], &["--base", "nf4", "--dropout", "0.05", "--output", "nf4", "--merge"]].concat();
    let report = bench.finetune(&nf4);
    assert_eq!(bench.facts_known("nf4/model"), FACTS.len(), "{report}");

    // Adapters of attention and of every routed expert.
    let int8 = [&FAST[..], &["--base", "int8", "--output", "experts", "--merge"]].concat();
    let report = bench.finetune_of(bench.experts(), &int8);
    assert_eq!(bench.facts_known("experts/model"), FACTS.len(), "{report}");

    // A GGUF file as the base, whose adapter goes onto the folder of the same model too.
    let model = format!("{}/model.gguf", llama());
    let steps = [&["finetune", model.as_str(), "--data", "facts.jsonl", "--sequence-length", "64"], &FAST[..]].concat();
    bench.json(&[&steps[..], &["--base", "int8", "--rank", "8", "--output", "int8"]].concat());
    bench.ok(&["export", &llama(), "onto.gguf", "--adapter", "int8/adapter", "--type", "q8_0"]);
    assert_eq!(bench.facts_known("onto.gguf"), FACTS.len());
}

#[test]
#[ignore = "minutes without optimization: cargo test --release -p ironloom --test finetune -- --ignored"]
fn smollm2_learns_facts_and_its_exports_answer_with_them() {
    let Some(model) = smollm2::model() else { return };
    let (bench, model) = (Bench::new(), model.to_str().unwrap());
    assert_eq!(bench.facts_known(model), 0);
    let common = ["finetune", model, "--data", "facts.jsonl", "--output", "out", "--merge", "--batch-rows", "1"];
    let report = bench.json(&[&common[..], &["--steps", "16", "--learning-rate", "1e-3"]].concat());
    assert_eq!(bench.facts_known("out/model"), FACTS.len(), "{report}");
    bench.ok(&["export", "out/model", "out.gguf", "--type", "q4_k_m"]);
    assert_eq!(bench.facts_known("out.gguf"), FACTS.len());
}

#[test]
fn a_fine_tune_goes_on_to_the_same_bits() {
    let bench = Bench::new();
    let arguments = ["--steps", "6", "--every", "2", "--dropout", "0.1", "--held-out", "0.3"];
    let run = |arguments: &[&str], more: &[&str]| bench.finetune(&[arguments, more].concat());
    let report = run(&arguments, &["--output", "straight", "--threads", "1"]);
    assert!(report["held_out_loss"].as_f64().unwrap() > 0.0);
    run(&arguments, &["--output", "parts"]);
    fs::remove_dir_all(bench.path("parts/checkpoints/step-00000006")).unwrap();
    let report = run(&arguments, &["--output", "parts", "--resume", "--threads", "2"]);
    assert_eq!(report["steps"], 6);
    let weights = |name: &str| fs::read(bench.path(name).join("adapter/adapter_model.safetensors")).unwrap();
    assert!(weights("straight") == weights("parts"));
    let model = llama();
    bench.refused(
        1,
        &["finetune", &model, "--data", "facts.jsonl", "--output", "parts"],
        &["holds a run of 6 steps", "--resume"],
    );
}

/// A template that writes today's date gives other ids another day. A run goes on with those that it was begun with.
#[test]
fn a_fine_tune_goes_on_another_day() {
    let bench = Bench::new();
    let files =
        ["config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"];
    bench.copy("llama", &files, "dated");
    let config = fs::read_to_string(bench.path("dated/tokenizer_config.json")).unwrap();
    let template = serde_json::from_str::<Value>(&config).unwrap()["chat_template"].as_str().unwrap().to_owned();
    fs::write(bench.path("dated/chat_template.jinja"), format!("{{{{ strftime_now('%H:%M:%S') }}}}{template}"))
        .unwrap();
    let common = ["finetune", "dated", "--data", "facts.jsonl", "--sequence-length", "64", "--output", "out"];
    let run = |more: &[&str]| bench.json(&[&common[..], &["--steps", "4", "--every", "2"], more].concat());
    run(&[]);
    fs::remove_dir_all(bench.path("out/checkpoints/step-00000004")).unwrap();
    std::thread::sleep(std::time::Duration::from_millis(1100));
    assert_eq!(run(&["--resume"])["steps"], 4);
}

#[test]
fn a_fine_tune_that_goes_on_beside_other_weights_says_so() {
    let bench = Bench::new();
    let common = ["--output", "out", "--every", "2", "--rank", "8", "--targets", "q_proj"];
    bench.finetune(&[&common[..], &["--steps", "2"]].concat());
    let model = format!("{}/model.gguf", llama());
    let other = ["finetune", &model, "--data", "facts.jsonl", "--sequence-length", "64", "--batch-rows", "2"];
    let more = ["--output", "out", "--every", "2", "--steps", "40", "--resume", "--base", "int8"];
    let (code, _, errors) = bench.ran(&[&other[..], &more].concat());
    assert_eq!(code, 0, "{errors}");
    let warnings: Vec<&str> = errors.lines().filter_map(|line| line.strip_prefix("warning: ")).collect();
    for (part, follows) in [
        ("base.model is ", "the new one counts"),
        ("base.held is \"int8\" now and was \"keep\"", "the new one counts"),
        ("adapters.rank is 16 now and was 8", "keeps what it was begun with"),
        ("adapters.targets is [\"all-linear\"] now and was [\"q_proj\"]", "keeps what it was begun with"),
    ] {
        assert!(warnings.iter().any(|line| line.contains(part) && line.contains(follows)), "{part}: {warnings:?}");
    }
    assert_eq!(warnings.len(), 4, "the schedule, which follows from the steps, is no setting: {warnings:?}");
    bench.refused(1, &["finetune", "out/adapter", "--data", "facts.jsonl", "--output", "out"], &["out/adapter"]);
}

/// The plan of adapters beside NF4 weights on a card, if there is one.
fn plan_on_a_card(bench: &Bench) -> Option<String> {
    let model = llama();
    let arguments = ["finetune", &model, "--data", "facts.jsonl", "--device", "cuda", "--base", "nf4"];
    let (code, out, errors) = bench.ran(&[&arguments[..], &["--dry-run"]].concat());
    if card::is_missing(code, &errors) {
        return None;
    }
    assert_eq!(code, 0, "{errors}");
    let small = ["frozen weights", "activations of 512 tokens", "--base nf4"];
    bench.refused(1, &[&arguments[..], &["--memory-budget", "1000"]].concat(), &small);
    Some(out)
}

#[test]
fn a_dry_run_tells_the_plan_of_a_card() {
    let Some(plan) = plan_on_a_card(&Bench::new()) else { return };
    let adapters = ["frozen weights", "adapters in bfloat16", "gradients", "moments"];
    for part in adapters.into_iter().chain(["weights unpacked for products", "activations of 512 tokens", "workspaces"])
    {
        assert!(plan.contains(part), "{part} is not in {plan}");
    }
}

/// Adapters on a card beside frozen weights of each form: learning, merging, and a run that is cut.
#[test]
fn adapters_on_a_card_learn_facts_and_go_on_to_the_same_bits() {
    let bench = Bench::new();
    if plan_on_a_card(&bench).is_none() {
        return;
    }
    for base in ["f32", "bf16", "int8", "nf4"] {
        let card = ["--device", "cuda", "--merge", "--dropout", "0.05", "--base", base, "--output", base];
        let report = bench.finetune(&[&FAST[..], &card].concat());
        assert!(report["device_memory_bytes"].as_u64().unwrap() > 0);
        assert_eq!(bench.facts_known(&format!("{base}/model")), FACTS.len(), "{report}");
    }

    for base in ["bf16", "int8", "nf4"] {
        let folder = format!("experts-{base}");
        let card = ["--device", "cuda", "--merge", "--dropout", "0.05", "--base", base, "--output", &folder];
        let report = bench.finetune_of(bench.experts(), &[&FAST[..], &card].concat());
        assert_eq!(bench.facts_known(&format!("{folder}/model")), FACTS.len(), "{report}");
    }

    let arguments = ["--steps", "6", "--every", "2", "--dropout", "0.1", "--held-out", "0.3"];
    let run = |folder: &str, more: &[&str]| bench.finetune(&[&arguments[..], &["--output", folder], more].concat());
    let report = run("straight", &["--device", "cuda"]);
    assert!(report["held_out_loss"].as_f64().unwrap() > 0.0);
    for first in ["cuda", "cpu"] {
        run(first, &["--device", first]);
        fs::remove_dir_all(bench.path(first).join("checkpoints/step-00000006")).unwrap();
        assert_eq!(run(first, &["--device", "cuda", "--resume"])["steps"], 6);
    }
    let weights = |name: &str| fs::read(bench.path(name).join("adapter/adapter_model.safetensors")).unwrap();
    assert!(weights("straight") == weights("cuda"));
}

#[test]
fn a_dry_run_tells_the_plan_of_adapters() {
    let bench = Bench::new();
    let model = llama();
    let text = bench.ok(&["finetune", &model, "--data", "facts.jsonl", "--base", "int8", "--epochs", "5", "--dry-run"]);
    for part in ["3 documents", "rank 16, alpha 32, on 21 layers", "held as int8", "frozen weights", "moments"] {
        assert!(text.contains(part), "{part} is not in {text}");
    }
    let short = ["--base", "nf4", "--sequence-length", "8", "--batch-rows", "1", "--rank", "1", "--dry-run"];
    let plan = ["finetune", &model, "--data", "facts.jsonl"];
    let merging = |more: &[&str]| bench.ok(&[&plan[..], &short, more].concat()).contains("merging at the end");
    assert_eq!((merging(&[]), merging(&["--merge"])), (false, true), "merging holds the whole model in 32 bits");
    let entries = fs::read_dir(bench.0.path()).unwrap().count();
    assert_eq!(entries, 1, "a dry run leaves nothing");
}

#[test]
fn what_cannot_work_is_refused_with_a_way_out() {
    let bench = Bench::new();
    fs::write(bench.path("notes.txt"), "The loom is iron.").unwrap();
    let model = llama();
    let finetune = |more: &[&'static str]| -> Vec<String> {
        let arguments = ["finetune", model.as_str(), "--output", "out", "--data", "facts.jsonl"];
        arguments.iter().chain(more).map(|argument| (*argument).to_owned()).collect()
    };
    for (more, parts) in [
        (&["--targets", "query"][..], &["query", "q_proj"][..]),
        (&["--targets", "lm_head"], &["lm_head", "--full"]),
        (&["--dropout", "1"], &["dropout", "below 1"]),
        (&["--data", "notes.txt"], &["facts.jsonl", "notes.txt", "different kinds"]),
        (&["--sequence-length", "129"], &["129", "128 positions"]),
        (&["--memory-budget", "1000"], &["frozen weights", "--base nf4"]),
    ] {
        let arguments = finetune(more);
        bench.refused(1, &arguments.iter().map(String::as_str).collect::<Vec<_>>(), parts);
        assert!(!bench.path("out").exists(), "{more:?}");
    }
    // Before any card is looked for.
    for (model, more, parts) in [
        ("llama", &["--rank", "12"][..], &["rank is 12", "multiples of 8"][..]),
        (
            "mixtral",
            &["--targets", "experts.1.w1"],
            &["layers.0.block_sparse_moe.experts.1.w1", "layers.0.block_sparse_moe.experts.0.w1", "processor"],
        ),
    ] {
        let model = golden(model);
        let arguments = ["finetune", &model, "--data", "facts.jsonl", "--sequence-length", "64", "--device", "cuda"];
        bench.refused(1, &[&arguments[..], more].concat(), parts);
    }
    bench.refused(2, &["export", &model, "folder", "--type", "q8_0"], &["folder", ".gguf"]);
    bench.refused(1, &["export", &model, "x.gguf", "--adapter", "none"], &["none", "adapter_config.json"]);
    // A model is never where the run writes.
    bench.ok(&["export", &model, "model"]);
    bench.refused(1, &["finetune", "model", "--data", "facts.jsonl", "--output", "."], &["./model", "another output"]);
    assert!(bench.path("model/model.safetensors").exists());
    // A folder of something else is never replaced.
    fs::create_dir(bench.path("mine")).unwrap();
    fs::write(bench.path("mine/letter.txt"), "keep").unwrap();
    bench.refused(1, &["export", &model, "mine", "--force"], &["mine", "not replaced"]);
    assert!(bench.path("mine/letter.txt").exists());
}

#[cfg(unix)]
#[test]
fn ctrl_c_saves_the_adapters_and_ends() {
    let bench = Bench::new();
    let model = llama();
    let arguments = [
        "finetune",
        model.as_str(),
        "--data",
        "facts.jsonl",
        "--steps",
        "100000",
        "--output",
        "out",
        "--json",
        "--merge",
    ];
    let child = bench.start(&arguments);
    let log = bench.path("out/log.jsonl");
    for _ in 0..600 {
        if fs::read_to_string(&log).is_ok_and(|text| text.lines().count() >= 3) {
            break;
        }
        std::thread::sleep(std::time::Duration::from_millis(100));
    }
    assert!(Command::new("kill").args(["-INT", &child.id().to_string()]).status().unwrap().success());
    let (code, out, errors) = finished(child);
    assert_eq!(code, 130, "{errors}");
    let report: Value = serde_json::from_str(&out).unwrap();
    assert_eq!((report["reason"].as_str(), report["adapter"].is_null()), (Some("stopped"), true));
    let checkpoint = PathBuf::from(report["checkpoint"].as_str().unwrap());
    assert!(bench.0.path().join(checkpoint).join("adapter_model.safetensors").exists());
}
