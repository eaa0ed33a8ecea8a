//! Decoding on a graphics card: the ids of the host's way, in any company, across growth; and nothing left behind.
//!
//! Without a card each test says that it was skipped.

use std::sync::Arc;

use ironloom_decode::{BatchDecoder, RowEvent, RowLimits, Sampler, SamplerOptions, Session, SessionOptions};
use ironloom_lm::{Config, DenseShape, Model};
use ironloom_quant::WeightFormat;
use ironloom_tensor::{Device, Error};

fn device() -> Option<Device> {
    match Device::cuda(0, 2) {
        Ok(device) => Some(device),
        Err(Error::Kernels(error @ (ironloom_kernels::Error::NoDriver | ironloom_kernels::Error::NoDevice { .. }))) => {
            println!("skipped: {error}");
            None
        }
        Err(error) => panic!("{error}"),
    }
}

fn model(device: &Device, format: WeightFormat) -> Arc<Model> {
    let shape =
        DenseShape { vocab_size: 1000, width: 256, layers: 3, heads: 4, kv_heads: 2, head_width: 64, inner_width: 704 };
    Arc::new(Model::random(&Config::dense(shape), device, format, 5).unwrap())
}

fn prompt(length: usize) -> Vec<u32> {
    (0..length as u32).map(|i| (i * 7919 + 13) % 1000).collect()
}

fn continued(model: &Arc<Model>, device: &Device, prompt: &[u32], count: usize, options: &SamplerOptions) -> Vec<u32> {
    let mut session = Session::new(model.clone(), device.clone(), SessionOptions::default()).unwrap();
    session.feed(prompt).unwrap();
    let mut sampler = Sampler::new(options.clone()).unwrap();
    (0..count).map(|_| session.step(&mut sampler).unwrap()).collect()
}

/// The ids that sampling on the host gives, from logits of one pass after the other.
fn by_the_host(
    model: &Arc<Model>,
    device: &Device,
    prompt: &[u32],
    count: usize,
    options: &SamplerOptions,
) -> Vec<u32> {
    let mut session = Session::new(model.clone(), device.clone(), SessionOptions::default()).unwrap();
    session.feed(prompt).unwrap();
    let mut sampler = Sampler::new(options.clone()).unwrap();
    let mut ids = Vec::new();
    for _ in 0..count {
        let history = session.ids().to_vec();
        let id = sampler.sample(session.logits().unwrap(), &history).unwrap();
        session.feed(&[id]).unwrap();
        ids.push(id);
    }
    ids
}

fn options() -> [SamplerOptions; 4] {
    let plain = SamplerOptions::default();
    [
        SamplerOptions::greedy(),
        SamplerOptions { temperature: 0.8, top_k: 40, top_p: 0.95, seed: 3, ..plain.clone() },
        SamplerOptions { temperature: 1.2, min_p: 0.02, seed: 4, ..plain.clone() },
        SamplerOptions { temperature: 0.7, repetition_penalty: 1.3, frequency_penalty: 0.2, seed: 5, ..plain },
    ]
}

#[test]
fn steps_ahead_give_the_ids_of_the_host() {
    let Some(device) = device() else { return };
    for format in [WeightFormat::Bf16, WeightFormat::Int8, WeightFormat::Nf4] {
        let model = model(&device, format);
        for options in options() {
            // Past 64 and 128 positions, where caches grow.
            for length in [1, 50, 63, 120] {
                let prompt = prompt(length);
                assert_eq!(
                    continued(&model, &device, &prompt, 40, &options),
                    by_the_host(&model, &device, &prompt, 40, &options),
                    "{format:?}, a prompt of {length}, {options:?}"
                );
            }
        }
    }
}

