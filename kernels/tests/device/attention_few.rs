//! Attention of few rows, each over its own history, against double precision; and that a row's bits are its own.

use ironloom_kernels::{AttentionFew, Buffer, FewShape, Gpu, attention_few};

use crate::{
    buffer, gpu, normals, read_bf16, read_split, read_u32, relative_error, round_bf16, upload_bf16, upload_f32,
    upload_i32, upload_u64,
};

/// Rows and all their numbers.
struct Case {
    /// Of each row: its sequence, and how many positions it sees without a window, its own among them (0: a padding
    /// row).
    rows: Vec<(usize, usize)>,
    shape: Shape,
    qkv: Vec<f32>,
    phases: Vec<f32>,
    norms: [Vec<f32>; 2],
    /// Of each sequence: keys, then values, rounded. What rows append is in its place.
    histories: Vec<[Vec<f32>; 2]>,
}

#[derive(Clone, Copy)]
struct Shape {
    heads: usize,
    kv_heads: usize,
    head_width: usize,
    half: usize,
    window: Option<usize>,
    norms: bool,
}

const EPSILON: f32 = 1e-5;
/// Positions behind a history, full of NaN: nothing of them may be used or written.
const BEHIND: usize = 40;

impl Shape {
    fn plain(heads: usize, kv_heads: usize, head_width: usize) -> Self {
        Self { heads, kv_heads, head_width, half: head_width / 2, window: None, norms: false }
    }

    fn kv_width(&self) -> usize {
        self.kv_heads * self.head_width
    }
}

impl Case {
    /// Each row a sequence of its own.
    fn new(lengths: &[usize], shape: Shape) -> Self {
        Self::of_sequences(&lengths.iter().copied().enumerate().collect::<Vec<_>>(), shape)
    }

    fn of_sequences(rows: &[(usize, usize)], shape: Shape) -> Self {
        let Shape { heads, kv_heads, head_width, half, .. } = shape;
        let sequences = rows.iter().map(|row| row.0 + 1).max().unwrap();
        let histories = (0..sequences as u64)
            .map(|sequence| {
                let length = rows.iter().filter(|row| row.0 as u64 == sequence).map(|row| row.1).max().unwrap();
                let draw = |seed| normals(seed, length * shape.kv_width()).into_iter().map(round_bf16).collect();
                [draw(10 + 2 * sequence), draw(11 + 2 * sequence)]
            })
            .collect();
        let mut case = Self {
            rows: rows.to_vec(),
            shape,
            qkv: normals(1, rows.len() * (heads + 2 * kv_heads) * head_width),
            phases: normals(2, rows.len() * 2 * half),
            norms: [3, 4].map(|seed| normals(seed, head_width).into_iter().map(|x| 1.0 + 0.3 * x).collect()),
            histories,
        };
        for (row, &(sequence, length)) in rows.iter().enumerate().filter(|row| row.1.1 > 0) {
            for part in 0..2 {
                for head in 0..kv_heads {
                    let new = case.head(row, heads + part * kv_heads + head);
                    let place = (length - 1) * shape.kv_width() + head * head_width;
                    let to = &mut case.histories[sequence][part][place..place + head_width];
                    to.iter_mut().zip(new).for_each(|(to, x)| *to = round_bf16(x as f32));
                }
            }
        }
        case
    }

    fn width(&self) -> usize {
        self.shape.heads * self.shape.head_width
    }

    fn row_width(&self) -> usize {
        self.width() + 2 * self.shape.kv_width()
    }

    fn scale(&self) -> f32 {
        // Phases of length 1.4 and norms of about 1 make longer vectors than a model has.
        0.5 / (self.shape.head_width as f32).sqrt()
    }

    /// A head of a row's projections, normed and turned, in double precision.
    fn head(&self, row: usize, head: usize) -> Vec<f64> {
        let Shape { heads, kv_heads, head_width, half, norms, .. } = self.shape;
        let mut x: Vec<f64> =
            self.qkv[row * self.row_width() + head * head_width..][..head_width].iter().map(|&x| x.into()).collect();
        if head >= heads + kv_heads {
            return x;
        }
        if norms {
            let factor = 1.0 / (x.iter().map(|x| x * x).sum::<f64>() / head_width as f64 + f64::from(EPSILON)).sqrt();
            let weight = &self.norms[usize::from(head >= heads)];
            x.iter_mut().zip(weight).for_each(|(x, &w)| *x *= factor * f64::from(w));
        }
        let phases = &self.phases[row * 2 * half..][..2 * half];
        for i in 0..half {
            let (cosine, sine) = (f64::from(phases[i]), f64::from(phases[half + i]));
            (x[i], x[half + i]) = (x[i] * cosine - x[half + i] * sine, x[half + i] * cosine + x[i] * sine);
        }
        x
    }

