//! Products of few rows against sums in double precision, in every tile format, and against themselves with other
//! numbers of rows, bit for bit.

use ironloom_core::DType;
use ironloom_kernels::{
    Activation, Buffer, Error, Gpu, Linear, LinearRoutedDown, LinearRoutedGated, Matrix, Then, TileFormat,
    WeightLayout, linear, linear_routed_down, linear_routed_gated,
};
use ironloom_quant::WeightFormat;

use crate::{
    buffer,
    dequantize::{Case, packed},
    gated_activation::activate,
    gpu, normals, read_f32, read_split, relative_error, upload_f32, upload_i32, upload_split,
};

const FORMATS: [(DType, WeightFormat); 9] = [
    (DType::F32, WeightFormat::Bf16),
    (DType::F32, WeightFormat::Int8),
    (DType::F32, WeightFormat::Nf4),
    (DType::F32, WeightFormat::Int4),
    (DType::Q4_0, WeightFormat::Keep),
    (DType::Q4_1, WeightFormat::Keep),
    (DType::Q8_0, WeightFormat::Keep),
    (DType::Q4_K, WeightFormat::Keep),
    (DType::Q6_K, WeightFormat::Keep),
];

/// Operands keep 16 bits of mantissa and sums are in single precision; a minimum costs a little more where it cancels.
const TOLERANCE: f64 = 2e-5;

/// A single chunk, parts of a chunk and of a record, several records, more records than warps.
fn widths(dtype: DType) -> &'static [usize] {
    match dtype.block_elements() {
        1 => &[8, 64, 200, 576, 2048, 4872],
        32 => &[32, 352, 2048, 4896],
        _ => &[256, 1280, 4864],
    }
}

fn tile_format(case: &Case) -> TileFormat {
    match case.layout {
        WeightLayout::Tiles(format) => format,
        WeightLayout::Plain(dtype) => panic!("{dtype} has no tiles"),
    }
}

fn upload(gpu: &Gpu, case: &Case) -> Buffer {
    gpu.upload(&case.bytes, "a test").unwrap()
}

/// `x W^T` in double precision.
fn product(case: &Case, x: &[f32]) -> Vec<f64> {
    let rows = x.chunks_exact(case.cols);
    rows.flat_map(|x| {
        case.weights
            .chunks_exact(case.cols)
            .map(|weights| x.iter().zip(weights).map(|(&x, &w)| f64::from(x) * f64::from(w)).sum::<f64>())
    })
    .collect()
}

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|value| value.to_bits()).collect()
}

#[test]
fn products_are_those_of_the_weights_and_ignore_the_other_rows() {
    let Some(gpu) = gpu() else { return };
    for (dtype, format) in FORMATS {
        for &cols in widths(dtype) {
            let case = packed(dtype, format, 90, cols);
            let matrix = upload(&gpu, &case);
            let x = normals(1, 64 * cols);
            let expected = product(&case, &x);
            let run_on = |x: &[f32]| {
                let n = x.len() / cols;
                let device_x = upload_split(&gpu, x, cols);
                let out = buffer(&gpu, n * 90 * 4);
                let matrices = [Matrix { weights: matrix.slice(), rows: 90, bias: None, column: 0 }];
                let call = Linear {
                    x: device_x.slice(),
                    n,
                    cols,
                    format: tile_format(&case),
                    matrices: &matrices,
                    then: Then::Store,
                    out: out.slice(),
                    width: 90,
                };
                linear(&gpu, &call).unwrap();
                read_f32(&gpu, &out, n * 90)
            };
            let all = run_on(&x);
            let error = relative_error(&all, &expected);
            assert!(error < TOLERANCE, "{:?} of {cols} columns: {error}", case.layout);
            for n in [1, 2, 3, 4, 5, 8, 9, 16, 17, 32, 33, 64] {
                let what = format!("{:?} of {cols} columns, {n} rows", case.layout);
                let first = 64 - n;
                let last_rows = &x[first * cols..];
                assert_eq!(bits(&run_on(last_rows)), bits(&all[first * 90..]), "{what}");
                // Nor does a row that is not finite reach its neighbours.
                for wild in [n / 2, n - 1] {
                    let mut beside = last_rows.to_vec();
                    beside[wild * cols..][..cols].fill(f32::INFINITY);
                    let beside = run_on(&beside);
                    for row in (0..n).filter(|row| *row != wild) {
                        assert_eq!(
                            bits(&beside[row * 90..][..90]),
                            bits(&all[(first + row) * 90..][..90]),
                            "{what}: row {row} beside one of infinities, {wild}"
                        );
                    }
                }
            }
        }
    }
}

