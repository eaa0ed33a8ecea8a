//! Caches of more than 2^31 elements: what lies behind that many is read and written as in a small cache.

use std::sync::{Mutex, MutexGuard, PoisonError};

use ironloom_kernels::{
    Attention, AttentionFew, Buffer, FewShape, Gpu, Kernels, Mask, RopeAppend, attention_few, attention_with,
    rope_append,
};

use crate::{
    buffer, gpu, normals, read_bf16, read_split, relative_error, round_bf16, upload_bf16, upload_f32, upload_i32,
    upload_u64,
};

/// Elements before the positions that hold numbers.
const ZEROS: usize = 1 << 31;
/// The positions that hold numbers, the last of a cache; a multiple of every kernel's tile.
const KNOWN: usize = 4096;
/// The caches of a test, and what is left to others.
const ROOM: usize = 16 << 30;
/// Held by the test whose caches are on the card.
static TURN: Mutex<()> = Mutex::new(());

/// Heads, and the numbers of the last positions.
struct Case {
    heads: usize,
    kv_heads: usize,
    head_width: usize,
    /// The new rows' projections `[rows, heads + 2 kv_heads, head_width]`, rounded.
    qkv: Vec<f32>,
    rows: usize,
    /// `[KNOWN, kv_heads, head_width]`, rounded: those of the new rows in their places.
    known: [Vec<f32>; 2],
}

/// Keys and values of one sequence.
struct Cache {
    parts: [Buffer; 2],
    length: usize,
}

impl Case {
    fn new(kv_heads: usize, head_width: usize, rows: usize) -> Self {
        let heads = 2 * kv_heads;
        let draw = |seed, count| -> Vec<f32> { normals(seed, count).into_iter().map(round_bf16).collect() };
        let kv_width = kv_heads * head_width;
        let row_width = heads * head_width + 2 * kv_width;
        let qkv = draw(1, rows * row_width);
        let mut known = [2, 3].map(|seed| draw(seed, KNOWN * kv_width));
        for (row, new) in qkv.chunks_exact(row_width).enumerate() {
            for (part, known) in known.iter_mut().enumerate() {
                let new = &new[heads * head_width + part * kv_width..][..kv_width];
                known[(KNOWN - rows + row) * kv_width..][..kv_width].copy_from_slice(new);
            }
        }
        Self { heads, kv_heads, head_width, qkv, rows, known }
    }

    fn kv_width(&self) -> usize {
        self.kv_heads * self.head_width
    }

    fn scale(&self) -> f32 {
        1.0 / (self.head_width as f32).sqrt()
    }

    /// Angles of zero: queries and keys stay what they are.
    fn phases(&self) -> Vec<f32> {
        let half = self.head_width / 2;
        [vec![1.0; half], vec![0.0; half]].concat().repeat(self.rows)
    }

    /// The small cache, of the known positions alone, and the large one. The new rows are not in them yet.
    fn caches(&self, gpu: &Gpu) -> [Cache; 2] {
        let kv_width = self.kv_width();
        let old = (KNOWN - self.rows) * kv_width;
        [0, ZEROS.div_ceil(kv_width).next_multiple_of(KNOWN)].map(|zeros| {
            let length = zeros + KNOWN;
            let parts = self.known.each_ref().map(|known| {
                let part = gpu.allocate_cleared(length * kv_width * 2, "a test").unwrap();
                let known = upload_bf16(gpu, &known[..old]);
                gpu.copy(part.part(zeros * kv_width * 2, known.bytes()).unwrap(), known.slice()).unwrap();
                part
            });
            Cache { parts, length }
        })
    }

