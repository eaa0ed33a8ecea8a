//! Every family's tiny model against the logits and greedy ids that its reference implementation computed
//! (`tests/golden/README.md` says how), from Hugging Face folders and from their GGUF twins.

use std::path::{Path, PathBuf};

use ironloom_core::DType;
use ironloom_lm::{Config, LoadOptions, LogitRows, Model};
use ironloom_nn::Span;
use ironloom_tensor::{Context, Device};
use ironloom_weights::Checkpoint;

/// The reference's own float64 pass differs from its float32 one by at most 1.5e-5, and the smallest wrong option seen moves
/// a logit by 2e-3.
const TOLERANCE: f32 = 1e-4;

fn golden() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden/models")
}

fn floats(checkpoint: &Checkpoint, name: &str) -> Vec<f32> {
    let data = checkpoint.tensor(name).unwrap();
    assert_eq!(data.dtype, DType::F32, "{name}");
    data.bytes.chunks_exact(4).map(|b| f32::from_le_bytes(b.try_into().unwrap())).collect()
}

fn ids(checkpoint: &Checkpoint, name: &str) -> Vec<u32> {
    let data = checkpoint.tensor(name).unwrap();
    assert_eq!(data.dtype, DType::I32, "{name}");
    data.bytes.chunks_exact(4).map(|b| u32::from_le_bytes(b.try_into().unwrap())).collect()
}

fn argmax(logits: &[f32]) -> u32 {
    (0..logits.len()).rev().max_by(|&a, &b| logits[a].total_cmp(&logits[b])).unwrap() as u32
}

/// Holds the model at `path` to the answers in `expected`; the largest difference of a logit.
fn check(path: &Path, expected: &Path, tolerance: f32) -> f32 {
    let device = Device::cpu(2);
    let cx = Context::inference(&device);
    let checkpoint = ironloom_weights::open(path).unwrap();
    let model = Model::load(&checkpoint, &device, &LoadOptions::default()).unwrap();
    assert!(model.unused_tensors().is_empty(), "{}: unused {:?}", path.display(), model.unused_tensors());
    let expected = ironloom_weights::open(expected).unwrap();
    let mut worst = 0.0f32;
    for sequence in ["short", "long"] {
        let prompt = ids(&expected, &format!("{sequence}.input_ids"));
        let logits = floats(&expected, &format!("{sequence}.logits"));
        let mut cache = model.new_cache();
        let mut spans = [Span { cache: &mut cache, rows: prompt.len() }];
        let ours = model.forward(&cx, &prompt, &mut spans, LogitRows::All).unwrap();
        let ours = ours.as_f32().unwrap();
        assert_eq!(ours.len(), logits.len());
        let width = model.config().vocab_size;
        for (i, (a, b)) in ours.iter().zip(&logits).enumerate() {
            let difference = (a - b).abs();
            worst = worst.max(difference);
            let (position, id) = (i / width, i % width);
            assert!(difference <= tolerance, "{} {sequence} position {position} id {id}: {a}, {b}", path.display());
        }
        // Decoding one id at a time from the cache gives the reference's ids, and the bits of the prompt's pass.
        let mut id = argmax(&ours[ours.len() - width..]);
        let greedy = ids(&expected, &format!("{sequence}.greedy_ids"));
        let mut produced = Vec::new();
        while produced.len() < greedy.len() {
            produced.push(id);
            let mut spans = [Span { cache: &mut cache, rows: 1 }];
            let logits = model.forward(&cx, &[id], &mut spans, LogitRows::Last).unwrap();
            id = argmax(logits.as_f32().unwrap());
        }
        assert_eq!(produced, greedy, "{} {sequence}", path.display());
        let mut cache = model.new_cache();
        for (position, id) in prompt.iter().enumerate() {
            let mut spans = [Span { cache: &mut cache, rows: 1 }];
            let alone = model.forward(&cx, &[*id], &mut spans, LogitRows::Last).unwrap();
            assert_eq!(alone.as_f32().unwrap(), &ours[position * width..][..width], "{} {position}", path.display());
        }
    }
    worst
}

macro_rules! families {
    ($($test:ident: $folder:literal;)*) => { $(
        #[test]
        fn $test() {
            let folder = golden().join($folder);
            let worst = check(&folder, &folder.join("expected.safetensors"), TOLERANCE);
            println!("{}: largest difference {worst:e}", $folder);
        }
    )* };
}

