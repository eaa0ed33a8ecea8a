//! Exports against the golden models: a folder and the GGUF file made of it are the same model, tensor by tensor the file that
//! the reference converter's conventions make, and back again the same folder.

use std::{
    fs,
    ops::ControlFlow,
    path::{Path, PathBuf},
};

use ironloom_core::{DType, Threads};
use ironloom_lm::{
    Config, Error, LoadOptions, LogitRows, Model,
    export::{ExportOptions, ExportReport, TextFiles, to_gguf, to_hugging_face, write_trained},
    text::{AddBos, AddGenerationPrompt, ChatTemplate, Message, Specials, Tokenizer, encode_chat},
};
use ironloom_nn::Span;
use ironloom_tensor::{Context, Device};
use ironloom_weights::{Checkpoint, Value, open, unwatched};

/// Golden models whose family and options GGUF has a place for.
const EXPORTABLE: &[&str] = &[
    "llama",
    "llama-linear",
    "llama-llama3",
    "llama-yarn",
    "llama-yarn-attention-factor",
    "llama-yarn-mscale-differs",
    "llama-yarn-mscale-equal",
    "mistral",
    "qwen2",
    "qwen3",
    "gemma3",
    "gemma3-linear",
    "internlm2",
    "mixtral",
    "qwen2_moe",
    "qwen2_moe-mixed",
    "qwen3_moe",
    "qwen3_moe-mixed",
];

fn golden(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden/models").join(name)
}

fn options(dtype: DType) -> ExportOptions<'static> {
    ExportOptions { threads: Threads::new(2), ..ExportOptions::new(dtype) }
}

fn exported(input: &Path, dtype: DType) -> (tempfile::TempDir, PathBuf, ExportReport) {
    let folder = tempfile::tempdir().unwrap();
    let out = folder.path().join("model.gguf");
    let report = to_gguf(&open(input).unwrap(), &out, &options(dtype))
        .unwrap_or_else(|error| panic!("{}: {error}", input.display()));
    (folder, out, report)
}

fn json(path: &Path) -> serde_json::Value {
    serde_json::from_slice(&fs::read(path).unwrap()).unwrap()
}

fn values(checkpoint: &Checkpoint, name: &str) -> Vec<f32> {
    let data = checkpoint.tensor(name).unwrap();
    let mut values = vec![0.0; data.shape.elements().unwrap()];
    ironloom_quant::unpack(data.dtype, &data.bytes, &mut values).unwrap();
    values
}

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|value| value.to_bits()).collect()
}

fn prompt(name: &str) -> Vec<u32> {
    let expected = open(golden(name).join("expected.safetensors")).unwrap();
    let data = expected.tensor("long.input_ids").unwrap();
    data.bytes.chunks_exact(4).map(|bytes| u32::from_le_bytes(bytes.try_into().unwrap())).collect()
}

fn logits(path: &Path, ids: &[u32]) -> Vec<f32> {
    let device = Device::cpu(2);
    let model = Model::load(&open(path).unwrap(), &device, &LoadOptions::default()).unwrap();
    assert!(model.unused_tensors().is_empty(), "{}: unused {:?}", path.display(), model.unused_tensors());
    let mut cache = model.new_cache();
    let mut spans = [Span { cache: &mut cache, rows: ids.len() }];
    let logits = model.forward(&Context::inference(&device), ids, &mut spans, LogitRows::All).unwrap();
    logits.as_f32().unwrap().to_vec()
}

fn largest_difference(a: &[f32], b: &[f32]) -> f32 {
    assert_eq!(a.len(), b.len());
    a.iter().zip(b).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max)
}

