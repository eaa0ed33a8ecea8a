//! Attention within documents against one row at a time in double precision, and its gradients against finite differences.

use ironloom_core::{Philox, SimdLevel, Threads};

use super::*;
use crate::{Device, Gradients, Tape};

#[derive(Clone)]
struct Case {
    heads: usize,
    kv_heads: usize,
    width: usize,
    mask: Mask,
    spans: Vec<DocumentSpan>,
}

/// The output and the gradients of q, k and v, or those inputs themselves.
type Numbers<T> = [Vec<T>; 4];

fn normals(seed: u64, count: usize) -> Vec<f32> {
    let mut draws = Philox::new(seed, 0);
    (0..count).map(|_| draws.next_normal()).collect()
}

fn case(heads: usize, kv_heads: usize, width: usize, mask: Mask, spans: &[(usize, usize)]) -> Case {
    let spans = spans.iter().map(|&(queries, keys)| DocumentSpan { queries, keys }).collect();
    Case { heads, kv_heads, width, mask, spans }
}

impl Case {
    fn rows(&self) -> [usize; 2] {
        [self.spans.iter().map(|span| span.queries).sum(), self.spans.iter().map(|span| span.keys).sum()]
    }

    fn options(&self) -> DocumentAttentionOptions {
        let &Self { heads, kv_heads, width, mask, .. } = self;
        DocumentAttentionOptions { heads, kv_heads, scale: 1.0 / (width as f32).sqrt(), mask }
    }

    /// q, k, v and the gradient of the output.
    fn inputs(&self) -> Numbers<f32> {
        let ([n, m], [q, k]) = (self.rows(), [self.heads, self.kv_heads].map(|heads| heads * self.width));
        [normals(1, n * q), normals(2, m * k), normals(3, m * k), normals(4, n * q)]
    }

    fn run(&self, device: &Device, inputs: &Numbers<f32>) -> Numbers<f32> {
        let (tape, mut gradients) = (Tape::new(), Gradients::new());
        let [n, m] = self.rows();
        let (q_width, k_width) = (self.heads * self.width, self.kv_heads * self.width);
        let [q, k, v, g] = [(0, n, q_width), (1, m, k_width), (2, m, k_width), (3, n, q_width)]
            .map(|(i, rows, width)| Tensor::from_f32(inputs[i].clone(), [rows, width]).unwrap());
        [&q, &k, &v].into_iter().for_each(|leaf| tape.watch(leaf));
        let cx = Context::training(device, &tape);
        let out = document_attention(&cx, &q, &k, &v, &self.spans, &self.options()).unwrap();
        tape.backward(&out, g, &mut gradients).unwrap();
        let [to_q, to_k, to_v] = [&q, &k, &v].map(|leaf| gradients.get(leaf.id()).unwrap().clone());
        [out, to_q, to_k, to_v].map(|tensor| tensor.into_f32().unwrap())
    }

    /// The output, row by row and head by head; `visit` gets the row, the head, its document's first row of keys, the keys it
    /// sees and their probabilities.
    fn exact(&self, [q, k, v]: [&[f64]; 3], mut visit: impl FnMut(usize, usize, Range<usize>, &[f64])) -> Vec<f64> {
        let (mut out, mut first) = (Vec::new(), [0, 0]);
        for span in &self.spans {
            for i in 0..span.queries {
                let seen = match self.mask {
                    Mask::Causal => 0..i + 1,
                    Mask::Window(window) => (i + 1).saturating_sub(window)..i + 1,
                    Mask::Bidirectional => 0..span.keys,
                };
                let seen = first[1] + seen.start..first[1] + seen.end;
                for head in 0..self.heads {
                    let row = first[0] + i;
                    let q = &q[(row * self.heads + head) * self.width..][..self.width];
                    let at = |key: usize| self.key(key, head);
                    let scores: Vec<f64> = seen
                        .clone()
                        .map(|key| q.iter().zip(&k[at(key)..]).map(|(q, k)| q * k).sum::<f64>())
                        .map(|score| score * f64::from(self.options().scale))
                        .collect();
                    let largest = scores.iter().fold(f64::MIN, |a, b| a.max(*b));
                    let total = scores.iter().map(|score| (score - largest).exp()).sum::<f64>();
                    let p: Vec<f64> = scores.iter().map(|score| (score - largest).exp() / total).collect();
                    out.extend(
                        (0..self.width).map(|d| seen.clone().zip(&p).map(|(key, p)| p * v[at(key) + d]).sum::<f64>()),
                    );
                    visit(row, head, seen.clone(), &p);
                }
            }
            first = [first[0] + span.queries, first[1] + span.keys];
        }
        out
    }

    /// Where a key starts for a query head.
    fn key(&self, key: usize, head: usize) -> usize {
        (key * self.kv_heads + head / (self.heads / self.kv_heads)) * self.width
    }

