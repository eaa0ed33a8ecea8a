//! The parts whose operations are checked, with weights and rows that keep numbers of the size that they have in a model.

use anyhow::Result;
use ironloom_tensor::ops::{
    self, Activation, CrossEntropyOptions, DocumentAttentionOptions, ExpertWeights, LowRank, Mask, Projection,
    RotatedAttention, RoutedTraining, RouterLosses,
};

use super::{Forward, Part, Pass, Rows};
use crate::check_parity::{inputs::Inputs, operations::rmsnorm::EPSILON};

/// The weight of the balance of experts' loads.
const BALANCE: f32 = 0.1;
/// The weight of squared log-sum-exps, of routers and of the output.
const Z_LOSS: f32 = 0.01;
/// Lengths of documents, heads, kv heads, head width, window, and whether heads are normed and have biases.
pub(super) type AttentionShape = (&'static [usize], [usize; 3], Option<usize>, bool);

/// Weights of the size that lets rows through as they are.
fn matrix(inputs: &mut Inputs, rows: usize, cols: usize) -> (Vec<f32>, Vec<usize>) {
    let scale = 1.0 / (cols as f32).sqrt();
    (inputs.normal(rows * cols).iter().map(|value| value * scale).collect(), vec![rows, cols])
}

/// Values around `mean`.
fn vector(inputs: &mut Inputs, length: usize, mean: f32) -> (Vec<f32>, Vec<usize>) {
    (inputs.normal(length).iter().map(|value| mean + 0.1 * value).collect(), vec![length])
}

fn part(
    inputs: &mut Inputs,
    rows: usize,
    width: usize,
    weights: Vec<(Vec<f32>, Vec<usize>)>,
    forward: Box<Forward>,
) -> Part {
    Part {
        weights,
        rows: Rows::Values(inputs.normal(rows * width)),
        documents: vec![rows],
        targets: Vec::new(),
        mask: Mask::Causal,
        half: 1,
        gradient: inputs.normal(rows * width),
        forward,
    }
}

pub(super) fn feed_forward([rows, width, inner]: [usize; 3], activation: Activation) -> Part {
    let mut inputs = Inputs::of("training feed-forward", &format!("{rows} {width} {inner}"));
    let sides = [[inner, width], [inner, width], [width, inner]];
    let mut weights: Vec<_> = sides.into_iter().map(|[rows, cols]| matrix(&mut inputs, rows, cols)).collect();
    weights.push(vector(&mut inputs, width, 1.0));
    let forward = move |pass: &Pass<'_>| {
        let (cx, x) = (&pass.cx, pass.x()?);
        let [gate, up, down] = [pass.weight(0)?, pass.weight(1)?, pass.weight(2)?];
        let normed = ops::rmsnorm(cx, x, &pass.weights[3], EPSILON)?;
        let halves = [&gate, &up].map(Projection::from);
        let inner = ops::gated_linear(cx, &normed, halves, activation)?;
        Ok(ops::linear_add(cx, x.clone(), &inner, &down)?)
    };
    part(&mut inputs, rows, width, weights, Box::new(forward))
}

pub(super) fn attention((documents, [heads, kv_heads, head_width], window, extras): AttentionShape) -> Part {
    const WIDTH: usize = 136;
    let shape = format!("{documents:?} {heads} {kv_heads} {head_width} {window:?}");
    let (mut inputs, rows) = (Inputs::of("training attention", &shape), documents.iter().sum());
    let (wide, narrow) = (heads * head_width, kv_heads * head_width);
    let sides = [[wide, WIDTH], [narrow, WIDTH], [narrow, WIDTH], [WIDTH, wide]];
    let mut weights: Vec<_> = sides.into_iter().map(|[rows, cols]| matrix(&mut inputs, rows, cols)).collect();
    weights.push(vector(&mut inputs, WIDTH, 1.0));
    if extras {
        weights.extend([head_width, head_width].map(|length| vector(&mut inputs, length, 1.0)));
        weights.extend([wide, narrow, narrow].map(|length| vector(&mut inputs, length, 0.0)));
    }
    let mask = window.map_or(Mask::Causal, Mask::Window);
    let forward = move |pass: &Pass<'_>| {
        let (cx, x, w) = (&pass.cx, pass.x()?, pass.weights);
        let [q, k, v, out] = [pass.weight(0)?, pass.weight(1)?, pass.weight(2)?, pass.weight(3)?];
        let normed = ops::rmsnorm(cx, x, &w[4], EPSILON)?;
        let projection =
            |weight, bias| Projection { bias: if extras { w.get(bias) } else { None }, ..Projection::from(weight) };
        let projected = ops::linear_many(cx, &normed, [projection(&q, 7), projection(&k, 8), projection(&v, 9)])?;
        let options = DocumentAttentionOptions { heads, kv_heads, scale: 1.0 / (head_width as f32).sqrt(), mask };
        let rotation = RotatedAttention {
            head_width,
            norms: extras.then(|| ([&w[5], &w[6]], EPSILON)),
            phases: pass.phases,
            documents: pass.documents,
            options: &options,
        };
        let attended = ops::rotated_attention(cx, projected, &rotation)?;
        Ok(ops::linear_add(cx, x.clone(), &attended, &out)?)
    };
    let part = part(&mut inputs, rows, WIDTH, weights, Box::new(forward));
    Part { documents: documents.to_vec(), mask, half: head_width / 2, ..part }
}