/// F32 holds every stored value, so the exported model is the model. Llama 3's scaling passes through a tensor of divisors in
/// single precision: the last bit of a frequency may differ, and then a logit by what that moves.
#[test]
fn a_folder_and_its_gguf_are_the_same_model() {
    for name in EXPORTABLE {
        let ids = prompt(name);
        let (_folder, out, report) = exported(&golden(name), DType::F32);
        assert_eq!(report.tensors, open(&out).unwrap().tensors().len());
        assert!(report.kept.is_empty(), "{name}: {:?}", report.kept);
        let (folder, file) = (logits(&golden(name), &ids), logits(&out, &ids));
        if *name == "llama-llama3" {
            let difference = largest_difference(&folder, &file);
            println!("{name}: {difference:e}");
            assert!(difference <= 2e-5, "{name}: {difference}");
        } else {
            assert_eq!(bits(&folder), bits(&file), "{name}");
        }
    }
}

/// The twins in `tests/golden` were written by another program from the same folders.
#[test]
fn exported_tensors_and_descriptions_are_those_of_the_golden_twins() {
    let mut count = 0;
    for name in EXPORTABLE {
        let twin_path = golden(name).join("model.gguf");
        if !twin_path.exists() {
            continue;
        }
        count += 1;
        let (_folder, out, _) = exported(&golden(name), DType::F32);
        let (twin, ours) = (open(twin_path).unwrap(), open(&out).unwrap());
        let mut names: Vec<&str> = twin.tensors().map(|info| info.name.as_str()).collect();
        let mut our_names: Vec<&str> = ours.tensors().map(|info| info.name.as_str()).collect();
        names.sort_unstable();
        our_names.sort_unstable();
        assert_eq!(names, our_names, "{name}");
        for tensor in names {
            assert_eq!(twin.info(tensor).unwrap(), ours.info(tensor).unwrap(), "{name}");
            assert_eq!(bits(&values(&twin, tensor)), bits(&values(&ours, tensor)), "{name} {tensor}");
        }
        for (key, value) in twin.metadata().iter() {
            let ours = ours.metadata();
            let differs = key == "general.name" || key.starts_with("tokenizer.") || key.ends_with(".context_length");
            // A count may have another integer type.
            let equal = match (value.as_integer(), ours.get(key).and_then(Value::as_integer)) {
                (Some(theirs), Some(ours)) => theirs == ours,
                _ => ours.get(key) == Some(value),
            };
            assert!(differs || equal, "{name}: {key} is {:?}, and the twin has {value:?}", ours.get(key));
        }
        assert_eq!(Config::from_checkpoint(&twin).unwrap(), Config::from_checkpoint(&ours).unwrap(), "{name}");
    }
    assert_eq!(count, 11);
}

/// Names and rows map back: what a wrong number of heads would permute, and what weights added to and taken from would round.
#[test]
fn a_folder_comes_back_bit_for_bit_through_gguf() {
    let mut grouped = 0;
    for name in EXPORTABLE {
        let (_folder, file, _) = exported(&golden(name), DType::F32);
        let back = tempfile::tempdir().unwrap();
        to_hugging_face(&open(&file).unwrap(), back.path()).unwrap_or_else(|error| panic!("{name}: {error}"));
        let (original, back) = (open(golden(name)).unwrap(), open(back.path()).unwrap());
        assert_eq!(original.tensors().len(), back.tensors().len(), "{name}");
        for info in original.tensors() {
            let tensor = info.name.as_str();
            assert_eq!(back.info(tensor).map(|info| info.shape), Some(info.shape), "{name} {tensor}");
            let mut wanted = values(&original, tensor);
            if name.starts_with("gemma") && tensor.ends_with("norm.weight") {
                // The file holds them with one added, rounded to single precision.
                wanted.iter_mut().for_each(|value| *value = (*value + 1.0) - 1.0);
            }
            assert_eq!(bits(&wanted), bits(&values(&back, tensor)), "{name} {tensor}");
        }
        if name.starts_with("gemma") {
            // transformers refuses 16.0.
            assert!(json(&back.path().join("config.json"))["query_pre_attn_scalar"].is_u64());
        }
        let (before, after) = (Config::from_checkpoint(&original).unwrap(), Config::from_checkpoint(&back).unwrap());
        grouped += usize::from(before.heads != before.kv_heads);
        assert_eq!(before.layers, after.layers, "{name}");
        assert_eq!((before.heads, before.kv_heads, before.head_width), (after.heads, after.kv_heads, after.head_width));
        let ids = prompt(name);
        let difference = largest_difference(&logits(original.path(), &ids), &logits(back.path(), &ids));
        assert!(difference <= 2e-5, "{name}: {difference}");
    }
    assert!(grouped >= 10, "{grouped} with fewer heads of keys than of queries");
}

