//! Public faults of this field that concern models and their files, one case each, named by project and number. The tiny
//! golden models stand in for the real ones; variants of them carry the fault's condition.

use std::path::{Path, PathBuf};

use ironloom_core::DType;
use ironloom_lm::{
    Config, Error, LoadOptions, LogitRows, Model,
    export::{ExportOptions, to_gguf, to_hugging_face},
    text::{ChatTemplate, Tokenizer},
};
use ironloom_nn::{RopeScaling, Span};
use ironloom_tensor::{Context, Device, Indices, Tensor, ops};
use ironloom_weights::{Checkpoint, Metadata, NewTensor, open, safetensors, unwatched};
use serde_json::{Value, json};

/// The golden models' bound; one wrong option moves a logit by 2e-3 at least.
const TOLERANCE: f32 = 1e-4;

fn golden(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden/models").join(name)
}

fn json_of(path: &Path) -> Value {
    serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap()
}

/// A copy of a golden folder with another configuration and only the tensors that `keep` keeps.
fn variant(name: &str, change: impl Fn(&mut Value), keep: impl Fn(&str) -> bool) -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    let mut config = json_of(&golden(name).join("config.json"));
    change(&mut config);
    std::fs::write(folder.path().join("config.json"), config.to_string()).unwrap();
    let source = open(golden(name)).unwrap();
    let names: Vec<String> = source.tensors().map(|info| info.name.clone()).filter(|name| keep(name)).collect();
    let tensors: Vec<NewTensor> = names.iter().map(|name| source.tensor(name).unwrap().into()).collect();
    let out = folder.path().join("model.safetensors");
    safetensors::write(out, &Metadata::new(), tensors, &mut unwatched).unwrap();
    folder
}

fn load(path: &Path) -> Result<Model, Error> {
    Model::load(&open(path).unwrap(), &Device::cpu(1), &LoadOptions::default())
}

fn numbers(checkpoint: &Checkpoint, name: &str) -> Vec<f32> {
    let data = checkpoint.tensor(name).unwrap();
    let mut values = vec![0.0; data.shape.elements().unwrap()];
    ironloom_quant::unpack(data.dtype, &data.bytes, &mut values).unwrap();
    values
}

fn ids(checkpoint: &Checkpoint, name: &str) -> Vec<u32> {
    let data = checkpoint.tensor(name).unwrap();
    data.bytes.chunks_exact(4).map(|bytes| u32::from_le_bytes(bytes.try_into().unwrap())).collect()
}

fn expected(name: &str) -> Checkpoint {
    open(golden(name).join("expected.safetensors")).unwrap()
}

fn prompt(name: &str) -> Vec<u32> {
    ids(&expected(name), "long.input_ids")
}

/// Logits of every row, each `[vocabulary]`.
fn logits(path: &Path, ids: &[u32]) -> Vec<Vec<f32>> {
    let (model, device) = (load(path).unwrap(), Device::cpu(1));
    let mut cache = model.new_cache();
    let mut spans = [Span { cache: &mut cache, rows: ids.len() }];
    let logits = model.forward(&Context::inference(&device), ids, &mut spans, LogitRows::All).unwrap();
    logits.as_f32().unwrap().chunks(model.config().vocab_size).map(<[f32]>::to_vec).collect()
}

fn difference(a: &[f32], b: &[f32]) -> f32 {
    assert_eq!(a.len(), b.len());
    a.iter().zip(b).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max)
}

/// How far the rows of two passes are apart at most.
fn largest(a: &[Vec<f32>], b: &[Vec<f32>]) -> f32 {
    a.iter().zip(b).map(|(a, b)| difference(a, b)).fold(0.0, f32::max)
}

/// Rows of q and k were permuted by one number of heads although keys have fewer: gibberish from GGUF, and silently other weights
/// on the way back.
#[test]
fn llama_cpp_2376_transformers_31766_rows_of_grouped_queries_come_back() {
    let folder = tempfile::tempdir().unwrap();
    for name in ["llama", "internlm2", "mixtral"] {
        let (file, back) = (folder.path().join(format!("{name}.gguf")), folder.path().join(name));
        let original = open(golden(name)).unwrap();
        let config = Config::from_checkpoint(&original).unwrap();
        assert!(config.heads != config.kv_heads && config.heads / config.kv_heads > 1);
        to_gguf(&original, &file, &ExportOptions::new(DType::F32)).unwrap();
        to_hugging_face(&open(&file).unwrap(), &back).unwrap();
        let back = open(&back).unwrap();
        for info in original.tensors() {
            let (a, b) = (numbers(&original, &info.name), numbers(&back, &info.name));
            assert!(a.iter().zip(&b).all(|(a, b)| a.to_bits() == b.to_bits()), "{name} {}", info.name);
        }
    }
}

