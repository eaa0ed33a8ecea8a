//! Attention of many rows against double precision, with every mask; and that a row's bits are its own.

use ironloom_kernels::{Attention, Buffer, Error, Gpu, Kernels, Mask, attention, attention_with};

use crate::{buffer, gpu, normals, read_bf16, read_f32, relative_error, round_bf16, upload_bf16};

/// A batch of sequences and all their numbers, rounded.
pub(crate) struct Case {
    batch: usize,
    rows: usize,
    length: usize,
    heads: usize,
    kv_heads: usize,
    head_width: usize,
    mask: Mask,
    queries: Vec<f32>,
    keys: Vec<f32>,
    values: Vec<f32>,
}

impl Case {
    pub(crate) fn new(sizes: [usize; 6], mask: Mask) -> Self {
        let [batch, rows, length, heads, kv_heads, head_width] = sizes;
        let draw = |seed, count| normals(seed, count).into_iter().map(round_bf16).collect();
        let history = batch * length * kv_heads * head_width;
        let queries = draw(1, batch * rows * heads * head_width);
        let (keys, values) = (draw(2, history), draw(3, history));
        Self { batch, rows, length, heads, kv_heads, head_width, mask, queries, keys, values }
    }

    fn scale(&self) -> f32 {
        1.0 / (self.head_width as f32).sqrt()
    }

    /// The outputs, and the log-sum-exp `[batch, heads, rows]`, in double precision.
    fn expected(&self) -> (Vec<f64>, Vec<f64>) {
        let Self { rows, length, heads, kv_heads, head_width, .. } = *self;
        let mut out = vec![0.0; self.queries.len()];
        let mut log_sum_exp = vec![0.0; self.batch * heads * rows];
        for (index, out) in out.chunks_exact_mut(head_width).enumerate() {
            let (sequence, row, head) = (index / heads / rows, index / heads % rows, index % heads);
            let position = length - rows + row;
            let seen = match self.mask {
                Mask::None => 0..length,
                Mask::Causal => 0..position + 1,
                Mask::Window(window) => (position + 1).saturating_sub(window)..position + 1,
            };
            let kv_head = head / (heads / kv_heads);
            let place = |s: usize| ((sequence * length + s) * kv_heads + kv_head) * head_width;
            let q = &self.queries[index * head_width..][..head_width];
            let scores: Vec<f64> = seen
                .clone()
                .map(|s| {
                    let key = &self.keys[place(s)..][..head_width];
                    let dot: f64 = q.iter().zip(key).map(|(&q, &k)| f64::from(q) * f64::from(k)).sum();
                    dot * f64::from(self.scale())
                })
                .collect();
            let greatest = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
            let mut total = 0.0;
            for (score, s) in scores.iter().zip(seen) {
                let p = (score - greatest).exp();
                total += p;
                for (out, &v) in out.iter_mut().zip(&self.values[place(s)..][..head_width]) {
                    *out += p * f64::from(v);
                }
            }
            out.iter_mut().for_each(|x| *x /= total);
            log_sum_exp[(sequence * heads + head) * rows + row] = greatest + total.ln();
        }
        (out, log_sum_exp)
    }

    /// The outputs and the log-sum-exp of a launch.
    pub(crate) fn run(&self, gpu: &Gpu, kernels: Kernels) -> (Vec<f32>, Vec<f32>) {
        self.run_often(gpu, kernels, 1)
    }

    /// Those of the last of some launches. Query rows and histories have NaN behind them.
    pub(crate) fn run_often(&self, gpu: &Gpu, kernels: Kernels, launches: usize) -> (Vec<f32>, Vec<f32>) {
        let Self { batch, rows, length, heads, kv_heads, head_width, mask, .. } = *self;
        let width = heads * head_width;
        let padded = |values: &[f32], part: usize, gap: usize| -> Buffer {
            let parts = values.chunks_exact(part);
            let padded: Vec<f32> = parts.flat_map(|part| part.iter().copied().chain(vec![f32::NAN; gap])).collect();
            upload_bf16(gpu, &padded)
        };
        let history = length * kv_heads * head_width;
        let (queries, keys, values) =
            (padded(&self.queries, width, 24), padded(&self.keys, history, 4096), padded(&self.values, history, 4096));
        let out = buffer(gpu, batch * rows * width * 2);
        let log_sum_exp = buffer(gpu, batch * heads * rows * 4);
        let call = Attention {
            queries: queries.slice(),
            query_stride: width + 24,
            keys: keys.slice(),
            values: values.slice(),
            kv_batch_stride: history + 4096,
            out: out.slice(),
            log_sum_exp: Some(log_sum_exp.slice()),
            batch,
            rows,
            length,
            heads,
            kv_heads,
            head_width,
            scale: self.scale(),
            mask,
        };
        for _ in 0..launches {
            attention_with(gpu, &call, kernels).unwrap();
        }
        (read_bf16(gpu, &out, batch * rows * width), read_f32(gpu, &log_sum_exp, batch * heads * rows))
    }