/// The golden checks above would notice rows permuted by another number of heads: there such a file is made, and isn't equal.
#[test]
fn rows_permuted_by_the_wrong_number_of_heads_are_noticed() {
    let (_folder, out, _) = exported(&golden("llama"), DType::F32);
    let (twin, ours) = (open(golden("llama").join("model.gguf")).unwrap(), open(&out).unwrap());
    let config = Config::from_checkpoint(&ours).unwrap();
    let stored = values(&open(golden("llama")).unwrap(), "model.layers.0.self_attn.k_proj.weight");
    // Neighbours from halves, with the number of heads as a parameter.
    let permuted = |heads: usize| -> Vec<f32> {
        let (width, rows) = (config.width, config.kv_heads * config.head_width);
        let per_head = rows / heads;
        let row = |place: usize| {
            let (head, element) = (place / per_head, place % per_head);
            head * per_head + element % 2 * (per_head / 2) + element / 2
        };
        (0..rows).flat_map(|place| stored[row(place) * width..][..width].iter().copied()).collect()
    };
    let written = values(&ours, "blk.0.attn_k.weight");
    assert_eq!(bits(&permuted(config.kv_heads)), bits(&written));
    assert_ne!(bits(&permuted(config.heads)), bits(&written), "the queries' number of heads");
    assert_eq!(bits(&values(&twin, "blk.0.attn_k.weight")), bits(&written));
}

/// Bounds on the largest logit difference, twice what was seen: random weights amplify a rounding more than trained ones do.
#[test]
fn packed_exports_stay_near_the_folder() {
    for (name, dtype, bound) in [
        ("llama", DType::F16, 0.025),
        ("llama", DType::BF16, 0.28),
        ("llama", DType::Q8_0, 0.5),
        ("qwen2", DType::Q8_0, 0.32),
    ] {
        let ids = prompt(name);
        let (_folder, out, report) = exported(&golden(name), dtype);
        let (wanted, found) = (logits(&golden(name), &ids), logits(&out, &ids));
        let difference = largest_difference(&wanted, &found);
        let largest = wanted.iter().fold(0.0f32, |largest, logit| largest.max(logit.abs()));
        println!("{name} {dtype}: {difference} of {largest}; {} bytes; kept {:?}", report.bytes_out, report.kept);
        assert!(difference > 0.0 && difference <= bound, "{name} {dtype}: {difference}");
    }
}

/// Every type, by the error of a matrix against the folder's in parts of its root mean square; experts lie in their places.
#[test]
fn packed_matrices_are_the_stored_ones_but_for_their_rounding() {
    let types = [
        (DType::F16, 5e-4),
        (DType::BF16, 3e-3),
        (DType::Q8_0, 0.01),
        (DType::Q5_1, 0.05),
        (DType::Q5_0, 0.06),
        (DType::Q4_1, 0.1),
        (DType::Q4_0, 0.12),
    ];
    let twin = open(golden("mixtral").join("model.gguf")).unwrap();
    for (dtype, bound) in types {
        let (_folder, out, _) = exported(&golden("mixtral"), dtype);
        let file = open(&out).unwrap();
        for tensor in ["blk.0.attn_k.weight", "blk.1.ffn_gate_exps.weight", "blk.1.ffn_up_exps.weight"] {
            assert_eq!(file.info(tensor).unwrap().dtype, dtype);
            let (wanted, found) = (values(&twin, tensor), values(&file, tensor));
            let square = |sum: f64, value: f32| sum + f64::from(value).powi(2);
            let error = wanted.iter().zip(&found).map(|(a, b)| a - b).fold(0.0, square);
            let error = (error / wanted.iter().copied().fold(0.0, square)).sqrt();
            assert!(error > 0.0 && error <= bound, "{dtype} {tensor}: {error}");
        }
    }
}

