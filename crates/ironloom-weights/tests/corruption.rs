//! Flips, cuts and patches valid files of every format thousands of times and opens them: no panic, and no allocation that
//! the file's own size doesn't cover. Every change comes from a counter-based stream, so a failure names the case to rerun.

mod forge;

use std::{
    alloc::{GlobalAlloc, Layout, System},
    cell::Cell,
    fs,
    path::Path,
};

use ironloom_core::Philox;
use ironloom_weights::{Array, DType, Metadata, NewTensor, Strings, TensorInfo, Value, gguf, safetensors, unwatched};

/// What opening may allocate beyond the file's size: paths, messages, the lists' first steps.
const ALLOWANCE: usize = 64 << 10;

/// Counts this thread's living bytes and their peak.
struct Counting;

thread_local! {
    /// Signed: a thread may free what another one allocated.
    static LIVING: Cell<isize> = const { Cell::new(0) };
    static PEAK: Cell<isize> = const { Cell::new(0) };
}

fn count(added: usize, removed: usize) {
    let living = LIVING.get() + added as isize - removed as isize;
    LIVING.set(living);
    PEAK.set(PEAK.get().max(living));
}

// SAFETY: every call goes to the system's allocator unchanged; the counters are thread-local cells without destructors.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count(layout.size(), 0);
        // SAFETY: the caller keeps the contract of `alloc`, which is the system allocator's.
        unsafe { System.alloc(layout) }
    }
    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        count(0, layout.size());
        // SAFETY: as above, for `dealloc`.
        unsafe { System.dealloc(pointer, layout) }
    }
    unsafe fn realloc(&self, pointer: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        // Both the old and the new block live while bytes move.
        count(size, 0);
        count(0, layout.size());
        // SAFETY: as above, for `realloc`.
        unsafe { System.realloc(pointer, layout, size) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// The most bytes that lived at once during `work`, above those before it.
fn peak_of<T>(work: impl FnOnce() -> T) -> (T, usize) {
    let before = LIVING.get();
    PEAK.set(before);
    let result = work();
    (result, (PEAK.get() - before) as usize)
}

/// Opens the model and touches everything it offers; the result says whether it opened.
fn read_everything(path: &Path) -> bool {
    let Ok(checkpoint) = ironloom_weights::open(path) else { return false };
    let infos: Vec<TensorInfo> = checkpoint.tensors().cloned().collect();
    for info in &infos {
        let data = checkpoint.tensor(&info.name).expect("a listed tensor is there");
        assert_eq!(data.bytes.len(), info.bytes().expect("a listed tensor has a size"));
        std::hint::black_box(data.bytes.iter().fold(0u8, |sum, &byte| sum.wrapping_add(byte)));
    }
    for (_, value) in checkpoint.metadata().iter() {
        if let Value::Array(Array::Strings(strings)) = value {
            std::hint::black_box(strings.iter().map(str::len).sum::<usize>());
        }
    }
    assert!(checkpoint.unused().is_empty());
    assert!(checkpoint.tensor("no such tensor").is_err());
    true
}

/// One to three changes: bits, bytes, numbers that overflow, cuts, doubled parts.
fn corrupt(bytes: &mut Vec<u8>, head: usize, draws: &mut Philox) {
    const NUMBERS: [u64; 8] = [0, 1, u64::MAX, 1 << 63, (1 << 42) + 1, u32::MAX as u64, 1 << 31, i64::MAX as u64];
    for _ in 0..1 + draws.next_u32() % 3 {
        if bytes.is_empty() {
            return;
        }
        // Most changes hit the head, where the numbers are.
        let bound = if draws.next_u32().is_multiple_of(8) { bytes.len() } else { head.clamp(1, bytes.len()) };
        let at = draws.next_u32() as usize % bound;
        let draw = draws.next_u32();
        match draws.next_u32() % 8 {
            0 | 1 => bytes[at] ^= 1 << (draw % 8),
            2 => bytes[at] = draw as u8,
            3 => {
                let number = NUMBERS[draw as usize % NUMBERS.len()].to_le_bytes();
                let width = [1, 2, 4, 8][draw as usize / 8 % 4];
                bytes[at..].iter_mut().zip(&number[..width]).for_each(|(to, &from)| *to = from);
            }
            4 => bytes.truncate(at),
            5 => bytes.extend((0..draw % 100).map(|i| i as u8)),
            6 => {
                let end = (at + draw as usize % 64).min(bytes.len());
                let part = bytes[at..end].to_vec();
                bytes.splice(at..at, part);
            }
            _ => {
                let end = (at + draw as usize % 16).min(bytes.len());
                bytes.drain(at..end);
            }
        }
    }
}

/// Corrupts `file` of the model at `model` again and again. `companions` are bytes of files beside it that count as the model's.
fn hammer(model: &Path, file: &Path, head: usize, companions: usize, cases: u64, stream: u64) {
    let valid = fs::read(file).expect("the valid file");
    assert!(read_everything(model), "the unchanged file must open");
    let (_, peak) = peak_of(|| ironloom_weights::open(model).map(drop));
    assert!(peak <= valid.len() + companions + ALLOWANCE, "the valid file took {peak} bytes");
    let mut opened = 0;
    for case in 0..cases {
        let mut draws = Philox::new(0x5eed, stream << 32 | case);
        let mut bytes = valid.clone();
        corrupt(&mut bytes, head, &mut draws);
        fs::write(file, &bytes).expect("a corrupted file");
        let limit = bytes.len() + companions + ALLOWANCE;
        let (result, peak) = peak_of(|| ironloom_weights::open(model).map(drop));
        assert!(peak <= limit, "stream {stream}, case {case}: {peak} bytes allocated, {limit} allowed");
        if result.is_ok() {
            opened += 1;
            read_everything(model);
        }
    }
    fs::write(file, &valid).expect("the valid file again");
    // Changes of tensors' bytes and of strings are not to be noticed; most others are.
    assert!(opened < cases / 2, "stream {stream}: {opened} of {cases} corrupted files opened");
}

fn example_tensors() -> Vec<NewTensor<'static>> {
    let tensor = |name: &str, dtype: DType, dims: &[usize]| {
        let shape = ironloom_weights::Shape::new(dims).expect("a shape");
        let info = TensorInfo { name: name.into(), dtype, shape };
        let bytes = (0..info.bytes().expect("a size")).map(|i| i as u8).collect();
        NewTensor::new(info, bytes)
    };
    vec![
        tensor("token_embd.weight", DType::F32, &[3, 32]),
        tensor("blk.0.attn_q.weight", DType::F16, &[2, 2, 7]),
        tensor("blk.0.attn_norm.weight", DType::BF16, &[5]),
        tensor("positions", DType::I64, &[1]),
    ]
}

fn write_gguf(path: &Path, vocabulary: usize) {
    let mut metadata = Metadata::new();
    metadata.insert("general.architecture", "llama");
    metadata.insert("llama.block_count", 1u32);
    metadata.insert("llama.rope.freq_base", 10_000f32);
    metadata.insert("tokenizer.ggml.add_bos_token", true);
    metadata.insert("tokenizer.ggml.tokens", (0..vocabulary).map(|i| format!("Ġ{i}")).collect::<Strings>());
    metadata.insert("tokenizer.ggml.scores", vec![0.5f32; vocabulary]);
    metadata.insert("nested", Array::Arrays(vec![Array::U8(vec![1, 2]), Array::Arrays(vec![Array::I32(vec![-1])])]));
    let mut tensors = example_tensors();
    let info = TensorInfo { name: "blk.0.ffn_up.weight".into(), dtype: DType::Q4_0, shape: [2, 64].into() };
    tensors.push(NewTensor::new(info, vec![7; 72]));
    gguf::write(path, &metadata, tensors, &mut unwatched).expect("a valid GGUF");
}

#[test]
fn gguf_v3() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let path = folder.path().join("model.gguf");
    write_gguf(&path, 20);
    hammer(&path, &path, 1200, 0, 4000, 3);
}

