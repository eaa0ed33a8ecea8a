//! Attention with caches against plain loops in double precision, its masks, and its refusals.

use ironloom_core::{Philox, SimdLevel, Threads};

use super::*;
use crate::Device;

struct Case {
    heads: usize,
    kv_heads: usize,
    width: usize,
    window: Option<usize>,
    /// (history before the call, query rows) of each sequence.
    spans: Vec<(usize, usize)>,
}

fn normals(seed: u64, rows: usize, width: usize) -> Tensor {
    let mut draws = Philox::new(seed, 0);
    Tensor::from_f32((0..rows * width).map(|_| draws.next_normal()).collect(), [rows, width]).unwrap()
}

impl Case {
    fn options(&self) -> AttentionOptions {
        AttentionOptions { heads: self.heads, scale: 1.0 / (self.width as f32).sqrt(), window: self.window }
    }

    fn run(&self, device: &Device) -> (Tensor, Vec<(Tensor, Tensor)>, Tensor) {
        let cx = Context::inference(device);
        let mut buffers = Vec::new();
        let mut histories = Vec::new();
        for (i, &(before, rows)) in self.spans.iter().enumerate() {
            let keys = normals(10 + i as u64, before + rows, self.kv_heads * self.width);
            let values = normals(90 + i as u64, before + rows, self.kv_heads * self.width);
            let mut buffer = KvBuffer::new(&Device::cpu(1), self.kv_heads, self.width);
            buffer.append(&cx, &keys, &values).unwrap();
            buffers.push(buffer);
            histories.push((keys, values));
        }
        let total = self.spans.iter().map(|span| span.1).sum();
        let q = normals(1, total, self.heads * self.width);
        let spans: Vec<_> =
            buffers.iter().zip(&self.spans).map(|(history, span)| AttentionSpan { history, rows: span.1 }).collect();
        (attention(&cx, &q, &spans, &self.options()).unwrap(), histories, q)
    }

    fn exact(&self, q: &Tensor, histories: &[(Tensor, Tensor)]) -> Vec<f64> {
        let (q, mut out, mut row) = (q.as_f32().unwrap(), Vec::new(), 0);
        for (&(before, rows), (keys, values)) in self.spans.iter().zip(histories) {
            let (keys, values) = (keys.as_f32().unwrap(), values.as_f32().unwrap());
            for i in 0..rows {
                for head in 0..self.heads {
                    let q = &q[(row * self.heads + head) * self.width..][..self.width];
                    let kv_head = head / (self.heads / self.kv_heads);
                    let at = |s: usize| (s * self.kv_heads + kv_head) * self.width;
                    let end = before + i + 1;
                    let start = self.window.map_or(0, |window| end.saturating_sub(window));
                    let scores: Vec<f64> = (start..end)
                        .map(|s| q.iter().zip(&keys[at(s)..]).map(|(q, k)| f64::from(*q) * f64::from(*k)).sum::<f64>())
                        .map(|dot| dot / (self.width as f64).sqrt())
                        .collect();
                    let largest = scores.iter().fold(f64::MIN, |a, b| a.max(*b));
                    let p: Vec<f64> = scores.iter().map(|score| (score - largest).exp()).collect();
                    let total: f64 = p.iter().sum();
                    out.extend((0..self.width).map(|d| {
                        (start..end).zip(&p).map(|(s, p)| p * f64::from(values[at(s) + d])).sum::<f64>() / total
                    }));
                }
                row += 1;
            }
        }
        out
    }
}

fn cases() -> Vec<Case> {
    let case = |heads, kv_heads, width, window, spans: &[(usize, usize)]| Case {
        heads,
        kv_heads,
        width,
        window,
        spans: spans.to_vec(),
    };
    vec![
        case(9, 3, 64, None, &[(0, 50)]),
        case(4, 1, 32, None, &[(100, 1)]),
        case(4, 4, 20, Some(8), &[(0, 7), (8, 1), (30, 9)]),
        case(2, 1, 96, Some(17), &[(3, 70)]),
        case(6, 2, 128, None, &[(0, 1), (15, 1), (16, 1), (17, 33)]),
        case(1, 1, 1, None, &[(0, 3)]),
    ]
}

#[test]
fn values_equal_double_precision() {
    for case in cases() {
        let (out, histories, q) = case.run(&Device::cpu(2));
        for (out, exact) in out.as_f32().unwrap().iter().zip(case.exact(&q, &histories)) {
            assert!((f64::from(*out) - exact).abs() < 2e-6 * (1.0 + exact.abs()), "{out} {exact}");
        }
    }
}

#[test]
fn a_dropped_key_is_noticed() {
    let case = &cases()[0];
    let (out, mut histories, q) = case.run(&Device::cpu(1));
    let (keys, _) = &mut histories[0];
    let shape = *keys.shape();
    let mut wrong = keys.clone().into_f32().unwrap();
    wrong.iter_mut().step_by(4).for_each(|key| *key = 0.0);
    *keys = Tensor::from_f32(wrong, shape).unwrap();
    let worst = out.as_f32().unwrap().iter().zip(case.exact(&q, &histories)).map(|(a, b)| (f64::from(*a) - b).abs());
    assert!(worst.fold(0.0, f64::max) > 1e-2);
}

#[test]
fn bits_do_not_depend_on_level_threads_or_neighbours() {
    for case in cases() {
        let (reference, _, q) = case.run(&Device::cpu(1));
        for level in SimdLevel::supported() {
            for count in [1, 3] {
                let device = Device::Cpu(CpuDevice { threads: Threads::new(count), level });
                assert_eq!(case.run(&device).0.as_f32().unwrap(), reference.as_f32().unwrap(), "{level:?} {count}");
            }
        }
        // One row at a time: as a decoding step sees it.
        let (device, mut row) = (Device::cpu(2), 0);
        let cx = Context::inference(&device);
        for (i, &(before, rows)) in case.spans.iter().enumerate() {
            let keys = normals(10 + i as u64, before + rows, case.kv_heads * case.width);
            let values = normals(90 + i as u64, before + rows, case.kv_heads * case.width);
            let mut buffer = KvBuffer::new(&Device::cpu(1), case.kv_heads, case.width);
            for position in 0..before + rows {
                let view = |tensor: &Tensor| tensor.rows_view(position..position + 1).unwrap();
                buffer.append(&cx, &view(&keys), &view(&values)).unwrap();
                if position >= before {
                    let q = q.rows_view(row..row + 1).unwrap();
                    let span = AttentionSpan { history: &buffer, rows: 1 };
                    let alone = attention(&cx, &q, &[span], &case.options()).unwrap();
                    assert_eq!(alone.as_f32().unwrap(), reference.rows_view(row..row + 1).unwrap().as_f32().unwrap());
                    row += 1;
                }
            }
        }
    }
}

#[test]
fn shapes_are_checked() {
    let device = Device::cpu(1);
    let cx = Context::inference(&device);
    let buffer = KvBuffer::new(&Device::cpu(1), 2, 4);
    let options = AttentionOptions { heads: 4, scale: 1.0, window: None };
    let q = Tensor::zeros([1, 16]).unwrap();
    let span = AttentionSpan { history: &buffer, rows: 1 };
    assert!(attention(&cx, &q, &[span], &options).is_err(), "an empty history");
    assert!(attention(&cx, &q, &[span, span], &options).is_err(), "too many rows");
    assert!(
        attention(&cx, &Tensor::zeros([1, 12]).unwrap(), &[span], &AttentionOptions { heads: 3, ..options }).is_err()
    );
}
