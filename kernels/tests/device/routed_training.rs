//! Products of routed experts in training and their gradients, forward and back between rows and places, against double
//! precision on the same rounded numbers.

use ironloom_kernels::{
    Buffer, Form, Gpu, GroupedInputGradient, GroupedProduct, GroupedWeightGradient, Output, RoutedSort, RoutedSpread,
    RoutedSum, grouped_input_gradient, grouped_product, grouped_weight_gradient, grouped_weight_gradient_workspace,
    routed_sort, routed_spread, routed_sum,
};

use crate::{
    buffer,
    gemm::{BF16_ERROR, F32_ERROR, filled, largest_error, seconds},
    gpu, normals, read_bf16, read_f32, read_i32, relative_error, round_bf16, upload_bf16, upload_f32, upload_i32,
};

/// Rows that go to `per_row` of `experts`, ascending; every seventh row is padding, expert 1 is nobody's, and lower numbers
/// are chosen more often.
struct Routes {
    rows: usize,
    per_row: usize,
    experts: usize,
    places: Vec<i32>,
    sources: Vec<i32>,
    offsets: Vec<i32>,
    device: [Buffer; 3],
}

impl Routes {
    fn new(gpu: &Gpu, rows: usize, per_row: usize, experts: usize) -> Self {
        let draws = normals(3, rows * experts);
        let mut ids = Vec::new();
        for (row, draws) in draws.chunks_exact(experts).enumerate() {
            let mut order: Vec<usize> = (0..experts).filter(|&expert| expert != 1).collect();
            let score = |expert: usize| draws[expert] - 2.0 * expert as f32 / experts as f32;
            order.sort_by(|&a, &b| score(b).total_cmp(&score(a)));
            order.truncate(per_row);
            order.sort_unstable();
            ids.extend(order.iter().map(|&expert| if row % 7 == 6 { -1 } else { expert as i32 }));
        }
        let slots = ids.len();
        let device = [buffer(gpu, slots * 4), buffer(gpu, slots * 4), buffer(gpu, (experts + 1) * 4)];
        let uploaded = upload_i32(gpu, &ids);
        let call = RoutedSort {
            ids: uploaded.slice(),
            places: device[0].slice(),
            sources: device[1].slice(),
            offsets: device[2].slice(),
            rows,
            per_row,
            experts,
        };
        routed_sort(gpu, &call).unwrap();
        let offsets = read_i32(gpu, &device[2], experts + 1);
        let sources = read_i32(gpu, &device[1], offsets[experts] as usize);
        Self { rows, per_row, experts, places: read_i32(gpu, &device[0], slots), sources, offsets, device }
    }

    fn slots(&self) -> usize {
        self.rows * self.per_row
    }

    /// The places of all experts.
    fn used(&self) -> usize {
        self.sources.len()
    }

    fn expert(&self, place: usize) -> usize {
        (0..self.experts).find(|&expert| (place as i32) < self.offsets[expert + 1]).unwrap()
    }
}

/// `rows` rows of `width` rounded normal numbers, and the same on the device, each row followed by NaN up to `stride`.
fn rows_of(gpu: &Gpu, seed: u64, rows: usize, width: usize, stride: usize) -> (Vec<f32>, Buffer) {
    let values: Vec<f32> = normals(seed, rows * width).iter().map(|&x| round_bf16(x)).collect();
    let padded: Vec<f32> =
        values.chunks_exact(width).flat_map(|row| row.iter().copied().chain(vec![f32::NAN; stride - width])).collect();
    (values, upload_bf16(gpu, &padded))
}

/// The first `rows` rows without what stands behind them, which has to be untouched.
fn unpadded(found: &[f32], rows: usize, width: usize, stride: usize) -> Vec<f32> {
    for (row, found) in found.chunks_exact(stride).enumerate() {
        assert!(found[width..].iter().all(|x| x.is_nan()), "row {row} wrote behind its end");
        assert!(row < rows || found.iter().all(|x| x.is_nan()), "row {row} of {rows} was written");
    }
    found.chunks_exact(stride).take(rows).flat_map(|row| row[..width].to_vec()).collect()
}

/// Results in a form, to be written or added to.
const RESULTS: [(Form, bool, f64); 4] = [
    (Form::Bf16, false, BF16_ERROR),
    (Form::Bf16, true, BF16_ERROR),
    (Form::F32, false, F32_ERROR),
    (Form::F32, true, F32_ERROR),
];