#[test]
fn gguf_v2() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let path = folder.path().join("model.gguf");
    write_gguf(&path, 20);
    let mut bytes = fs::read(&path).expect("the file");
    bytes[4] = 2;
    fs::write(&path, bytes).expect("the file");
    hammer(&path, &path, 1200, 0, 4000, 2);
}

/// With a vocabulary large enough that the allowance cannot hide a second copy of it.
#[test]
fn gguf_with_a_large_vocabulary() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let path = folder.path().join("model.gguf");
    write_gguf(&path, 30_000);
    hammer(&path, &path, 400, 0, 300, 1);
}

#[test]
fn safetensors_single() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let path = folder.path().join("model.safetensors");
    let mut metadata = Metadata::new();
    metadata.insert("format", "pt");
    safetensors::write(&path, &metadata, example_tensors(), &mut unwatched).expect("a valid file");
    hammer(&path, &path, 420, 0, 4000, 4);
}

#[test]
fn safetensors_index() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let metadata = Metadata::new();
    safetensors::write_sharded(folder.path(), &metadata, example_tensors(), 100, &mut unwatched).expect("valid shards");
    let shards = fs::read_dir(folder.path()).expect("the folder").filter_map(|entry| entry.ok()?.metadata().ok());
    let shard_bytes = shards.map(|metadata| metadata.len() as usize).sum();
    let index = folder.path().join("model.safetensors.index.json");
    hammer(folder.path(), &index, usize::MAX, shard_bytes, 4000, 5);
    let shard = folder.path().join("model-00001-of-00003.safetensors");
    hammer(folder.path(), &shard, 200, shard_bytes, 1000, 6);
}

