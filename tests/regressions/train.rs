//! Public faults of training, each as a test named by project and number.

use ironloom_core::{Philox, Threads};
use ironloom_lm::{Config, DenseShape, ExpertsConfig, FeedForwardConfig, Model};
use ironloom_tensor::Device;
use ironloom_train::{
    Trainer, TrainerOptions,
    data::{
        Batch, Document, DocumentsBuilder, IGNORED, Loader, LoaderOptions, Order, Overlong, Packing, Place, Share,
        counted,
    },
    optimizer::{AdamWOptions, LionOptions, MuonOptions, Optimizer, OptimizerOptions, Parameter, ParameterRole, Step},
};

/// Weights held in 16 bits do not move: a step of a millionth is far below half their spacing, and every optimizer ran on without
/// learning. Here weights are single precision in every optimizer, and the mean moves as far as the steps say.
#[test]
fn pytorch_120376_weights_move_at_a_rate_of_a_millionth() {
    let (threads, elements, steps, rate) = (Threads::new(2), 64 * 128, 100, 1e-6f32);
    let mut philox = Philox::new(120_376, 0);
    let start: Vec<f32> = (0..elements).map(|_| 1.0 + 0.02 * philox.next_normal()).collect();
    let mean = |weights: &[f32]| weights.iter().map(|&weight| f64::from(weight)).sum::<f64>() / weights.len() as f64;
    let adamw = || AdamWOptions { weight_decay: 0.0, ..Default::default() };
    for options in [
        OptimizerOptions::AdamW(adamw()),
        OptimizerOptions::AdamW8bit(adamw()),
        OptimizerOptions::Lion(LionOptions { weight_decay: 0.0, ..Default::default() }),
        OptimizerOptions::Muon(MuonOptions { adamw: adamw(), ..Default::default() }),
    ] {
        let (mut optimizer, mut weights) = (Optimizer::new(options.clone()).unwrap(), start.clone());
        for number in 1..=steps {
            let step = Step { number, learning_rate: rate, gradient_factor: 1.0 };
            let parameter = Parameter::new("embed", &[64, 128], ParameterRole::Embedding);
            optimizer.update(&threads, &step, &parameter, &mut weights, &vec![0.3; elements]).unwrap();
        }
        let moved = mean(&weights) - mean(&start);
        let expected = -f64::from(rate) * steps as f64;
        assert!((moved / expected - 1.0).abs() < 0.05, "{}: {moved}, expected {expected}", options.name());
    }
}

/// The same for decay: `weight · (1 - rate · decay)` is the weight itself once the product is below half the spacing, and
/// decay was a no-op. It is added to the step first, and together they move the mean as double precision says.
#[test]
fn torchao_1124_weight_decay_moves_weights_at_a_small_rate() {
    let (threads, elements, steps, rate) = (Threads::new(1), 4096, 200, 1e-6f32);
    let mut philox = Philox::new(1124, 0);
    let start: Vec<f32> = (0..elements).map(|_| 0.02 * philox.next_normal().abs()).collect();
    let sum = |weights: &[f32]| weights.iter().map(|&weight| f64::from(weight)).sum::<f64>();
    for options in [
        OptimizerOptions::AdamW(AdamWOptions::default()),
        OptimizerOptions::AdamW8bit(AdamWOptions::default()),
        OptimizerOptions::Lion(LionOptions { weight_decay: 0.1, ..Default::default() }),
    ] {
        let (mut optimizer, mut weights) = (Optimizer::new(options.clone()).unwrap(), start.clone());
        for number in 1..=steps {
            let step = Step { number, learning_rate: rate, gradient_factor: 1.0 };
            let parameter = Parameter::new("w", &[4096], ParameterRole::Matrix);
            optimizer.update(&threads, &step, &parameter, &mut weights, &vec![0.0; elements]).unwrap();
        }
        let expected = (1.0 - 1e-7f64).powi(steps as i32) - 1.0;
        let moved = sum(&weights) / sum(&start) - 1.0;
        assert!((moved / expected - 1.0).abs() < 0.2, "{}: {moved}, expected {expected}", options.name());
    }
}

/// transformers PR 34191, 35438, trl 2175: a step cut into micro-batches divided each one's loss by its own count, so that
/// tokens of short ones weighed more. All batches of a step have one divisor, and cutting a step does not change its rows.
#[test]
fn transformers_34191_a_step_has_one_count_of_predictions() {
    let documents: Vec<Vec<u32>> = (0..300).map(|d| (0..2 + d * d % 57).collect()).collect();
    let step = |rows: usize, batches: usize| {
        let mut loader = loader(&documents, 64, rows, Packing::Documents);
        loader.next_step(batches).unwrap()
    };
    let whole = step(8, 1);
    for (rows, batches) in [(4, 2), (2, 4), (1, 8)] {
        let parts = step(rows, batches);
        assert_eq!(counted(&parts), whole[0].counted());
        let counts: Vec<usize> = parts.iter().map(Batch::counted).collect();
        assert!(
            counts.iter().any(|&count| count != counts[0]),
            "ragged, so that the mean of means is another: {counts:?}"
        );
        let mut joined = Batch::default();
        parts.iter().cloned().for_each(|part| joined.append(part));
        assert_eq!(joined, whole[0]);
        let (cut, uncut) = (trainer().step(&parts).unwrap(), trainer().step(&whole).unwrap());
        assert!((cut.loss - uncut.loss).abs() < 1e-6, "{} {}", cut.loss, uncut.loss);
        assert!((cut.gradient_norm / uncut.gradient_norm - 1.0).abs() < 1e-5, "{cut:?} {uncut:?}");
    }
}