#[test]
fn matrices_whose_rows_are_not_whole_blocks_are_reported() {
    // Rows of 64 and 96 elements: no K type fits.
    let (_folder, out, report) = exported(&golden("llama"), DType::Q4_K);
    let file = open(&out).unwrap();
    assert_eq!(file.info("blk.0.attn_q.weight").unwrap().dtype, DType::Q5_0);
    assert_eq!(file.info("blk.0.attn_norm.weight").unwrap().dtype, DType::F32);
    let matrices = file.tensors().filter(|info| info.shape.rank() > 1).count();
    assert_eq!(report.kept.len(), matrices);
    assert!(report.kept.iter().any(|kept| kept.contains("blk.0.ffn_down.weight") && kept.contains("96")));
    assert_eq!(file.metadata().u32("general.file_type").unwrap(), Some(14));
    // Mixtral's experts have rows of 40, which no block divides.
    let (_folder, out, _) = exported(&golden("mixtral"), DType::Q5_0);
    let file = open(&out).unwrap();
    assert_eq!(file.info("blk.0.ffn_down_exps.weight").unwrap().dtype, DType::F16);
    assert_eq!(file.info("blk.0.ffn_gate_exps.weight").unwrap().dtype, DType::Q5_0);
    assert_eq!(file.info("blk.0.ffn_gate_inp.weight").unwrap().dtype, DType::F32);
}

#[test]
fn a_gguf_file_is_packed_again_with_its_metadata() {
    let (_folder, out, _) = exported(&golden("llama").join("model.gguf"), DType::Q8_0);
    let (before, after) = (open(golden("llama").join("model.gguf")).unwrap(), open(&out).unwrap());
    for (key, value) in before.metadata().iter() {
        let wanted = if key == "general.file_type" { &7u32.into() } else { value };
        assert_eq!(after.metadata().get(key), Some(wanted), "{key}");
    }
    let data = before.tensor("blk.1.ffn_up.weight").unwrap();
    let mut values = vec![0.0; data.shape.elements().unwrap()];
    ironloom_quant::unpack(data.dtype, &data.bytes, &mut values).unwrap();
    let packed = ironloom_quant::pack(DType::Q8_0, &values).unwrap();
    assert_eq!(&*after.tensor("blk.1.ffn_up.weight").unwrap().bytes, &packed[..]);
    // Any number of threads gives the same file, and what has the type already is left alone.
    let again = tempfile::tempdir().unwrap();
    let one = ExportOptions { threads: Threads::new(1), ..ExportOptions::new(DType::Q8_0) };
    to_gguf(&open(&out).unwrap(), &again.path().join("model.gguf"), &one).unwrap();
    assert_eq!(fs::read(again.path().join("model.gguf")).unwrap(), fs::read(&out).unwrap());
}

#[test]
fn what_gguf_cannot_say_is_refused_by_name_and_writes_nothing() {
    for (name, part) in [
        ("ironloom_moe", "ironloom_moe"),
        ("ernie4_5_moe", "ernie4_5_moe"),
        ("ironloom_dense", "ironloom_dense"),
        ("qwen2-window", "window"),
        ("gemma3-pattern", "attention scale"),
        ("llama-yarn-not-truncated", "truncate"),
    ] {
        let folder = tempfile::tempdir().unwrap();
        let error = to_gguf(&open(golden(name)).unwrap(), &folder.path().join("m.gguf"), &options(DType::F32));
        let error = error.unwrap_err();
        assert!(matches!(error, Error::NotExportable { .. }), "{name}: {error}");
        assert!(error.to_string().contains(part), "{name}: {error}");
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 0, "{name}");
    }
    let error = to_gguf(&open(golden("llama")).unwrap(), Path::new("unused.gguf"), &options(DType::Q2_K));
    assert!(error.unwrap_err().to_string().contains("Q4_K"));
    let error = to_hugging_face(&open(golden("llama")).unwrap(), Path::new("unused")).unwrap_err();
    assert!(error.to_string().contains("already"), "{error}");
}