/// Claims of a head that ask for far more than the file has.
#[test]
fn claims_allocate_nothing() {
    let huge = u64::MAX / 2;
    let array = |kind: u32, count: u64| [kind.to_le_bytes().to_vec(), count.to_le_bytes().to_vec()].concat();
    let mut files: Vec<Vec<u8>> = [0, 4, 8, 9, 12]
        .into_iter()
        .flat_map(|kind| [huge, 1 << 33, 1 << 20].map(|count| (kind, count)))
        .map(|(kind, count)| forge::Gguf::new().key("k", forge::ARRAY, &array(kind, count)).build())
        .collect();
    files.push(forge::Gguf::new().key("k", forge::STRING, &huge.to_le_bytes()).build());
    for counts in [(huge, 0), (0, huge), (1 << 32, 0), (0, 1 << 32)] {
        let mut file = forge::Gguf::new();
        file.counts = Some(counts);
        files.push(file.build());
    }
    // A shape of a million dimensions, which the file really has.
    let dims = vec!["1"; 1 << 20].join(",");
    let header = format!("{{\"a\":{{\"dtype\":\"U8\",\"shape\":[{dims}],\"data_offsets\":[0,1]}}}}");
    files.push(forge::safetensors(&header, &[0]));
    let folder = tempfile::tempdir().expect("a temporary folder");
    for (i, bytes) in files.iter().enumerate() {
        let path = folder.path().join("model");
        fs::write(&path, bytes).expect("a file");
        let (result, peak) = peak_of(|| ironloom_weights::open(&path).map(drop));
        assert!(result.is_err(), "file {i}");
        assert!(peak <= ALLOWANCE, "file {i} of {} bytes: {peak} bytes allocated", bytes.len());
    }
}

/// The counter itself must see what it's there to see.
#[test]
fn the_counter_counts() {
    let (_, peak) = peak_of(|| drop(std::hint::black_box(vec![0u8; 1 << 20])));
    assert!(peak >= 1 << 20);
}