/// With a `rank`, adapters beside all of the experts' matrices and the router's.
pub(super) fn experts([rows, count, per_row, width, inner]: [usize; 5], normalize: bool, rank: Option<usize>) -> Part {
    let mut inputs = Inputs::of("training experts", &format!("{rows} {count} {per_row} {width} {inner}"));
    let sides = [[inner, width], [inner, width], [width, inner]].repeat(count);
    let mut weights: Vec<_> = sides.iter().map(|&[rows, cols]| matrix(&mut inputs, rows, cols)).collect();
    // The first elements of a row say by a wide margin which experts it goes to, so that no rounding moves it to others.
    let (mut router, shape) = matrix(&mut inputs, count, width);
    for (expert, row) in router.chunks_mut(width).enumerate() {
        row.iter_mut().for_each(|value| *value *= 0.02);
        row[expert] = 1.0;
    }
    weights.push((router, shape));
    let (mut norm, shape) = vector(&mut inputs, width, 1.0);
    norm[..count].fill(1.0);
    weights.push((norm, shape));
    if let Some(rank) = rank {
        for [rows, cols] in sides.into_iter().chain([[count, width]]) {
            weights.extend([matrix(&mut inputs, rank, cols), matrix(&mut inputs, rows, rank)]);
        }
        if let Some((router, _)) = weights.last_mut() {
            router.iter_mut().for_each(|value| *value *= 0.02);
        }
    }
    let forward = move |pass: &Pass<'_>| {
        let (cx, x) = (&pass.cx, pass.x()?);
        let held = (0..3 * count).map(|number| pass.weight(number)).collect::<Result<Vec<_>>>()?;
        let factors = 3 * count + 2..pass.weights.len();
        let factors = factors.map(|number| pass.weight(number)).collect::<Result<Vec<_>>>()?;
        let adapter = |number: usize| {
            let pair = factors.chunks(2).nth(number)?;
            Some(LowRank { a: &pair[0], b: &pair[1], scale: 0.5, dropout: 0.0, stream: 1, rows_before: 0 })
        };
        let projection = |number: usize| Projection { weight: &held[number], bias: None, adapter: adapter(number) };
        let expert = |number: usize| ExpertWeights {
            gate: projection(3 * number),
            up: projection(3 * number + 1),
            down: projection(3 * number + 2),
        };
        let experts: Vec<_> = (0..count).map(expert).collect();
        let normed = ops::rmsnorm(cx, x, &pass.weights[3 * count + 1], EPSILON)?;
        let router = pass.weight(3 * count)?;
        let router = Projection { adapter: adapter(3 * count), ..Projection::from(&router) };
        let layer = RoutedTraining {
            logits: &ops::linear(cx, &normed, router)?,
            per_row,
            normalize,
            losses: RouterLosses { balance: BALANCE, z: Z_LOSS },
            scale: 1.0,
            experts: &experts,
            activation: Activation::Silu,
        };
        Ok(ops::routed_training(cx, x.clone(), &normed, &layer)?)
    };
    let mut part = part(&mut inputs, rows, width, weights, Box::new(forward));
    if let Rows::Values(x) = &mut part.rows {
        for (number, row) in x.chunks_mut(width).enumerate() {
            for (expert, value) in row.iter_mut().take(count).enumerate() {
                *value = 0.25 * ((3 * expert + 5 * number) % count) as f32;
            }
        }
    }
    part
}

pub(super) fn head([rows, vocabulary, width]: [usize; 3], tied: bool) -> Part {
    let mut inputs = Inputs::of("training head", &format!("{rows} {vocabulary} {width} {tied}"));
    let mut weights = vec![matrix(&mut inputs, vocabulary, width)];
    if !tied {
        weights.push(matrix(&mut inputs, vocabulary, width));
    }
    weights.push(vector(&mut inputs, width, 1.0));
    let forward = move |pass: &Pass<'_>| {
        let (cx, table) = (&pass.cx, pass.weight(0)?);
        let rows = ops::embedding(cx, &table, pass.ids, 3.0)?;
        let (head, norm) = if tied { (table, 1) } else { (pass.weight(1)?, 2) };
        let normed = ops::rmsnorm(cx, &rows, &pass.weights[norm], EPSILON)?;
        let scale = 1.0 / pass.counted as f32;
        let options = CrossEntropyOptions { z_loss: Z_LOSS, scale, ..CrossEntropyOptions::default() };
        Ok(ops::cross_entropy(cx, &normed, &head, pass.targets, &options)?.loss)
    };
    let mut part = part(&mut inputs, rows, width, weights, Box::new(forward));
    part.rows = Rows::Ids(inputs.below(vocabulary as u32, rows));
    let targets = inputs.below(vocabulary as u32, rows).into_iter().enumerate();
    // Some rows are asked for nothing.
    part.targets = targets.map(|(row, id)| if row % 5 == 3 { -100 } else { i64::from(id) }).collect();
    part
}