    /// The rows' outputs in double precision, over all positions up to their own, `zeros` of them before the known ones.
    fn expected(&self, zeros: usize) -> Vec<f64> {
        let Self { heads, kv_heads, head_width, rows, .. } = *self;
        let mut out = vec![0.0; rows * heads * head_width];
        for (index, out) in out.chunks_exact_mut(head_width).enumerate() {
            let (row, head) = (index / heads, index % heads);
            let q = &self.qkv[(row * (heads + 2 * kv_heads) + head) * head_width..][..head_width];
            let of = |part: usize, s: usize| {
                &self.known[part][(s * kv_heads + head / (heads / kv_heads)) * head_width..][..head_width]
            };
            let dot = |s| -> f64 { q.iter().zip(of(0, s)).map(|(&q, &k)| f64::from(q) * f64::from(k)).sum() };
            let scores: Vec<f64> = (0..=KNOWN - rows + row).map(|s| dot(s) * f64::from(self.scale())).collect();
            let mut total = zeros as f64;
            for (s, p) in scores.into_iter().map(f64::exp).enumerate() {
                total += p;
                out.iter_mut().zip(of(1, s)).for_each(|(out, &v)| *out += p * f64::from(v));
            }
            out.iter_mut().for_each(|x| *x /= total);
        }
        out
    }

    /// The new rows are where they belong.
    fn check_appended(&self, gpu: &Gpu, cache: &Cache) {
        let (kv_width, bytes) = (self.kv_width(), self.rows * self.kv_width() * 2);
        for (part, known) in cache.parts.iter().zip(&self.known) {
            let last = gpu.allocate(bytes, "a test").unwrap();
            gpu.copy(last.slice(), part.part(part.bytes() - bytes, bytes).unwrap()).unwrap();
            let found = read_bf16(gpu, &last, self.rows * kv_width);
            assert!(found == known[(KNOWN - self.rows) * kv_width..], "width {}: what was appended", self.head_width);
        }
    }
}

/// The first device, where it has the room, and this test's turn on it.
fn large_gpu() -> Option<(Gpu, MutexGuard<'static, ()>)> {
    let turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
    let gpu = gpu()?;
    let available = gpu.available_bytes().unwrap();
    if available < ROOM {
        println!("skipped: {available} bytes are available, and {ROOM} are needed");
        return None;
    }
    Some((gpu, turn))
}

/// The output of attention of few rows for one row at the cache's last position.
fn decode(gpu: &Gpu, case: &Case, cache: &Cache, window: Option<usize>) -> Vec<f32> {
    let Case { heads, kv_heads, head_width, .. } = *case;
    let shape = FewShape { rows: 1, max_positions: cache.length, heads, kv_heads, head_width, window };
    let workspace = shape.workspace().unwrap();
    let (partials, tickets) = (buffer(gpu, workspace.partials), buffer(gpu, workspace.tickets));
    gpu.clear(tickets.slice()).unwrap();
    let (qkv, phases) = (upload_f32(gpu, &case.qkv), upload_f32(gpu, &case.phases()));
    let table = upload_u64(gpu, &cache.parts.each_ref().map(|part| part.slice().address()));
    let positions = upload_i32(gpu, &[cache.length as i32 - 1]);
    let out = buffer(gpu, heads * head_width * 4);
    let call = AttentionFew {
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
        scale: case.scale(),
    };
    attention_few(gpu, &call).unwrap();
    read_split(gpu, &out, 1, heads * head_width)
}

test_each!(
    a_row_decodes_what_lies_behind_two_to_the_31_elements,
    decode_window,
    width_64: [8, 64],
    width_128: [8, 128],
    width_256: [4, 256],
    // By the kernel for any width.
    width_80: [8, 80],
);

fn decode_window([kv_heads, head_width]: [usize; 2]) {
    let Some((gpu, _turn)) = large_gpu() else { return };
    let case = Case::new(kv_heads, head_width, 1);
    let caches = case.caches(&gpu);
    // One leaf of chunks, and several.
    for window in [700, 3000] {
        let [small, large] = caches.each_ref().map(|cache| decode(&gpu, &case, cache, Some(window)));
        assert!(small == large, "width {head_width}, window {window}");
    }
    caches.iter().for_each(|cache| case.check_appended(&gpu, cache));
}

test_each!(
    a_row_decodes_all_of_more_than_two_to_the_31_elements,
    decode_all,
    width_64: [8, 64],
    width_128: [8, 128],
    width_256: [4, 256],
    width_80: [8, 80],
);

