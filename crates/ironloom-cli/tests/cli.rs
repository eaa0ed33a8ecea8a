//! The built program, run as a person runs it: every command on tiny models, bad input, signals and closed pipes.
//!
//! Models are the golden ones of `tests/golden/models`. SmolLM2 is held to its golden ids where it is in the cache.

mod smollm2;

use std::{
    fs,
    io::{BufRead, BufReader, Read, Write},
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
};

use ironloom_weights::{DType, NewTensor, TensorInfo, unwatched};
use serde_json::Value;

/// What a finished run left.
struct Ran {
    code: i32,
    out: String,
    err: String,
}

impl Ran {
    fn of(child: Child) -> Self {
        let output = child.wait_with_output().unwrap();
        // A test that has read the first byte of an answer may have cut a character.
        let text = |bytes: Vec<u8>| String::from_utf8_lossy(&bytes).into_owned();
        let ran = Self {
            code: output.status.code().expect("ended by a signal"),
            out: text(output.stdout),
            err: text(output.stderr),
        };
        assert!(!ran.err.contains("panicked"), "{}", ran.err);
        ran
    }

    /// The output of a run that must have gone well.
    fn ok(self) -> String {
        assert_eq!(self.code, 0, "{}", self.err);
        self.out
    }

    fn json(self) -> Value {
        serde_json::from_str(&self.ok()).unwrap()
    }

    /// The error of a run that must have failed, after making sure that it is one line that says all of `parts`.
    fn refused(self, code: i32, parts: &[&str]) {
        assert_eq!(self.code, code, "{}{}", self.out, self.err);
        let line = self.err.lines().find(|line| line.starts_with("error: ")).expect("an error line");
        for part in parts {
            assert!(line.contains(part), "{part:?} is not in {line:?}");
        }
        if code == 1 {
            assert_eq!(self.err.trim_end(), line, "more than the error");
        }
    }
}

fn start(arguments: &[&str]) -> Child {
    Command::new(env!("CARGO_BIN_EXE_ironloom"))
        .args(arguments)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap()
}

fn ironloom(arguments: &[&str]) -> Ran {
    with_input(arguments, "")
}

fn with_input(arguments: &[&str], input: &str) -> Ran {
    let mut child = start(arguments);
    // A program that ended without reading closes the pipe.
    let _ = child.stdin.take().unwrap().write_all(input.as_bytes());
    Ran::of(child)
}

fn golden(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden").join(path)
}

/// The tiny Llama: 128 positions, 272 tokens, a chat template.
fn llama() -> String {
    golden("models/llama").to_str().unwrap().to_owned()
}

/// The tiny Llama in a folder of its own, its configuration changed.
fn changed_llama(change: impl FnOnce(&mut Value)) -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    for name in ["model.safetensors", "tokenizer.json", "tokenizer_config.json", "generation_config.json"] {
        fs::copy(golden("models/llama").join(name), folder.path().join(name)).unwrap();
    }
    let mut config = serde_json::from_slice(&fs::read(golden("models/llama/config.json")).unwrap()).unwrap();
    change(&mut config);
    fs::write(folder.path().join("config.json"), config.to_string()).unwrap();
    folder
}

fn text(path: &Path) -> &str {
    path.to_str().unwrap()
}

const GREEDY: [&str; 2] = ["--temperature", "0"];

#[test]
fn run_streams_an_answer_and_ends_with_its_speed() {
    let ran = ironloom(&["run", &llama(), "Hello", "--max-tokens", "16", "--seed", "3", "--ignore-eos"]);
    let last = ran.err.lines().last().unwrap().to_owned();
    let words: Vec<&str> = last.split(' ').collect();
    assert!(
        matches!(words[..], ["prompt", _, "tokens", _, "tok/s,", "generated", "16", "tokens", _, "tok/s"]),
        "{last}"
    );
    assert!(words[3].parse::<f64>().unwrap() > 0.0 && words[8].parse::<f64>().unwrap() > 0.0, "{last}");
    let out = ran.ok();
    assert!(out.ends_with('\n') && out.len() > 1, "{out:?}");
    let quiet = ironloom(&["run", &llama(), "Hello", "--max-tokens", "16", "--seed", "3", "--ignore-eos", "--quiet"]);
    assert_eq!((quiet.err.as_str(), quiet.out.as_str()), ("", out.as_str()));
}