    /// The output and the gradients by the formulas at the head of the file, one row at a time.
    fn exact_gradients(&self, inputs: &Numbers<f32>) -> Numbers<f64> {
        let [q, k, v, g] = inputs.each_ref().map(|x| x.iter().map(|x| f64::from(*x)).collect::<Vec<_>>());
        let mut made = [vec![0.0; q.len()], vec![0.0; k.len()], vec![0.0; v.len()]];
        let out = self.exact([&q, &k, &v], |row, head, seen, p| {
            let start = (row * self.heads + head) * self.width;
            let slopes: Vec<f64> = seen
                .clone()
                .map(|key| (0..self.width).map(|d| g[start + d] * v[self.key(key, head) + d]).sum::<f64>())
                .collect();
            let delta = slopes.iter().zip(p).map(|(slope, p)| slope * p).sum::<f64>();
            for ((key, p), slope) in seen.zip(p).zip(slopes) {
                let slope = p * (slope - delta) * f64::from(self.options().scale);
                let at = self.key(key, head);
                for d in 0..self.width {
                    made[0][start + d] += slope * k[at + d];
                    made[1][at + d] += slope * q[start + d];
                    made[2][at + d] += p * g[start + d];
                }
            }
        });
        let [to_q, to_k, to_v] = made;
        [out, to_q, to_k, to_v]
    }
}

fn spread<T: Copy + Into<f64>>(values: &[T]) -> f64 {
    let squares = values.iter().map(|value| (*value).into().powi(2)).sum::<f64>();
    (squares / values.len().max(1) as f64).sqrt()
}

fn small() -> Vec<Case> {
    vec![
        case(1, 1, 1, Mask::Causal, &[(1, 1)]),
        case(2, 1, 3, Mask::Causal, &[(1, 1), (5, 5), (0, 0), (2, 2)]),
        case(4, 2, 5, Mask::Window(2), &[(4, 4), (3, 3)]),
        case(2, 2, 4, Mask::Window(1), &[(4, 4)]),
        case(2, 2, 4, Mask::Window(9), &[(4, 4), (1, 1)]),
        case(3, 1, 2, Mask::Bidirectional, &[(3, 5), (0, 2), (4, 1)]),
    ]
}

/// Past a tile of keys, past a block of queries, and in several slices.
fn large() -> Vec<Case> {
    vec![
        case(2, 1, 16, Mask::Causal, &[(600, 600), (65, 65)]),
        case(2, 2, 7, Mask::Window(300), &[(620, 620), (3, 3)]),
        case(2, 1, 33, Mask::Window(64), &[(64, 64), (340, 340)]),
        case(3, 3, 8, Mask::Bidirectional, &[(70, 530), (530, 17)]),
    ]
}

#[test]
fn small_gradients_equal_finite_differences_of_every_element() {
    for case in small() {
        let inputs = case.inputs();
        let found = case.run(&Device::cpu(2), &inputs);
        let doubled = inputs.each_ref().map(|x| x.iter().map(|x| f64::from(*x)).collect::<Vec<_>>());
        let loss = |inputs: &[Vec<f64>; 4]| {
            let [q, k, v, g] = inputs;
            case.exact([q, k, v], |_, _, _, _| ()).iter().zip(g).map(|(out, g)| out * g).sum::<f64>()
        };
        for input in 0..3 {
            for element in 0..inputs[input].len() {
                let at = |step: f64| {
                    let mut moved = doubled.clone();
                    moved[input][element] += step;
                    loss(&moved)
                };
                let (exact, found) = ((at(1e-5) - at(-1e-5)) / 2e-5, f64::from(found[input + 1][element]));
                assert!((found - exact).abs() < 3e-6 * (1.0 + exact.abs()), "{input} {element}: {found} {exact}");
            }
        }
    }
}

#[test]
fn outputs_and_gradients_equal_double_precision() {
    for case in small().into_iter().chain(large()) {
        let inputs = case.inputs();
        let exact = case.exact_gradients(&inputs);
        for (what, (found, exact)) in case.run(&Device::cpu(2), &inputs).iter().zip(&exact).enumerate() {
            let bound = 2e-6 * (1.0 + 5.0 * spread(exact));
            for (i, (found, exact)) in found.iter().zip(exact).enumerate() {
                assert!((f64::from(*found) - exact).abs() < bound, "{what} {i}: {found} {exact}, bound {bound}");
            }
        }
    }
}

#[test]
fn a_window_one_too_wide_is_noticed() {
    let case = large().swap_remove(2);
    let inputs = case.inputs();
    let exact = Case { mask: Mask::Window(65), ..case.clone() }.exact_gradients(&inputs);
    for (found, exact) in case.run(&Device::cpu(1), &inputs).iter().zip(&exact) {
        let differences: Vec<f64> = found.iter().zip(exact).map(|(found, exact)| f64::from(*found) - exact).collect();
        assert!(spread(&differences) > 1e-3 * spread(exact));
    }
}

#[test]
fn bits_do_not_depend_on_threads_or_levels() {
    for case in small().into_iter().chain(large()) {
        let inputs = case.inputs();
        let expected = case.run(&Device::cpu(1), &inputs);
        for count in [2, 3] {
            assert_eq!(case.run(&Device::cpu(count), &inputs), expected);
        }
        for level in SimdLevel::supported() {
            let device = Device::Cpu(CpuDevice { threads: Threads::new(2), level });
            assert_eq!(case.run(&device, &inputs), expected, "{level:?}");
        }
    }
}