fn decode_all([kv_heads, head_width]: [usize; 2]) {
    let Some((gpu, _turn)) = large_gpu() else { return };
    let case = Case::new(kv_heads, head_width, 1);
    for cache in case.caches(&gpu) {
        let out = decode(&gpu, &case, &cache, None);
        let error = relative_error(&out, &case.expected(cache.length - KNOWN));
        assert!(error < 1e-4, "width {head_width}, {} positions: {error:.2e}", cache.length);
        case.check_appended(&gpu, &cache);
    }
}

/// The output of attention of many rows, which end at the cache's last position.
fn prompt(gpu: &Gpu, case: &Case, cache: &Cache, queries: &Buffer, mask: Mask, kernels: Kernels) -> Vec<f32> {
    let Case { heads, kv_heads, head_width, rows, .. } = *case;
    let out = buffer(gpu, rows * heads * head_width * 2);
    let call = Attention {
        queries: queries.slice(),
        query_stride: heads * head_width,
        keys: cache.parts[0].slice(),
        values: cache.parts[1].slice(),
        kv_batch_stride: 0,
        out: out.slice(),
        log_sum_exp: None,
        batch: 1,
        rows,
        length: cache.length,
        heads,
        kv_heads,
        head_width,
        scale: case.scale(),
        mask,
    };
    attention_with(gpu, &call, kernels).unwrap();
    read_bf16(gpu, &out, rows * heads * head_width)
}

/// Appends the new rows to the cache; their queries.
fn append(gpu: &Gpu, case: &Case, cache: &Cache) -> Buffer {
    let Case { heads, kv_heads, head_width, rows, .. } = *case;
    let (qkv, phases) = (upload_bf16(gpu, &case.qkv), upload_f32(gpu, &case.phases()));
    let queries = buffer(gpu, rows * heads * head_width * 2);
    let [keys, values] = cache.parts.each_ref().map(Buffer::slice);
    let call = RopeAppend {
        qkv: qkv.slice(),
        q_norm: None,
        k_norm: None,
        epsilon: 0.0,
        phases: phases.slice(),
        queries: queries.slice(),
        keys,
        values,
        first_position: cache.length - rows,
        rows,
        heads,
        kv_heads,
        head_width,
        half: head_width / 2,
    };
    rope_append(gpu, &call).unwrap();
    queries
}

test_each!(
    a_prompt_sees_what_lies_behind_two_to_the_31_elements,
    prompt_window,
    width_64: [8, 64],
    width_96: [8, 96],
    width_128: [8, 128],
    width_256: [4, 256],
);

fn prompt_window([kv_heads, head_width]: [usize; 2]) {
    let Some((gpu, _turn)) = large_gpu() else { return };
    let case = Case::new(kv_heads, head_width, 20);
    let caches = case.caches(&gpu);
    let queries = caches.each_ref().map(|cache| append(&gpu, &case, cache));
    for kernels in [Kernels::Fastest, Kernels::Portable] {
        let run = |i: usize| prompt(&gpu, &case, &caches[i], &queries[i], Mask::Window(1000), kernels);
        assert!(run(0) == run(1), "width {head_width}, {kernels:?}");
    }
    caches.iter().for_each(|cache| case.check_appended(&gpu, cache));
}

test_each!(
    a_prompt_sees_all_of_more_than_two_to_the_31_elements,
    prompt_all,
    width_64: [8, 64],
    width_96: [8, 96],
    width_128: [8, 128],
    width_256: [4, 256],
);

fn prompt_all([kv_heads, head_width]: [usize; 2]) {
    let Some((gpu, _turn)) = large_gpu() else { return };
    let case = Case::new(kv_heads, head_width, 20);
    for cache in case.caches(&gpu) {
        let (queries, expected) = (append(&gpu, &case, &cache), case.expected(cache.length - KNOWN));
        for kernels in [Kernels::Fastest, Kernels::Portable] {
            let error = relative_error(&prompt(&gpu, &case, &cache, &queries, Mask::Causal, kernels), &expected);
            assert!(error < 1e-2, "width {head_width}, {kernels:?}, {} positions: {error:.2e}", cache.length);
        }
        case.check_appended(&gpu, &cache);
    }
}
