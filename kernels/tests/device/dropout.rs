//! Dropout: bit for bit the processor's mask, in both forms, of strided and odd rows, in place and not.

use ironloom_core::Philox;
use ironloom_kernels::{Dropout, Form, Gpu, dropout};

use crate::{
    gpu, round_bf16,
    rows::{Rows, same_bits},
    upload_u64,
};

const SEED: u64 = 0x1234_5678_9ABC_DEF0;
const STREAM: u64 = 0x7_0000_0003;

fn run(gpu: &Gpu, [rows, width, gap]: [usize; 3], form: Form, probability: f32, in_place: bool) -> Vec<f32> {
    let shape = [rows, width, width + gap];
    let (x, values) = Rows::normals(gpu, form, shape, 1, 1.0);
    let new = Rows::poisoned(gpu, form, [rows, width, width + 2 * gap]);
    let seed = upload_u64(gpu, &[SEED]);
    let out = if in_place { &x } else { &new };
    let call = Dropout {
        x: x.slice(),
        x_stride: x.stride,
        out: out.slice(),
        out_stride: out.stride,
        form,
        seed: seed.slice(),
        stream: STREAM,
        probability,
        rows,
        width,
    };
    dropout(gpu, &call).unwrap();
    assert!(dropout(gpu, &Dropout { rows: rows + 1, ..call }).is_err());
    for probability in [-0.1, 1.0, f32::NAN] {
        assert!(dropout(gpu, &Dropout { probability, ..call }).is_err());
    }
    let found = out.read(gpu);
    let (threshold, scale) = ((f64::from(probability) * 4_294_967_296.0) as u32, 1.0 / (1.0 - f64::from(probability)));
    let mut draws = Philox::new(SEED, STREAM);
    let expected: Vec<f32> = values
        .iter()
        .map(|&x| if draws.next_u32() >= threshold { x * scale as f32 } else { 0.0 })
        .map(|x| if form == Form::Bf16 { round_bf16(x) } else { x })
        .collect();
    assert!(same_bits(&found, &expected), "{rows} x {width} + {gap}, {form:?}, {probability}");
    found
}

#[test]
fn masks_are_the_processors() {
    let Some(gpu) = gpu() else { return };
    for shape in [[1, 4, 0], [33, 768, 8], [5, 37, 3], [300, 1000, 0], [7, 30, 0], [4, 8, 2]] {
        for form in [Form::F32, Form::Bf16] {
            for probability in [0.0, 0.1, 0.5, 0.999] {
                let new = run(&gpu, shape, form, probability, false);
                assert!(same_bits(&run(&gpu, shape, form, probability, true), &new));
            }
        }
    }
}