/// As many rows go to a block as it takes to have all blocks on the card at once; sixteen rows take two row tiles to a
/// warp where those fill the card, or to a cluster where the columns are many.
fn fill_the_card((dtype, format): (DType, WeightFormat)) {
    let Some(gpu) = gpu() else { return };
    let card = gpu.properties().multiprocessors as usize;
    let wide = dtype.block_elements() == 256;
    // The last tile has nine rows, and two numbers of tiles are odd.
    for (tiles, cols) in [(8 * card, 576), (12 * card + 1, 576), (card - 1, 4200)] {
        let (rows, cols) = (16 * tiles - 7, if wide { cols / 256 * 256 } else { cols / 32 * 32 });
        let case = packed(dtype, format, rows, cols);
        let matrix = upload(&gpu, &case);
        let x = normals(1, 33 * cols);
        let (bias, before) = (normals(2, rows), normals(3, 33 * rows));
        let device_bias = upload_f32(&gpu, &bias);
        let one = Matrix { weights: matrix.slice(), rows, bias: Some(device_bias.slice()), column: 0 };
        for (then, matrices) in [(Then::Add, &[one][..]), (Then::Gated(Activation::Silu), &[one, one][..])] {
            let run = |first: usize, n: usize| {
                let device_x = upload_split(&gpu, &x[first * cols..][..n * cols], cols);
                let out = upload_f32(&gpu, &before[first * rows..][..n * rows]);
                let call = Linear {
                    x: device_x.slice(),
                    n,
                    cols,
                    format: tile_format(&case),
                    matrices,
                    then,
                    out: out.slice(),
                    width: rows,
                };
                linear(&gpu, &call).unwrap();
                bits(&match then {
                    Then::Gated(_) => read_split(&gpu, &out, n, rows),
                    _ => read_f32(&gpu, &out, n * rows),
                })
            };
            let all = run(0, 33);
            for (first, n) in [(0, 4), (4, 8), (12, 3), (15, 1), (3, 13), (17, 16), (5, 17), (1, 32)] {
                let same = run(first, n) == all[first * rows..][..n * rows];
                assert!(same, "{:?}, {tiles} tiles, {n} rows from {first} on, {then:?}", case.layout);
            }
        }
    }
}

test_each!(
    matrices_that_fill_the_card_have_the_same_bits_for_any_number_of_rows,
    fill_the_card,
    bf16: super::FORMATS[0],
    int8: super::FORMATS[1],
    nf4: super::FORMATS[2],
    int4: super::FORMATS[3],
    q4_0: super::FORMATS[4],
    q4_1: super::FORMATS[5],
    q8_0: super::FORMATS[6],
    q4_k: super::FORMATS[7],
    q6_k: super::FORMATS[8],
);

