//! AdamW with 8-bit states over 50 steps: the bits of the same arithmetic on the host, where a code is found by search among
//! all levels.

use ironloom_kernels::{AdamW8bit, AdamWRule, Gpu, ParameterRange, StepValues, adamw_8bit};

use crate::{
    buffer, gpu, normals,
    optimizer::{adamw_on_host, bits, gradients, step_values},
    read_bf16, read_f32, round_bf16, upload_f32,
};

const BLOCK: usize = AdamW8bit::BLOCK;
const RULE: AdamWRule = AdamWRule { beta1: 0.9, beta2: 0.95, epsilon: 1e-8, weight_decay: 0.1 };

/// The levels of a map, and what lies in the middle between each and the next.
struct Map {
    levels: Vec<f32>,
    middles: Vec<f32>,
}

impl Map {
    fn new(has_sign: bool) -> Self {
        let mut levels = vec![0.0, 1.0];
        for decade in 0..7 {
            let bins = 1u32 << (decade + u32::from(!has_sign));
            let scale = (decade..6).fold(1.0f64, |scale, _| scale / 10.0);
            for bin in 0..bins {
                let level = (scale * (0.1 + 0.9 * (f64::from(bin) + 0.5) / f64::from(bins))) as f32;
                levels.push(level);
                if has_sign {
                    levels.push(-level);
                }
            }
        }
        levels.sort_by(f32::total_cmp);
        assert_eq!(levels.len(), 256);
        let middles = levels.windows(2).map(|pair| (pair[0] + pair[1]) / 2.0).collect();
        Self { levels, middles }
    }

    fn code(&self, value: f32) -> u8 {
        self.middles.partition_point(|&middle| middle < value) as u8
    }

    fn pack(&self, values: &[f32], codes: &mut [u8]) -> f32 {
        let absmax = values.iter().fold(0.0f32, |largest, value| largest.max(value.abs()));
        for (code, value) in codes.iter_mut().zip(values) {
            *code = self.code(if absmax == 0.0 { 0.0 } else { value / absmax });
        }
        absmax
    }
}

/// A block's moments on the host.
#[derive(Clone)]
struct Moments {
    codes: [[u8; BLOCK]; 2],
    absmax: [f32; 2],
}

impl Moments {
    fn step(&mut self, maps: &[Map; 2], values: &StepValues, gradient: &[f32], weights: &mut [f32]) {
        let level = |part: usize, i: usize| self.absmax[part] * maps[part].levels[usize::from(self.codes[part][i])];
        let (mut first, mut roots) = ([0.0; BLOCK], [0.0; BLOCK]);
        for i in 0..BLOCK {
            let (mut m, root) = (level(0, i), level(1, i));
            let mut v = root * root;
            adamw_on_host(values, &RULE, gradient[i], &mut weights[i], &mut m, &mut v);
            (first[i], roots[i]) = (m, v.sqrt());
        }
        self.absmax = [maps[0].pack(&first, &mut self.codes[0]), maps[1].pack(&roots, &mut self.codes[1])];
    }
}

fn upload_step(gpu: &Gpu, values: &StepValues) -> ironloom_kernels::Buffer {
    gpu.upload(bytemuck::bytes_of(values), "a test").unwrap()
}

fn read_bytes(gpu: &Gpu, buffer: &ironloom_kernels::Buffer, count: usize) -> Vec<u8> {
    let mut bytes = vec![0; count];
    gpu.read(buffer.slice(), &mut bytes).unwrap();
    bytes
}

#[test]
fn steps_have_the_bits_of_the_host() {
    let Some(gpu) = gpu() else { return };
    let maps = [Map::new(true), Map::new(false)];
    // One block, one to each warp and one more, and more than one card's launch takes at once.
    for (blocks, steps) in [(1, 50), (9, 50), (21, 50), (20_000, 2)] {
        let count = blocks * BLOCK;
        let start = normals(1, count);
        let mut w = start.clone();
        let mut moments = vec![Moments { codes: [[0; BLOCK]; 2], absmax: [0.0; 2] }; blocks];
        let weights = upload_f32(&gpu, &w);
        let zeros = |bytes: usize| gpu.upload(&vec![0; bytes], "a test").unwrap();
        let states = [zeros(count), zeros(4 * blocks), zeros(count), zeros(4 * blocks)];
        let rounded = buffer(&gpu, 2 * count);
        for number in 1..=steps {
            let refused = number == 20;
            let mut g = if refused { vec![f32::NAN; count] } else { gradients(number, count) };
            if !refused && blocks > 5 {
                // A block without a gradient has no scale.
                g[5 * BLOCK..6 * BLOCK].fill(0.0);
            }
            let values = step_values(number, u32::from(!refused));
            let (step, gradient) = (upload_step(&gpu, &values), upload_f32(&gpu, &g));
            let range = ParameterRange {
                weights: weights.slice(),
                gradient: gradient.slice(),
                rounded: Some(rounded.slice()),
                step: step.slice(),
                count,
            };
            let call = AdamW8bit {
                range,
                first: states[0].slice(),
                first_absmax: states[1].slice(),
                second: states[2].slice(),
                second_absmax: states[3].slice(),
                rule: RULE,
            };
            adamw_8bit(&gpu, &call).unwrap();
            if !refused {
                let parts = w.chunks_exact_mut(BLOCK).zip(g.chunks_exact(BLOCK)).zip(&mut moments);
                parts.for_each(|((w, g), moments)| moments.step(&maps, &values, g, w));
            }
        }
        assert!(bits(&read_f32(&gpu, &weights, count)) == bits(&w), "{blocks} blocks");
        assert!(read_bf16(&gpu, &rounded, count) == w.iter().map(|&w| round_bf16(w)).collect::<Vec<_>>());
        for part in 0..2 {
            let codes: Vec<u8> = moments.iter().flat_map(|moments| moments.codes[part]).collect();
            assert!(read_bytes(&gpu, &states[2 * part], count) == codes, "{blocks} blocks, codes {part}");
            let absmax: Vec<f32> = moments.iter().map(|moments| moments.absmax[part]).collect();
            assert_eq!(bits(&read_f32(&gpu, &states[2 * part + 1], blocks)), bits(&absmax), "{blocks} blocks");
        }
    }
}

#[test]
fn parts_of_blocks_are_refused() {
    let Some(gpu) = gpu() else { return };
    let (memory, step) = (upload_f32(&gpu, &[0.0; 512]), upload_step(&gpu, &step_values(1, 1)));
    let whole = memory.slice();
    let call = |count, codes| {
        let range = ParameterRange { weights: whole, gradient: whole, rounded: None, step: step.slice(), count };
        let call =
            AdamW8bit { range, first: codes, first_absmax: whole, second: whole, second_absmax: whole, rule: RULE };
        adamw_8bit(&gpu, &call)
    };
    call(0, whole).unwrap();
    assert!(call(255, whole).is_err());
    assert!(call(768, whole).is_err());
    assert!(call(256, memory.part(0, 255).unwrap()).is_err());
    assert!(call(256, memory.part(8, 256).unwrap()).is_err());
}