#[test]
fn run_gives_the_same_text_for_the_same_seed_on_any_number_of_threads() {
    let answer = |more: &[&str]| {
        let run = ["run", &llama(), "Tell me", "--ignore-eos", "-n", "40", "--temperature", "1.5", "--json"];
        ironloom(&[&run, more].concat()).json()["ids"].clone()
    };
    let first = answer(&["--seed", "1", "--threads", "1"]);
    assert_eq!(answer(&["--seed", "1", "--threads", "3"]), first);
    assert_ne!(answer(&["--seed", "2", "--threads", "1"]), first);
    let unseeded = [answer(&[]), answer(&[]), answer(&[])];
    assert!(unseeded.iter().any(|ids| ids != &unseeded[0]) || unseeded[0] != first);
}

#[test]
fn run_prints_one_json_object() {
    let report =
        ironloom(&["run", &llama(), "Hello", "-n", "8", "--ignore-eos", "--seed", "5", "--json", "--threads", "2"])
            .json();
    assert_eq!(report["ids"].as_array().unwrap().len(), 8);
    assert_eq!(report["generated_tokens"], 8);
    assert_eq!(report["finish_reason"], "max_tokens");
    assert_eq!(report["sampling"]["seed"], 5);
    assert_eq!(report["model"]["architecture"], "llama");
    assert_eq!(report["model"]["context"], 128);
    assert!(report["model"]["device"].as_str().unwrap().contains("2 threads"));
    assert!(report["timings"]["generation_seconds"].as_f64().unwrap() > 0.0);
    assert!(report["text"].is_string());
}

#[test]
fn run_uses_the_chat_template_unless_told_not_to() {
    let tokens = |more: &[&str]| {
        let run = ["run", &llama(), "Hi", "--json", "-n", "1"];
        ironloom(&[&run, more].concat()).json()["prompt_tokens"].as_u64().unwrap()
    };
    let raw = tokens(&["--raw"]);
    let chat = tokens(&[]);
    let system = tokens(&["--system", "Be brief."]);
    assert!(raw < chat && chat < system, "{raw} {chat} {system}");
    let shown = ironloom(&["tokenize", &llama(), "Hi", "--chat", "--json"]).json();
    assert_eq!(shown["count"], chat);
}

#[test]
fn run_reads_a_prompt_from_stdin() {
    let report =
        |input: &str| with_input(&["run", &llama(), "-", "--json", "-n", "4", "--temperature", "0"], input).json();
    assert_eq!(
        report("Hello\n")["ids"],
        ironloom(&["run", &llama(), "Hello", "--json", "-n", "4", "--temperature", "0"]).json()["ids"]
    );
    assert_ne!(report("Hello")["prompt_tokens"], report("Hello, world")["prompt_tokens"]);
}

#[test]
fn run_ends_before_a_stop_string() {
    let run = ["run", &llama(), "Tell me", "--raw", "--ignore-eos", "-n", "60", "--json"];
    let whole = ironloom(&[&run[..], &GREEDY].concat()).json()["text"].as_str().unwrap().to_owned();
    let (at, stop) = whole.char_indices().map(|(at, c)| (at, c.to_string())).nth(5).unwrap();
    let stopped = ironloom(&[&run[..], &GREEDY, &["--stop", "never this", "--stop", &stop]].concat()).json();
    assert_eq!(stopped["finish_reason"], "stop_string");
    let kept = stopped["text"].as_str().unwrap();
    assert!(whole.starts_with(kept) && kept.len() <= at && !kept.contains(&stop), "{kept:?} of {whole:?}");
    ironloom(&["run", &llama(), "Hi", "--stop", ""]).refused(1, &["stop string 0 is empty"]);
}

#[test]
fn run_holds_weights_as_it_is_told() {
    let model = |weights: &str| {
        ironloom(&["run", &llama(), "Hi", "-n", "2", "--json", "--weights", weights]).json()["model"].clone()
    };
    let (keep, nf4) = (model("keep"), model("nf4"));
    assert!(nf4["weight_bytes"].as_u64().unwrap() < keep["weight_bytes"].as_u64().unwrap() / 3, "{keep} {nf4}");
    assert_ne!(keep["weights"], nf4["weights"]);
}