#[test]
fn matrices_on_one_input_go_to_their_columns_and_are_added_to_a_residual() {
    let Some(gpu) = gpu() else { return };
    for (dtype, format) in FORMATS {
        let cols = 768;
        // The last column of the output is nobody's.
        let (rows, columns, width) = ([64, 17, 33], [0, 64, 81], 115);
        let cases = rows.map(|rows| packed(dtype, format, rows, cols));
        let (biases, matrices) =
            (rows.map(|rows| normals(rows as u64, rows)), cases.each_ref().map(|case| upload(&gpu, case)));
        let device_biases = biases.each_ref().map(|bias| upload_f32(&gpu, bias));
        for n in [1, 6, 33] {
            let (x, before) = (normals(2, n * cols), normals(3, n * width));
            let device_x = upload_split(&gpu, &x, cols);
            let mut sums = vec![0.0; n * width];
            let mut calls = Vec::new();
            for (m, case) in cases.iter().enumerate() {
                // The second has no bias.
                let bias = (m != 1).then(|| device_biases[m].slice());
                calls.push(Matrix { weights: matrices[m].slice(), rows: rows[m], bias, column: columns[m] });
                for (at, value) in product(case, &x).into_iter().enumerate() {
                    let (i, row) = (at / rows[m], at % rows[m]);
                    let bias = if m == 1 { 0.0 } else { f64::from(biases[m][row]) };
                    sums[i * width + columns[m] + row] = value + bias;
                }
            }
            for then in [Then::Store, Then::Add] {
                let out = upload_f32(&gpu, &before);
                let call = Linear {
                    x: device_x.slice(),
                    n,
                    cols,
                    format: tile_format(&cases[0]),
                    matrices: &calls,
                    then,
                    out: out.slice(),
                    width,
                };
                linear(&gpu, &call).unwrap();
                let found = read_f32(&gpu, &out, n * width);
                let expected: Vec<f64> = (0..n * width)
                    .map(|at| {
                        let stays = then == Then::Add || at % width == width - 1;
                        sums[at] + if stays { f64::from(before[at]) } else { 0.0 }
                    })
                    .collect();
                let error = relative_error(&found, &expected);
                assert!(error < TOLERANCE, "{:?}, {n} rows, {then:?}: {error}", cases[0].layout);
                for i in 0..n {
                    assert_eq!(
                        found[i * width + width - 1],
                        before[i * width + width - 1],
                        "a column that is not written"
                    );
                }
            }
        }
    }
}

#[test]
fn gated_pairs_are_activated_and_ignore_the_other_rows() {
    let Some(gpu) = gpu() else { return };
    for (dtype, format) in FORMATS {
        for (rows, cols) in [(40, 256), (101, 2304)] {
            // Two matrices of one packing: the first rows and the last.
            let pair = [rows, rows + 5].map(|count| packed(dtype, format, count, cols));
            let up = second(&pair[1], dtype, format, rows);
            let gate = &pair[0];
            let matrices = [upload(&gpu, gate), upload(&gpu, &up)];
            let biases = [normals(5, rows), normals(6, rows)];
            let device_biases = biases.each_ref().map(|bias| upload_f32(&gpu, bias));
            let x: Vec<f32> = normals(4, 64 * cols).iter().map(|x| x / (cols as f32).sqrt()).collect();
            for (activation, with_bias) in [(Activation::Silu, false), (Activation::GeluTanh, true)] {
                let of = |m: usize, at: usize| if with_bias { f64::from(biases[m][at % rows]) } else { 0.0 };
                let (gates, ups) = (product(gate, &x), product(&up, &x));
                let both = gates.iter().zip(&ups).enumerate();
                let expected: Vec<f64> =
                    both.map(|(at, (&g, &u))| activate(activation, g + of(0, at)) * (u + of(1, at))).collect();
                let run = |first: usize, n: usize| {
                    let device_x = upload_split(&gpu, &x[first * cols..][..n * cols], cols);
                    let out = buffer(&gpu, n * rows * 4);
                    let calls = [0, 1].map(|m| Matrix {
                        weights: matrices[m].slice(),
                        rows,
                        bias: with_bias.then(|| device_biases[m].slice()),
                        column: 0,
                    });
                    let call = Linear {
                        x: device_x.slice(),
                        n,
                        cols,
                        format: tile_format(gate),
                        matrices: &calls,
                        then: Then::Gated(activation),
                        out: out.slice(),
                        width: rows,
                    };
                    linear(&gpu, &call).unwrap();
                    read_split(&gpu, &out, n, rows)
                };
                let all = run(0, 64);
                let error = relative_error(&all, &expected);
                assert!(error < TOLERANCE, "{:?} [{rows}, {cols}], {activation:?}: {error}", gate.layout);
                for n in [1, 7, 16, 31] {
                    let first = 64 - n;
                    assert_eq!(bits(&run(first, n)), bits(&all[first * rows..]), "{:?}, {n} rows", gate.layout);
                }
            }
        }
    }
}