/// A trainer of a small model with 64 ids and positions.
fn trainer() -> Trainer {
    let shape =
        DenseShape { vocab_size: 64, width: 32, layers: 2, heads: 2, kv_heads: 1, head_width: 16, inner_width: 48 };
    let config = Config { context_length: 64, ..Config::dense(shape) };
    Trainer::new(Model::untrained(&config, &Device::cpu(1), 1).unwrap(), TrainerOptions::default()).unwrap()
}

/// nanoVLM PR 204, trl PR 3526, torchtune PR 875: documents packed into a row ran into each other. A target is never in another
/// document, and what a document brings to a row does not depend on its neighbours.
#[test]
fn nanovlm_204_packed_documents_stay_apart() {
    let document = |d: u32, changed: u32| (0..9).map(|t| 1000 * d + t + if d == 3 { changed } else { 0 }).collect();
    let documents = |changed| (0..12).map(|d| document(d, changed)).collect::<Vec<Vec<u32>>>();
    for packing in [Packing::Documents, Packing::Continuous] {
        let draw = |changed| loader(&documents(changed), 30, 3, packing).next_batch().unwrap();
        let (before, after) = (draw(0), draw(500));
        assert_eq!(before.documents, after.documents);
        let mut changed = 0;
        for range in before.ranges() {
            let is_changed = before.ids[range.start] / 1000 == 3;
            changed += usize::from(is_changed);
            let same = before.ids[range.clone()] == after.ids[range.clone()]
                && before.targets[range.clone()] == after.targets[range.clone()];
            assert_eq!(same, !is_changed, "only the changed document's part of the row changes");
            if packing == Packing::Documents {
                assert_eq!(before.targets[range.end - 1], IGNORED, "the last token of a document predicts nothing");
            }
        }
        assert!(changed > 0);
    }
}

/// The same in the model: a document has the loss that it has alone, whatever it is packed with.
#[test]
fn nanovlm_204_a_packed_document_has_the_loss_that_it_has_alone() {
    let document = |start: u32, length: u32| -> Batch {
        let ids: Vec<u32> = (0..length).map(|place| (start + place * place) % 64).collect();
        let targets = ids[1..].iter().map(|&id| i64::from(id)).chain([IGNORED]).collect();
        Batch { documents: vec![ids.len()], ids, targets }
    };
    let mut trainer = trainer();
    let mut sum = |batch: &Batch| trainer.evaluate(std::slice::from_ref(batch)).unwrap() * batch.counted() as f64;
    let last = document(5, 13);
    for before in [document(1, 9), document(40, 9), document(3, 30)] {
        let alone = sum(&before) + sum(&last);
        let mut packed = before;
        packed.append(last.clone());
        assert!((sum(&packed) - alone).abs() < 1e-5 * alone, "{} {alone}", sum(&packed));
    }
}

/// Draws rows of these documents.
fn loader(documents: &[Vec<u32>], sequence_length: usize, rows: usize, packing: Packing) -> Loader {
    let vocab_size = 100_000;
    let mut builder = DocumentsBuilder::new("documents", vocab_size);
    let place = Place { path: "documents".into(), line: None };
    for ids in documents {
        builder.push(&Document { ids: ids.clone(), learned: None }, &place).unwrap();
    }
    let shares = vec![Share { documents: builder.finish().unwrap(), weight: 1.0 }];
    let (overlong, order, seed) = (Overlong::Split, Order::Shuffled, 7);
    Loader::new(shares, &LoaderOptions { sequence_length, rows, packing, overlong, order, seed, vocab_size }).unwrap()
}

/// Routers that choose one expert and renormalize trained without ever moving, since the weight was always 1.
#[test]
fn minimind_858_a_router_that_could_not_learn_is_refused() {
    let config = |per_row, normalize| {
        let shape =
            DenseShape { vocab_size: 64, width: 32, layers: 3, heads: 2, kv_heads: 1, head_width: 16, inner_width: 48 };
        let (dense, moe) = (Config::dense(shape), Config::moe_55m());
        let experts = moe.experts.map(|experts| ExpertsConfig { per_row, normalize, width: 16, ..experts });
        let layers = moe.layers[..3].to_vec();
        let layers = layers.into_iter().zip(&dense.layers).map(|(moe, dense)| match moe.feed_forward {
            FeedForwardConfig::Routed => moe,
            FeedForwardConfig::Dense { .. } => dense.clone(),
        });
        Config { architecture: moe.architecture, experts, layers: layers.collect(), ..dense }
    };
    for (per_row, normalize) in [(1, true), (1, false), (2, true), (2, false)] {
        let model = Model::untrained(&config(per_row, normalize), &Device::cpu(1), 1).unwrap();
        let router = |model: &Model| {
            let parameters = model.parameters();
            let router = parameters.iter().find(|parameter| parameter.name.ends_with("mlp.gate.weight")).unwrap();
            router.values.as_f32().unwrap().to_vec()
        };
        let before = router(&model);
        let options = TrainerOptions { balance_loss: 0.0, router_z_loss: 0.0, ..TrainerOptions::default() };
        match Trainer::new(model, options) {
            Err(error) => assert!((per_row, normalize) == (1, true) && error.to_string().contains("norm_topk_prob")),
            Ok(mut trainer) => {
                let (ids, targets) = (vec![1, 2, 3, 4], vec![2, 3, 4, 5]);
                trainer.step(&[Batch { ids, targets, documents: vec![4] }]).unwrap();
                assert_ne!(router(trainer.model()), before, "{per_row} {normalize}");
            }
        }
    }
}