#[test]
fn a_prompt_that_does_not_fit_is_refused() {
    let long = "word ".repeat(200);
    ironloom(&["run", &llama(), &long]).refused(1, &["the prompt has", "context of 128", "shorten"]);
    ironloom(&["run", &llama(), "Hello there", "--context", "4"]).refused(1, &["context of 4"]);
    ironloom(&["run", &llama(), "Hi", "--context", "129"]).refused(1, &["129", "128"]);
}

#[test]
fn a_full_context_ends_the_answer_and_is_said() {
    let ran = ironloom(&["run", &llama(), "Hi", "--raw", "--ignore-eos", "--context", "20"]);
    assert!(ran.err.contains("context of 20 tokens is full"), "{}", ran.err);
    ran.ok();
}

#[test]
fn wrong_usage_has_its_own_exit_code() {
    ironloom(&["run", &llama(), "Hi", "--device", "gpu"]).refused(2, &["gpu", "--device", "cuda:N"]);
    ironloom(&["run", &llama(), "Hi", "--memory-budget", "much"]).refused(2, &["much", "--memory-budget", "12GiB"]);
    ironloom(&["run", &llama(), "Hi", "--threads", "0"]).refused(2, &["--threads"]);
    ironloom(&["run", &llama(), "Hi", "--weights", "q3"]).refused(2, &["q3"]);
    ironloom(&["run", &llama(), "Hi", "--temperature", "-1"]).refused(2, &["temperature is -1", "from 0 up"]);
    ironloom(&["run", &llama(), "Hi", "--top-p", "2"]).refused(2, &["top_p is 2"]);
    ironloom(&["run", &llama(), "Hi", "--context", "0"]).refused(2, &["--context"]);
    ironloom(&["tokenize", &llama(), "--decode", "1,9999"]).refused(2, &["9999", "271"]);
    ironloom(&["bench", &llama(), "-p", "4096"]).refused(2, &["pp4096", "context of 128"]);
    ironloom(&["bench", &llama(), "-p", "0", "-n", "0"]).refused(2, &["nothing to measure"]);
    ironloom(&["bench", &llama(), "-p", "8", "--memory-budget", "1000"])
        .refused(1, &["plan (weights", "1000 B", "-d", "raise --memory-budget"]);
    assert_eq!(ironloom(&[]).code, 2);
    assert_eq!(ironloom(&["walk"]).code, 2);
}

#[test]
fn bad_files_are_refused_with_their_reason() {
    let folder = tempfile::tempdir().unwrap();
    let file = |name: &str, bytes: &[u8]| {
        let path = folder.path().join(name);
        fs::write(&path, bytes).unwrap();
        text(&path).to_owned()
    };
    let whole = fs::read(golden("models/llama/model.gguf")).unwrap();
    let missing = text(&folder.path().join("missing.gguf")).to_owned();
    let truncated = file("truncated.gguf", &whole[..whole.len() / 2]);
    let page = file("page.gguf", b"<!DOCTYPE html><html><body>Not found</body></html>");
    let noise = file("noise.gguf", &[7; 4096]);
    let empty = file("empty.gguf", b"");
    for command in [
        &["run", "MODEL", "Hi"][..],
        &["chat", "MODEL"],
        &["inspect", "MODEL"],
        &["tokenize", "MODEL", "Hi"],
        &["bench", "MODEL"],
    ] {
        let on = |model: &str| {
            ironloom(&command.iter().map(|&word| if word == "MODEL" { model } else { word }).collect::<Vec<_>>())
        };
        on(&missing).refused(1, &["missing.gguf", "No such file"]);
        on(&truncated).refused(1, &["truncated.gguf"]);
        on(&page).refused(1, &["page.gguf", "web page"]);
        on(&noise).refused(1, &["noise.gguf"]);
        on(&empty).refused(1, &["empty.gguf"]);
        on(text(folder.path())).refused(1, &[]);
    }
}