/// Room for `rows` results, of which the first `used` hold rounded normal numbers where they are added to and NaN elsewhere.
fn room(gpu: &Gpu, form: Form, add: bool, [rows, used, width, stride]: [usize; 4]) -> (Vec<f32>, Buffer) {
    let before: Vec<f32> =
        normals(7, used * width).iter().map(|&x| if add { round_bf16(x) } else { f32::NAN }).collect();
    let mut padded = vec![f32::NAN; rows * stride];
    for (padded, before) in padded.chunks_exact_mut(stride).zip(before.chunks_exact(width)) {
        padded[..width].copy_from_slice(before);
    }
    let buffer = if form == Form::F32 { upload_f32(gpu, &padded) } else { upload_bf16(gpu, &padded) };
    (before, buffer)
}

fn read(gpu: &Gpu, form: Form, buffer: &Buffer, count: usize) -> Vec<f32> {
    if form == Form::F32 { read_f32(gpu, buffer, count) } else { read_bf16(gpu, buffer, count) }
}

/// What was computed, and where it was to be added what stood there before too.
fn with_before(sums: &[f64], before: &[f32], add: bool) -> Vec<f64> {
    sums.iter().zip(before).map(|(sum, &before)| if add { sum + f64::from(before) } else { *sum }).collect()
}

fn wide(values: &[f32]) -> Vec<f64> {
    values.iter().map(|&x| x.into()).collect()
}

/// Rows, experts a row, experts, outputs and inputs of a matrix.
const CASES: [(usize, usize, usize, usize, usize); 4] =
    [(17, 2, 8, 72, 64), (300, 4, 12, 136, 200), (700, 2, 4, 264, 136), (9, 3, 40, 8, 8)];

test_each!(
    products_agree_with_double_precision,
    check_products,
    few_rows: super::CASES[0],
    many_experts: super::CASES[1],
    long_groups: super::CASES[2],
    fewer_rows_than_experts: super::CASES[3],
);

fn check_products((rows, per_row, experts, outputs, inputs): (usize, usize, usize, usize, usize)) {
    let Some(gpu) = gpu() else { return };
    let routes = Routes::new(&gpu, rows, per_row, experts);
    let (slots, used) = (routes.slots(), routes.used());
    let (x_stride, weight_stride, out_stride) = (inputs + 8, inputs + 16, outputs + 24);
    let (weight, weights) = rows_of(&gpu, 2, experts * outputs, inputs, weight_stride);
    for by_place in [false, true] {
        let (x, xs) = rows_of(&gpu, 1, if by_place { slots } else { rows }, inputs, x_stride);
        let run = |form: Form, add: bool| {
            let (before, out) = room(&gpu, form, add, [slots, used, outputs, out_stride]);
            let call = GroupedProduct {
                x: xs.slice(),
                x_rows: if by_place { slots } else { rows },
                x_stride,
                sources: (!by_place).then(|| routes.device[1].slice()),
                offsets: routes.device[2].slice(),
                weight: weights.slice(),
                weight_stride,
                expert_stride: outputs * weight_stride,
                out: out.slice(),
                form,
                add,
                out_stride,
                places: slots,
                experts,
                outputs,
                inputs,
            };
            grouped_product(&gpu, &call).unwrap();
            (before, unpadded(&read(&gpu, form, &out, slots * out_stride), used, outputs, out_stride))
        };
        let mut expected = Vec::new();
        for place in 0..used {
            let row = if by_place { place } else { routes.sources[place] as usize };
            let x = wide(&x[row * inputs..][..inputs]);
            let matrix = wide(&weight[routes.expert(place) * outputs * inputs..][..outputs * inputs]);
            expected.extend(
                matrix.chunks_exact(inputs).map(|weight| x.iter().zip(weight).map(|(x, w)| x * w).sum::<f64>()),
            );
        }
        for (form, add, most) in RESULTS {
            let (before, found) = run(form, add);
            assert_eq!(run(form, add).1, found, "two runs");
            let error = largest_error(&found, &with_before(&expected, &before, add));
            let case = format!("{rows} rows, [{outputs}, {inputs}], by place {by_place}, {form:?}, added {add}");
            assert!(error < most, "{case}: {error:.2e}");
        }
    }
}