/// The last `rows` rows of a matrix, so that two matrices of one test differ.
fn second(case: &Case, dtype: DType, format: WeightFormat, rows: usize) -> Case {
    let stored = crate::dequantize::stored(dtype, case.rows, case.cols, 11);
    let row_bytes = stored.len() / case.rows;
    let threads = ironloom_core::Threads::new(2);
    let bytes = &stored[(case.rows - rows) * row_bytes..];
    let source = ironloom_quant::StoredMatrix { dtype, bytes, rows, cols: case.cols, row_order: None };
    let matrix = ironloom_quant::TiledMatrix::from_stored(&source, format, &threads).unwrap();
    let weights = case.weights[(case.rows - rows) * case.cols..].to_vec();
    Case { layout: case.layout, bytes: matrix.into_bytes(), weights, rows, cols: case.cols }
}

/// The experts of a layer, one after the other on the device.
fn experts(
    gpu: &Gpu,
    dtype: DType,
    format: WeightFormat,
    shape: [usize; 2],
    count: usize,
    skip: usize,
) -> (Vec<Case>, Buffer) {
    let [rows, cols] = shape;
    let cases: Vec<Case> = (skip..skip + count)
        .map(|extra| second(&packed(dtype, format, rows + extra, cols), dtype, format, rows))
        .collect();
    let bytes: Vec<u8> = cases.iter().flat_map(|case| case.bytes.iter().copied()).collect();
    let buffer = gpu.upload(&bytes, "a test").unwrap();
    (cases, buffer)
}

#[test]
fn routed_experts_are_weighted_sums_of_their_products() {
    let Some(gpu) = gpu() else { return };
    for (dtype, format) in FORMATS {
        for (width, inner, per_row) in [(512, 256, 2), (256, 1024, 3), (768, 512, 1)] {
            let count = 4;
            let (gates, device_gates) = experts(&gpu, dtype, format, [inner, width], count, 1);
            let (ups, device_ups) = experts(&gpu, dtype, format, [inner, width], count, 7);
            let (downs, device_downs) = experts(&gpu, dtype, format, [width, inner], count, 3);
            let n = 5;
            let x: Vec<f32> = normals(8, n * width).iter().map(|x| x / (width as f32).sqrt()).collect();
            let (weights, before) = (normals(9, n * per_row), normals(10, n * width));
            // Row 2 is not in use.
            let ids: Vec<i32> = (0..n * per_row)
                .map(|at| if at / per_row == 2 { -1 } else { ((at / per_row * 2 + at % per_row) % count) as i32 })
                .collect();
            let (device_x, device_ids) = (upload_split(&gpu, &x, width), upload_i32(&gpu, &ids));
            let device_weights = upload_f32(&gpu, &weights);
            let mut hidden = vec![0.0; n * per_row * inner];
            let mut sums = vec![0.0; n * width];
            for (slot, &expert) in ids.iter().enumerate().filter(|(_, expert)| **expert >= 0) {
                let (row, expert) = (slot / per_row, expert as usize);
                let x = &x[row * width..][..width];
                let pairs = product(&gates[expert], x).into_iter().zip(product(&ups[expert], x));
                let y: Vec<f64> = pairs.map(|(gate, up)| activate(Activation::Silu, gate) * up).collect();
                let weight = f64::from(weights[slot]);
                for (out, row_of_down) in
                    sums[row * width..][..width].iter_mut().zip(downs[expert].weights.chunks(inner))
                {
                    *out += weight * y.iter().zip(row_of_down).map(|(y, &w)| y * f64::from(w)).sum::<f64>();
                }
                hidden[slot * inner..][..inner].copy_from_slice(&y);
            }
            let run = |first: usize, n: usize, then_add: bool| {
                let x = device_x.slice().part(first * width * 4, n * width * 4).unwrap();
                let ids = device_ids.slice().part(first * per_row * 4, n * per_row * 4).unwrap();
                let gates = device_weights.slice().part(first * per_row * 4, n * per_row * 4).unwrap();
                let middle = buffer(&gpu, n * per_row * inner * 4);
                let call = LinearRoutedGated {
                    x,
                    n,
                    cols: width,
                    format: tile_format(&downs[0]),
                    gate: device_gates.slice(),
                    up: device_ups.slice(),
                    experts: count,
                    rows: inner,
                    ids,
                    per_row,
                    activation: Activation::Silu,
                    out: middle.slice(),
                };
                linear_routed_gated(&gpu, &call).unwrap();
                let out = upload_f32(&gpu, &before[first * width..][..n * width]);
                let call = LinearRoutedDown {
                    x: middle.slice(),
                    n,
                    cols: inner,
                    format: tile_format(&downs[0]),
                    down: device_downs.slice(),
                    experts: count,
                    rows: width,
                    ids,
                    gates,
                    per_row,
                    add: then_add,
                    out: out.slice(),
                };
                linear_routed_down(&gpu, &call).unwrap();
                (read_split(&gpu, &middle, n * per_row, inner), read_f32(&gpu, &out, n * width))
            };
            for add in [false, true] {
                let (found_hidden, found) = run(0, n, add);
                let what = format!("{:?}, {per_row} of {count} experts [{inner}, {width}]", downs[0].layout);
                for (slot, _) in ids.iter().enumerate().filter(|(_, expert)| **expert >= 0) {
                    let part = slot * inner..(slot + 1) * inner;
                    let error = relative_error(&found_hidden[part.clone()], &hidden[part]);
                    assert!(error < TOLERANCE, "{what}, slot {slot}: {error}");
                }
                let expected: Vec<f64> = (0..n * width)
                    .map(|at| sums[at] + if add || at / width == 2 { f64::from(before[at]) } else { 0.0 })
                    .collect();
                let error = relative_error(&found, &expected);
                assert!(error < 2.0 * TOLERANCE, "{what}: {error}");
                assert_eq!(&found[2 * width..3 * width], &before[2 * width..3 * width], "{what}: a row not in use");
                for row in [0, 3, 4] {
                    assert_eq!(
                        bits(&run(row, 1, add).1),
                        bits(&found[row * width..][..width]),
                        "{what}: row {row} alone"
                    );
                }
            }
        }
    }
}

