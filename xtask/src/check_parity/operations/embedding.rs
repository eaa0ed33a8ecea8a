//! `embedding`: rows of a table by their numbers, exactly what the stored weights say.

use ironloom_quant::{PackedMatrix, WeightFormat};
use ironloom_tensor::{Context, Device, Indices, Weight, ops};

use crate::check_parity::{
    case::{Bound, Case, Results},
    inputs::Inputs,
};

pub(super) fn cases(device: &Device) -> Vec<Case> {
    let shapes = [[1, 4, 1], [5, 17, 3], [33, 65, 40], [256, 576, 7]];
    let case = |[vocabulary, width, ids]: [usize; 3]| {
        let shape = format!("{ids} of [{vocabulary}, {width}]");
        let mut inputs = Inputs::of("embedding", &shape);
        let (table, ids) = (inputs.normal(vocabulary * width), inputs.below(vocabulary as u32, ids));
        let device = device.clone();
        Case::new("embedding", shape, Bound::Exact, move |kernel| {
            let packed = PackedMatrix::from_f32(
                &kernel.inputs(&table),
                vocabulary,
                width,
                WeightFormat::Keep,
                device.threads(),
            )?;
            let ours =
                ops::embedding(&Context::inference(&device), &Weight::cpu(packed), &Indices::new(&device, &ids)?, 1.0)?;
            let rows = ids.iter().flat_map(|&id| &table[id as usize * width..][..width]);
            let reference = rows.map(|&value| f64::from(value)).collect();
            Ok(Results::new(reference, Vec::new(), ours.into_f32()?))
        })
    };
    shapes.into_iter().map(case).collect()
}
