//! Times of the row-wise kernels of a training step, each by itself, at the sizes of the benchmarks' models.

use ironloom_kernels::{
    Activation, Columns, CrossEntropy, Form, GatedActivation, GatedActivationBackward, GatherRows, Gpu, LogitsBecome,
    NormWeightGradient, RmsNorm, RmsNormBackward, RopeTraining, cross_entropy, gated_activation,
    gated_activation_backward, gather_rows, rmsnorm, rmsnorm_backward, rmsnorm_backward_workspace, rope_training,
};

use crate::{buffer, gemm::filled, gpu, upload_f32, upload_i32};

/// What a model's rows have.
struct Widths {
    rows: usize,
    width: usize,
    heads: usize,
    /// Of a row that has queries, keys and values.
    attention: usize,
    inner: usize,
}

#[test]
#[ignore = "prints times"]
fn speed_of_rows_in_training() {
    let Some(gpu) = gpu() else { return };
    for rows in [2048, 8192] {
        time_loss(&gpu, rows, 32_000);
    }
    for rows in [4096, 32_768] {
        time_rows(&gpu, Widths { rows, width: 768, heads: 16, attention: 1280, inner: 1408 });
        time_rows(&gpu, Widths { rows, width: 512, heads: 10, attention: 768, inner: 352 });
    }
    time_rows(&gpu, Widths { rows: 8192, width: 2048, heads: 40, attention: 3072, inner: 8192 });
}

fn time_loss(gpu: &Gpu, rows: usize, vocabulary: usize) {
    let logits = filled(gpu, rows, vocabulary);
    let targets = upload_i32(gpu, &(0..rows).map(|row| (row * 7919 % vocabulary) as i32).collect::<Vec<_>>());
    let (scale, figures, totals) = (upload_f32(gpu, &[1.0]), buffer(gpu, 16 * rows), buffer(gpu, 32));
    let loss = CrossEntropy {
        logits: logits.slice(),
        logits_stride: vocabulary,
        targets: targets.slice(),
        scale: scale.slice(),
        z_loss: 0.0,
        logits_become: LogitsBecome::Slopes,
        row_figures: figures.slice(),
        totals: totals.slice(),
        rows,
        vocabulary,
    };
    time(gpu, "loss", [rows, vocabulary, 4 * vocabulary], &|| cross_entropy(gpu, &loss).unwrap());
}

/// Prints the time of the longest kernel, and the rate of the bytes that it has to move for each row.
fn time(gpu: &Gpu, name: &str, [rows, width, bytes_of_row]: [usize; 3], run: &dyn Fn()) {
    let times = gpu.profile::<ironloom_kernels::Error>(|| {
        (0..8).for_each(|_| run());
        Ok(())
    });
    let kernel = &times.unwrap()[0];
    let seconds = kernel.seconds / kernel.launches as f64;
    let rate = (rows * bytes_of_row) as f64 / seconds / 1e9;
    println!("{rows} x {width}, {name}: {} {:.2} us, {rate:.0} GB/s", kernel.name, seconds * 1e6);
}