/// The width of a head was taken as hidden / heads, 160 for 128 and 2560 for 4096.
#[test]
fn mistral_rs_1118_candle_vllm_147_head_width_is_read() {
    for (name, head_width) in [("llama-yarn", 32), ("qwen3", 16), ("gemma3", 16)] {
        for path in [golden(name), golden(name).join("model.gguf")] {
            let config = Config::from_checkpoint(&open(&path).unwrap()).unwrap();
            assert_eq!(config.head_width, head_width, "{}", path.display());
            assert_ne!(config.width / config.heads, head_width);
        }
    }
    let mistral = json!({"model_type": "mistral", "hidden_size": 5120, "num_attention_heads": 32, "head_dim": 128,
        "num_key_value_heads": 8, "num_hidden_layers": 2, "intermediate_size": 14336, "vocab_size": 131072,
        "max_position_embeddings": 1024000});
    let config = Config::from_json(&mistral).unwrap();
    assert_eq!((config.head_width, config.heads * config.head_width), (128, 4096));
}

/// An exported fine-tune never stopped: its template and its second end token were lost.
#[test]
fn unsloth_976_ollama_8363_exports_keep_end_tokens_and_template() {
    let folder = tempfile::tempdir().unwrap();
    let out = folder.path().join("model.gguf");
    to_gguf(&open(golden("llama")).unwrap(), &out, &ExportOptions::new(DType::Q8_0)).unwrap();
    let (before, after) = (open(golden("llama")).unwrap(), open(&out).unwrap());
    let ends = |checkpoint| Tokenizer::from_checkpoint(checkpoint).unwrap().end_ids().to_vec();
    assert_eq!((ends(&before), ends(&after)), (vec![268, 270], vec![268, 270]));
    let source = |checkpoint| ChatTemplate::from_checkpoint(checkpoint).unwrap().source().to_owned();
    assert_eq!(source(&before), source(&after));
}

/// Llama 3's scaling was parsed and not applied, or not found under the older key: fine on short texts, degenerate on long ones.
#[test]
fn llama_cpp_8650_mlxcel_1355_llama3_scaling_is_applied_under_either_key() {
    let ids = prompt("llama-llama3");
    let plain = logits(&golden("llama-llama3"), &ids);
    let older = variant(
        "llama-llama3",
        |config| {
            let kind = config["rope_scaling"].as_object_mut().unwrap().remove("rope_type").unwrap();
            config["rope_scaling"]["type"] = kind;
        },
        |_| true,
    );
    assert_eq!(largest(&logits(older.path(), &ids), &plain), 0.0);
    let without = variant("llama-llama3", |config| config["rope_scaling"] = Value::Null, |_| true);
    assert!(largest(&logits(without.path(), &ids), &plain) > 0.1, "scaling changes the answer");
}

/// Sines and cosines of real configurations, factors 8 and 32 among them, past position 8192.
#[test]
fn llama_cpp_8650_phases_hold_at_long_positions() {
    let reference = open(golden("rope").join("expected.safetensors")).unwrap();
    let cases = json_of(&golden("rope").join("cases.json"));
    let (device, mut factors) = (Device::cpu(1), Vec::new());
    for (name, case) in cases.as_object().unwrap() {
        let mut whole = json!({"model_type": "llama", "hidden_size": 64, "num_attention_heads": 1, "num_hidden_layers": 1,
            "intermediate_size": 16, "vocab_size": 16, "max_position_embeddings": 4096});
        whole.as_object_mut().unwrap().extend(case.as_object().unwrap().clone());
        let rope = Config::from_json(&whole).unwrap().ropes[0].clone();
        if let RopeScaling::Llama3 { factor, .. } = rope.scaling {
            factors.push(factor);
        }
        let (frequencies, factor) = rope.inverse_frequencies().unwrap();
        let half = frequencies.len();
        let positions = ids(&reference, &format!("{name}.positions"));
        assert!(positions.iter().any(|position| *position > 8192), "{name}");
        let table = Tensor::from_f32(frequencies, [half]).unwrap();
        let phases =
            ops::rope_phases(&Context::inference(&device), &table, factor, &Indices::new(&device, &positions).unwrap())
                .unwrap();
        let phases = phases.as_f32().unwrap();
        let (cos, sin) = (numbers(&reference, &format!("{name}.cos")), numbers(&reference, &format!("{name}.sin")));
        assert_eq!(phases.len(), cos.len() + sin.len());
        for (row, position) in positions.iter().enumerate() {
            let bound = 1e-6 + 2e-7 * *position as f32;
            let ours = &phases[row * 2 * half..][..2 * half];
            let theirs = [&cos[row * half..][..half], &sin[row * half..][..half]].concat();
            assert!(difference(ours, &theirs) <= bound, "{name} at {position}");
        }
    }
    assert!(factors.contains(&8.0) && factors.contains(&32.0), "{factors:?}");
}