/// A window is written for readers that know it, and others are warned about.
#[test]
fn notes_say_what_other_readers_do_differently() {
    let notes = |name: &str| exported(&golden(name), DType::F32).2.notes.join("\n");
    assert!(notes("mistral").contains("llama.attention.sliding_window"));
    assert!(notes("qwen2_moe-mixed").contains("norm_topk_prob"));
    assert!(notes("llama-yarn-attention-factor").contains("yarn_beta_fast"));
    assert_eq!(notes("llama"), "");
}

#[test]
fn missing_tensors_are_refused_together() {
    let folder = tempfile::tempdir().unwrap();
    for file in ["config.json", "tokenizer.json"] {
        fs::copy(golden("llama").join(file), folder.path().join(file)).unwrap();
    }
    let source = open(golden("llama")).unwrap();
    let is_kept = |name: &str| !name.contains("layers.1.mlp.up") && !name.contains("layers.2.input_layernorm");
    let kept: Vec<String> = source.tensors().map(|info| info.name.clone()).filter(|name| is_kept(name)).collect();
    let tensors = kept.iter().map(|name| source.tensor(name).unwrap().into()).collect();
    let weights = folder.path().join("model.safetensors");
    ironloom_weights::safetensors::write(weights, &ironloom_weights::Metadata::new(), tensors, &mut unwatched).unwrap();
    let out = folder.path().join("m.gguf");
    let error = to_gguf(&open(folder.path()).unwrap(), &out, &options(DType::F32)).unwrap_err().to_string();
    assert!(error.contains("layers.1.mlp.up_proj") && error.contains("layers.2.input_layernorm"), "{error}");
    assert!(!out.exists());
}

#[test]
fn progress_ends_at_all_bytes() {
    let steps = std::cell::RefCell::new(Vec::new());
    let show = |done, total| {
        steps.borrow_mut().push((done, total));
        ControlFlow::Continue(())
    };
    let folder = tempfile::tempdir().unwrap();
    let options = ExportOptions { progress: Some(&show), ..options(DType::Q8_0) };
    let out = folder.path().join("m.gguf");
    let report = to_gguf(&open(golden("llama")).unwrap(), &out, &options).unwrap();
    let steps = steps.into_inner();
    assert_eq!(steps.len(), report.tensors);
    assert!(steps.windows(2).all(|pair| pair[0].0 < pair[1].0));
    assert!(steps.last().is_some_and(|(done, total)| done == total && *total < report.bytes_out));
}

#[test]
fn a_cancelled_export_leaves_the_old_file_and_nothing_else() {
    let folder = tempfile::tempdir().unwrap();
    let out = folder.path().join("m.gguf");
    fs::write(&out, "old").unwrap();
    let stop = |done, total| if 2 * done < total { ControlFlow::Continue(()) } else { ControlFlow::Break(()) };
    let options = ExportOptions { progress: Some(&stop), ..options(DType::Q8_0) };
    let error = to_gguf(&open(golden("llama")).unwrap(), &out, &options).unwrap_err();
    assert!(matches!(error, Error::Weights(ironloom_weights::Error::Cancelled { .. })), "{error}");
    assert_eq!(fs::read(&out).unwrap(), b"old");
    assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1);
}

const TEXTS: &[&str] = &[
    "",
    "The lighthouse keeper lived on the rock.",
    "  two  spaces, 12345 digits; it's naïve café 東京 🙂\n\n\ttab",
    "<|im_start|>user\nHi<|im_end|>\n",
    "<start_of_turn>user\nHi<end_of_turn><table>\n\n\n   end",
];