test_each!(
    gradients_of_inputs_agree_with_double_precision,
    check_gradients_of_inputs,
    few_rows: super::CASES[0],
    many_experts: super::CASES[1],
    long_groups: super::CASES[2],
    fewer_rows_than_experts: super::CASES[3],
);

fn check_gradients_of_inputs((rows, per_row, experts, outputs, inputs): (usize, usize, usize, usize, usize)) {
    let Some(gpu) = gpu() else { return };
    let routes = Routes::new(&gpu, rows, per_row, experts);
    let (slots, used) = (routes.slots(), routes.used());
    let (dy_stride, weight_stride, dx_stride) = (outputs + 8, inputs + 16, inputs + 8);
    let (weight, weights) = rows_of(&gpu, 2, experts * outputs, inputs, weight_stride);
    let (dy, dys) = rows_of(&gpu, 1, slots, outputs, dy_stride);
    let run = |form: Form, add: bool| {
        let (before, dx) = room(&gpu, form, add, [slots, used, inputs, dx_stride]);
        let call = GroupedInputGradient {
            dy: dys.slice(),
            dy_stride,
            offsets: routes.device[2].slice(),
            weight: weights.slice(),
            weight_stride,
            expert_stride: outputs * weight_stride,
            dx: dx.slice(),
            form,
            add,
            dx_stride,
            places: slots,
            experts,
            outputs,
            inputs,
        };
        grouped_input_gradient(&gpu, &call).unwrap();
        (before, unpadded(&read(&gpu, form, &dx, slots * dx_stride), used, inputs, dx_stride))
    };
    let mut expected = vec![0.0; used * inputs];
    for (place, sums) in expected.chunks_exact_mut(inputs).enumerate() {
        let matrix = &weight[routes.expert(place) * outputs * inputs..][..outputs * inputs];
        for (weight, &g) in matrix.chunks_exact(inputs).zip(&dy[place * outputs..][..outputs]) {
            sums.iter_mut().zip(weight).for_each(|(sum, &w)| *sum += f64::from(g) * f64::from(w));
        }
    }
    for (form, add, most) in RESULTS {
        let (before, found) = run(form, add);
        assert_eq!(run(form, add).1, found, "two runs");
        let error = largest_error(&found, &with_before(&expected, &before, add));
        assert!(error < most, "{rows} rows, [{outputs}, {inputs}], {form:?}, added {add}: {error:.2e}");
    }
}