#[test]
fn an_unknown_architecture_is_refused_to_run_and_shown_by_inspect() {
    let folder = changed_llama(|config| config["model_type"] = "rwkv".into());
    let model = text(folder.path());
    ironloom(&["run", model, "Hi"]).refused(1, &["\"rwkv\"", "llama", "qwen3"]);
    ironloom(&["bench", model]).refused(1, &["\"rwkv\""]);
    let report = ironloom(&["inspect", model, "--json"]).json();
    assert!(report["model"]["error"].as_str().unwrap().contains("rwkv"));
    assert_eq!(report["memory"], Value::Null);
    assert!(ironloom(&["inspect", model]).ok().contains("rwkv"));
}

#[test]
fn a_model_without_a_tokenizer_or_a_template_says_so() {
    let folder = changed_llama(|_| {});
    fs::remove_file(folder.path().join("tokenizer_config.json")).unwrap();
    let model = text(folder.path());
    ironloom(&["chat", model]).refused(1, &["no chat template", "ironloom run"]);
    ironloom(&["tokenize", model, "Hi", "--chat"]).refused(1, &["no chat template"]);
    let ran = ironloom(&["run", model, "Hi", "--system", "Be brief.", "-n", "2"]);
    assert!(ran.err.contains("warning: the model has no chat template"), "{}", ran.err);
    ran.ok();
    fs::remove_file(folder.path().join("tokenizer.json")).unwrap();
    ironloom(&["run", model, "Hi"]).refused(1, &["tokenizer.json"]);
    let report = ironloom(&["inspect", model, "--json"]).json();
    assert!(report["tokenizer"]["error"].as_str().unwrap().contains("tokenizer.json"));
    assert_eq!(report["model"]["architecture"], "llama");
}

#[test]
fn tensors_that_the_model_does_not_use_are_named() {
    let folder = changed_llama(|_| {});
    let stored = ironloom_weights::open(golden("models/llama")).unwrap();
    let mut tensors: Vec<NewTensor<'_>> =
        stored.tensors().map(|info| stored.tensor(&info.name).unwrap().into()).collect();
    let info = TensorInfo { name: "model.extra.weight".into(), dtype: DType::F32, shape: [2].into() };
    tensors.push(NewTensor::new(info, vec![0; 8]));
    ironloom_weights::safetensors::write(
        folder.path().join("model.safetensors"),
        &ironloom_weights::Metadata::new(),
        tensors,
        &mut unwatched,
    )
    .unwrap();
    let ran = ironloom(&["run", text(folder.path()), "Hi", "-n", "2"]);
    assert!(
        ran.err.contains("warning: the model does not use 1 tensor of the file: model.extra.weight"),
        "{}",
        ran.err
    );
    ran.ok();
}

#[test]
fn inspect_shows_configuration_tensors_types_and_memory() {
    let path = golden("models/llama/model-q8_0.gguf");
    let report = ironloom(&["inspect", text(&path), "--json", "--tensors", "--metadata"]).json();
    assert_eq!(report["format"], "GGUF v3");
    assert_eq!(report["file_bytes"], fs::metadata(&path).unwrap().len());
    let model = &report["model"];
    assert_eq!(
        (&model["architecture"], &model["layers"], &model["context_length"]),
        (&"llama".into(), &3.into(), &128.into())
    );
    assert_eq!(model["parameters"], model["active_parameters"]);
    let tensors = report["tensors"].as_array().unwrap();
    assert_eq!(report["tensor_count"], tensors.len());
    let total = |rows: &Value| rows.as_array().unwrap().iter().map(|row| row["bytes"].as_u64().unwrap()).sum::<u64>();
    assert_eq!(total(&report["types"]), total(&report["tensors"]));
    assert!(report["types"].as_array().unwrap().iter().any(|row| row["type"] == "Q8_0"));
    let elements: u64 = report["types"].as_array().unwrap().iter().map(|row| row["elements"].as_u64().unwrap()).sum();
    assert_eq!(model["parameters"], elements);
    assert_eq!(report["metadata"]["general.architecture"], "llama");
    assert_eq!(report["memory"]["context"], 128);
    assert!(report["memory"]["total_bytes"].as_u64().unwrap() > total(&report["types"]));

    let page = ironloom(&["inspect", text(&path), "--tensors", "--metadata"]).ok();
    for part in ["GGUF v3", "llama", "Q8_0", "memory for a context of 128", "token_embd.weight", "general.architecture"]
    {
        assert!(page.contains(part), "{part} is not in\n{page}");
    }
    assert!(page.lines().all(|line| line.chars().count() < 140), "{page}");
}

