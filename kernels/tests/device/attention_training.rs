//! Attention for training, forward and backward, against double precision: packed documents of every kind of mask, groups
//! of query heads, strided operands; and that two runs have the same bits.

use ironloom_kernels::{
    AttentionBounds, AttentionTraining, AttentionTrainingBackward, Buffer, Error, Gpu, Kernels, attention_training,
    attention_training_backward, attention_training_backward_with, attention_training_with,
};

use crate::{buffer, gpu, normals, read_bf16, read_f32, relative_error, round_bf16, upload_bf16, upload_i32};

/// What a document's queries see of its keys.
#[derive(Clone, Copy, Debug)]
enum Sees {
    All,
    Causal,
    Window(usize),
    Nothing,
}

/// Queries, keys and the mask of a document.
type Document = (usize, usize, Sees);

/// The four bounds of packed documents.
fn bounds(documents: &[Document]) -> [Vec<i32>; 4] {
    let [mut first_key, mut end_key, mut first_query, mut end_query] = [const { Vec::new() }; 4];
    let (mut query, mut key) = (0, 0);
    for &(queries, keys, sees) in documents {
        for i in 0..queries {
            let (first, end) = match sees {
                Sees::All => (0, keys),
                Sees::Causal => (0, i + 1),
                Sees::Window(window) => ((i + 1).saturating_sub(window), i + 1),
                Sees::Nothing => (0, 0),
            };
            first_key.push((key + first) as i32);
            end_key.push((key + end) as i32);
        }
        for s in 0..keys {
            let (first, end) = match sees {
                Sees::All => (0, queries),
                Sees::Causal => (s, queries),
                Sees::Window(window) => (s, (s + window).min(queries)),
                Sees::Nothing => (0, 0),
            };
            first_query.push((query + first) as i32);
            end_query.push((query + end) as i32);
        }
        query += queries;
        key += keys;
    }
    [first_key, end_key, first_query, end_query]
}

/// Elements between rows, different for each operand.
const GAPS: [usize; 8] = [8, 16, 24, 32, 40, 48, 56, 64];

struct Case {
    documents: Vec<Document>,
    bounds: [Vec<i32>; 4],
    rows: usize,
    keys: usize,
    heads: usize,
    kv_heads: usize,
    head_width: usize,
    q: Vec<f32>,
    k: Vec<f32>,
    v: Vec<f32>,
    gradient: Vec<f32>,
}

/// What a forward and a backward pass make, in the order of their rows without gaps.
struct Made<T> {
    out: Vec<T>,
    log_sum_exp: Vec<T>,
    dq: Vec<T>,
    dk: Vec<T>,
    dv: Vec<T>,
}

impl Case {
    fn new(documents: &[Document], [heads, kv_heads, head_width]: [usize; 3]) -> Self {
        let rows = documents.iter().map(|document| document.0).sum();
        let keys = documents.iter().map(|document| document.1).sum();
        let draw = |seed, count, mean: f32| normals(seed, count).into_iter().map(|x| round_bf16(x + mean)).collect();
        let (width, kv_width) = (heads * head_width, kv_heads * head_width);
        Self {
            documents: documents.to_vec(),
            bounds: bounds(documents),
            rows,
            keys,
            heads,
            kv_heads,
            head_width,
            q: draw(1, rows * width, 0.0),
            k: draw(2, keys * kv_width, 0.0),
            v: draw(3, keys * kv_width, 0.5),
            gradient: draw(4, rows * width, 0.0),
        }
    }

    fn scale(&self) -> f32 {
        1.0 / (self.head_width as f32).sqrt()
    }

