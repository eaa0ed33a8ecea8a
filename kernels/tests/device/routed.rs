//! Routed experts for many rows: places against a plain sort, products and sums against double precision.

use ironloom_core::Philox;
use ironloom_kernels::{
    Activation, Gpu, RoutedCombine, RoutedDown, RoutedGated, RoutedSort, routed_combine, routed_down, routed_gated,
    routed_sort,
};

use crate::{
    buffer,
    gated_activation::activate,
    gemm::{expected_product, filled, largest_error, seconds},
    gpu, normals, read_f32, read_i32, round_bf16, upload_bf16, upload_f32, upload_i32,
};

#[derive(Clone, Copy)]
struct Layer {
    rows: usize,
    per_row: usize,
    experts: usize,
    width: usize,
    inner: usize,
}

/// `per_row` experts of each row, ascending; expert 1 is nobody's and the higher ones are rarer. Every eleventh row is
/// not in use.
fn routes(layer: &Layer) -> Vec<i32> {
    let mut draws = Philox::new(3, 0);
    let mut ids = Vec::new();
    for row in 0..layer.rows {
        let mut chosen = Vec::new();
        while chosen.len() < layer.per_row {
            let position = (draws.next_normal().abs() / 3.0).min(0.999) * layer.experts as f32;
            let id = position as i32;
            if id != 1 && !chosen.contains(&id) {
                chosen.push(id);
            }
        }
        chosen.sort_unstable();
        ids.extend(if row % 11 == 10 { vec![-1; layer.per_row] } else { chosen });
    }
    ids
}

struct Sorted {
    places: ironloom_kernels::Buffer,
    sources: ironloom_kernels::Buffer,
    offsets: ironloom_kernels::Buffer,
}

fn sort(gpu: &Gpu, layer: &Layer, ids: &[i32]) -> Sorted {
    let slots = ids.len();
    let sorted = Sorted {
        places: buffer(gpu, slots * 4),
        sources: buffer(gpu, slots * 4),
        offsets: buffer(gpu, (layer.experts + 1) * 4),
    };
    let uploaded = upload_i32(gpu, ids);
    let call = RoutedSort {
        ids: uploaded.slice(),
        places: sorted.places.slice(),
        sources: sorted.sources.slice(),
        offsets: sorted.offsets.slice(),
        rows: layer.rows,
        per_row: layer.per_row,
        experts: layer.experts,
    };
    routed_sort(gpu, &call).unwrap();
    gpu.synchronize().unwrap();
    sorted
}

#[test]
fn places_are_those_of_a_stable_sort() {
    let Some(gpu) = gpu() else { return };
    for (rows, per_row, experts) in
        [(1, 1, 2), (17, 2, 8), (700, 8, 128), (3000, 4, 60), (2048, 8, 512), (32_768, 2, 8), (5000, 1, 3)]
    {
        let layer = Layer { rows, per_row, experts, width: 8, inner: 8 };
        let ids = routes(&layer);
        let sorted = sort(&gpu, &layer, &ids);
        let mut slots: Vec<usize> = (0..ids.len()).filter(|&slot| ids[slot] >= 0).collect();
        slots.sort_by_key(|&slot| ids[slot]);
        let mut places = vec![-1; ids.len()];
        for (place, &slot) in slots.iter().enumerate() {
            places[slot] = place as i32;
        }
        let sources: Vec<i32> = slots.iter().map(|&slot| (slot / per_row) as i32).collect();
        let offsets: Vec<i32> = (0..=experts as i32)
            .map(|expert| slots.iter().filter(|&&slot| ids[slot] < expert).count() as i32)
            .collect();
        assert_eq!(read_i32(&gpu, &sorted.places, ids.len()), places, "{rows} rows, {experts} experts");
        assert_eq!(read_i32(&gpu, &sorted.sources, slots.len()), sources, "{rows} rows, {experts} experts");
        assert_eq!(read_i32(&gpu, &sorted.offsets, experts + 1), offsets, "{rows} rows, {experts} experts");
    }
}

/// A layer's weights, on the host and on the device.
struct Experts {
    gate: Vec<f32>,
    up: Vec<f32>,
    down: Vec<f32>,
    device: [ironloom_kernels::Buffer; 3],
}

