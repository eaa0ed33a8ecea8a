//! Products from packed weights: one row of x (a decoding step, bound by bytes) and 512 (a prompt, bound by multiply-adds).
//!
//! The decoding case walks over copies of the matrix worth 96 MiB, as a model's layers would: a single matrix would stay in
//! the second-level cache. Criterion prints bytes per second for it, and weights times rows ("elements") per second for 512.

use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use ironloom_core::{DType, Threads};
use ironloom_quant::{PackedMatrix, Product, StoredMatrix, WeightFormat, matmul, pack};

const SHAPES: [(usize, usize); 3] = [(1024, 1024), (2816, 1024), (1024, 2816)];
const FORMATS: [(DType, WeightFormat); 6] = [
    (DType::F32, WeightFormat::Int8),
    (DType::F32, WeightFormat::Nf4),
    (DType::Q4_1, WeightFormat::Keep),
    (DType::Q4_K, WeightFormat::Keep),
    (DType::Q6_K, WeightFormat::Keep),
    (DType::BF16, WeightFormat::Keep),
];
const STREAMED_BYTES: usize = 96 << 20;

fn products(criterion: &mut Criterion) {
    let threads = Threads::all();
    for (rows, cols) in SHAPES {
        let values: Vec<f32> = (0..rows * cols).map(|i| (i * 7919 % 1013) as f32 / 506.0 - 1.0).collect();
        for (dtype, format) in FORMATS {
            let bytes = pack(dtype, &values).expect("finite weights");
            let build = || {
                let stored = StoredMatrix { dtype, bytes: &bytes, rows, cols, row_order: None };
                PackedMatrix::from_stored(&stored, format, &threads).expect("a valid matrix")
            };
            let matrix = build();
            let (name, size) = (matrix.name(), matrix.bytes());
            let copies: Vec<_> = (0..STREAMED_BYTES.div_ceil(size)).map(|_| build()).collect();
            let x: Vec<f32> = (0..512 * cols).map(|i| (i * 31 % 97) as f32 / 48.0 - 1.0).collect();
            let mut out = vec![0.0; 512 * rows];

            let mut group = criterion.benchmark_group(format!("{rows}x{cols}"));
            group.sample_size(20);
            group.throughput(Throughput::Bytes(size as u64));
            let mut next = copies.iter().cycle();
            group.bench_function(format!("{name}/1"), |bencher| {
                bencher.iter(|| {
                    let matrix = next.next().expect("a cycle");
                    matmul(&threads, &x[..cols], 1, &mut [Product { matrix, out: &mut out[..rows] }])
                })
            });
            group.throughput(Throughput::Elements((512 * rows * cols) as u64));
            group.bench_function(format!("{name}/512"), |bencher| {
                bencher.iter(|| matmul(&threads, &x, 512, &mut [Product { matrix: &matrix, out: &mut out }]))
            });
            group.finish();
        }
    }
}

criterion_group!(benches, products);
criterion_main!(benches);