    fn expected(&self) -> Made<f64> {
        let Self { rows, heads, kv_heads, head_width, .. } = *self;
        let scale = f64::from(self.scale());
        let dot = |a: &[f32], b: &[f32]| a.iter().zip(b).map(|(&a, &b)| f64::from(a) * f64::from(b)).sum::<f64>();
        let add = |sums: &mut [f64], factor: f64, row: &[f32]| {
            sums.iter_mut().zip(row).for_each(|(sum, &x)| *sum += factor * f64::from(x));
        };
        let mut made = Made {
            out: vec![0.0; self.q.len()],
            log_sum_exp: vec![f64::NEG_INFINITY; heads * rows],
            dq: vec![0.0; self.q.len()],
            dk: vec![0.0; self.k.len()],
            dv: vec![0.0; self.k.len()],
        };
        for (index, q) in self.q.chunks_exact(head_width).enumerate() {
            let (row, head) = (index / heads, index % heads);
            let at = |s: usize| (s * kv_heads + head / (heads / kv_heads)) * head_width;
            let seen = self.bounds[0][row] as usize..self.bounds[1][row] as usize;
            let own = index * head_width..(index + 1) * head_width;
            let gradient = &self.gradient[own.clone()];
            let mut p: Vec<f64> = seen.clone().map(|s| scale * dot(q, &self.k[at(s)..at(s) + head_width])).collect();
            let greatest = p.iter().copied().fold(f64::NEG_INFINITY, f64::max);
            let total: f64 = p.iter().map(|score| (score - greatest).exp()).sum();
            p.iter_mut().for_each(|score| *score = (*score - greatest).exp() / total);
            if !p.is_empty() {
                made.log_sum_exp[head * rows + row] = greatest + total.ln();
            }
            let slopes: Vec<f64> = seen.clone().map(|s| dot(gradient, &self.v[at(s)..at(s) + head_width])).collect();
            let delta: f64 = p.iter().zip(&slopes).map(|(p, slope)| p * slope).sum();
            for ((p, slope), s) in p.iter().zip(&slopes).zip(seen) {
                let place = at(s)..at(s) + head_width;
                let ds = scale * p * (slope - delta);
                add(&mut made.out[own.clone()], *p, &self.v[place.clone()]);
                add(&mut made.dq[own.clone()], ds, &self.k[place.clone()]);
                add(&mut made.dk[place.clone()], ds, q);
                add(&mut made.dv[place], *p, gradient);
            }
        }
        made
    }

    /// A forward and a backward pass on operands whose rows have NaN between them.
    fn run(&self, gpu: &Gpu, kernels: Kernels) -> Made<f32> {
        let Self { rows, keys, heads, kv_heads, head_width, .. } = *self;
        let (width, kv_width) = (heads * head_width, kv_heads * head_width);
        let upload = |values: &[f32], width: usize, gap: usize| -> Buffer {
            let rows = values.chunks_exact(width);
            let padded: Vec<f32> = rows.flat_map(|row| row.iter().copied().chain(vec![f32::NAN; gap])).collect();
            upload_bf16(gpu, &padded)
        };
        let download = |buffer: &Buffer, rows: usize, width: usize, gap: usize| -> Vec<f32> {
            let values = read_bf16(gpu, buffer, rows * (width + gap));
            values
                .chunks_exact(width + gap)
                .flat_map(|row| {
                    assert!(row[width..].iter().all(|x| x.is_nan()), "nothing is written between rows");
                    row[..width].to_vec()
                })
                .collect()
        };
        let (q, k, v) =
            (upload(&self.q, width, GAPS[0]), upload(&self.k, kv_width, GAPS[1]), upload(&self.v, kv_width, GAPS[2]));
        let gradient = upload(&self.gradient, width, GAPS[3]);
        let poisoned = |rows: usize, width: usize| buffer(gpu, rows * width * 2);
        let (out, dq) = (poisoned(rows, width + GAPS[4]), poisoned(rows, width + GAPS[5]));
        let (dk, dv) = (poisoned(keys, kv_width + GAPS[6]), poisoned(keys, kv_width + GAPS[7]));
        let (log_sum_exp, delta) = (buffer(gpu, heads * rows * 4), buffer(gpu, heads * rows * 4));
        let bounds = self.bounds.each_ref().map(|bounds| upload_i32(gpu, bounds));
        let forward = AttentionTraining {
            q: q.slice(),
            q_stride: width + GAPS[0],
            k: k.slice(),
            k_stride: kv_width + GAPS[1],
            v: v.slice(),
            v_stride: kv_width + GAPS[2],
            out: out.slice(),
            out_stride: width + GAPS[4],
            log_sum_exp: log_sum_exp.slice(),
            bounds: AttentionBounds {
                first_key: bounds[0].slice(),
                end_key: bounds[1].slice(),
                first_query: bounds[2].slice(),
                end_query: bounds[3].slice(),
            },
            rows,
            keys,
            heads,
            kv_heads,
            head_width,
            scale: self.scale(),
        };
        let backward = AttentionTrainingBackward {
            forward,
            gradient: gradient.slice(),
            gradient_stride: width + GAPS[3],
            delta: delta.slice(),
            dq: dq.slice(),
            dq_stride: width + GAPS[5],
            dk: dk.slice(),
            dk_stride: kv_width + GAPS[6],
            dv: dv.slice(),
            dv_stride: kv_width + GAPS[7],
        };
        attention_training_with(gpu, &forward, kernels).unwrap();
        attention_training_backward_with(gpu, &backward, kernels).unwrap();
        Made {
            out: download(&out, rows, width, GAPS[4]),
            log_sum_exp: read_f32(gpu, &log_sum_exp, heads * rows),
            dq: download(&dq, rows, width, GAPS[5]),
            dk: download(&dk, keys, kv_width, GAPS[6]),
            dv: download(&dv, keys, kv_width, GAPS[7]),
        }
    }

