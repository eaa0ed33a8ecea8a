//! The gradient of an embedding table: many ids and few, one id in every row, ids outside the vocabulary, new and added.

use ironloom_core::Philox;
use ironloom_kernels::{EmbeddingBackward, Form, Gpu, embedding_backward, embedding_backward_workspace};

use crate::{
    buffer, gpu, read_f32, relative_error,
    rows::{Rows, same_bits},
    upload_f32, upload_u32,
};

const SCALE: f32 = 1.5;

#[derive(Clone, Copy, Debug)]
enum Ids {
    /// Drawn evenly.
    Even,
    /// A third of them one id, some outside the vocabulary.
    Frequent,
    /// All the same.
    One,
    /// In runs as long as two pieces of the kernel.
    Runs,
}

#[derive(Clone, Copy, Debug)]
struct Case {
    rows: usize,
    vocabulary: usize,
    width: usize,
    form: Form,
    ids: Ids,
    clear: bool,
}

fn run(gpu: &Gpu, case: Case) -> Vec<f32> {
    let Case { rows, vocabulary, width, form, clear, .. } = case;
    let mut draws = Philox::new(11, rows as u64);
    let mut even = || draws.next_u32() % vocabulary as u32;
    let id_values: Vec<u32> = (0..rows)
        .map(|row| match case.ids {
            Ids::Even => even(),
            Ids::Frequent if row % 17 == 4 => [vocabulary as u32, u32::MAX][row % 2],
            Ids::Frequent if row % 3 == 0 => 1,
            Ids::Frequent => even(),
            Ids::One => vocabulary as u32 / 2,
            Ids::Runs => (row / 64 % vocabulary) as u32,
        })
        .collect();
    let (gradient, values) = Rows::normals(gpu, form, [rows, width, width], 3, 1.0);
    let ids = upload_u32(gpu, &id_values);
    let count = vocabulary * width;
    let table = if clear { buffer(gpu, 4 * count) } else { upload_f32(gpu, &vec![0.25; count]) };
    let workspace = buffer(gpu, embedding_backward_workspace(rows, width).unwrap());
    let call = EmbeddingBackward {
        ids: ids.slice(),
        gradient: gradient.slice(),
        form,
        scale: SCALE,
        table_gradient: table.slice(),
        clear,
        workspace: workspace.slice(),
        rows,
        vocabulary,
        width,
    };
    embedding_backward(gpu, &call).unwrap();
    assert!(embedding_backward(gpu, &EmbeddingBackward { rows: rows + 1, ..call }).is_err());
    assert!(embedding_backward(gpu, &EmbeddingBackward { vocabulary: vocabulary + 1, ..call }).is_err());
    assert!(embedding_backward(gpu, &EmbeddingBackward { form: Form::Split, ..call }).is_err());
    let found = read_f32(gpu, &table, count);
    let mut expected = vec![if clear { 0.0 } else { 0.25 }; count];
    for (&id, row) in id_values.iter().zip(values.chunks_exact(width)) {
        if (id as usize) < vocabulary {
            let sums = &mut expected[id as usize * width..][..width];
            sums.iter_mut().zip(row).for_each(|(sum, &x)| *sum += f64::from(SCALE) * f64::from(x));
        }
    }
    let error = relative_error(&found, &expected);
    assert!(error < 2e-6, "{case:?}: {error:e}");
    found
}

#[test]
fn sums_equal_double_precision() {
    let Some(gpu) = gpu() else { return };
    for (rows, vocabulary, width) in
        [(1, 5, 8), (300, 1000, 768), (77, 33, 37), (4096, 32_000, 64), (2500, 40, 132), (700, 300_000, 6), (33, 1, 4)]
    {
        for (ids, form) in [
            (Ids::Even, Form::F32),
            (Ids::Frequent, Form::F32),
            (Ids::Frequent, Form::Bf16),
            (Ids::One, Form::Bf16),
            (Ids::Runs, Form::F32),
        ] {
            if vocabulary == 1 && matches!(ids, Ids::Frequent) {
                continue;
            }
            for clear in [false, true] {
                run(&gpu, Case { rows, vocabulary, width, form, ids, clear });
            }
        }
    }
}

#[test]
fn many_rows_give_the_same_bits_again() {
    let Some(gpu) = gpu() else { return };
    for ids in [Ids::Even, Ids::Frequent, Ids::One] {
        let case = Case { rows: 65_536, vocabulary: 5000, width: 64, form: Form::F32, ids, clear: true };
        assert!(same_bits(&run(&gpu, case), &run(&gpu, case)), "{ids:?}");
    }
}