#[test]
fn calls_that_do_not_fit_are_refused() {
    let Some(gpu) = gpu() else { return };
    let case = packed(DType::F32, WeightFormat::Nf4, 20, 64);
    let (matrix, out) = (upload(&gpu, &case), buffer(&gpu, 65 * 20 * 4));
    let x = upload_split(&gpu, &normals(1, 65 * 64), 64);
    let matrices = [Matrix { weights: matrix.slice(), rows: 20, bias: None, column: 0 }];
    let good = Linear {
        x: x.slice(),
        n: 64,
        cols: 64,
        format: TileFormat::Nf4,
        matrices: &matrices,
        then: Then::Store,
        out: out.slice(),
        width: 20,
    };
    linear(&gpu, &good).unwrap();
    linear(&gpu, &Linear { n: 0, ..good }).unwrap();
    let shape = |call: Linear<'_>| assert!(matches!(linear(&gpu, &call), Err(Error::Shape { .. })), "{call:?}");
    shape(Linear { n: 65, ..good });
    shape(Linear { width: 19, ..good });
    shape(Linear { x: x.slice().part(0, 64).unwrap(), ..good });
    shape(Linear { out: out.slice().part(0, 64).unwrap(), ..good });
    shape(Linear { then: Then::Gated(Activation::Silu), ..good });
    shape(Linear { matrices: &[Matrix { column: 1, ..matrices[0] }], ..good });
    shape(Linear { matrices: &[Matrix { rows: 21, ..matrices[0] }], width: 21, ..good });
    shape(Linear { matrices: &[Matrix { bias: Some(matrix.slice().part(0, 76).unwrap()), ..matrices[0] }], ..good });
    let odd = linear(&gpu, &Linear { cols: 63, ..good });
    assert!(matches!(odd, Err(Error::Unsupported { .. })));
    let misaligned = linear(&gpu, &Linear { n: 1, x: x.slice().part(4, 512).unwrap(), ..good });
    assert!(matches!(misaligned, Err(Error::Unsupported { .. })));
}