#[test]
fn gradients_of_weights_agree_with_double_precision() {
    let Some(gpu) = gpu() else { return };
    // The last two are summed in pieces on any card.
    let pieces = [(3000, 2, 5, 72, 64), (2500, 1, 3, 72, 136)];
    for (case, (rows, per_row, experts, outputs, inputs)) in CASES.into_iter().chain(pieces).enumerate() {
        let routes = Routes::new(&gpu, rows, per_row, experts);
        let (slots, used) = (routes.slots(), routes.used());
        let (dy_stride, x_stride, stride) = (outputs + 8, inputs + 16, inputs + 4);
        // What lies behind the places in use is not to be read.
        let nan = |mut values: Vec<f32>, width: usize| {
            values[used * width..].fill(f32::NAN);
            values
        };
        let dy = nan(normals(1, slots * outputs).iter().map(|&x| round_bf16(x)).collect(), outputs);
        let x = nan(normals(2, slots * inputs).iter().map(|&x| round_bf16(x)).collect(), inputs);
        let strided = |values: &[f32], width: usize, stride: usize| {
            let padded =
                values.chunks_exact(width).flat_map(|row| row.iter().copied().chain(vec![f32::NAN; stride - width]));
            upload_bf16(&gpu, &padded.collect::<Vec<_>>())
        };
        let (dys, xs) = (strided(&dy, outputs, dy_stride), strided(&x, inputs, x_stride));
        let mut sums = vec![0.0; experts * outputs * inputs];
        for place in 0..used {
            let matrix = &mut sums[routes.expert(place) * outputs * inputs..][..outputs * inputs];
            let x = wide(&x[place * inputs..][..inputs]);
            for (sums, &g) in matrix.chunks_exact_mut(inputs).zip(&dy[place * outputs..][..outputs]) {
                sums.iter_mut().zip(&x).for_each(|(sum, x)| *sum += f64::from(g) * x);
            }
        }
        let bytes = grouped_weight_gradient_workspace(&gpu, slots, experts, outputs, inputs).unwrap();
        assert_eq!(bytes > 0, case >= CASES.len(), "case {case}: {bytes} bytes of workspace");
        let before = normals(4, experts * outputs * stride);
        for output in [Output::F32, Output::AddF32] {
            let run = || {
                let gradient = match output {
                    Output::AddF32 => upload_f32(&gpu, &before),
                    _ => buffer(&gpu, experts * outputs * stride * 4),
                };
                let workspace = buffer(&gpu, bytes.max(16));
                let call = GroupedWeightGradient {
                    dy: dys.slice(),
                    dy_stride,
                    x: xs.slice(),
                    x_stride,
                    offsets: routes.device[2].slice(),
                    gradient: gradient.slice(),
                    gradient_stride: stride,
                    expert_stride: outputs * stride,
                    output,
                    workspace: workspace.slice(),
                    places: slots,
                    experts,
                    outputs,
                    inputs,
                };
                grouped_weight_gradient(&gpu, &call).unwrap();
                read_f32(&gpu, &gradient, experts * outputs * stride)
            };
            let found = run();
            assert!(run().iter().zip(&found).all(|(a, b)| a.to_bits() == b.to_bits()), "two runs");
            let (mut expected, mut written) = (Vec::new(), Vec::new());
            for ((found, before), sums) in
                found.chunks_exact(stride).zip(before.chunks_exact(stride)).zip(sums.chunks_exact(inputs))
            {
                let kept = |(found, before): (&f32, &f32)| match output {
                    Output::AddF32 => found.to_bits() == before.to_bits(),
                    _ => found.is_nan(),
                };
                assert!(found[inputs..].iter().zip(&before[inputs..]).all(kept), "written behind a row's end");
                written.extend_from_slice(&found[..inputs]);
                let start = |before: f32| if output == Output::AddF32 { f64::from(before) } else { 0.0 };
                expected.extend(sums.iter().zip(before).map(|(sum, &before)| sum + start(before)));
            }
            let error = largest_error(&written, &expected);
            assert!(error < F32_ERROR, "case {case}, [{outputs}, {inputs}], {output:?}: {error:.2e}");
        }
    }
}

#[test]
fn rows_and_places_exchange_what_double_precision_says() {
    let Some(gpu) = gpu() else { return };
    for (rows, per_row, experts, width) in [(17, 2, 8, 8), (300, 4, 12, 200), (101, 8, 64, 1024), (64, 1, 3, 2056)] {
        let routes = Routes::new(&gpu, rows, per_row, experts);
        let (slots, used) = (routes.slots(), routes.used());
        let (y, ys) = rows_of(&gpu, 1, slots, width, width);
        let gates: Vec<f32> = normals(2, slots).iter().map(|x| x.abs() + 0.1).collect();
        let dout = normals(3, rows * width);
        let (uploaded_gates, uploaded_dout) = (upload_f32(&gpu, &gates), upload_f32(&gpu, &dout));

        let dy = buffer(&gpu, slots * width * 2);
        let call = RoutedSpread {
            dout: uploaded_dout.slice(),
            places: routes.device[0].slice(),
            gates: uploaded_gates.slice(),
            dy: dy.slice(),
            rows,
            per_row,
            width,
        };
        routed_spread(&gpu, &call).unwrap();
        let dy = unpadded(&read_bf16(&gpu, &dy, slots * width), used, width, width);
        let mut expected_dy = vec![0.0; used * width];
        for (slot, &place) in routes.places.iter().enumerate().filter(|(_, place)| **place >= 0) {
            let dout = &dout[slot / per_row * width..][..width];
            let to = &mut expected_dy[place as usize * width..][..width];
            to.iter_mut().zip(dout).for_each(|(to, &g)| *to = f64::from(gates[slot]) * f64::from(g));
        }
        assert!(relative_error(&dy, &expected_dy) < 3e-3, "{rows} rows of {width}: dy");

        for form in [Form::F32, Form::Bf16] {
            for (with_gates, with_before) in [(true, true), (false, false), (false, true)] {
                let before: Vec<f32> = normals(4, rows * width)
                    .iter()
                    .map(|&x| if form == Form::Bf16 { round_bf16(x) } else { x })
                    .collect();
                let uploaded = if form == Form::Bf16 { upload_bf16(&gpu, &before) } else { upload_f32(&gpu, &before) };
                // In place where neither is left out.
                let fresh = buffer(&gpu, form.bytes(rows, width).unwrap());
                let out = if with_gates { &uploaded } else { &fresh };
                let call = RoutedSum {
                    y: ys.slice(),
                    places: routes.device[0].slice(),
                    gates: with_gates.then(|| uploaded_gates.slice()),
                    before: with_before.then(|| uploaded.slice()),
                    out: out.slice(),
                    form,
                    rows,
                    per_row,
                    width,
                };
                routed_sum(&gpu, &call).unwrap();
                let mut expected = if with_before { wide(&before) } else { vec![0.0; rows * width] };
                for (slot, &place) in routes.places.iter().enumerate().filter(|(_, place)| **place >= 0) {
                    let gate = if with_gates { f64::from(gates[slot]) } else { 1.0 };
                    let y = &y[place as usize * width..][..width];
                    let to = &mut expected[slot / per_row * width..][..width];
                    to.iter_mut().zip(y).for_each(|(to, &y)| *to += gate * f64::from(y));
                }
                let count = rows * width;
                let found = if form == Form::Bf16 { read_bf16(&gpu, out, count) } else { read_f32(&gpu, out, count) };
                let bound = if form == Form::Bf16 { 3e-3 } else { 5e-7 };
                let error = relative_error(&found, &expected);
                assert!(error < bound, "{rows} rows of {width}, {form:?}, {with_gates}, {with_before}: {error:.2e}");
            }
        }
    }
}