fn experts(gpu: &Gpu, layer: &Layer) -> Experts {
    let Layer { experts, width, inner, .. } = *layer;
    let matrices = |seed, inputs: usize| -> Vec<f32> {
        let scale = 2.0 / (inputs as f32).sqrt();
        normals(seed, experts * width * inner).iter().map(|x| round_bf16(scale * x)).collect()
    };
    let (gate, up, down) = (matrices(1, width), matrices(2, width), matrices(3, inner));
    let device = [&gate, &up, &down].map(|matrices| upload_bf16(gpu, matrices));
    Experts { gate, up, down, device }
}

/// The layer's output added to `before`.
fn run(gpu: &Gpu, layer: &Layer, weights: &Experts, x: &[f32], ids: &[i32], gates: &[f32], before: &[f32]) -> Vec<f32> {
    let Layer { rows, per_row, experts, width, inner } = *layer;
    let sorted = sort(gpu, layer, ids);
    let (x, gates, out) = (upload_bf16(gpu, x), upload_f32(gpu, gates), upload_f32(gpu, before));
    let hidden = buffer(gpu, rows * per_row * inner * 2);
    let y = buffer(gpu, rows * per_row * width * 4);
    let gated = RoutedGated {
        x: x.slice(),
        x_stride: width,
        sources: sorted.sources.slice(),
        offsets: sorted.offsets.slice(),
        gate: weights.device[0].slice(),
        up: weights.device[1].slice(),
        weight_stride: width,
        expert_stride: inner * width,
        out: hidden.slice(),
        out_stride: inner,
        activation: Activation::Silu,
        rows,
        per_row,
        experts,
        outputs: inner,
        inputs: width,
    };
    routed_gated(gpu, &gated).unwrap();
    let down = RoutedDown {
        x: hidden.slice(),
        x_stride: inner,
        offsets: sorted.offsets.slice(),
        weight: weights.device[2].slice(),
        weight_stride: inner,
        expert_stride: inner * width,
        out: y.slice(),
        rows,
        per_row,
        experts,
        outputs: width,
        inputs: inner,
    };
    routed_down(gpu, &down).unwrap();
    let combine = RoutedCombine {
        y: y.slice(),
        places: sorted.places.slice(),
        gates: gates.slice(),
        out: out.slice(),
        rows,
        per_row,
        width,
    };
    routed_combine(gpu, &combine).unwrap();
    read_f32(gpu, &out, rows * width)
}

#[test]
fn a_layer_agrees_with_double_precision() {
    let Some(gpu) = gpu() else { return };
    for layer in [
        Layer { rows: 17, per_row: 2, experts: 8, width: 64, inner: 72 },
        Layer { rows: 300, per_row: 4, experts: 12, width: 200, inner: 136 },
        Layer { rows: 600, per_row: 2, experts: 5, width: 136, inner: 264 },
    ] {
        let Layer { rows, per_row, width, inner, .. } = layer;
        let (weights, ids) = (experts(&gpu, &layer), routes(&layer));
        let x: Vec<f32> = normals(5, rows * width).iter().map(|&x| round_bf16(x)).collect();
        let gates: Vec<f32> = normals(6, rows * per_row).iter().map(|x| x.abs() + 0.1).collect();
        let before = normals(7, rows * width);
        let found = run(&gpu, &layer, &weights, &x, &ids, &gates, &before);
        let mut expected: Vec<f64> = before.iter().map(|&x| x.into()).collect();
        for (slot, &id) in ids.iter().enumerate().filter(|(_, id)| **id >= 0) {
            let of = |matrices: &'_ [f32]| matrices[id as usize * inner * width..][..inner * width].to_vec();
            let row = slot / per_row;
            let x = &x[row * width..][..width];
            let gate = expected_product(x, &of(&weights.gate), width);
            let up = expected_product(x, &of(&weights.up), width);
            let hidden: Vec<f32> = gate
                .iter()
                .zip(up)
                .map(|(&gate, up)| round_bf16((activate(Activation::Silu, gate) * up) as f32))
                .collect();
            for (column, y) in expected_product(&hidden, &of(&weights.down), inner).into_iter().enumerate() {
                expected[row * width + column] += f64::from(gates[slot]) * y;
            }
        }
        let error = largest_error(&found, &expected);
        assert!(error < 3e-2, "{rows} rows of {width}: {error:.2e}");
    }
}

