//! Products of many rows by cuBLASLt, with the cases of `gemm.rs`.

use ironloom_kernels::{CublasLt, Error, Gpu, Output, Product};

use crate::{
    buffer,
    gemm::{TIMED, check_products, check_rows_stand_alone, filled, seconds},
    gpu,
};

/// None where the library is not there.
fn cublaslt(gpu: &Gpu, choice_rows: usize) -> Option<CublasLt> {
    match CublasLt::open(gpu, choice_rows) {
        Ok(library) => Some(library),
        Err(error @ Error::CublasLtMissing) => {
            println!("skipped: {error}");
            None
        }
        Err(error) => panic!("{error}"),
    }
}

#[test]
fn products_agree_with_double_precision() {
    let Some(gpu) = gpu() else { return };
    let Some(library) = cublaslt(&gpu, CublasLt::CHOICE_ROWS) else { return };
    check_products(&gpu, |call| library.matmul(&gpu, call).unwrap());
}

#[test]
fn a_row_has_the_same_bits_in_any_product() {
    let Some(gpu) = gpu() else { return };
    let Some(library) = cublaslt(&gpu, CublasLt::CHOICE_ROWS) else { return };
    for (outputs, inputs) in [(2048, 2048), (256, 2048), (5504, 640), (2048, 5504), (200, 1096), (1001, 576)] {
        check_rows_stand_alone(&gpu, 18, outputs, inputs, |call| library.matmul(&gpu, call).unwrap());
    }
}

/// The library is asked while a stream is captured too: no memory is taken and nothing is waited for.
#[test]
fn a_product_can_be_captured() {
    let Some(gpu) = gpu() else { return };
    let Some(library) = cublaslt(&gpu, CublasLt::CHOICE_ROWS) else { return };
    let (rows, outputs, inputs) = (100, 256, 512);
    let (x, weight) = (filled(&gpu, rows, inputs), filled(&gpu, outputs, inputs));
    let (first, second) = (buffer(&gpu, rows * outputs * 4), buffer(&gpu, rows * outputs * 4));
    let product = |out| {
        library.matmul(
            &gpu,
            &Product {
                x: x.slice(),
                x_stride: inputs,
                weight: weight.slice(),
                weight_stride: inputs,
                bias: None,
                out,
                out_stride: outputs,
                output: Output::F32,
                rows,
                outputs,
                inputs,
            },
        )
    };
    product(first.slice()).unwrap();
    let (graph, ()) = gpu.capture(|| product(second.slice())).unwrap();
    gpu.clear(second.slice()).unwrap();
    graph.replay().unwrap();
    let bits = |buffer| -> Vec<u32> { crate::read_u32(&gpu, buffer, rows * outputs) };
    assert_eq!(bits(&first), bits(&second));
}

#[test]
#[ignore = "prints times"]
fn speed_by_the_rows_of_choice() {
    let Some(gpu) = gpu() else { return };
    for (outputs, inputs) in TIMED {
        let weight = filled(&gpu, outputs, inputs);
        let inputs_of = [512, 1024, 4096].map(|rows| (rows, filled(&gpu, rows, inputs)));
        let out = buffer(&gpu, 4096 * outputs * 4);
        for output in [Output::Bf16, Output::AddF32] {
            for choice_rows in [256, 512, 1024, 2048, 4096] {
                let Some(library) = cublaslt(&gpu, choice_rows) else { return };
                let mut line = format!("cublaslt {outputs} x {inputs} {output:?}, chosen for {choice_rows}:");
                for (rows, x) in &inputs_of {
                    let call = Product {
                        x: x.slice(),
                        x_stride: inputs,
                        weight: weight.slice(),
                        weight_stride: inputs,
                        bias: None,
                        out: out.slice(),
                        out_stride: outputs,
                        output,
                        rows: *rows,
                        outputs,
                        inputs,
                    };
                    let time = seconds(&gpu, || library.matmul(&gpu, &call).unwrap());
                    line +=
                        &format!(" {rows} rows {:.0} TFLOP/s,", 2.0 * (rows * outputs * inputs) as f64 / time / 1e12);
                    if *rows == 4096 {
                        line += &format!(" {:?}", library.algorithm(&call).unwrap());
                    }
                }
                println!("{line}");
            }
        }
    }
}