#[test]
fn inspect_counts_experts_and_plans_for_the_context_asked_for() {
    let path = golden("models/qwen3_moe");
    let report = ironloom(&["inspect", text(&path), "--json"]).json();
    let model = &report["model"];
    assert!(model["active_parameters"].as_u64().unwrap() < model["parameters"].as_u64().unwrap());
    assert!(model["experts"]["count"].as_u64().unwrap() > model["experts"]["per_token"].as_u64().unwrap());
    let total = |context: &str| {
        let report = ironloom(&["inspect", &llama(), "--json", "--context", context]).json();
        report["memory"]["total_bytes"].as_u64().unwrap()
    };
    assert!(total("128") > total("16"));
    ironloom(&["inspect", &llama(), "--context", "500"]).refused(2, &["500", "128"]);
}

#[test]
fn every_golden_model_is_shown_and_those_with_a_tokenizer_run() {
    let mut shown = 0;
    for entry in fs::read_dir(golden("models")).unwrap() {
        let folder = entry.unwrap().path();
        if !folder.is_dir() {
            continue;
        }
        for path in [folder.clone(), folder.join("model.gguf")] {
            if !path.join("config.json").exists() && !path.is_file() {
                continue;
            }
            let report = ironloom(&["inspect", text(&path), "--json"]).json();
            assert!(report["model"]["parameters"].as_u64().unwrap() > 0, "{}: {report}", path.display());
            shown += 1;
            if path.is_file() {
                let run = ["run", text(&path), "ab", "--raw", "-n", "3", "--ignore-eos", "--json"];
                assert_eq!(ironloom(&run).json()["generated_tokens"], 3, "{}", path.display());
            }
        }
    }
    assert!(shown > 20, "{shown}");
}

#[test]
fn tokenize_goes_there_and_back() {
    let report = ironloom(&["tokenize", &llama(), "Hello, wörld\n", "--json"]).json();
    let ids: Vec<String> = report["ids"].as_array().unwrap().iter().map(Value::to_string).collect();
    assert_eq!(report["count"], ids.len());
    assert_eq!(report["pieces"].as_array().unwrap().len(), ids.len());
    assert_eq!(ironloom(&["tokenize", &llama(), "--decode", &ids.join(",")]).ok(), "Hello, wörld\n\n");
    assert_eq!(
        ironloom(&["tokenize", &llama(), "--decode", &format!("[{}]", ids.join(", "))]).ok(),
        "Hello, wörld\n\n"
    );
    let table = ironloom(&["tokenize", &llama(), "Hello"]);
    assert_eq!(table.err.trim(), format!("{} tokens", table.out.lines().count()));
    let count = |more: &[&str]| {
        let tokenize = ["tokenize", &llama(), "<|im_end|>", "--no-bos", "--json"];
        ironloom(&[&tokenize, more].concat()).json()["count"].as_u64().unwrap()
    };
    assert_eq!(count(&["--special"]), 1);
    assert!(count(&[]) > 1);
    assert_eq!(with_input(&["tokenize", &llama(), "-", "--json"], "Hello, wörld\n\n").json()["ids"], report["ids"]);
}