    /// The last `rows` query rows over the first positions up to `length`, of the first sequence.
    fn part(&self, first_row: usize, rows: usize) -> Self {
        let width = self.heads * self.head_width;
        let length = self.length - self.rows + first_row + rows;
        let history = length * self.kv_heads * self.head_width;
        Self {
            batch: 1,
            rows,
            length,
            queries: self.queries[first_row * width..(first_row + rows) * width].to_vec(),
            keys: self.keys[..history].to_vec(),
            values: self.values[..history].to_vec(),
            ..*self
        }
    }
}

/// The kernels of this card, and those of every card.
pub(crate) const BOTH: [Kernels; 2] = [Kernels::Fastest, Kernels::Portable];

fn check(gpu: &Gpu, sizes: [usize; 6], mask: Mask) {
    let case = Case::new(sizes, mask);
    let (expected, expected_log) = case.expected();
    for kernels in BOTH {
        let (found, found_log) = case.run(gpu, kernels);
        let name = format!("{sizes:?}, {mask:?}, {kernels:?}");
        // Probabilities and the output are rounded to bfloat16.
        let error = relative_error(&found, &expected);
        assert!(error < 4e-3, "{name}: {error:.2e}");
        // No row is lost among many.
        for (row, (found, expected)) in
            found.chunks_exact(case.head_width).zip(expected.chunks_exact(case.head_width)).enumerate()
        {
            let error = relative_error(found, expected);
            assert!(error < 2e-2, "{name}, row and head {row}: {error:.2e}");
        }
        for (index, (&found, expected)) in found_log.iter().zip(&expected_log).enumerate() {
            let error = (f64::from(found) - expected).abs();
            assert!(error < 2e-5 * expected.abs().max(1.0), "{name}: log-sum-exp {index}: {error:.2e}");
        }
        let again = case.run(gpu, kernels);
        assert!((found, found_log) == again, "{name}: two runs differ");
    }
}

test_each!(
    rows_agree_with_double_precision_for_every_mask,
    check_masks,
    width_64: 64,
    width_96: 96,
    width_128: 128,
    width_256: 256,
);

fn check_masks(head_width: usize) {
    let Some(gpu) = gpu() else { return };
    for (rows, before) in [(1, 0), (1, 500), (17, 0), (128, 77), (300, 0), (300, 213)] {
        for mask in [Mask::None, Mask::Causal, Mask::Window(1), Mask::Window(100)] {
            check(&gpu, [1, rows, rows + before, 4, 2, head_width], mask);
        }
    }
    // More tiles of keys than shared memory holds.
    for mask in [Mask::None, Mask::Causal, Mask::Window(700)] {
        check(&gpu, [1, 200, 1500, 2, 1, head_width], mask);
    }
}

#[test]
fn rows_agree_with_double_precision_for_every_group() {
    let Some(gpu) = gpu() else { return };
    for (heads, kv_heads) in [(4, 4), (6, 2), (4, 1), (7, 1), (16, 2)] {
        check(&gpu, [1, 70, 133, heads, kv_heads, 64], Mask::Causal);
    }
}

test_each!(
    rows_agree_with_double_precision_in_batches,
    check_batches,
    width_64: ([3, 129, 200, 4, 2, 64], super::Mask::Causal),
    width_128: ([3, 129, 200, 4, 2, 128], super::Mask::Causal),
    // Enough blocks for the large ones.
    width_64_in_large_blocks: ([8, 290, 290, 32, 8, 64], super::Mask::Window(150)),
    width_128_in_large_blocks: ([8, 290, 290, 32, 8, 128], super::Mask::Window(150)),
    // And enough for heads to follow each other.
    width_64_head_after_head: ([20, 193, 193, 64, 8, 64], super::Mask::Window(9)),
    width_128_head_after_head: ([20, 193, 193, 64, 8, 128], super::Mask::Window(9)),
);

fn check_batches((shape, mask): ([usize; 6], Mask)) {
    if let Some(gpu) = gpu() {
        check(&gpu, shape, mask);
    }
}