#[test]
fn a_document_gets_the_bits_it_gets_alone() {
    for case in small().into_iter().chain(large()) {
        let (inputs, device) = (case.inputs(), Device::cpu(2));
        let packed = case.run(&device, &inputs);
        let [q_width, k_width] = [case.heads, case.kv_heads].map(|heads| heads * case.width);
        let mut first = [0, 0];
        for &span in &case.spans {
            let queries = first[0] * q_width..(first[0] + span.queries) * q_width;
            let keys = first[1] * k_width..(first[1] + span.keys) * k_width;
            let part = |numbers: &Numbers<f32>, of_output: [bool; 4]| -> Numbers<f32> {
                std::array::from_fn(|i| numbers[i][if of_output[i] { queries.clone() } else { keys.clone() }].to_vec())
            };
            let alone = Case { spans: vec![span], ..case.clone() };
            let alone = alone.run(&device, &part(&inputs, [true, false, false, true]));
            assert_eq!(alone, part(&packed, [true, true, false, false]), "{span:?}");
            first = [first[0] + span.queries, first[1] + span.keys];
        }
    }
}

#[test]
fn only_the_gradients_asked_for_are_made_and_they_are_the_same() {
    let (case, device) = (small().swap_remove(2), Device::cpu(1));
    let inputs = case.inputs();
    let [_, expected @ ..] = case.run(&device, &inputs);
    let [n, m] = case.rows();
    for wanted in 0..3 {
        let (tape, mut gradients) = (Tape::new(), Gradients::new());
        let [q, k, v, g] = [(0, n), (1, m), (2, m), (3, n)]
            .map(|(i, rows)| Tensor::from_f32(inputs[i].clone(), [rows, inputs[i].len() / rows]).unwrap());
        let leaves = [&q, &k, &v];
        tape.watch(leaves[wanted]);
        let cx = Context::training(&device, &tape);
        let out = document_attention(&cx, &q, &k, &v, &case.spans, &case.options()).unwrap();
        tape.backward(&out, g, &mut gradients).unwrap();
        for (i, leaf) in leaves.iter().enumerate() {
            let found = gradients.get(leaf.id()).map(|gradient| gradient.as_f32().unwrap().to_vec());
            assert_eq!(found, (i == wanted).then(|| expected[i].clone()));
        }
    }
}

#[test]
fn what_does_not_fit_is_refused() {
    let device = Device::cpu(1);
    let cx = Context::inference(&device);
    let zeros = |rows: usize, width: usize| Tensor::zeros([rows, width]).unwrap();
    let (q, k) = (zeros(6, 8), zeros(6, 4));
    let options = DocumentAttentionOptions { heads: 4, kv_heads: 2, scale: 1.0, mask: Mask::Causal };
    let spans = |spans: &[(usize, usize)]| case(4, 2, 2, Mask::Causal, spans).spans;
    let refuse = |q: &Tensor, k: &Tensor, v: &Tensor, of: &[(usize, usize)], options| {
        document_attention(&cx, q, k, v, &spans(of), &options).unwrap_err().to_string()
    };
    assert!(document_attention(&cx, &q, &k, &k, &spans(&[(2, 2), (4, 4)]), &options).is_ok());
    assert!(document_attention(&cx, &zeros(0, 8), &zeros(0, 4), &zeros(0, 4), &[], &options).is_ok());
    let whole = [(6, 6)];
    assert!(refuse(&q, &k, &k, &[(6, 5)], options).contains("keys is 5, and 6"));
    assert!(refuse(&q, &k, &k, &[(2, 2), (3, 3)], options).contains("queries is 5, and 6"));
    assert!(refuse(&q, &k, &k, &[(2, 2), (5, 5)], options).contains("queries is 7, and 6"));
    assert!(refuse(&q, &k, &k, &[(usize::MAX, usize::MAX), (7, 7)], options).contains("queries"));
    assert!(refuse(&q, &k, &zeros(6, 6), &whole, options).contains("the values"));
    assert!(refuse(&q, &zeros(6, 6), &k, &whole, options).contains("the keys"));
    assert!(refuse(&zeros(6, 9), &k, &k, &whole, options).contains("the queries"));
    assert!(refuse(&zeros(6, 0), &k, &k, &whole, options).contains("head width"));
    for (heads, kv_heads) in [(4, 0), (0, 2), (3, 2)] {
        let options = DocumentAttentionOptions { heads, kv_heads, ..options };
        assert!(refuse(&q, &k, &k, &whole, options).contains("query heads"));
    }
    let window = DocumentAttentionOptions { mask: Mask::Window(0), ..options };
    assert!(refuse(&q, &k, &k, &whole, window).contains("window"));
    let cross = DocumentAttentionOptions { mask: Mask::Bidirectional, ..options };
    assert!(refuse(&q, &k, &k, &[(5, 6), (1, 0)], cross).contains("keys is 0, and 1"));
}
