//! Attention of few rows, each over its own history, against double precision; and that a row's bits are its own.

use ironloom_kernels::{AttentionFew, Buffer, FewShape, Gpu, attention_few};

use crate::{
    buffer, gpu, normals, read_bf16, read_split, read_u32, relative_error, round_bf16, upload_bf16, upload_f32,
    upload_i32, upload_u64,
};

/// Rows with the lengths of their histories (0: a padding row), and all their numbers.
struct Case {
    lengths: Vec<usize>,
    heads: usize,
    kv_heads: usize,
    head_width: usize,
    window: Option<usize>,
    queries: Vec<f32>,
    /// Of each row: keys, then values, rounded.
    histories: Vec<[Vec<f32>; 2]>,
}

impl Case {
    fn new(lengths: &[usize], heads: usize, kv_heads: usize, head_width: usize, window: Option<usize>) -> Self {
        let histories = lengths
            .iter()
            .enumerate()
            .map(|(row, length)| {
                let draw = |seed| normals(seed, length * kv_heads * head_width).into_iter().map(round_bf16).collect();
                [draw(10 + 2 * row as u64), draw(11 + 2 * row as u64)]
            })
            .collect();
        let queries = normals(1, lengths.len() * heads * head_width);
        Self { lengths: lengths.to_vec(), heads, kv_heads, head_width, window, queries, histories }
    }

    fn width(&self) -> usize {
        self.heads * self.head_width
    }

    fn scale(&self) -> f32 {
        1.0 / (self.head_width as f32).sqrt()
    }

    /// The rows' outputs in double precision; zeros for padding rows.
    fn expected(&self) -> Vec<f64> {
        let (head_width, kv_width) = (self.head_width, self.kv_heads * self.head_width);
        let mut out = vec![0.0; self.lengths.len() * self.width()];
        for (index, out) in out.chunks_exact_mut(head_width).enumerate() {
            let (row, head) = (index / self.heads, index % self.heads);
            let length = self.lengths[row];
            let first = self.window.map_or(0, |window| length.saturating_sub(window));
            let kv_head = head / (self.heads / self.kv_heads);
            let q = &self.queries[index * head_width..][..head_width];
            let of =
                |part: usize, s: usize| &self.histories[row][part][s * kv_width + kv_head * head_width..][..head_width];
            let scores: Vec<f64> = (first..length)
                .map(|s| q.iter().zip(of(0, s)).map(|(&q, &k)| f64::from(q) * f64::from(k)).sum::<f64>())
                .map(|dot| dot * f64::from(self.scale()))
                .collect();
            let greatest = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
            let mut total = 0.0;
            for (score, s) in scores.iter().zip(first..) {
                let p = (score - greatest).exp();
                total += p;
                for (out, &v) in out.iter_mut().zip(of(1, s)) {
                    *out += p * f64::from(v);
                }
            }
            if length > 0 {
                out.iter_mut().for_each(|x| *x /= total);
            }
        }
        out
    }
}

/// A case on the device.
struct Uploaded {
    queries: Buffer,
    caches: Vec<Buffer>,
    table: Buffer,
    positions: Buffer,
}

impl Uploaded {
    /// The rows of `case` that `chosen` names.
    fn new(gpu: &Gpu, case: &Case, chosen: &[usize]) -> Self {
        let width = case.width();
        let queries: Vec<f32> =
            chosen.iter().flat_map(|&row| case.queries[row * width..][..width].iter().copied()).collect();
        // Behind a history is NaN: nothing of it may be used.
        let behind = vec![f32::NAN; 40 * case.kv_heads * case.head_width];
        let caches: Vec<Buffer> = chosen
            .iter()
            .flat_map(|&row| &case.histories[row])
            .map(|history| upload_bf16(gpu, &[history.as_slice(), &behind].concat()))
            .collect();
        let table: Vec<u64> = caches.iter().map(|cache| cache.slice().address()).collect();
        let positions: Vec<i32> = chosen.iter().map(|&row| case.lengths[row] as i32 - 1).collect();
        Self {
            queries: upload_f32(gpu, &queries),
            caches,
            table: upload_u64(gpu, &table),
            positions: upload_i32(gpu, &positions),
        }
    }
}