fn time_rows(gpu: &Gpu, widths: Widths) {
    let Widths { rows, width, heads, attention, inner } = widths;
    let (normed, gradient, columns) =
        (filled(gpu, rows, width), filled(gpu, rows, width), filled(gpu, rows, attention));
    let (halves, slope) = (filled(gpu, rows, 2 * inner), filled(gpu, rows, inner));
    let (residual, ones) = (upload_f32(gpu, &vec![0.5; rows * width]), upload_f32(gpu, &vec![1.0; width]));
    let phases = upload_f32(gpu, &vec![0.6; rows * 64]);
    let [copy, out, operand] = [(); 3].map(|()| buffer(gpu, rows * width * 2));
    let (turned, product) = (buffer(gpu, rows * attention * 2), buffer(gpu, rows * inner * 2));
    let to_halves = buffer(gpu, rows * 2 * inner * 2);
    let (weight_gradient, partials) =
        (buffer(gpu, width * 4), buffer(gpu, rmsnorm_backward_workspace(rows, 1, width).unwrap()));
    let norm = RmsNorm {
        x: residual.slice(),
        x_form: Form::F32,
        x_stride: width,
        weight: ones.slice(),
        out: out.slice(),
        form: Form::Bf16,
        copy: Some(copy.slice()),
        rows,
        runs: 1,
        width,
        epsilon: 1e-5,
    };
    let again = RmsNorm { x: normed.slice(), x_form: Form::Bf16, copy: None, ..norm };
    let back = RmsNormBackward {
        x: normed.slice(),
        x_form: Form::Bf16,
        x_stride: width,
        weight: ones.slice(),
        gradient: gradient.slice(),
        gradient_form: Form::Bf16,
        gradient_stride: width,
        residual: Some(residual.slice()),
        out: residual.slice(),
        out_form: Form::F32,
        out_stride: width,
        operand: Some(operand.slice()),
        weight_gradient: Some(NormWeightGradient {
            out: weight_gradient.slice(),
            add: false,
            partials: partials.slice(),
        }),
        rows,
        runs: 1,
        width,
        epsilon: 1e-5,
    };
    let rope = RopeTraining {
        x: columns.slice(),
        x_stride: attention,
        out: turned.slice(),
        out_stride: attention,
        norm: None,
        phases: phases.slice(),
        rows,
        heads,
        head_width: 64,
        half: 32,
    };
    let up = halves.part(2 * inner, halves.bytes() - 2 * inner).unwrap();
    let gated = GatedActivation {
        gate: halves.slice(),
        gate_stride: 2 * inner,
        up,
        up_stride: 2 * inner,
        input_form: Form::Bf16,
        out: product.slice(),
        form: Form::Bf16,
        rows,
        width: inner,
        activation: Activation::Silu,
    };
    let half = |slice| Columns { slice, stride: 2 * inner };
    let gated_back = GatedActivationBackward {
        gate: half(halves.slice()),
        up: half(up),
        gradient: Columns { slice: slope.slice(), stride: inner },
        gate_gradient: half(to_halves.slice()),
        up_gradient: half(to_halves.part(2 * inner, up.bytes()).unwrap()),
        product: Some(Columns { slice: product.slice(), stride: inner }),
        rows,
        width: inner,
        activation: Activation::Silu,
    };
    let places: Vec<i32> = (0..2 * rows).map(|place| (place * 7919 % rows) as i32).collect();
    let (places, picked) = (upload_i32(gpu, &places), buffer(gpu, 2 * rows * width * 2));
    // As the rows of experts are picked: two numbers in bfloat16 as one.
    let gather = GatherRows {
        x: normed.slice(),
        x_rows: rows,
        rows: places.slice(),
        out: picked.slice(),
        count: 2 * rows,
        width: width / 2,
    };
    let cases: [(&str, usize, &dyn Fn()); 7] = [
        ("norm with a copy", 8 * width, &|| rmsnorm(gpu, &norm).unwrap()),
        ("norm again", 4 * width, &|| rmsnorm(gpu, &again).unwrap()),
        ("norm back", 14 * width, &|| rmsnorm_backward(gpu, &back).unwrap()),
        ("rotation", heads * 64 * 4 + 256, &|| rope_training(gpu, &rope).unwrap()),
        ("gated activation", 6 * inner, &|| gated_activation(gpu, &gated).unwrap()),
        ("picked rows", 8 * width, &|| gather_rows(gpu, &gather).unwrap()),
        ("gated activation back", 12 * inner, &|| gated_activation_backward(gpu, &gated_back).unwrap()),
    ];
    for (name, bytes_of_row, run) in cases {
        time(gpu, name, [rows, width, bytes_of_row], run);
    }
}
