//! Phases of rotary embedding at small and large positions, of rows in use and not.

use ironloom_kernels::{RopePhases, rope_phases};

use crate::{buffer, gpu, read_f32, upload_f32, upload_i32};

#[test]
fn phases_are_those_of_double_precision() {
    let Some(gpu) = gpu() else { return };
    for (half, factor) in [(32usize, 1.0f32), (64, 1.25), (3, 1.0), (200, 1.0)] {
        let frequencies: Vec<f32> = (0..half).map(|i| 10_000.0f64.powf(-(i as f64) / half as f64) as f32).collect();
        let positions: Vec<i32> = (0..64).map(|i| if i % 5 == 4 { -1 } else { i * i * i * 4 }).collect();
        let (device_positions, device_frequencies) = (upload_i32(&gpu, &positions), upload_f32(&gpu, &frequencies));
        let phases = buffer(&gpu, 64 * 2 * half * 4);
        let call = RopePhases {
            positions: device_positions.slice(),
            inverse_frequencies: device_frequencies.slice(),
            factor,
            phases: phases.slice(),
            rows: 64,
            half,
        };
        rope_phases(&gpu, &call).unwrap();
        let found = read_f32(&gpu, &phases, 64 * 2 * half);
        for (row, (&position, found)) in positions.iter().zip(found.chunks_exact(2 * half)).enumerate() {
            for j in 0..half {
                let phase = f64::from(position as f32 * frequencies[j]);
                let (sine, cosine) = if position < 0 { (0.0, 0.0) } else { phase.sin_cos() };
                // One unit in the last place: the libraries' double precision may differ in its own last bit.
                for (found, exact) in [(found[j], cosine), (found[half + j], sine)] {
                    let exact = exact as f32 * factor;
                    assert!((found - exact).abs() <= f32::EPSILON * exact.abs(), "row {row}, {j}: {found} {exact}");
                }
            }
        }
        assert!(rope_phases(&gpu, &RopePhases { rows: 65, ..call }).is_err());
    }
}