#[test]
fn chat_feeds_only_what_is_new_and_takes_commands() {
    let folder = tempfile::tempdir().unwrap();
    let saved = folder.path().join("talk.json");
    let input = format!(
        "Hi there\nAnd now\n/regenerate\n/save {0}\n/save {0}\n/fly\n//slash\n/help\n/system Be brief.\n/reset\nAgain\n/quit\nnot read\n",
        text(&saved)
    );
    let ran = with_input(&["chat", &llama(), "-n", "3", "--temperature", "0", "--ignore-eos"], &input);
    assert_eq!(ran.code, 0, "{}", ran.err);
    let prompts: Vec<usize> =
        ran.err.lines().filter_map(|line| line.strip_prefix("[prompt ")?.split(' ').next()?.parse().ok()).collect();
    let count = |words: &[&str]| {
        ironloom(&[&["tokenize", &llama(), "--json", "--chat"], words].concat()).json()["count"].as_u64().unwrap()
            as usize
    };
    let user = count(&["And now"]);
    // The second turn is fed the end of the first answer's line and its own message, and the answer written anew nothing.
    assert_eq!(prompts.len(), 5, "{}", ran.err);
    assert_eq!(prompts[0], count(&["Hi there"]));
    assert!(prompts[1] <= user + 3, "{prompts:?} {user}");
    assert_eq!(prompts[2], 0);
    // The two conversations have the token that opens a message in common.
    assert_eq!(prompts[4], count(&["Again", "--system", "Be brief."]) - 1);
    for part in
        ["saved to", "error: cannot write", "error: there is no command /fly", "/regenerate", "a new conversation"]
    {
        assert!(ran.err.contains(part), "{part} is not in {}", ran.err);
    }
    let messages: Value = serde_json::from_slice(&fs::read(&saved).unwrap()).unwrap();
    let roles: Vec<&str> =
        messages.as_array().unwrap().iter().map(|message| message["role"].as_str().unwrap()).collect();
    assert_eq!(roles, ["user", "assistant", "user", "assistant"]);
    assert_eq!(messages[2]["content"], "And now");
}

#[test]
fn chat_answers_as_run_does_and_outlives_a_full_context() {
    let run = ironloom(&["run", &llama(), "Hi there", "-n", "6", "--temperature", "0", "--quiet"]).ok();
    let chat = with_input(&["chat", &llama(), "-n", "6", "--temperature", "0", "--quiet"], "Hi there\n").ok();
    assert_eq!(run, chat);
    let long = format!("{}\nHi there\n", "word ".repeat(100));
    let ran = with_input(&["chat", &llama(), "-n", "6", "--temperature", "0"], &long);
    assert!(ran.err.contains("error: the conversation is too long (/reset"), "{}", ran.err);
    assert_eq!(ran.ok(), run);
}

#[test]
fn bench_prints_rows_like_llama_bench() {
    let rows =
        ironloom(&["bench", &llama(), "-p", "16,32", "-n", "4", "-d", "0,8", "-r", "2", "-t", "1,2", "--json"]).json();
    let rows = rows.as_array().unwrap();
    let tests: Vec<&str> = rows.iter().map(|row| row["test"].as_str().unwrap()).collect();
    let once = ["pp16", "pp32", "tg4", "pp16 @ d8", "pp32 @ d8", "tg4 @ d8"];
    assert_eq!(tests, [once, once].concat());
    for row in rows {
        assert_eq!(row["samples"].as_array().unwrap().len(), 2);
        assert!(row["tokens_per_second"].as_f64().unwrap() > 0.0);
    }
    assert_eq!((&rows[0]["threads"], &rows[11]["threads"]), (&1.into(), &2.into()));
    let ran = ironloom(&["bench", &llama(), "-p", "8", "-n", "0", "-d", "0,16", "-r", "1", "-t", "1"]);
    assert!(ran.err.contains("plan: weights") && ran.err.contains("cache of 24 positions"), "{}", ran.err);
    let table = ironloom(&["bench", &llama(), "-p", "8", "-n", "0", "-r", "1", "-t", "1"]).ok();
    let lines: Vec<&str> = table.lines().collect();
    assert_eq!(lines.len(), 3, "{table}");
    assert!(
        lines.iter().all(|line| line.matches('|').count() == 8 && line.chars().count() == lines[0].chars().count()),
        "{table}"
    );
    assert!(lines[2].contains("pp8") && lines[2].contains('±'), "{table}");
}

#[test]
fn help_shows_examples_for_every_command() {
    let all = ironloom(&["--help"]).ok();
    for command in ["run", "chat", "inspect", "quantize", "tokenize", "bench", "train", "finetune", "export"] {
        assert!(all.contains(command));
        let help = ironloom(&[command, "--help"]).ok();
        assert!(help.contains("Examples:") && help.contains(&format!("ironloom {command} ")), "{help}");
    }
}