#[test]
fn sizes_that_do_not_fit_are_refused() {
    let Some(gpu) = gpu() else { return };
    let memory = buffer(&gpu, 1 << 16);
    let slice = memory.slice();
    let product = GroupedProduct {
        x: slice,
        x_rows: 16,
        x_stride: 16,
        sources: None,
        offsets: upload_zeros(&gpu, &memory),
        weight: slice,
        weight_stride: 16,
        expert_stride: 256,
        out: slice,
        form: Form::Bf16,
        add: false,
        out_stride: 16,
        places: 16,
        experts: 2,
        outputs: 16,
        inputs: 16,
    };
    grouped_product(&gpu, &product).unwrap();
    for wrong in [
        GroupedProduct { x_rows: 15, ..product },
        GroupedProduct { inputs: 12, ..product },
        GroupedProduct { outputs: 12, ..product },
        GroupedProduct { out_stride: 20, ..product },
        GroupedProduct { expert_stride: 1 << 16, ..product },
        GroupedProduct { experts: 0, ..product },
        GroupedProduct { weight: slice.part(8, 4096).unwrap(), ..product },
    ] {
        assert!(grouped_product(&gpu, &wrong).is_err(), "{wrong:?}");
    }
    let gradient = GroupedWeightGradient {
        dy: slice,
        dy_stride: 16,
        x: slice,
        x_stride: 16,
        offsets: product.offsets,
        gradient: slice,
        gradient_stride: 16,
        expert_stride: 256,
        output: Output::F32,
        workspace: slice,
        places: 16,
        experts: 2,
        outputs: 16,
        inputs: 16,
    };
    for wrong in [
        GroupedWeightGradient { output: Output::Bf16, ..gradient },
        GroupedWeightGradient { gradient_stride: 18, ..gradient },
        GroupedWeightGradient { expert_stride: 1 << 15, ..gradient },
        GroupedWeightGradient { places: 1 << 14, workspace: slice.part(0, 0).unwrap(), ..gradient },
    ] {
        assert!(grouped_weight_gradient(&gpu, &wrong).is_err(), "{wrong:?}");
    }
}

/// Offsets of experts without places, at the start of the memory.
fn upload_zeros<'a>(gpu: &Gpu, memory: &'a Buffer) -> ironloom_kernels::Slice<'a> {
    gpu.clear(memory.slice()).unwrap();
    memory.part(0, 64).unwrap()
}

