//! `embedding`: rows of a table by their numbers, exactly what the stored weights say.

use ironloom_core::DType;
use ironloom_quant::WeightFormat;
use ironloom_tensor::{Device, Indices, ops};

use super::weights::{self, Matrix};
use crate::check_parity::{
    case::{Bound, Case, Kernel, Results},
    inputs::Inputs,
    place::{Place, is_cpu},
};

/// Rows and columns of the table, ids looked up.
const SHAPES: [[usize; 3]; 4] = [[1, 4, 1], [5, 17, 3], [33, 65, 40], [256, 576, 7]];
/// On a card also a table of every format: columns that are parts of its chunks, and past a block of threads.
const CARD_SHAPES: [[usize; 3]; 3] = [[5, 64, 3], [50, 328, 40], [33, 2048, 64]];

pub(super) fn cases(device: &Device) -> Vec<Case> {
    let mut cases: Vec<Case> =
        SHAPES.iter().map(|&shape| case(device, (DType::F32, WeightFormat::Keep), shape)).collect();
    if !is_cpu(device) {
        for format in weights::formats() {
            for [vocabulary, width, ids] in CARD_SHAPES {
                cases.push(case(device, format, [vocabulary, width.next_multiple_of(format.0.block_elements()), ids]));
            }
        }
    }
    cases
}

fn case(device: &Device, format: (DType, WeightFormat), [vocabulary, width, ids]: [usize; 3]) -> Case {
    let name = match format {
        (DType::F32, WeightFormat::Keep) => String::new(),
        format => format!(" {}", weights::name(format)),
    };
    let shape = format!("{ids} of [{vocabulary}, {width}]{name}");
    let place = Place::single(device);
    Case::new("embedding", shape.clone(), Bound::Exact, move |kernel| {
        let mut inputs = Inputs::of("embedding", &shape);
        let table = Matrix::random(format, [vocabulary, width], &mut inputs)?;
        let ids = inputs.below(vocabulary as u32, ids);
        let weight = match kernel {
            Kernel::Ours => table.weight(&place.device)?,
            Kernel::OneInFourDropped => table.with_bytes_dropped().weight(&place.device)?,
        };
        let ours = ops::embedding(&place.context(), &weight, &Indices::new(&place.device, &ids)?, 1.0)?;
        let held = table.held(&place.device)?;
        let rows = ids.iter().flat_map(|&id| &held[id as usize * width..][..width]);
        Ok(Results::new(rows.map(|&value| f64::from(value)).collect(), Vec::new(), ours.into_f32()?))
    })
}