    /// The kernels of this card, and those of every card.
    fn check(&self, gpu: &Gpu) {
        let expected = self.expected();
        for kernels in [Kernels::Fastest, Kernels::Portable] {
            self.check_with(gpu, kernels, &expected);
        }
    }

    fn check_with(&self, gpu: &Gpu, kernels: Kernels, expected: &Made<f64>) {
        let found = self.run(gpu, kernels);
        let name = format!(
            "{kernels:?}: {:?}, {} / {} heads x {}",
            &self.documents[..self.documents.len().min(4)],
            self.heads,
            self.kv_heads,
            self.head_width
        );
        let parts = [
            ("out", &found.out, &expected.out, self.head_width),
            ("dq", &found.dq, &expected.dq, self.heads * self.head_width),
            ("dk", &found.dk, &expected.dk, self.kv_heads * self.head_width),
            ("dv", &found.dv, &expected.dv, self.kv_heads * self.head_width),
        ];
        for (what, found, expected, row) in parts {
            // Where a row sees one key its slopes are zero but for the rounding of F32.
            let is_zero = |row: &[f32]| row.iter().all(|x| x.abs() < 1e-4);
            let size = |row: &[f64]| row.iter().map(|x| x * x).sum::<f64>() / row.len() as f64;
            let usual = size(expected);
            if usual == 0.0 {
                assert!(is_zero(found), "{name}: {what} is zero");
                continue;
            }
            // Probabilities, slopes and results are rounded to bfloat16; delta is of the rounded output.
            let error = relative_error(found, expected);
            assert!(error < 6e-3, "{name}: {what}: {error:.2e}");
            // No row is lost among many, where it is not small beside the others.
            for (i, (found, expected)) in found.chunks_exact(row).zip(expected.chunks_exact(row)).enumerate() {
                if size(expected) == 0.0 {
                    assert!(is_zero(found), "{name}: {what}: row {i} is zero");
                } else if size(expected) > 0.1 * usual {
                    let error = relative_error(found, expected);
                    assert!(error < 5e-2, "{name}: {what}: row {i}: {error:.2e}");
                }
            }
        }
        for (i, (&found, &expected)) in found.log_sum_exp.iter().zip(&expected.log_sum_exp).enumerate() {
            let close = (f64::from(found) - expected).abs() < 2e-5 * expected.abs().max(1.0);
            let both_empty = found == f32::NEG_INFINITY && expected == f64::NEG_INFINITY;
            assert!(close || both_empty, "{name}: log-sum-exp {i}: {found} for {expected}");
        }
        let again = self.run(gpu, kernels);
        let bits = |made: &Made<f32>| {
            let all = [&made.out, &made.log_sum_exp, &made.dq, &made.dk, &made.dv];
            all.into_iter().flatten().map(|x| x.to_bits()).collect::<Vec<u32>>()
        };
        assert!(bits(&found) == bits(&again), "{name}: two runs differ");
    }
}

/// Packings of documents with every mask, across the bounds of tiles.
fn packings() -> Vec<Vec<Document>> {
    vec![
        vec![(1, 1, Sees::Causal)],
        vec![(300, 300, Sees::Causal)],
        vec![(900, 900, Sees::Causal), (40, 700, Sees::All)],
        vec![(64, 64, Sees::Causal), (128, 128, Sees::Causal), (64, 64, Sees::All)],
        vec![(70, 70, Sees::Causal), (1, 1, Sees::Causal), (133, 133, Sees::All), (97, 97, Sees::Window(33))],
        vec![(40, 230, Sees::All), (5, 0, Sees::All), (190, 37, Sees::All), (0, 9, Sees::All)],
        vec![(130, 130, Sees::Nothing), (100, 100, Sees::Window(1)), (50, 50, Sees::Nothing)],
    ]
}