#[test]
fn a_row_of_a_batch_gets_the_ids_it_gets_alone() {
    let Some(device) = device() else { return };
    let model = model(&device, WeightFormat::Nf4);
    for count in [2, 5, 16, 64] {
        let mut batch = BatchDecoder::new(model.clone(), device.clone(), 512).unwrap();
        let mut expected = Vec::new();
        let mut rows = Vec::new();
        for row in 0..count {
            // Uneven prompts and answers, so that rows leave one after the other; some prompts take the path of many rows.
            let (prompt, new) = (prompt(1 + row * 11 % 150), 5 + row % 40);
            let choice = options()[row % 4].clone();
            expected.push(continued(&model, &device, &prompt, new, &choice));
            let session = Session::new(model.clone(), device.clone(), SessionOptions::default()).unwrap();
            let limits = RowLimits { max_tokens: new, ..RowLimits::default() };
            rows.push(batch.join(session, &prompt, Sampler::new(choice).unwrap(), limits).unwrap());
        }
        let mut found = vec![Vec::new(); count];
        while !batch.is_empty() {
            for (id, event) in batch.step().unwrap() {
                let row = rows.iter().position(|known| *known == id).unwrap();
                match event {
                    RowEvent::Token(token) => found[row].push(token),
                    RowEvent::Finished { last, .. } => found[row].extend(last),
                    RowEvent::Failed { error, .. } => panic!("{error}"),
                }
            }
        }
        assert_eq!(found, expected, "{count} rows");
    }
}

#[test]
fn a_card_that_is_opened_again_is_another_device() {
    let Some((device, again)) = device().zip(device()) else { return };
    let model = model(&device, WeightFormat::Bf16);
    for other in [again, Device::cpu(1)] {
        let session = Session::new(model.clone(), other.clone(), SessionOptions::default());
        assert!(matches!(session.err(), Some(ironloom_decode::Error::OtherDevice { .. })));
        let batch = BatchDecoder::new(model.clone(), other.clone(), 512);
        assert!(matches!(batch.err(), Some(ironloom_decode::Error::OtherDevice { .. })));
    }
}

#[test]
fn forks_and_cuts_go_on_as_fresh_sessions() {
    let Some(device) = device() else { return };
    let model = model(&device, WeightFormat::Bf16);
    let greedy = SamplerOptions::greedy();
    let mut sampler = Sampler::greedy();
    let mut session = Session::new(model.clone(), device.clone(), SessionOptions::default()).unwrap();
    session.feed(&prompt(30)).unwrap();
    let first: Vec<u32> = (0..20).map(|_| session.step(&mut sampler).unwrap()).collect();
    let mut fork = session.fork();
    let on: Vec<u32> = (0..60).map(|_| session.step(&mut sampler).unwrap()).collect();
    assert_eq!((0..60).map(|_| fork.step(&mut sampler).unwrap()).collect::<Vec<_>>(), on);
    session.truncate(40).unwrap();
    session.feed(&[7, 8, 9]).unwrap();
    let ids = [&prompt(30)[..], &first[..10], &[7, 8, 9]].concat();
    let again: Vec<u32> = (0..20).map(|_| session.step(&mut sampler).unwrap()).collect();
    assert_eq!(again, continued(&model, &device, &ids, 20, &greedy));
}

#[test]
fn nothing_is_left_on_the_card() {
    let Some(device) = device() else { return };
    let gpu = device.card("a test").unwrap().gpu();
    // The first use loads kernels and the library of products.
    drop(continued(&model(&device, WeightFormat::Bf16), &device, &prompt(100), 4, &SamplerOptions::greedy()));
    let before = gpu.held_bytes();
    let model = model(&device, WeightFormat::Bf16);
    let with_model = gpu.held_bytes();
    let mut session = Session::new(model.clone(), device.clone(), SessionOptions::default()).unwrap();
    session.feed(&prompt(100)).unwrap();
    let mut sampler = Sampler::new(options()[3].clone()).unwrap();
    for _ in 0..10 {
        session.step(&mut sampler).unwrap();
    }
    assert!(gpu.held_bytes() > with_model);
    drop(session);
    drop(model);
    assert_eq!(gpu.held_bytes(), before);
}