#[test]
fn a_closed_pipe_ends_quietly() {
    let mut child = start(&["inspect", &llama(), "--tensors"]);
    drop(child.stdout.take());
    let ran = Ran::of(child);
    assert_eq!((ran.code, ran.err.as_str()), (0, ""));
    let mut child = start(&["run", &llama(), "Hi", "--ignore-eos", "--raw", "-n", "100"]);
    drop(child.stdout.take());
    let ran = Ran::of(child);
    assert_eq!((ran.code, ran.err.as_str()), (0, ""));
}

/// The tiny Llama with room for an answer that takes far longer than a test waits.
#[cfg(unix)]
fn endless_llama() -> tempfile::TempDir {
    changed_llama(|config| config["max_position_embeddings"] = 400_000.into())
}

#[cfg(unix)]
const ENDLESS: [&str; 3] = ["--ignore-eos", "-n", "390000"];

#[cfg(unix)]
#[test]
fn ctrl_c_ends_an_answer_cleanly() {
    let folder = endless_llama();
    let mut child = start(&[&["run", text(folder.path()), "Hi"][..], &ENDLESS].concat());
    child.stdout.as_mut().unwrap().read_exact(&mut [0]).unwrap();
    interrupt(&child);
    let ran = Ran::of(child);
    assert_eq!(ran.code, 130, "{}", ran.err);
    assert!(ran.out.ends_with('\n'));
    assert!(ran.err.lines().last().unwrap().starts_with("prompt "), "{}", ran.err);
}

#[cfg(unix)]
#[test]
fn ctrl_c_leaves_the_json_of_what_there_is() {
    let folder = endless_llama();
    // Nothing tells from outside that loading is over, and until then Ctrl-C ends the program without an answer.
    for milliseconds in [200, 1000, 5000, 20_000] {
        let child = start(&[&["run", text(folder.path()), "Hi", "--json"][..], &ENDLESS].concat());
        std::thread::sleep(std::time::Duration::from_millis(milliseconds));
        interrupt(&child);
        let ran = Ran::of(child);
        assert_eq!(ran.code, 130, "{}", ran.err);
        if !ran.out.is_empty() {
            let report: Value = serde_json::from_str(&ran.out).unwrap();
            assert_eq!(report["finish_reason"], "cancelled");
            assert_eq!(report["generated_tokens"], report["ids"].as_array().unwrap().len());
            return;
        }
    }
    panic!("no answer was begun in 20 seconds");
}

#[cfg(unix)]
#[test]
fn ctrl_c_stops_an_answer_of_a_chat_and_the_chat_goes_on() {
    let folder = endless_llama();
    let mut child = start(&[&["chat", text(folder.path())][..], &ENDLESS].concat());
    let mut input = child.stdin.take().unwrap();
    let mut output = child.stdout.take().unwrap();
    let mut errors = BufReader::new(child.stderr.take().unwrap()).lines();
    input.write_all(b"Hi\n").unwrap();
    output.read_exact(&mut [0]).unwrap();
    // Whoever does not read on holds the program up at a full pipe.
    let drained = std::thread::spawn(move || output.read_to_end(&mut Vec::new()).unwrap());
    interrupt(&child);
    let line = errors.next().unwrap().unwrap();
    assert!(line.starts_with("[prompt "), "{line}");
    input.write_all(b"/reset\n/quit\n").unwrap();
    assert_eq!(errors.next().unwrap().unwrap(), "a new conversation");
    assert_eq!(child.wait().unwrap().code(), Some(0));
    drained.join().unwrap();
}