#[test]
fn gradients_equal_double_precision_for_fast_widths() {
    let Some(gpu) = gpu() else { return };
    for head_width in [64, 128] {
        for documents in packings() {
            Case::new(&documents, [4, 2, head_width]).check(&gpu);
        }
        for heads in [[3, 1], [6, 2], [2, 2]] {
            let [heads, kv_heads] = heads;
            Case::new(&packings()[4], [heads, kv_heads, head_width]).check(&gpu);
        }
    }
}

#[test]
fn gradients_equal_double_precision_for_other_widths() {
    let Some(gpu) = gpu() else { return };
    for head_width in [8, 40, 72, 96, 136, 200, 256] {
        for documents in &packings()[4..] {
            Case::new(documents, [2, 1, head_width]).check(&gpu);
        }
    }
}

test_each!(
    gradients_equal_double_precision_in_large_grids,
    check_large_grid,
    // Enough blocks for the large tiles, of short documents.
    width_64: (&super::SHORT, [96, 96, 64]),
    width_64_of_groups: (&super::SHORT, [192, 96, 64]),
    width_128: (&super::SHORT, [96, 96, 128]),
    width_128_of_groups: (&super::SHORT, [192, 96, 128]),
    // And enough for the order of blocks that does not rank tiles.
    width_8_of_many_heads: (&[(150, 150, super::Sees::Window(9))], [2400, 1200, 8]),
    width_64_of_many_heads: (&[(150, 150, super::Sees::Window(9))], [2400, 1200, 64]),
);

const SHORT: [(usize, usize, Sees); 5] = [
    (100, 100, Sees::Causal),
    (90, 90, Sees::All),
    (130, 130, Sees::Window(40)),
    (30, 30, Sees::Nothing),
    (80, 80, Sees::Causal),
];

fn check_large_grid((documents, heads): (&[(usize, usize, Sees)], [usize; 3])) {
    if let Some(gpu) = gpu() {
        Case::new(documents, heads).check(&gpu);
    }
}

#[test]
fn shapes_that_do_not_fit_are_refused() {
    let Some(gpu) = gpu() else { return };
    let (some, zero) = (buffer(&gpu, 1 << 14), upload_i32(&gpu, &[0; 64]));
    let bounds = AttentionBounds {
        first_key: zero.slice(),
        end_key: zero.slice(),
        first_query: zero.slice(),
        end_query: zero.slice(),
    };
    let call = AttentionTraining {
        q: some.slice(),
        q_stride: 128,
        k: some.slice(),
        k_stride: 64,
        v: some.slice(),
        v_stride: 64,
        out: some.slice(),
        out_stride: 128,
        log_sum_exp: some.slice(),
        bounds,
        rows: 5,
        keys: 7,
        heads: 2,
        kv_heads: 1,
        head_width: 64,
        scale: 0.125,
    };
    let backward = |forward| AttentionTrainingBackward {
        forward,
        gradient: some.slice(),
        gradient_stride: 128,
        delta: some.slice(),
        dq: some.slice(),
        dq_stride: 128,
        dk: some.slice(),
        dk_stride: 64,
        dv: some.slice(),
        dv_stride: 64,
    };
    for none in [AttentionTraining { rows: 0, ..call }, AttentionTraining { keys: 0, ..call }] {
        attention_training(&gpu, &none).unwrap();
        attention_training_backward(&gpu, &backward(none)).unwrap();
    }
    for head_width in [0, 20, 264] {
        let wrong = AttentionTraining { head_width, q_stride: 528, k_stride: 264, v_stride: 264, ..call };
        assert!(matches!(attention_training(&gpu, &wrong), Err(Error::Unsupported { .. })));
    }
    for wrong in [
        AttentionTraining { heads: 3, kv_heads: 2, ..call },
        AttentionTraining { q_stride: 120, ..call },
        AttentionTraining { v_stride: 66, ..call },
        AttentionTraining { rows: 65, ..call },
        AttentionTraining { keys: 200, ..call },
        AttentionTraining { scale: 0.0, ..call },
        AttentionTraining { k: some.part(8, 4096).unwrap(), ..call },
    ] {
        assert!(attention_training(&gpu, &wrong).is_err(), "{wrong:?}");
        assert!(attention_training_backward(&gpu, &backward(wrong)).is_err(), "{wrong:?}");
    }
    let right = backward(call);
    for wrong in [
        AttentionTrainingBackward { gradient_stride: 64, ..right },
        AttentionTrainingBackward { dk_stride: 32, ..right },
        AttentionTrainingBackward { delta: some.part(0, 16).unwrap(), ..right },
        AttentionTrainingBackward { dv: some.part(0, 16).unwrap(), ..right },
    ] {
        assert!(attention_training_backward(&gpu, &wrong).is_err(), "{wrong:?}");
    }
}