#[test]
fn a_row_has_the_same_bits_in_any_call() {
    let Some(gpu) = gpu() else { return };
    for head_width in [64, 96, 128, 256] {
        for mask in [Mask::Causal, Mask::Window(90)] {
            // 3 x 64 blocks of 128 rows, or many of 64.
            let case = Case::new([1, 300, 420, 64, 16, head_width], mask);
            let width = case.heads * head_width;
            for kernels in BOTH {
                let whole = case.run(&gpu, kernels);
                for (first, rows) in [(0, 1), (7, 1), (299, 1), (100, 17), (0, 128), (5, 200)] {
                    let (part, part_log) = case.part(first, rows).run(&gpu, kernels);
                    assert_eq!(
                        part,
                        whole.0[first * width..(first + rows) * width],
                        "width {head_width}, {mask:?}, {kernels:?}, rows {first} .. {}",
                        first + rows
                    );
                    for head in 0..case.heads {
                        assert_eq!(part_log[head * rows..][..rows], whole.1[head * case.rows + first..][..rows]);
                    }
                }
            }
        }
    }
}

#[test]
fn shapes_that_do_not_fit_are_refused() {
    let Some(gpu) = gpu() else { return };
    let some = buffer(&gpu, 1 << 16);
    let call = Attention {
        queries: some.slice(),
        query_stride: 128,
        keys: some.slice(),
        values: some.slice(),
        kv_batch_stride: 0,
        out: some.slice(),
        log_sum_exp: None,
        batch: 1,
        rows: 4,
        length: 10,
        heads: 2,
        kv_heads: 1,
        head_width: 64,
        scale: 1.0,
        mask: Mask::Causal,
    };
    attention(&gpu, &call).unwrap();
    attention(&gpu, &Attention { rows: 0, ..call }).unwrap();
    let unsupported = attention(&gpu, &Attention { head_width: 80, query_stride: 160, ..call });
    assert!(matches!(unsupported, Err(Error::Unsupported { .. })));
    for wrong in [
        Attention { heads: 3, kv_heads: 2, query_stride: 192, ..call },
        Attention { length: 3, ..call },
        Attention { query_stride: 127, ..call },
        Attention { query_stride: 130, ..call },
        Attention { length: 1000, ..call },
        Attention { mask: Mask::Window(0), ..call },
        Attention { scale: f32::NAN, ..call },
        Attention { queries: some.part(2, 4096).unwrap(), ..call },
    ] {
        assert!(attention(&gpu, &wrong).is_err(), "{wrong:?}");
    }
}

/// Teraflops of full causal passes, 16 sequences of 16 heads and 4,096 positions, and of prompts' chunks.
#[test]
#[ignore = "prints times"]
fn speed_of_a_pass() {
    let Some(gpu) = gpu() else { return };
    let sizes = [
        [16, 4096, 4096, 16, 16, 64],
        [16, 4096, 4096, 16, 16, 96],
        [16, 4096, 4096, 16, 16, 128],
        [16, 4096, 4096, 8, 8, 256],
        [1, 512, 512, 16, 2, 128],
        [1, 2048, 4096, 16, 2, 128],
        [1, 17, 4096, 16, 2, 128],
    ];
    for [batch, rows, length, heads, kv_heads, head_width] in sizes {
        let filled = |count: usize| {
            let pattern = normals(1, 1 << 16);
            upload_bf16(&gpu, &pattern.into_iter().cycle().take(count).collect::<Vec<_>>())
        };
        let (width, history) = (heads * head_width, length * kv_heads * head_width);
        let (queries, keys, values) = (filled(batch * rows * width), filled(batch * history), filled(batch * history));
        let out = buffer(&gpu, batch * rows * width * 2);
        let call = Attention {
            queries: queries.slice(),
            query_stride: width,
            keys: keys.slice(),
            values: values.slice(),
            kv_batch_stride: history,
            out: out.slice(),
            log_sum_exp: None,
            batch,
            rows,
            length,
            heads,
            kv_heads,
            head_width,
            scale: 1.0 / (head_width as f32).sqrt(),
            mask: Mask::Causal,
        };
        for kernels in BOTH {
            let mut times: Vec<f64> = (0..8)
                .map(|_| {
                    let start = gpu.record_event().unwrap();
                    for _ in 0..5 {
                        attention_with(&gpu, &call, kernels).unwrap();
                    }
                    gpu.record_event().unwrap().seconds_since(&start).unwrap() / 5.0
                })
                .collect();
            times.sort_by(f64::total_cmp);
            let pairs = rows * (length - rows) + rows * (rows + 1) / 2;
            let operations = (4 * batch * heads * head_width * pairs) as f64;
            let heads = format!("{heads} / {kv_heads} heads x {head_width}");
            println!(
                "attention {batch} x {rows} of {length}, {heads}, {kernels:?}: {:.1} us, {:.0} TFLOP/s",
                times[4] * 1e6,
                operations / times[4] / 1e12
            );
        }
    }
}