/// An exported fine-tune that lost its template or an end token never stops.
#[test]
fn tokenizer_end_tokens_and_template_are_kept() {
    let (_folder, out, _) = exported(&golden("llama"), DType::Q8_0);
    let (folder, file) = (open(golden("llama")).unwrap(), open(&out).unwrap());
    let (before, after) = (Tokenizer::from_checkpoint(&folder).unwrap(), Tokenizer::from_checkpoint(&file).unwrap());
    assert_eq!(before.end_ids(), [268, 270]);
    assert_eq!(
        (after.end_ids(), after.bos_id(), after.adds_bos()),
        (before.end_ids(), before.bos_id(), before.adds_bos())
    );
    assert_eq!(after.vocab_size(), before.vocab_size());
    same_ids(&before, &after, "llama");
    let templates = [&folder, &file].map(|checkpoint| ChatTemplate::from_checkpoint(checkpoint).unwrap());
    assert_eq!(templates[0].source(), templates[1].source());
    let messages = [Message::new("user", "Hi"), Message::new("assistant", "Yes?"), Message::new("user", "So it's 12?")];
    let chats = [(&before, &templates[0]), (&after, &templates[1])]
        .map(|(tokenizer, template)| encode_chat(tokenizer, template, &messages, AddGenerationPrompt::Yes).unwrap());
    assert_eq!(chats[0], chats[1]);
    assert!(chats[0].contains(&269) && chats[0].contains(&270));
}

fn same_ids(before: &Tokenizer, after: &Tokenizer, name: &str) {
    for text in TEXTS {
        for specials in [Specials::Parse, Specials::Literal] {
            let ids = |tokenizer: &Tokenizer| tokenizer.encode(text, specials, AddBos::Yes).unwrap();
            assert_eq!(ids(before), ids(after), "{name}: {text:?}");
        }
    }
}

/// A tiny model with one of the golden tokenizers beside it.
fn folder_with_tokenizer(name: &str, settings: serde_json::Value, vocab_size: usize) -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    let tokenizers = golden("../text/tokenizers");
    fs::copy(tokenizers.join(format!("{name}.json")), folder.path().join("tokenizer.json")).unwrap();
    fs::write(folder.path().join("tokenizer_config.json"), settings.to_string()).unwrap();
    let config = serde_json::json!({"model_type": "llama", "hidden_size": 32, "num_attention_heads": 2,
        "num_hidden_layers": 1, "intermediate_size": 32, "vocab_size": vocab_size, "max_position_embeddings": 64,
        "tie_word_embeddings": true});
    fs::write(folder.path().join("config.json"), config.to_string()).unwrap();
    let mut tensors = vec![("embed_tokens".to_owned(), vec![vocab_size, 32]), ("norm".to_owned(), vec![32])];
    for part in ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj"] {
        tensors.push((format!("layers.0.{part}"), vec![32, 32]));
    }
    for part in ["mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"] {
        tensors.push((format!("layers.0.{part}"), vec![32, 32]));
    }
    for part in ["input_layernorm", "post_attention_layernorm"] {
        tensors.push((format!("layers.0.{part}"), vec![32]));
    }
    let tensors = tensors.into_iter().map(|(name, shape)| {
        let info = ironloom_weights::TensorInfo {
            name: format!("model.{name}.weight"),
            dtype: DType::F32,
            shape: ironloom_core::Shape::new(&shape).unwrap(),
        };
        let bytes = vec![0; info.bytes().unwrap()];
        ironloom_weights::NewTensor::new(info, bytes)
    });
    let weights = folder.path().join("model.safetensors");
    let metadata = ironloom_weights::Metadata::new();
    ironloom_weights::safetensors::write(weights, &metadata, tensors.collect(), &mut unwatched).unwrap();
    folder
}