/// Microseconds of both passes over causal documents, and teraflops, the backward pass counted as 2.5 forward ones.
#[test]
#[ignore = "prints times"]
fn speed_of_training_passes() {
    let Some(gpu) = gpu() else { return };
    let sizes = [
        [4, 1024, 12, 4, 64],
        [16, 1024, 12, 4, 64],
        [16, 4096, 16, 16, 64],
        [4, 1024, 12, 4, 128],
        [16, 4096, 16, 16, 128],
        [4, 1024, 12, 4, 96],
        [4, 1024, 4, 4, 256],
    ];
    for [batch, length, heads, kv_heads, head_width] in sizes {
        let rows = batch * length;
        let bounds = bounds(&vec![(length, length, Sees::Causal); batch]).map(|bounds| upload_i32(&gpu, &bounds));
        let (width, kv_width) = (heads * head_width, kv_heads * head_width);
        let pattern = normals(1, 1 << 16);
        let filled = |count: usize| upload_bf16(&gpu, &pattern.iter().copied().cycle().take(count).collect::<Vec<_>>());
        let (q, k, v, gradient) =
            (filled(rows * width), filled(rows * kv_width), filled(rows * kv_width), filled(rows * width));
        let (out, dq) = (buffer(&gpu, rows * width * 2), buffer(&gpu, rows * width * 2));
        let (dk, dv) = (buffer(&gpu, rows * kv_width * 2), buffer(&gpu, rows * kv_width * 2));
        let (log_sum_exp, delta) = (buffer(&gpu, heads * rows * 4), buffer(&gpu, heads * rows * 4));
        let forward = AttentionTraining {
            q: q.slice(),
            q_stride: width,
            k: k.slice(),
            k_stride: kv_width,
            v: v.slice(),
            v_stride: kv_width,
            out: out.slice(),
            out_stride: width,
            log_sum_exp: log_sum_exp.slice(),
            bounds: AttentionBounds {
                first_key: bounds[0].slice(),
                end_key: bounds[1].slice(),
                first_query: bounds[2].slice(),
                end_query: bounds[3].slice(),
            },
            rows,
            keys: rows,
            heads,
            kv_heads,
            head_width,
            scale: 1.0 / (head_width as f32).sqrt(),
        };
        let backward = AttentionTrainingBackward {
            forward,
            gradient: gradient.slice(),
            gradient_stride: width,
            delta: delta.slice(),
            dq: dq.slice(),
            dq_stride: width,
            dk: dk.slice(),
            dk_stride: kv_width,
            dv: dv.slice(),
            dv_stride: kv_width,
        };
        let median = |launch: &dyn Fn()| {
            let mut times: Vec<f64> = (0..8)
                .map(|_| {
                    let start = gpu.record_event().unwrap();
                    (0..5).for_each(|_| launch());
                    gpu.record_event().unwrap().seconds_since(&start).unwrap() / 5.0
                })
                .collect();
            times.sort_by(f64::total_cmp);
            times[4]
        };
        let forward_time = median(&|| attention_training(&gpu, &forward).unwrap());
        let portable_time = median(&|| attention_training_with(&gpu, &forward, Kernels::Portable).unwrap());
        let backward_time = median(&|| attention_training_backward(&gpu, &backward).unwrap());
        let portable_backward_time =
            median(&|| attention_training_backward_with(&gpu, &backward, Kernels::Portable).unwrap());
        let operations = (4 * batch * heads * head_width * length * (length + 1) / 2) as f64;
        println!(
            "attention for training, {batch} x {length}, {heads} / {kv_heads} heads x {head_width}: forward {:.1} us, \
             {:.0} TFLOP/s, portable {:.0}, backward {:.1} us, {:.0} TFLOP/s, portable {:.0}",
            forward_time * 1e6,
            operations / forward_time / 1e12,
            operations / portable_time / 1e12,
            backward_time * 1e6,
            2.5 * operations / backward_time / 1e12,
            2.5 * operations / portable_backward_time / 1e12
        );
    }
}