#[test]
fn a_row_has_the_same_bits_among_any_rows() {
    let Some(gpu) = gpu() else { return };
    let layer = Layer { rows: 1024, per_row: 2, experts: 6, width: 256, inner: 384 };
    let Layer { per_row, width, .. } = layer;
    let (weights, ids) = (experts(&gpu, &layer), routes(&layer));
    let x = normals(5, layer.rows * width);
    let gates = normals(6, layer.rows * per_row);
    let before = normals(7, layer.rows * width);
    let whole = run(&gpu, &layer, &weights, &x, &ids, &gates, &before);
    for (first, rows) in [(0, 1), (0, 17), (0, 100), (33, 64), (500, 512)] {
        let part = Layer { rows, ..layer };
        let (of_width, of_slots) = (first * width..(first + rows) * width, first * per_row..(first + rows) * per_row);
        let found = run(
            &gpu,
            &part,
            &weights,
            &x[of_width.clone()],
            &ids[of_slots.clone()],
            &gates[of_slots],
            &before[of_width.clone()],
        );
        let same = found.iter().zip(&whole[of_width]).filter(|(a, b)| a.to_bits() == b.to_bits()).count();
        assert_eq!(same, found.len(), "rows {first}.. ({rows})");
    }
}

#[test]
#[ignore = "prints times"]
fn speed_of_routed_experts() {
    let Some(gpu) = gpu() else { return };
    for layer in [
        Layer { rows: 512, per_row: 2, experts: 8, width: 640, inner: 1792 },
        Layer { rows: 2048, per_row: 8, experts: 128, width: 2048, inner: 768 },
        Layer { rows: 4096, per_row: 2, experts: 8, width: 4096, inner: 4096 },
    ] {
        let Layer { rows, per_row, experts, width, inner } = layer;
        let ids = routes(&layer);
        let sorted = sort(&gpu, &layer, &ids);
        let uploaded = upload_i32(&gpu, &ids);
        let (matrices, up) = (filled(&gpu, experts * inner, width), filled(&gpu, experts * inner, width));
        let (x, slots) = (filled(&gpu, rows, width), rows * per_row);
        let (hidden, y) = (filled(&gpu, slots, inner), buffer(&gpu, slots * width * 4));
        let (gates, out) = (upload_f32(&gpu, &vec![0.5; slots]), upload_f32(&gpu, &vec![0.0; rows * width]));
        let sort_time = seconds(&gpu, || {
            let call = RoutedSort {
                ids: uploaded.slice(),
                places: sorted.places.slice(),
                sources: sorted.sources.slice(),
                offsets: sorted.offsets.slice(),
                rows,
                per_row,
                experts,
            };
            routed_sort(&gpu, &call).unwrap();
        });
        let gated_time = seconds(&gpu, || {
            let call = RoutedGated {
                x: x.slice(),
                x_stride: width,
                sources: sorted.sources.slice(),
                offsets: sorted.offsets.slice(),
                gate: matrices.slice(),
                up: up.slice(),
                weight_stride: width,
                expert_stride: inner * width,
                out: hidden.slice(),
                out_stride: inner,
                activation: Activation::Silu,
                rows,
                per_row,
                experts,
                outputs: inner,
                inputs: width,
            };
            routed_gated(&gpu, &call).unwrap();
        });
        let down_time = seconds(&gpu, || {
            let call = RoutedDown {
                x: hidden.slice(),
                x_stride: inner,
                offsets: sorted.offsets.slice(),
                weight: matrices.slice(),
                weight_stride: inner,
                expert_stride: inner * width,
                out: y.slice(),
                rows,
                per_row,
                experts,
                outputs: width,
                inputs: inner,
            };
            routed_down(&gpu, &call).unwrap();
        });
        let combine_time = seconds(&gpu, || {
            let call = RoutedCombine {
                y: y.slice(),
                places: sorted.places.slice(),
                gates: gates.slice(),
                out: out.slice(),
                rows,
                per_row,
                width,
            };
            routed_combine(&gpu, &call).unwrap();
        });
        // A row in eleven is not in use.
        let operations = 2.0 * (slots * width * inner) as f64 * 10.0 / 11.0 / 1e12;
        println!(
            "routed {rows} rows, {per_row} of {experts}, {width} x {inner}: sort {:.1} us, gated {:.1} us ({:.0} \
             TFLOP/s), down {:.1} us ({:.0} TFLOP/s), combine {:.1} us",
            sort_time * 1e6,
            gated_time * 1e6,
            2.0 * operations / gated_time,
            down_time * 1e6,
            operations / down_time,
            combine_time * 1e6,
        );
    }
}
