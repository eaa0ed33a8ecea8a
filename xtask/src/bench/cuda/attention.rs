//! Attention alone: of many rows over one history, backward over documents, and of one row over histories of several lengths.

use anyhow::Result;
use ironloom_kernels::{
    Attention, AttentionBounds, AttentionFew, AttentionTraining, AttentionTrainingBackward, FewShape, Mask, attention,
    attention_few, attention_training, attention_training_backward,
};
use serde_json::{Value, json};

use super::card::Card;
use crate::bench::measurement::{Measurement, Work};

/// TFLOP/s of 16 sequences with 16 heads and 4,096 positions, causal: the products of the half of the scores that the mask
/// leaves. Queries, keys and values are larger than the cache.
pub(in crate::bench) fn forward(card: &Card, head_width: usize) -> Result<Measurement> {
    const LAUNCHES: usize = 4;
    let elements = BATCH * POSITIONS * HEADS * head_width;
    let (queries, keys, values) = (card.normals(elements)?, card.normals(elements)?, card.normals(elements)?);
    let out = card.gpu.allocate_lasting(2 * elements, "attention")?;
    let (operations, shape) = (forward_operations(head_width), shape_of_many(head_width));
    card.measure(Work::Operations(1e12), shape, || {
        let seconds = card.seconds_of(LAUNCHES, |_| {
            let call = Attention {
                queries: queries.slice(),
                query_stride: HEADS * head_width,
                keys: keys.slice(),
                values: values.slice(),
                kv_batch_stride: POSITIONS * HEADS * head_width,
                out: out.slice(),
                log_sum_exp: None,
                batch: BATCH,
                rows: POSITIONS,
                length: POSITIONS,
                heads: HEADS,
                kv_heads: HEADS,
                head_width,
                scale: 1.0 / (head_width as f32).sqrt(),
                mask: Mask::Causal,
            };
            Ok(attention(&card.gpu, &call)?)
        })?;
        Ok(operations / seconds / 1e12)
    })
}

/// TFLOP/s of the way back of the same, as documents of training: five products of the half of the scores where the way forward
/// has two, with the sums of gradient times output before them.
pub(in crate::bench) fn backward(card: &Card, head_width: usize) -> Result<Measurement> {
    const ROWS: usize = BATCH * POSITIONS;
    let (gpu, width) = (&card.gpu, HEADS * head_width);
    let normals = || card.normals(ROWS * width);
    let (q, k, v, gradient) = (normals()?, normals()?, normals()?, normals()?);
    let room = |bytes: usize| gpu.allocate_lasting(bytes, "attention");
    let (out, dq, dk, dv) =
        (room(2 * ROWS * width)?, room(2 * ROWS * width)?, room(2 * ROWS * width)?, room(2 * ROWS * width)?);
    let (log_sum_exp, delta) = (room(4 * HEADS * ROWS)?, room(4 * HEADS * ROWS)?);
    let numbers = |of_row: fn(usize) -> usize| {
        let bytes: Vec<u8> = (0..ROWS).flat_map(|row| (of_row(row) as i32).to_le_bytes()).collect();
        gpu.upload(&bytes, "attention")
    };
    let (document_start, document_end) =
        (numbers(|row| row / POSITIONS * POSITIONS)?, numbers(|row| (row / POSITIONS + 1) * POSITIONS)?);
    let (row, next_row) = (numbers(|row| row)?, numbers(|row| row + 1)?);
    let call = AttentionTraining {
        q: q.slice(),
        q_stride: width,
        k: k.slice(),
        k_stride: width,
        v: v.slice(),
        v_stride: width,
        out: out.slice(),
        out_stride: width,
        log_sum_exp: log_sum_exp.slice(),
        bounds: AttentionBounds {
            first_key: document_start.slice(),
            end_key: next_row.slice(),
            first_query: row.slice(),
            end_query: document_end.slice(),
        },
        rows: ROWS,
        keys: ROWS,
        heads: HEADS,
        kv_heads: HEADS,
        head_width,
        scale: 1.0 / (head_width as f32).sqrt(),
    };
    attention_training(gpu, &call)?;
    let back = AttentionTrainingBackward {
        forward: call,
        gradient: gradient.slice(),
        gradient_stride: width,
        delta: delta.slice(),
        dq: dq.slice(),
        dq_stride: width,
        dk: dk.slice(),
        dk_stride: width,
        dv: dv.slice(),
        dv_stride: width,
    };
    let ahead = card.seconds_of(1, |_| Ok(attention_training(gpu, &call)?))?;
    let operations = forward_operations(head_width);
    let measured = card.measure(Work::Operations(1e12), shape_of_many(head_width), || {
        Ok(2.5 * operations / card.seconds_of(1, |_| Ok(attention_training_backward(gpu, &back)?))? / 1e12)
    })?;
    Ok(Measurement { notes: format!("forward {:.0} TFLOP/s", operations / ahead / 1e12), ..measured })
}