families! {
    llama: "llama";
    llama_with_linear_rope_scaling: "llama-linear";
    llama_with_llama3_rope_scaling: "llama-llama3";
    llama_with_yarn: "llama-yarn";
    llama_with_yarn_attention_factor: "llama-yarn-attention-factor";
    llama_with_yarn_different_mscales: "llama-yarn-mscale-differs";
    llama_with_yarn_equal_mscales: "llama-yarn-mscale-equal";
    llama_with_yarn_not_truncated: "llama-yarn-not-truncated";
    mistral_past_its_window: "mistral";
    qwen2: "qwen2";
    qwen2_with_windows: "qwen2-window";
    qwen3: "qwen3";
    gemma3_past_its_window: "gemma3";
    gemma3_with_linear_rope_scaling: "gemma3-linear";
    gemma3_with_another_pattern: "gemma3-pattern";
    internlm2: "internlm2";
    mixtral: "mixtral";
    qwen2_moe: "qwen2_moe";
    qwen2_moe_with_dense_layers: "qwen2_moe-mixed";
    qwen3_moe: "qwen3_moe";
    qwen3_moe_with_dense_layers: "qwen3_moe-mixed";
    ernie4_5_moe: "ernie4_5_moe";
    ironloom_dense: "ironloom_dense";
    ironloom_moe: "ironloom_moe";
}

/// GGUF twins: the same answers from the same weights under the other naming, with rows permuted back.
#[test]
fn gguf_twins_answer_alike() {
    let mut count = 0;
    for folder in std::fs::read_dir(golden()).unwrap() {
        let folder = folder.unwrap().path();
        if folder.join("model.gguf").exists() {
            check(&folder.join("model.gguf"), &folder.join("expected.safetensors"), TOLERANCE);
            count += 1;
        }
    }
    assert!(count >= 6, "{count} twins found");
}

#[test]
fn a_gguf_of_mixed_types_answers_as_its_unpacked_weights_do() {
    let folder = golden().join("llama");
    check(&folder.join("model-q8_0.gguf"), &folder.join("expected-q8_0.safetensors"), TOLERANCE);
}

/// The newer layout of config.json means the same model.
#[test]
fn both_layouts_of_the_configuration_are_the_same() {
    let read =
        |path: &Path| Config::from_json(&serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap()).unwrap();
    let mut count = 0;
    for folder in std::fs::read_dir(golden()).unwrap() {
        let folder = folder.unwrap().path();
        for variant in ["config.rope_parameters.json", "config.dynamic.json"] {
            if folder.join(variant).exists() {
                assert_eq!(read(&folder.join("config.json")), read(&folder.join(variant)), "{}", folder.display());
                count += 1;
            }
        }
    }
    assert!(count >= 6, "{count} variants found");
}

#[test]
fn own_models_at_full_size_are_the_presets() {
    let read =
        |path: &str| Config::from_json(&serde_json::from_slice(&std::fs::read(golden().join(path)).unwrap()).unwrap());
    let moe = read("ironloom_moe/config.moe-55m.json").unwrap();
    assert_eq!((moe.parameters(), moe.active_parameters()), (55_181_824, 35_717_632));
    assert_eq!(moe.layers, Config::moe_55m().layers);
    let dense = read("ironloom_dense/config.dense-102m.json").unwrap();
    assert_eq!(dense.parameters(), 101_671_680);
}

/// Frequencies of real configurations: equal to the reference's within 1e-6 of themselves, also at factors 8 and 32.
#[test]
fn rope_tables_of_real_configurations() {
    let folder = golden().join("rope");
    let cases: serde_json::Value = serde_json::from_slice(&std::fs::read(folder.join("cases.json")).unwrap()).unwrap();
    let expected = ironloom_weights::open(folder.join("expected.safetensors")).unwrap();
    for (name, config) in cases.as_object().unwrap() {
        let rope = rope_of(config);
        let (frequencies, factor) = rope.inverse_frequencies().unwrap();
        let reference = floats(&expected, &format!("{name}.inv_freq"));
        assert_eq!(frequencies.len(), reference.len(), "{name}");
        for (ours, theirs) in frequencies.iter().zip(&reference) {
            assert!((ours - theirs).abs() <= 1e-6 * theirs.abs(), "{name}: {ours} {theirs}");
        }
        let their_factor = floats(&expected, &format!("{name}.attention_factor"))[0];
        assert!((factor - their_factor).abs() <= 1e-6 * their_factor, "{name}: {factor} {their_factor}");
    }
}

fn rope_of(config: &serde_json::Value) -> ironloom_nn::RopeOptions {
    let mut whole = config.clone();
    let defaults = serde_json::json!({"model_type": "llama", "hidden_size": 64, "num_attention_heads": 1,
        "num_hidden_layers": 1, "intermediate_size": 16, "vocab_size": 16, "max_position_embeddings": 4096});
    for (key, value) in defaults.as_object().unwrap() {
        if whole.get(key).is_none() {
            whole[key] = value.clone();
        }
    }
    Config::from_json(&whole).unwrap().ropes[0].clone()
}