    /// The rows' outputs in double precision; zeros for padding rows.
    fn expected(&self) -> Vec<f64> {
        let Shape { heads, kv_heads, head_width, window, .. } = self.shape;
        let mut out = vec![0.0; self.rows.len() * self.width()];
        for (index, out) in out.chunks_exact_mut(head_width).enumerate() {
            let (row, head) = (index / heads, index % heads);
            let (sequence, length) = self.rows[row];
            let first = window.map_or(0, |window| length.saturating_sub(window));
            let kv_head = head / (heads / kv_heads);
            let q = self.head(row, head);
            let of = |part: usize, s: usize| {
                &self.histories[sequence][part][s * self.shape.kv_width() + kv_head * head_width..][..head_width]
            };
            let scores: Vec<f64> = (first..length)
                .map(|s| q.iter().zip(of(0, s)).map(|(&q, &k)| q * f64::from(k)).sum::<f64>())
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

    /// What the caches of a sequence hold before a pass of the rows `chosen`: NaN where these append, and behind.
    fn before(&self, sequence: usize, part: usize, chosen: &[usize]) -> Vec<f32> {
        let kv_width = self.shape.kv_width();
        let mut cache = self.histories[sequence][part].clone();
        for &row in chosen.iter().filter(|&&row| self.rows[row].0 == sequence && self.rows[row].1 > 0) {
            cache[(self.rows[row].1 - 1) * kv_width..][..kv_width].fill(f32::NAN);
        }
        cache.resize(cache.len() + BEHIND * kv_width, f32::NAN);
        cache
    }
}

/// The caches of a case before a pass of `chosen`: keys and values of each sequence.
fn upload_caches(gpu: &Gpu, case: &Case, chosen: &[usize]) -> Vec<[Buffer; 2]> {
    (0..case.histories.len())
        .map(|sequence| [0, 1].map(|part| upload_bf16(gpu, &case.before(sequence, part, chosen))))
        .collect()
}

/// The outputs of `chosen` rows in one launch made for `max_positions`, the second of two on the same workspace.
fn pass(gpu: &Gpu, case: &Case, chosen: &[usize], max_positions: usize, caches: &[[Buffer; 2]]) -> Vec<f32> {
    let Shape { heads, kv_heads, head_width, half, window, norms } = case.shape;
    let of_rows = |numbers: &[f32], width: usize| -> Vec<f32> {
        chosen.iter().flat_map(|&row| numbers[row * width..][..width].iter().copied()).collect()
    };
    let qkv = upload_f32(gpu, &of_rows(&case.qkv, case.row_width()));
    // One number more, as an upload of none is refused.
    let phases = upload_f32(gpu, &[of_rows(&case.phases, 2 * half), vec![0.0]].concat());
    let weights = [0, 1].map(|i| upload_f32(gpu, &case.norms[i]));
    let table: Vec<u64> = chosen
        .iter()
        .flat_map(|&row| caches[case.rows[row].0].each_ref().map(|cache| cache.slice().address()))
        .collect();
    let positions: Vec<i32> = chosen.iter().map(|&row| case.rows[row].1 as i32 - 1).collect();
    let (table, positions) = (upload_u64(gpu, &table), upload_i32(gpu, &positions));
    let shape = FewShape { rows: chosen.len(), max_positions, heads, kv_heads, head_width, window };
    let workspace = shape.workspace().unwrap();
    let (partials, tickets) = (buffer(gpu, workspace.partials), buffer(gpu, workspace.tickets));
    gpu.clear(tickets.slice()).unwrap();
    let mut results = [(); 2].map(|()| {
        let out = buffer(gpu, chosen.len() * case.width() * 4);
        let call = AttentionFew {
            qkv: qkv.slice(),
            q_norm: norms.then(|| weights[0].slice()),
            k_norm: norms.then(|| weights[1].slice()),
            epsilon: EPSILON,
            phases: phases.slice(),
            half,
            kv_table: table.slice(),
            positions: positions.slice(),
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

/// The outputs of a pass over caches of its own. What it appends is checked.
fn run(gpu: &Gpu, case: &Case, chosen: &[usize], max_positions: usize) -> Vec<f32> {
    let caches = upload_caches(gpu, case, chosen);
    let out = pass(gpu, case, chosen, max_positions, &caches);
    for (sequence, caches) in caches.iter().enumerate() {
        for (part, cache) in caches.iter().enumerate() {
            let before = case.before(sequence, part, chosen);
            let after = read_bf16(gpu, cache, before.len());
            let history = &case.histories[sequence][part];
            // A position that no row of the pass appended is NaN still, or as it was.
            let appended: Vec<usize> = (0..history.len()).filter(|&i| before[i].is_nan()).collect();
            let (found, expected): (Vec<f32>, Vec<f64>) =
                appended.iter().map(|&i| (after[i], f64::from(history[i]))).unzip();
            assert!(relative_error(&found, &expected) < 1e-3, "sequence {sequence}, part {part}: what was appended");
            for i in (0..before.len()).filter(|&i| i >= history.len() || !before[i].is_nan()) {
                assert!(after[i].to_bits() == before[i].to_bits() || (after[i].is_nan() && before[i].is_nan()));
            }
        }
    }
    out
}

const LENGTHS: [usize; 14] = [1, 15, 16, 17, 63, 64, 65, 0, 127, 513, 640, 1025, 2048, 2049];

fn check(gpu: &Gpu, case: &Case) {
    let chosen: Vec<usize> = (0..case.rows.len()).collect();
    let longest = case.rows.iter().map(|row| row.1).max().unwrap();
    let found = run(gpu, case, &chosen, longest);
    let expected = case.expected();
    let Shape { heads, kv_heads, head_width, half, window, norms } = case.shape;
    let name = format!(
        "width {head_width}, {half} pairs, {heads} heads over {kv_heads}, window {window:?}, norms {norms}, {:?}",
        case.rows
    );
    for (row, (found, expected)) in
        found.chunks_exact(case.width()).zip(expected.chunks_exact(case.width())).enumerate()
    {
        let length = case.rows[row].1;
        if length == 0 {
            assert!(found.iter().all(|&x| x == 0.0), "{name}: a padding row is not zero");
            continue;
        }
        // Two parts of bfloat16 hold 16 bits: of queries, of probabilities, of the output. A new key that lies between
        // two bfloat16 may be rounded to the other one.
        let error = relative_error(found, expected);
        assert!(error < 5e-5 + 4e-3 / (length as f64), "{name}, length {length}: {error:.2e}");
    }
}

#[test]
fn rows_agree_with_double_precision_for_every_group() {
    let Some(gpu) = gpu() else { return };
    for (heads, kv_heads) in [(4, 4), (4, 2), (6, 2), (8, 2), (7, 1), (16, 2), (10, 1)] {
        check(&gpu, &Case::new(&LENGTHS, Shape::plain(heads, kv_heads, 64)));
    }
}

#[test]
fn rows_agree_with_double_precision_for_every_width() {
    let Some(gpu) = gpu() else { return };
    for (head_width, half) in
        [(64, 32), (80, 40), (96, 48), (128, 64), (256, 128), (67, 33), (16, 8), (128, 12), (96, 16)]
    {
        for (window, norms) in [(None, true), (Some(1), false), (Some(100), true)] {
            let shape = Shape { half, window, norms, ..Shape::plain(8, 2, head_width) };
            check(&gpu, &Case::new(&LENGTHS, shape));
        }
    }
}

#[test]
fn a_long_history_is_merged_in_two_levels() {
    let Some(gpu) = gpu() else { return };
    for (heads, kv_heads, head_width) in [(8, 1, 128), (3, 1, 80), (8, 4, 64)] {
        check(&gpu, &Case::new(&[20_001, 9000], Shape::plain(heads, kv_heads, head_width)));
    }
}

#[test]
fn rows_of_one_sequence_see_each_other() {
    let Some(gpu) = gpu() else { return };
    for (head_width, window) in [(128, None), (64, Some(5)), (80, None), (256, None)] {
        // A prompt, a verify pass over the end of a chunk, and two rows of their own.
        let rows: Vec<(usize, usize)> = (1..=18)
            .map(|length| (0, length))
            .chain((634..650).map(|length| (1, length)))
            .chain([(2, 300), (3, 1)])
            .collect();
        let shape = Shape { window, norms: true, ..Shape::plain(8, 2, head_width) };
        let case = Case::of_sequences(&rows, shape);
        check(&gpu, &case);
        // Each row alone, after those before it were appended by this pass, has the same bits.
        let all: Vec<usize> = (0..rows.len()).collect();
        let caches = upload_caches(&gpu, &case, &all);
        let together = pass(&gpu, &case, &all, 700, &caches);
        for row in all {
            let alone = pass(&gpu, &case, &[row], 700, &caches);
            assert_eq!(alone, together[row * case.width()..][..case.width()], "width {head_width}, row {row}");
        }
    }
}

fn same_bits_alone(head_width: usize) {
    let Some(gpu) = gpu() else { return };
    // On a card with clusters, a row alone is merged in a cluster, and one of 64 rows by tickets.
    let lengths: Vec<usize> = (0..64).map(|row| 1 + row * 37).collect();
    let case = Case::new(&lengths, Shape { norms: true, ..Shape::plain(4, 2, head_width) });
    let together = run(&gpu, &case, &(0..64).collect::<Vec<_>>(), 2500);
    for row in [0, 1, 2, 17, 40, 63] {
        // Alone, and in a launch made for longer histories.
        for max_positions in [lengths[row], 100_000] {
            let alone = run(&gpu, &case, &[row], max_positions);
            assert_eq!(alone, together[row * case.width()..][..case.width()], "row {row}");
        }
    }
}

test_each!(
    a_row_has_the_same_bits_alone_and_among_others,
    same_bits_alone,
    width_64: 64,
    width_80: 80,
    width_96: 96,
    width_128: 128,
    width_256: 256,
);

#[test]
fn shapes_that_do_not_fit_are_refused() {
    let Some(gpu) = gpu() else { return };
    let some = buffer(&gpu, 8192);
    let shape = FewShape { rows: 1, max_positions: 10, heads: 2, kv_heads: 1, head_width: 64, window: None };
    let call = AttentionFew {
        qkv: some.slice(),
        q_norm: None,
        k_norm: None,
        epsilon: 0.0,
        phases: some.slice(),
        half: 32,
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
    assert!(attention_few(&gpu, &AttentionFew { half: 33, ..call }).is_err());
}

/// Microseconds of a launch inside a graph of 36, each with caches of its own, made for 32,768 positions at least.
#[test]
#[ignore = "prints times"]
fn speed_of_a_layer() {
    let Some(gpu) = gpu() else { return };
    const LAYERS: usize = 36;
    for (rows, length, kv_heads) in [
        (1, 640, 2),
        (8, 640, 2),
        (12, 640, 2),
        (16, 640, 2),
        (64, 640, 2),
        (1, 4096, 2),
        (1, 16_384, 2),
        (1, 65_536, 2),
    ] {
        let (heads, head_width) = (8 * kv_heads, 128);
        let max_positions = length.max(32_768);
        let shape = FewShape { rows, max_positions, heads, kv_heads, head_width, window: None };
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
        let qkv = upload_f32(&gpu, &normals(1, rows * (heads + 2 * kv_heads) * head_width));
        let phases = upload_f32(&gpu, &normals(2, rows * head_width));
        let (out, partials) = (buffer(&gpu, rows * heads * head_width * 4), buffer(&gpu, workspace.partials));
        let tickets = buffer(&gpu, workspace.tickets);
        gpu.clear(tickets.slice()).unwrap();
        let (graph, ()) = gpu
            .capture(|| {
                tables.iter().try_for_each(|table| {
                    attention_few(
                        &gpu,
                        &AttentionFew {
                            qkv: qkv.slice(),
                            q_norm: None,
                            k_norm: None,
                            epsilon: 0.0,
                            phases: phases.slice(),
                            half: head_width / 2,
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