#[test]
#[ignore = "prints times"]
fn speed_of_routed_training() {
    let Some(gpu) = gpu() else { return };
    for (rows, per_row, experts, width, inner) in
        [(4096, 2, 8, 512, 352), (32_768, 2, 8, 512, 352), (8192, 8, 64, 1024, 512)]
    {
        // Even loads: row r goes to neighbouring experts from r on.
        let slots = rows * per_row;
        let each = slots / experts;
        let offsets: Vec<i32> = (0..=experts).map(|expert| (expert * each) as i32).collect();
        let places: Vec<i32> = (0..slots).map(|slot| (slot % experts * each + slot / experts) as i32).collect();
        let mut sources = vec![0; slots];
        places.iter().enumerate().for_each(|(slot, &place)| sources[place as usize] = (slot / per_row) as i32);
        let (offsets, places, sources) =
            (upload_i32(&gpu, &offsets), upload_i32(&gpu, &places), upload_i32(&gpu, &sources));
        let x = filled(&gpu, rows, width);
        let dout = upload_f32(&gpu, &vec![0.5; rows * width]);
        let gates = upload_f32(&gpu, &vec![0.5; slots]);
        for (outputs, inputs) in [(2 * inner, width), (width, inner)] {
            let (by_place, dy) = (filled(&gpu, slots, inputs), filled(&gpu, slots, outputs));
            let weight = filled(&gpu, experts * outputs, inputs);
            let out = buffer(&gpu, slots * outputs.max(inputs) * 2);
            let gathered = outputs == 2 * inner;
            let product = GroupedProduct {
                x: if gathered { x.slice() } else { by_place.slice() },
                x_rows: if gathered { rows } else { slots },
                x_stride: inputs,
                sources: gathered.then(|| sources.slice()),
                offsets: offsets.slice(),
                weight: weight.slice(),
                weight_stride: inputs,
                expert_stride: outputs * inputs,
                out: out.slice(),
                form: Form::Bf16,
                add: false,
                out_stride: outputs,
                places: slots,
                experts,
                outputs,
                inputs,
            };
            let back = GroupedInputGradient {
                dy: dy.slice(),
                dy_stride: outputs,
                offsets: offsets.slice(),
                weight: weight.slice(),
                weight_stride: inputs,
                expert_stride: outputs * inputs,
                dx: out.slice(),
                form: Form::Bf16,
                add: false,
                dx_stride: inputs,
                places: slots,
                experts,
                outputs,
                inputs,
            };
            let bytes = grouped_weight_gradient_workspace(&gpu, slots, experts, outputs, inputs).unwrap();
            let (workspace, gradient) = (buffer(&gpu, bytes.max(16)), buffer(&gpu, experts * outputs * inputs * 4));
            let weights = GroupedWeightGradient {
                dy: dy.slice(),
                dy_stride: outputs,
                x: by_place.slice(),
                x_stride: inputs,
                offsets: offsets.slice(),
                gradient: gradient.slice(),
                gradient_stride: inputs,
                expert_stride: outputs * inputs,
                output: Output::F32,
                workspace: workspace.slice(),
                places: slots,
                experts,
                outputs,
                inputs,
            };
            let times = [
                seconds(&gpu, || grouped_product(&gpu, &product).unwrap()),
                seconds(&gpu, || grouped_input_gradient(&gpu, &back).unwrap()),
                seconds(&gpu, || grouped_weight_gradient(&gpu, &weights).unwrap()),
            ];
            let operations = 2.0 * (slots * outputs * inputs) as f64 / 1e12;
            let [forward, back, gradient] =
                times.map(|time| format!("{:.1} us ({:.0} TFLOP/s)", time * 1e6, operations / time));
            println!(
                "{slots} places, {experts} x [{outputs}, {inputs}]: product {forward}, inputs' gradient {back}, weights' \
                 gradient {gradient}, {:.1} MB of workspace",
                bytes as f64 / 1e6
            );
        }
        let (y, dy) = (filled(&gpu, slots, width), buffer(&gpu, slots * width * 2));
        let spread = RoutedSpread {
            dout: dout.slice(),
            places: places.slice(),
            gates: gates.slice(),
            dy: dy.slice(),
            rows,
            per_row,
            width,
        };
        let out = buffer(&gpu, rows * width * 4);
        let sum = RoutedSum {
            y: y.slice(),
            places: places.slice(),
            gates: Some(gates.slice()),
            before: Some(dout.slice()),
            out: out.slice(),
            form: Form::F32,
            rows,
            per_row,
            width,
        };
        let (spread, sum) = (
            seconds(&gpu, || routed_spread(&gpu, &spread).unwrap()),
            seconds(&gpu, || routed_sum(&gpu, &sum).unwrap()),
        );
        println!(
            "{rows} rows of {width}, {per_row} places each: spread {:.1} us, sum {:.1} us",
            spread * 1e6,
            sum * 1e6
        );
    }
}
