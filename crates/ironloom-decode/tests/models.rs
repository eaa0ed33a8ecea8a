//! Sessions and batches over real (tiny) models: the reference's greedy ids, and the same bits however a sequence is cut or
//! accompanied.

use std::{
    path::{Path, PathBuf},
    sync::Arc,
};

use ironloom_decode::{BatchDecoder, RowEvent, RowLimits, Sampler, SamplerOptions, Session, SessionOptions};
use ironloom_lm::{LoadOptions, Model};
use ironloom_tensor::Device;

/// Linear attention spans, a sliding window, two kinds of layer, routed experts.
const FAMILIES: [&str; 4] = ["llama", "mistral", "gemma3", "qwen3_moe"];

fn folder(family: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden/models").join(family)
}

fn load(family: &str, device: &Device) -> Arc<Model> {
    let checkpoint = ironloom_weights::open(folder(family)).unwrap();
    Arc::new(Model::load(&checkpoint, device, &LoadOptions::default()).unwrap())
}

/// Ids kept as `I32` beside the expected logits.
fn expected_ids(family: &str, name: &str) -> Vec<u32> {
    let file = ironloom_weights::open(folder(family).join("expected.safetensors")).unwrap();
    let tensor = file.tensor(name).unwrap();
    let number = |bytes: &[u8]| u32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]);
    tensor.bytes.chunks_exact(4).map(number).collect()
}

fn session(model: &Arc<Model>, device: &Device, prefill_rows: usize) -> Session {
    let options = SessionOptions { prefill_rows, ..Default::default() };
    Session::new(model.clone(), device.clone(), options).unwrap()
}

fn sampler(seed: u64) -> Sampler {
    Sampler::new(SamplerOptions { top_p: 0.9, repetition_penalty: 1.2, seed, ..Default::default() }).unwrap()
}

fn bits(logits: &[f32]) -> Vec<u32> {
    logits.iter().map(|logit| logit.to_bits()).collect()
}

#[test]
fn greedy_ids_are_the_references() {
    let device = Device::cpu(2);
    for family in FAMILIES {
        let model = load(family, &device);
        for sequence in ["short", "long"] {
            let mut session = session(&model, &device, 512);
            session.feed(&expected_ids(family, &format!("{sequence}.input_ids"))).unwrap();
            let expected = expected_ids(family, &format!("{sequence}.greedy_ids"));
            let ids: Vec<u32> = expected.iter().map(|_| session.step(&mut Sampler::greedy()).unwrap()).collect();
            assert_eq!(ids, expected, "{family} {sequence}");
        }
    }
}

#[test]
fn a_sequence_gives_the_same_bits_however_it_came_about() {
    let device = Device::cpu(2);
    for family in FAMILIES {
        let model = load(family, &device);
        let prompt = expected_ids(family, "long.input_ids");
        let mut whole = session(&model, &device, 512);
        whole.feed(&prompt).unwrap();
        let logits = bits(whole.logits().unwrap());
        for rows in [1, 3, 7] {
            // The processor is one device, whatever threads it is given.
            let mut cut = session(&model, &Device::cpu(1), rows);
            cut.feed(&prompt).unwrap();
            assert_eq!(bits(cut.logits().unwrap()), logits, "{family}, {rows} rows at a time");
        }
        let ids: Vec<u32> = (0..12).map(|_| whole.step(&mut sampler(3)).unwrap()).collect();
        let mut fork = whole.fork();
        whole.truncate(prompt.len()).unwrap();
        assert_eq!(bits(whole.logits().unwrap()), logits, "{family}, cut back");
        let again: Vec<u32> = (0..12).map(|_| whole.step(&mut sampler(3)).unwrap()).collect();
        assert_eq!(again, ids, "{family}, cut back");
        fork.truncate(5).unwrap();
        fork.feed(&prompt[5..]).unwrap();
        assert_eq!(bits(fork.logits().unwrap()), logits, "{family}, a fork cut back and fed");
    }
}

#[test]
fn a_row_of_a_batch_gets_the_ids_it_gets_alone() {
    let device = Device::cpu(2);
    for family in FAMILIES {
        let model = load(family, &device);
        let prompt = expected_ids(family, "long.input_ids");
        let prompts = [&prompt[..], &prompt[3..4], &prompt[2..19], &prompt[7..9]];
        let limits = RowLimits { max_tokens: 10, ..Default::default() };
        let mut batch = BatchDecoder::new(model.clone(), device.clone(), 16).unwrap();
        let mut found = vec![Vec::new(); prompts.len()];
        let mut rows = Vec::new();
        for (number, prompt) in prompts.iter().enumerate() {
            rows.push(
                batch.join(session(&model, &device, 16), prompt, sampler(number as u64), limits.clone()).unwrap(),
            );
            // The next one joins while this one is under way.
            collect(&mut batch, &rows, &mut found);
        }
        while !batch.is_empty() {
            collect(&mut batch, &rows, &mut found);
        }
        for (number, prompt) in prompts.iter().enumerate() {
            let mut alone = session(&model, &device, 512);
            alone.feed(prompt).unwrap();
            let ids: Vec<u32> = (0..10).map(|_| alone.step(&mut sampler(number as u64)).unwrap()).collect();
            assert_eq!(found[number], ids, "{family}, row {number}");
        }
    }
}

fn collect(batch: &mut BatchDecoder, rows: &[ironloom_decode::RowId], found: &mut [Vec<u32>]) {
    for (row, event) in batch.step().unwrap() {
        let ids = &mut found[rows.iter().position(|id| *id == row).unwrap()];
        match event {
            RowEvent::Token(id) => ids.push(id),
            RowEvent::Finished { last, .. } => ids.extend(last),
            RowEvent::Failed { error, .. } => panic!("{error}"),
        }
    }
}