/// Every kind of tokenizer that GGUF can say: ids of the golden texts stay, with tokens for a padded vocabulary.
#[test]
fn tokenizers_of_every_kind_come_through() {
    let golden_ids = json(&golden("../text/ids.json"));
    let texts: Vec<&str> = golden_ids["texts"].as_array().unwrap().iter().map(|text| text.as_str().unwrap()).collect();
    for (name, eos) in [
        ("gpt2", "<|endoftext|>"),
        ("smollm", "<|im_end|>"),
        ("llama3", "<|end_of_text|>"),
        ("qwen2", "<|im_end|>"),
        ("llama2", "</s>"),
        ("gemma", "<eos>"),
    ] {
        let folder = folder_with_tokenizer(name, serde_json::json!({"eos_token": eos}), 1024);
        let (_out_folder, out, report) = exported(folder.path(), DType::Q8_0);
        assert_eq!(report.notes, [""; 0], "{name}");
        let before = Tokenizer::from_checkpoint(&open(folder.path()).unwrap()).unwrap();
        let after = Tokenizer::from_checkpoint(&open(&out).unwrap()).unwrap();
        assert_eq!((before.end_ids(), before.bos_id()), (after.end_ids(), after.bos_id()), "{name}");
        assert_eq!((after.vocab_size(), before.vocab_size() < 1024), (1024, true), "{name}");
        same_ids(&before, &after, name);
        for text in &texts {
            for specials in [Specials::Parse, Specials::Literal] {
                let ids = |tokenizer: &Tokenizer| tokenizer.encode(text, specials, AddBos::Yes).unwrap();
                assert_eq!(ids(&before), ids(&after), "{name}: {text:?}");
            }
        }
    }
}

/// And back: a folder made of the GGUF file has the same ids, also for the library that defines the format.
#[test]
fn tokenizers_of_every_kind_come_back_as_tokenizer_json() {
    let golden_ids = json(&golden("../text/ids.json"));
    let texts: Vec<&str> = golden_ids["texts"].as_array().unwrap().iter().map(|text| text.as_str().unwrap()).collect();
    for name in ["gpt2", "smollm", "llama3", "qwen2", "llama2", "gemma"] {
        let settings = serde_json::json!({"eos_token": "<eos>", "chat_template": "{{ messages[0].content }}"});
        let folder = folder_with_tokenizer(name, settings, 1024);
        let (_out_folder, out, _) = exported(folder.path(), DType::F32);
        let back = tempfile::tempdir().unwrap();
        let report = to_hugging_face(&open(&out).unwrap(), back.path()).unwrap();
        assert_eq!(report.notes, [""; 0], "{name}");
        let tokenizers =
            [folder.path(), back.path()].map(|path| Tokenizer::from_checkpoint(&open(path).unwrap()).unwrap());
        let [before, after] = &tokenizers;
        assert_eq!((before.end_ids(), before.bos_id()), (after.end_ids(), after.bos_id()), "{name}");
        same_ids(before, after, name);
        let library = tokenizers::Tokenizer::from_file(back.path().join("tokenizer.json")).unwrap();
        for (place, text) in texts.iter().enumerate() {
            for specials in [Specials::Parse, Specials::Literal] {
                let ids = |tokenizer: &Tokenizer| tokenizer.encode(text, specials, AddBos::Yes).unwrap();
                assert_eq!(ids(before), ids(after), "{name}: {text:?}");
            }
            let wanted = &golden_ids["tokenizers"][name]["parsed"][place];
            let wanted: Vec<u32> = wanted.as_array().unwrap().iter().map(|id| id.as_u64().unwrap() as u32).collect();
            assert_eq!(library.encode(*text, false).unwrap().get_ids(), wanted, "{name}: {text:?}");
        }
        let template = ChatTemplate::from_checkpoint(&open(back.path()).unwrap()).unwrap();
        assert_eq!(template.source(), "{{ messages[0].content }}");
    }
}

#[test]
fn tokenizers_that_gguf_cannot_say_are_refused_or_noted() {
    let result = |name: &str, settings: serde_json::Value, vocab_size: usize| {
        let folder = folder_with_tokenizer(name, settings, vocab_size);
        to_gguf(&open(folder.path()).unwrap(), &folder.path().join("m.gguf"), &options(DType::F32))
    };
    for name in ["tekken", "unigram"] {
        let error = result(name, serde_json::json!({}), 1024).unwrap_err().to_string();
        assert!(error.contains("tokenizer") && error.contains("GGUF"), "{name}: {error}");
    }
    let error = result("llama3", serde_json::json!({}), 600).unwrap_err().to_string();
    assert!(error.contains("906") && error.contains("600"), "{error}");
    let report = result("mistral_v0_3", serde_json::json!({"eos_token": "</s>"}), 1024).unwrap();
    assert!(report.notes.join("").contains("special tokens"), "{:?}", report.notes);
}