/// YaRN's factor on attention was lost, doubled, or taken although another was given.
#[test]
fn exllamav3_259_vllm_46280_yarn_attention_factor() {
    let factor = |extra: Value| {
        let mut config = json_of(&golden("llama-yarn").join("config.json"));
        config["rope_scaling"].as_object_mut().unwrap().extend(extra.as_object().unwrap().clone());
        match Config::from_json(&config).unwrap().ropes[0].scaling {
            RopeScaling::Yarn { attention_factor, .. } => attention_factor,
            ref other => panic!("{other:?}"),
        }
    };
    let usual = 0.1 * 4.0f64.ln() + 1.0;
    assert_eq!(factor(json!({})), usual);
    assert_eq!(factor(json!({"attention_factor": 1.0})), 1.0);
    assert_eq!(factor(json!({"attention_factor": 1.25, "mscale": 1.0, "mscale_all_dim": 0.5})), 1.25);
    assert_eq!(factor(json!({"mscale": 1.0, "mscale_all_dim": 1.0})), 1.0);
    assert_eq!(factor(json!({"mscale": 1.0, "mscale_all_dim": 0.5})), usual / (0.05 * 4.0f64.ln() + 1.0));
    // On the way to GGUF, whose key multiplies the usual factor, and back.
    let folder = tempfile::tempdir().unwrap();
    let out = folder.path().join("model.gguf");
    to_gguf(&open(golden("llama-yarn-attention-factor")).unwrap(), &out, &ExportOptions::new(DType::F32)).unwrap();
    let rope = Config::from_checkpoint(&open(&out).unwrap()).unwrap().ropes[0].clone();
    assert!((rope.inverse_frequencies().unwrap().1 - 1.25).abs() < 1e-6);
}

/// No window in the mask: garbage past it. The window is 8, so position 7 is the last that sees everything.
#[test]
fn llama_cpp_7709_vllm_2064_windows_hold_at_their_edges() {
    let ids = prompt("mistral");
    let ours = logits(&golden("mistral"), &ids);
    let reference = numbers(&expected("mistral"), "long.logits");
    let reference: Vec<&[f32]> = reference.chunks(ours[0].len()).collect();
    for position in [6, 7, 8, 23] {
        let apart = difference(&ours[position], reference[position]);
        assert!(apart <= TOLERANCE, "position {position}: {apart}");
    }
    let without = variant("mistral", |config| config["sliding_window"] = Value::Null, |_| true);
    let without = logits(without.path(), &ids);
    assert_eq!(difference(&without[7], &ours[7]), 0.0);
    assert!(difference(&without[8], &ours[8]) > 0.01 && difference(&without[23], &ours[23]) > 0.01);
    // The exported file keeps the window, although the architecture it's written as has none of its own.
    let folder = tempfile::tempdir().unwrap();
    let out = folder.path().join("model.gguf");
    to_gguf(&open(golden("mistral")).unwrap(), &out, &ExportOptions::new(DType::F32)).unwrap();
    assert_eq!(largest(&logits(&out, &ids), &ours), 0.0);
}

/// The prompt was windowed and the steps after it were not.
#[test]
fn mistral_rs_2094_steps_see_the_window_that_the_prompt_sees() {
    for name in ["mistral", "qwen2-window", "gemma3"] {
        let (model, device, ids) = (load(&golden(name)).unwrap(), Device::cpu(1), prompt(name));
        assert!(ids.len() > 24, "past three windows");
        let whole = logits(&golden(name), &ids);
        let mut cache = model.new_cache();
        for (position, id) in ids.iter().enumerate() {
            let mut spans = [Span { cache: &mut cache, rows: 1 }];
            let step = model.forward(&Context::inference(&device), &[*id], &mut spans, LogitRows::Last).unwrap();
            assert_eq!(step.as_f32().unwrap(), &whole[position][..], "{name} at {position}");
        }
    }
}

/// A head that was in no file stayed random, and the server answered garbage.
#[test]
fn sglang_1508_vllm_53020_a_missing_head_is_tied_or_an_error() {
    let untied = variant("llama", |_| {}, |name| name != "lm_head.weight");
    let error = load(untied.path()).unwrap_err().to_string();
    assert!(error.contains("lm_head.weight"), "{error}");
    // Said to be tied, the embedding is the head and none is asked for.
    let tied = variant("llama", |config| config["tie_word_embeddings"] = json!(true), |name| name != "lm_head.weight");
    assert!(load(tied.path()).unwrap().config().tied_embeddings);
    let out = tied.path().join("tied.gguf");
    to_gguf(&open(tied.path()).unwrap(), &out, &ExportOptions::new(DType::F32)).unwrap();
    assert!(!open(&out).unwrap().contains("output.weight"));
    let ids = prompt("llama");
    assert_eq!(largest(&logits(&out, &ids), &logits(tied.path(), &ids)), 0.0);
}