/// The outputs of `chosen` rows in one launch made for `max_positions`, the second of two on the same workspace.
fn run(gpu: &Gpu, case: &Case, chosen: &[usize], max_positions: usize) -> Vec<f32> {
    let uploaded = Uploaded::new(gpu, case, chosen);
    assert_eq!(uploaded.caches.len(), 2 * chosen.len());
    let Case { heads, kv_heads, head_width, window, .. } = *case;
    let shape = FewShape { rows: chosen.len(), max_positions, heads, kv_heads, head_width, window };
    let workspace = shape.workspace().unwrap();
    let (partials, tickets) = (buffer(gpu, workspace.partials), buffer(gpu, workspace.tickets));
    gpu.clear(tickets.slice()).unwrap();
    let mut results = [(); 2].map(|()| {
        let out = buffer(gpu, chosen.len() * case.width() * 4);
        let call = AttentionFew {
            queries: uploaded.queries.slice(),
            kv_table: uploaded.table.slice(),
            positions: uploaded.positions.slice(),
            out: out.slice(),
            partials: partials.slice(),
            tickets: tickets.slice(),
            shape,
            scale: case.scale(),
        };
        attention_few(gpu, &call).unwrap();
        assert!(read_u32(gpu, &tickets, workspace.tickets / 4).iter().all(|&ticket| ticket == 0));
        // The parts, so that equal numbers are equal bits.
        (read_bf16(gpu, &out, 2 * chosen.len() * case.width()), read_split(gpu, &out, chosen.len(), case.width()))
    });
    assert_eq!(results[0].0, results[1].0, "a second launch differs");
    std::mem::take(&mut results[0].1)
}

const LENGTHS: [usize; 12] = [1, 15, 16, 17, 63, 64, 65, 0, 127, 1000, 1025, 4100];

fn check(gpu: &Gpu, case: &Case) {
    let chosen: Vec<usize> = (0..case.lengths.len()).collect();
    let longest = *case.lengths.iter().max().unwrap();
    let found = run(gpu, case, &chosen, longest);
    let expected = case.expected();
    let name =
        format!("width {}, {} heads over {}, window {:?}", case.head_width, case.heads, case.kv_heads, case.window);
    for (row, (found, expected)) in
        found.chunks_exact(case.width()).zip(expected.chunks_exact(case.width())).enumerate()
    {
        let length = case.lengths[row];
        if length == 0 {
            assert!(found.iter().all(|&x| x == 0.0), "{name}: a padding row is not zero");
            continue;
        }
        // Two parts of bfloat16 hold 16 bits: of queries, of probabilities, of the output.
        let error = relative_error(found, expected);
        assert!(error < 2e-5, "{name}, length {length}: {error:.2e}");
    }
}

#[test]
fn rows_agree_with_double_precision_for_every_group() {
    let Some(gpu) = gpu() else { return };
    for (heads, kv_heads) in [(4, 4), (4, 2), (6, 2), (8, 2), (7, 1), (16, 2), (10, 1)] {
        check(&gpu, &Case::new(&LENGTHS, heads, kv_heads, 64, None));
    }
}

#[test]
fn rows_agree_with_double_precision_for_every_width() {
    let Some(gpu) = gpu() else { return };
    for head_width in [64, 80, 96, 128, 256, 67, 16] {
        for window in [None, Some(1), Some(100)] {
            check(&gpu, &Case::new(&LENGTHS, 8, 2, head_width, window));
        }
    }
}

#[test]
fn a_long_history_is_merged_in_two_levels() {
    let Some(gpu) = gpu() else { return };
    for (heads, kv_heads, head_width) in [(8, 1, 128), (3, 1, 80), (8, 4, 64)] {
        check(&gpu, &Case::new(&[20_001, 9000], heads, kv_heads, head_width, None));
    }
}