/// Sequences, or documents, of attention of many rows, and their positions.
const BATCH: usize = 16;
const POSITIONS: usize = 4096;

/// Operations of the two products of the half of the scores that the mask leaves.
fn forward_operations(head_width: usize) -> f64 {
    4.0 * (BATCH * HEADS * head_width) as f64 * (POSITIONS as f64).powi(2) / 2.0
}

fn shape_of_many(head_width: usize) -> Value {
    json!({"batch": BATCH, "heads": HEADS, "kv_heads": HEADS, "positions": POSITIONS, "head_width": head_width})
}

/// GB/s of keys and values through the attention of one row at the heads of Qwen2.5-3B, after 32,768 positions; the notes
/// have other lengths and numbers of rows.
pub(in crate::bench) fn few_rows(card: &Card) -> Result<Measurement> {
    const LENGTH: usize = 32_768;
    let shape = json!({"rows": 1, "positions": LENGTH, "heads": HEADS, "kv_heads": KV_HEADS, "head_width": WIDTH});
    let measured = card.measure(Work::Bytes(1e9), shape, || {
        Ok(history_bytes(LENGTH) as f64 / seconds_of_few(card, 1, LENGTH, LENGTH)? / 1e9)
    })?;
    let mut notes = Vec::new();
    for (rows, length) in [(1, 512), (1, 4096), (1, LENGTH), (1, 131_072), (16, 512), (16, 4096)] {
        let seconds = seconds_of_few(card, rows, length, length.max(LENGTH))?;
        let rate = (rows * history_bytes(length)) as f64 / seconds / 1e12;
        notes.push(format!("{rows} x {length}: {:.2} us ({rate:.2} TB/s)", 1e6 * seconds));
    }
    Ok(Measurement { notes: notes.join("; "), ..measured })
}

const HEADS: usize = 16;
const KV_HEADS: usize = 2;
const WIDTH: usize = 128;
/// Launches in a graph, at least: as many as a step has.
const LAUNCHES: usize = 36;

/// Bytes of the keys and values of one row.
fn history_bytes(length: usize) -> usize {
    2 * 2 * length * KV_HEADS * WIDTH
}

/// Seconds of the attention of `rows` rows after `length` positions each, in a grid that reaches `reach`. Each launch has
/// histories of its own.
fn seconds_of_few(card: &Card, rows: usize, length: usize, reach: usize) -> Result<f64> {
    let gpu = &card.gpu;
    let half = history_bytes(length) / 2;
    let histories = card.rotation(rows * history_bytes(length));
    let caches = card.normals(histories * rows * half)?;
    let address = caches.slice().address();
    let table: Vec<u64> = (0..histories * rows * 2).map(|part| address + (part * half) as u64).collect();
    let bytes = |numbers: &[u64]| numbers.iter().flat_map(|number| number.to_le_bytes()).collect::<Vec<u8>>();
    let table = gpu.upload(&bytes(&table), "attention")?;
    let positions: Vec<u8> = (0..rows).flat_map(|_| (length as i32 - 1).to_le_bytes()).collect();
    let positions = gpu.upload(&positions, "attention")?;
    let numbers =
        |count: usize| -> Vec<u8> { (0..count).flat_map(|i| ((i % 13) as f32 / 13.0 - 0.5).to_le_bytes()).collect() };
    let qkv = gpu.upload(&numbers(rows * (HEADS + 2 * KV_HEADS) * WIDTH), "attention")?;
    let phases = gpu.upload(&numbers(rows * WIDTH), "attention")?;
    let out = gpu.allocate_lasting(4 * rows * HEADS * WIDTH, "attention")?;
    let shape =
        FewShape { rows, max_positions: reach, heads: HEADS, kv_heads: KV_HEADS, head_width: WIDTH, window: None };
    let workspace = shape.workspace()?;
    let partials = gpu.allocate_lasting(workspace.partials, "attention")?;
    let tickets = gpu.allocate_cleared(workspace.tickets, "attention")?;
    card.seconds_of(histories.max(LAUNCHES), |launch| {
        let call = AttentionFew {
            qkv: qkv.slice(),
            q_norm: None,
            k_norm: None,
            epsilon: 1e-6,
            phases: phases.slice(),
            half: WIDTH / 2,
            kv_table: table.part(launch % histories * rows * 16, rows * 16)?,
            positions: positions.slice(),
            out: out.slice(),
            partials: partials.slice(),
            tickets: tickets.slice(),
            shape,
            scale: 1.0 / (WIDTH as f32).sqrt(),
        };
        Ok(attention_few(gpu, &call)?)
    })
}