/// An untied model ran with its embedding as head and repeated itself.
#[test]
fn pegainfer_544_the_tie_flag_is_read_where_it_stands() {
    let ids = prompt("llama");
    let ours = logits(&golden("llama"), &ids);
    let tied = variant("llama", |config| config["tie_word_embeddings"] = json!(true), |_| true);
    assert!(largest(&logits(tied.path(), &ids), &ours) > 0.1, "the head isn't the embedding");
    assert_eq!(load(tied.path()).unwrap().unused_tensors(), ["lm_head.weight"]);
    // Multimodal configurations nest the language model's entries, and the flag is in either place.
    let text = json_of(&golden("gemma3").join("config.json"));
    let nested = |root: Value, inside: Value| {
        let mut config = json!({"model_type": "gemma3", "text_config": text});
        config["tie_word_embeddings"] = root;
        config["text_config"]["tie_word_embeddings"] = inside;
        Config::from_json(&config).unwrap().tied_embeddings
    };
    assert!(nested(Value::Null, Value::Null), "the family's own default");
    assert!(!nested(json!(false), Value::Null) && !nested(Value::Null, json!(false)));
    assert!(nested(json!(false), json!(true)), "the language model's own entry decides");
}

/// Qwen2's biases on q, k and v were dropped without a word.
#[test]
fn candle_vllm_167_biases_are_loaded_or_missed_by_name() {
    let missing = variant("qwen2", |_| {}, |name| name != "model.layers.1.self_attn.k_proj.bias");
    let error = load(missing.path()).unwrap_err().to_string();
    assert!(error.contains("model.layers.1.self_attn.k_proj.bias"), "{error}");
    let none = variant("qwen2", |_| {}, |name| !name.ends_with(".bias"));
    let error = load(none.path()).unwrap_err().to_string();
    assert!(error.contains("lacks 9") && error.contains("model.layers.0.self_attn.q_proj.bias"), "{error}");
    let gguf = golden("qwen2").join("model.gguf");
    let bias = numbers(&open(gguf).unwrap(), "blk.0.attn_q.bias");
    assert!(bias.iter().any(|value| *value != 0.0), "the golden model has biases that count");
}

/// Tensors that no part of the model asked for were left without a word.
#[test]
fn aneforge_253_unused_tensors_are_reported() {
    // A configuration without biases does not ask for Qwen2's.
    let plain = variant("qwen2", |config| config["model_type"] = json!("llama"), |_| true);
    let model = load(plain.path()).unwrap();
    assert_eq!(model.unused_tensors().len(), 9);
    assert!(model.unused_tensors().iter().all(|name| name.ends_with(".bias")));
}

/// Chosen experts' weights were not divided by their sum where they should be, or were where they should not.
#[test]
fn torchtitan_1448_norm_topk_prob_is_obeyed_both_ways() {
    for name in ["qwen2_moe", "qwen2_moe-mixed", "qwen3_moe", "qwen3_moe-mixed"] {
        let normalize = json_of(&golden(name).join("config.json"))["norm_topk_prob"].as_bool().unwrap();
        assert_eq!(load(&golden(name)).unwrap().config().experts.as_ref().unwrap().normalize, normalize);
        let other = variant(name, |config| config["norm_topk_prob"] = json!(!normalize), |_| true);
        let ids = prompt(name);
        let apart = largest(&logits(other.path(), &ids), &logits(&golden(name), &ids));
        assert!(apart > 0.1, "{name}: {apart}");
    }
}

/// Without normalizing, raw logits came back, or the flag never reached the kernel.
#[test]
fn sglang_35160_flashinfer_2889_weights_are_softmax_over_all_experts() {
    let (device, scores) = (Device::cpu(1), [0.5f32, -1.0, 2.0, 1.5, 0.0]);
    let router = Tensor::from_f32(scores.to_vec(), [1, 5]).unwrap();
    let all: f64 = scores.iter().map(|score| f64::from(*score).exp()).sum();
    let probability = |expert: usize| f64::from(scores[expert]).exp() / all;
    for normalize in [false, true] {
        let routing = ops::route_experts(&Context::inference(&device), &router, 2, normalize).unwrap();
        let (chosen, weights) = routing.read().unwrap();
        let total = if normalize { probability(2) + probability(3) } else { 1.0 };
        for (expert, weight) in chosen.iter().zip(&weights) {
            let wanted = probability(*expert as usize) / total;
            assert!((f64::from(*weight) - wanted).abs() < 1e-6, "expert {expert}: {weight}, and {wanted} is right");
        }
        assert_eq!(chosen, [2, 3]);
    }
}