#[test]
fn a_row_has_the_same_bits_alone_and_among_others() {
    let Some(gpu) = gpu() else { return };
    for head_width in [128, 80] {
        let lengths: Vec<usize> = (0..64).map(|row| 1 + row * 37).collect();
        let case = Case::new(&lengths, 4, 2, head_width, None);
        let together = run(&gpu, &case, &(0..64).collect::<Vec<_>>(), 2500);
        for row in [0, 1, 2, 17, 40, 63] {
            // Alone, and in a launch made for longer histories.
            for max_positions in [lengths[row], 100_000] {
                let alone = run(&gpu, &case, &[row], max_positions);
                assert_eq!(alone, together[row * case.width()..][..case.width()], "width {head_width}, row {row}");
            }
        }
    }
}

#[test]
fn shapes_that_do_not_fit_are_refused() {
    let Some(gpu) = gpu() else { return };
    let some = buffer(&gpu, 4096);
    let shape = FewShape { rows: 1, max_positions: 10, heads: 2, kv_heads: 1, head_width: 64, window: None };
    let call = AttentionFew {
        queries: some.slice(),
        kv_table: some.slice(),
        positions: some.slice(),
        out: some.slice(),
        partials: some.slice(),
        tickets: some.slice(),
        shape,
        scale: 1.0,
    };
    for wrong in [
        FewShape { heads: 3, kv_heads: 2, ..shape },
        FewShape { head_width: 257, ..shape },
        FewShape { window: Some(0), ..shape },
        FewShape { rows: 1000, ..shape },
        FewShape { max_positions: 100_000, ..shape },
    ] {
        assert!(attention_few(&gpu, &AttentionFew { shape: wrong, ..call }).is_err(), "{wrong:?}");
    }
}

/// Microseconds of a launch inside a graph of 36, each with caches of its own.
#[test]
#[ignore = "prints times"]
fn speed_of_a_layer() {
    let Some(gpu) = gpu() else { return };
    const LAYERS: usize = 36;
    for (rows, length, kv_heads) in
        [(1, 640, 2), (16, 640, 2), (64, 640, 2), (1, 4096, 2), (1, 16_384, 2), (1, 65_536, 2)]
    {
        let (heads, head_width) = (8 * kv_heads, 128);
        let shape = FewShape { rows, max_positions: length, heads, kv_heads, head_width, window: None };
        let workspace = shape.workspace().unwrap();
        let bytes = length * kv_heads * head_width * 2;
        let caches: Vec<Buffer> = (0..LAYERS * rows).map(|_| gpu.allocate(2 * bytes, "a test").unwrap()).collect();
        for cache in &caches {
            gpu.clear(cache.slice()).unwrap();
        }
        let address = |cache: &Buffer| [cache.slice().address(), cache.slice().address() + bytes as u64];
        let tables: Vec<Buffer> = caches
            .chunks_exact(rows)
            .map(|caches| upload_u64(&gpu, &caches.iter().flat_map(address).collect::<Vec<_>>()))
            .collect();
        let positions = upload_i32(&gpu, &vec![length as i32 - 1; rows]);
        let queries = upload_f32(&gpu, &normals(1, rows * heads * head_width));
        let (out, partials) = (buffer(&gpu, rows * heads * head_width * 4), buffer(&gpu, workspace.partials));
        let tickets = buffer(&gpu, workspace.tickets);
        gpu.clear(tickets.slice()).unwrap();
        let (graph, ()) = gpu
            .capture(|| {
                tables.iter().try_for_each(|table| {
                    attention_few(
                        &gpu,
                        &AttentionFew {
                            queries: queries.slice(),
                            kv_table: table.slice(),
                            positions: positions.slice(),
                            out: out.slice(),
                            partials: partials.slice(),
                            tickets: tickets.slice(),
                            shape,
                            scale: 0.09,
                        },
                    )
                })
            })
            .unwrap();
        let mut times: Vec<f64> = (0..20)
            .map(|_| {
                let start = gpu.record_event().unwrap();
                graph.replay().unwrap();
                gpu.record_event().unwrap().seconds_since(&start).unwrap() / LAYERS as f64
            })
            .collect();
        times.sort_by(f64::total_cmp);
        println!(
            "attention_few {rows} x {length}, {heads} heads over {kv_heads} x {head_width}: {:.2} us, {:.2} TB/s",
            times[10] * 1e6,
            (2 * bytes * rows) as f64 / times[10] / 1e12
        );
    }
}