/// On a terminal the line editor has a say in signals too.
#[cfg(target_os = "linux")]
#[test]
fn ctrl_c_on_a_terminal_stops_an_answer() {
    let folder = endless_llama();
    let program = env!("CARGO_BIN_EXE_ironloom");
    // A shell that stayed would die of the Ctrl-C, as `dash` does.
    let chat = format!("exec {program} chat {} --ignore-eos -n 10000 --no-history", text(folder.path()));
    // `script` gives its child a terminal and passes on what it is sent.
    let mut script = Command::new("script");
    script
        .args(["-qec", &chat, "/dev/null"])
        .env("TERM", "xterm")
        .env("SHELL", "/bin/sh")
        .stdin(Stdio::piped())
        .stdout(Stdio::piped());
    let Ok(mut child) = script.spawn() else {
        println!("skipped: there is no `script` to make a terminal with");
        return;
    };
    let mut keys = child.stdin.take().unwrap();
    let mut screen = child.stdout.take().unwrap();
    let mut seen = Vec::new();
    let mut wait_for = |what: &str| {
        seen.clear();
        let mut byte = [0];
        while !String::from_utf8_lossy(&seen).ends_with(what) {
            screen.read_exact(&mut byte).expect("the program ended early");
            seen.push(byte[0]);
        }
        String::from_utf8_lossy(&seen).into_owned()
    };
    wait_for("> ");
    keys.write_all(b"Hi\r").unwrap();
    // The editor hands the terminal back when the line is complete; then the answer begins.
    wait_for("\u{1b}[?2004l");
    std::thread::sleep(std::time::Duration::from_millis(300));
    keys.write_all(b"\x03").unwrap();
    let answer = wait_for(" tokens held]");
    assert!(answer.contains("[prompt ") && !answer.contains("generated 10000 tokens"), "{answer}");
    wait_for("> ");
    keys.write_all(b"\x04").unwrap();
    std::io::copy(&mut screen, &mut std::io::sink()).unwrap();
    assert_eq!(child.wait().unwrap().code(), Some(0));
}

#[cfg(unix)]
fn interrupt(child: &Child) {
    assert!(Command::new("kill").args(["-INT", &child.id().to_string()]).status().unwrap().success());
}

#[test]
fn smollm2_continues_as_the_reference_does() {
    let Some(model) = smollm2::model() else { return };
    let expected: Value = serde_json::from_slice(&fs::read(golden("smollm2/expected.json")).unwrap()).unwrap();
    let prompt = &expected["prompts"][0];
    let run = ["run", text(&model), prompt["text"].as_str().unwrap(), "--raw", "-n", "8", "--json"];
    let report = ironloom(&[&run[..], &GREEDY].concat()).json();
    assert_eq!(report["ids"].as_array().unwrap()[..], prompt["greedy_ids"].as_array().unwrap()[..8]);
}

#[test]
fn quantize_writes_a_file_that_runs_and_never_over_another_unasked() {
    let folder = tempfile::tempdir().unwrap();
    let out = folder.path().join("out.gguf");
    let quantize = |more: &[&str]| {
        let quantize = ["quantize", &llama(), text(&out), "--type", "q8_0"];
        ironloom(&[&quantize, more].concat())
    };
    let report = quantize(&["--json"]).json();
    assert_eq!(
        (report["type"].as_str().unwrap(), report["bytes_out"].as_u64().unwrap()),
        ("Q8_0", fs::metadata(&out).unwrap().len())
    );
    assert!(report["bytes_out"].as_u64() < report["bytes_in"].as_u64());
    let shown = ironloom(&["inspect", text(&out), "--json"]).json();
    assert_eq!(shown["tensor_count"], report["tensors"]);
    assert!(shown["types"].as_array().unwrap().iter().any(|row| row["type"] == "Q8_0"));
    assert_eq!(shown["chat_template"], true);

    quantize(&[]).refused(1, &["out.gguf exists", "--force"]);
    assert!(quantize(&["--force"]).ok().contains("Q8_0"));
    let narrow = ironloom(&["quantize", &llama(), text(&out), "--type", "q4_k", "--force"]);
    assert!(narrow.err.contains("because its rows of 64 are not whole blocks of 256"), "{}", narrow.err);
    assert!(narrow.err.lines().count() < 8, "{}", narrow.err);
    narrow.ok();
    quantize(&["--force"]).ok();
    ironloom(&["quantize", text(&out), text(&out), "--type", "q4_0", "--force"]).refused(1, &["the input itself"]);
    ironloom(&["quantize", text(&out), text(folder.path()), "--type", "q4_0"]).refused(1, &["is a folder"]);
    ironloom(&["quantize", text(&out), "other.gguf", "--type", "q9"]).refused(2, &["q9", "q4_k"]);

    let ids = |model: &str| {
        ironloom(&["run", model, "Hello", "--raw", "-n", "4", "--temperature", "0", "--ignore-eos", "--json"]).json()["ids"].clone()
    };
    let twin = golden("models/llama/model-q8_0.gguf");
    assert_eq!(ids(text(&out)), ids(text(&twin)));
    assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1, "something was left beside the output");
}