/// Three end tokens have keys; marks known by their text need none.
#[test]
fn end_tokens_without_a_usual_name_are_kept() {
    let folder = folder_with_tokenizer("qwen2", serde_json::json!({"eos_token": "<|im_end|>"}), 1024);
    let generation = serde_json::json!({"eos_token_id": [902, 903, 904, 17]}).to_string();
    fs::write(folder.path().join("generation_config.json"), generation).unwrap();
    let (_out_folder, out, report) = exported(folder.path(), DType::F32);
    let after = Tokenizer::from_checkpoint(&open(&out).unwrap()).unwrap();
    // 900 is <|endoftext|>, found by its text. Of the other three, two have keys.
    assert_eq!(after.end_ids(), [17, 900, 902, 903]);
    assert!(report.notes.join("").contains("</tool_call>"), "{:?}", report.notes);
}

/// transformers made the golden folder, so what is written is what it reads: rows of q and k for their rotation over neighbours, the
/// routers' biases, names and entries.
#[test]
fn ernie_is_written_as_transformers_writes_it() {
    let device = Device::cpu(1);
    let load = |checkpoint: &Checkpoint| Model::load(checkpoint, &device, &LoadOptions::default()).unwrap();
    let stored = open(golden("ernie4_5_moe")).unwrap();
    let mut model = load(&stored);
    model.make_trainable().unwrap();
    let folder = tempfile::tempdir().unwrap();
    write_trained(&model, folder.path(), &TextFiles::from_checkpoint(&stored).unwrap()).unwrap();
    let written = open(folder.path()).unwrap();
    let names = |checkpoint: &Checkpoint| -> Vec<String> {
        let mut names: Vec<_> = checkpoint.tensors().map(|info| info.name.clone()).collect();
        names.sort();
        names
    };
    assert_eq!(names(&written), names(&stored));
    for name in names(&stored) {
        assert_eq!(values(&written, &name), values(&stored, &name), "{name}");
        assert_eq!(written.info(&name).unwrap().shape, stored.info(&name).unwrap().shape, "{name}");
    }
    assert_eq!(Config::from_checkpoint(&written).unwrap(), Config::from_checkpoint(&stored).unwrap());
    let (wanted, found) = (json(&golden("ernie4_5_moe").join("config.json")), json(&folder.path().join("config.json")));
    for (key, value) in wanted.as_object().unwrap() {
        if !["torch_dtype", "transformers_version", "use_cache"].contains(&key.as_str()) {
            assert_eq!(&found[key], value, "{key}");
        }
    }
}

#[test]
fn a_bias_on_the_choice_of_experts_is_refused() {
    let stored = open(golden("ernie4_5_moe")).unwrap();
    let folder = tempfile::tempdir().unwrap();
    fs::copy(golden("ernie4_5_moe").join("config.json"), folder.path().join("config.json")).unwrap();
    let bias = "model.layers.2.mlp.moe_statics.e_score_correction_bias";
    let tensors = stored.tensors().map(|info| {
        let mut info = info.clone();
        let mut bytes = stored.tensor(&info.name).unwrap().bytes.to_vec();
        if info.name == bias {
            info.dtype = DType::F32;
            bytes = [0.0_f32, 0.0, 0.25, 0.0, 0.0, 0.0].iter().flat_map(|value| value.to_le_bytes()).collect();
        }
        ironloom_weights::NewTensor::new(info, bytes)
    });
    let weights = folder.path().join("model.safetensors");
    let nothing = ironloom_weights::Metadata::new();
    ironloom_weights::safetensors::write(weights, &nothing, tensors.collect(), &mut unwatched).unwrap();
    let loaded = Model::load(&open(folder.path()).unwrap(), &Device::cpu(1), &LoadOptions::default());
    let error = loaded.unwrap_err().to_string();
    assert!(error.contains(bias) && error.contains("0.25") && error.contains("transformers"), "{error}");
}
