//! Every operation's gradient on the processor against PyTorch's autograd in double precision.
//!
//! `golden/mod.rs` reads the cases and states the bound; a test here says how an operation is called on them. Each was seen to
//! fail with a term of the backward pass left out.

use ironloom_core::Threads;
use ironloom_quant::{PackedMatrix, WeightFormat};
use ironloom_tensor::{
    Indices, Tensor, Weight,
    ops::{
        self, Activation, CrossEntropyOptions, DocumentAttentionOptions, DocumentSpan, ExpertWeights, Mask, Projection,
        RouterLosses, RowWeights,
    },
};

mod golden;

use golden::{Case, Made, Pass, check};

#[test]
fn rmsnorm() {
    check("rmsnorm", &[], |pass| {
        let (x, weight) = (pass.leaf("x"), pass.leaf("weight"));
        pass.made(ops::rmsnorm(&pass.cx, &x, &weight, pass.case.number("epsilon")).unwrap())
    });
}

#[test]
fn rope() {
    check("rope", &[], |pass| {
        let phases = pass.case.tensor("phases");
        pass.made(ops::rope(&pass.cx, pass.leaf("x"), pass.case.count("head_width"), &phases).unwrap())
    });
}

fn activation(case: &Case<'_>) -> Activation {
    match case.word("activation") {
        "silu" => Activation::Silu,
        "gelu_tanh" => Activation::GeluTanh,
        other => panic!("{other}"),
    }
}

#[test]
fn gated_activation() {
    check("gated_activation", &[], |pass| {
        let (gate, up) = (pass.leaf("gate"), pass.leaf("up"));
        pass.made(ops::gated_activation(&pass.cx, gate, &up, activation(pass.case)).unwrap())
    });
}

fn linear_through(pass: &Pass<'_>, weight: &Weight) -> Made {
    let bias = pass.case.has("bias").then(|| pass.leaf("bias"));
    let projection = Projection { weight, bias: bias.as_ref(), adapter: None };
    let x = pass.leaf("x");
    pass.made(match pass.case.has("residual") {
        true => ops::linear_add(&pass.cx, pass.leaf("residual"), &x, projection).unwrap(),
        false => ops::linear(&pass.cx, &x, projection).unwrap(),
    })
}

#[test]
fn linear() {
    check("linear", &[], |pass| linear_through(pass, &pass.weight("weight")));
}

fn packed(case: &Case<'_>, name: &str) -> Weight {
    let tensor = case.tensor(name);
    let (values, rows, cols) = (tensor.as_f32().unwrap(), tensor.rows(), tensor.width());
    Weight::cpu(PackedMatrix::from_f32(values, rows, cols, WeightFormat::F32, &Threads::new(1)).unwrap())
}

#[test]
fn linear_through_a_packed_weight_hands_on_what_its_input_needs() {
    check("linear", &["weight"], |pass| linear_through(pass, &packed(pass.case, "weight")));
}

#[test]
fn linear_many() {
    check("linear_many", &[], |pass| {
        let [query, key, value] = ["query", "key", "value"].map(|name| pass.weight(name));
        let x = pass.leaf("x");
        let parts = ops::linear_many(&pass.cx, &x, [&query, &key, &value].map(Projection::from)).unwrap();
        side_by_side(pass, &parts)
    });
}

/// A backward pass starts from one tensor: here the sum of all outputs, each times its gradient.
fn side_by_side(pass: &Pass<'_>, parts: &[Tensor]) -> Made {
    let (gradient, expected) = (pass.case.tensor("out_gradient"), pass.case.floats("out"));
    let (rows, width) = (gradient.rows(), gradient.width());
    let mut found = vec![0.0; rows * width];
    let mut total: Option<Tensor> = None;
    let mut column = 0;
    for part in parts {
        let mut factors = Vec::with_capacity(rows * part.width());
        for row in 0..rows {
            let place = row * width + column;
            found[place..][..part.width()]
                .copy_from_slice(&part.as_f32().unwrap()[row * part.width()..][..part.width()]);
            factors.extend_from_slice(&gradient.as_f32().unwrap()[place..][..part.width()]);
        }
        column += part.width();
        let flat = part.clone().reshape([1, factors.len()]).unwrap();
        let weight = Weight::dense(Tensor::from_f32(factors.clone(), [1, factors.len()]).unwrap()).unwrap();
        let term = ops::linear(&pass.cx, &flat, &weight).unwrap();
        total = Some(match total {
            None => term,
            Some(earlier) => ops::add(&pass.cx, earlier, &term).unwrap(),
        });
    }
    Made { out: total.unwrap(), gradient: Tensor::from_f32(vec![1.0], [1, 1]).unwrap(), found, expected }
}

#[test]
fn embedding() {
    check("embedding", &[], |pass| {
        let ids = Indices::new(pass.cx.device, &pass.case.ids("ids")).unwrap();
        let table = pass.weight("table");
        pass.made(ops::embedding(&pass.cx, &table, &ids, pass.case.number("scale")).unwrap())
    });
}

#[test]
fn attention_within_documents() {
    check("attention", &[], |pass| {
        let case = pass.case;
        let mask = match (case.word("mask"), case.optional_count("window")) {
            ("causal", None) => Mask::Causal,
            ("causal", Some(window)) => Mask::Window(window),
            ("bidirectional", None) => Mask::Bidirectional,
            other => panic!("{other:?}"),
        };
        let options = DocumentAttentionOptions {
            heads: case.count("heads"),
            kv_heads: case.count("kv_heads"),
            scale: case.number("scale"),
            mask,
        };
        let lengths = case.counts("documents").into_iter().zip(case.counts("key_documents"));
        let spans: Vec<DocumentSpan> = lengths.map(|(queries, keys)| DocumentSpan { queries, keys }).collect();
        let [q, k, v] = ["q", "k", "v"].map(|name| pass.leaf(name));
        pass.made(ops::document_attention(&pass.cx, &q, &k, &v, &spans, &options).unwrap())
    });
}

/// Experts that make unit vectors of a row of 1, exactly: `silu(32) / 32` is 1. So what a row gets of expert `e` in element `e`
/// is its weight.
#[test]
fn route_experts() {
    check("route_experts", &[], |pass| {
        let logits = pass.leaf("logits");
        let (rows, count, per_row) = (logits.rows(), logits.width(), pass.case.count("per_row"));
        let routing = ops::route_experts(&pass.cx, &logits, per_row, pass.case.flag("normalize")).unwrap();
        let chosen = pass.case.ids("experts");
        assert_eq!(routing.read().unwrap().0, chosen);

        let dense =
            |values: Vec<f32>, shape: [usize; 2]| Weight::dense(Tensor::from_f32(values, shape).unwrap()).unwrap();
        let (gate, up) = (dense(vec![32.0], [1, 1]), dense(vec![1.0 / 32.0], [1, 1]));
        let unit = |expert: usize| (0..count).map(|at| f32::from(u8::from(at == expert))).collect();
        let downs: Vec<Weight> = (0..count).map(|expert| dense(unit(expert), [count, 1])).collect();
        let experts: Vec<_> = downs
            .iter()
            .map(|down| ExpertWeights { gate: (&gate).into(), up: (&up).into(), down: down.into() })
            .collect();
        let (ones, zeros) =
            (Tensor::from_f32(vec![1.0; rows], [rows, 1]).unwrap(), Tensor::zeros([rows, count]).unwrap());
        let out = ops::routed_experts(&pass.cx, zeros, &ones, &routing, &experts, Activation::Silu).unwrap();

        let spread = |values: Vec<f32>| {
            let mut wide = vec![0.0; rows * count];
            for (slot, (value, expert)) in values.into_iter().zip(&chosen).enumerate() {
                wide[slot / per_row * count + *expert as usize] = value;
            }
            wide
        };
        let gradient = Tensor::from_f32(spread(pass.case.floats("out_gradient")), [rows, count]).unwrap();
        let found = out.as_f32().unwrap().to_vec();
        Made { out, gradient, found, expected: spread(pass.case.floats("out")) }
    });
}

/// The steps that routed experts are made of, with weights and choices that are given.
#[test]
fn rows_gathered_and_scattered() {
    check("routed_experts", &[], |pass| {
        let (cx, case) = (&pass.cx, pass.case);
        let [gates, ups, downs] = ["gate", "up", "down"].map(|name| pass.weights(name));
        let (x, weights, chosen) = (pass.leaf("x"), pass.leaf("weights"), case.ids("experts"));
        let mut out = pass.leaf("residual");
        for (expert, ((gate, up), down)) in gates.iter().zip(&ups).zip(&downs).enumerate() {
            let places: Vec<u32> =
                (0..chosen.len() as u32).filter(|&at| chosen[at as usize] as usize == expert).collect();
            let rows: Vec<u32> = places.iter().map(|place| place / weights.width() as u32).collect();
            let input = ops::gather_rows(cx, &x, &rows).unwrap();
            let inner = ops::gated_linear(cx, &input, [gate, up].map(Projection::from), activation(case)).unwrap();
            let y = ops::linear(cx, &inner, down).unwrap();
            let weights = RowWeights { weights: &weights, places: &places };
            out = ops::scatter_add_rows(cx, out, &rows, &y, weights).unwrap();
        }
        pass.made(out)
    });
}

#[test]
fn routed_experts_behind_their_router() {
    check("routed_layer", &[], |pass| {
        let (cx, case) = (&pass.cx, pass.case);
        let [gates, ups, downs] = ["gate", "up", "down"].map(|name| pass.weights(name));
        let experts: Vec<ExpertWeights<'_>> = (0..gates.len())
            .map(|e| ExpertWeights { gate: (&gates[e]).into(), up: (&ups[e]).into(), down: (&downs[e]).into() })
            .collect();
        let x = pass.leaf("x");
        let logits = ops::linear(cx, &x, &pass.weight("router")).unwrap();
        let routing = ops::route_experts(cx, &logits, case.count("per_row"), case.flag("normalize")).unwrap();
        let residual = pass.leaf("residual");
        let out = ops::routed_experts(cx, residual, &x, &routing, &experts, activation(case)).unwrap();
        pass.made(out)
    });
}

/// A side loss whose weight is the golden output's gradient; rows of padding never come to the router.
fn router_losses(pass: &Pass<'_>, per_row: usize, losses: impl Fn(f32) -> RouterLosses) -> Made {
    let (logits, counted) = (pass.leaf("logits"), pass.case.ids("counted"));
    let rows: Vec<u32> = (0..counted.len() as u32).filter(|&row| counted[row as usize] == 1).collect();
    let routed = ops::gather_rows(&pass.cx, &logits, &rows).unwrap();
    let routing = ops::route_experts(&pass.cx, &routed, per_row, false).unwrap();
    let weight = pass.case.floats("out_gradient")[0];
    ops::router_losses(&pass.cx, &routed, &routing, losses(weight), 1.0).unwrap();
    let (found, expected) = (pass.tape.side_loss() as f32, weight * pass.case.floats("out")[0]);
    let gradient = Tensor::zeros(*logits.shape()).unwrap();
    Made { out: logits, gradient, found: vec![found], expected: vec![expected] }
}

#[test]
fn load_balancing_loss() {
    check("load_balancing", &[], |pass| {
        router_losses(pass, pass.case.count("per_row"), |balance| RouterLosses { balance, z: 0.0 })
    });
}

#[test]
fn router_z_loss() {
    check("router_z_loss", &[], |pass| router_losses(pass, 1, |z| RouterLosses { balance: 0.0, z }));
}

fn loss(pass: &Pass<'_>, hidden: &Tensor, head: &Weight) -> Made {
    let case = pass.case;
    let options = CrossEntropyOptions {
        z_loss: case.number("z_weight"),
        scale: 1.0 / case.number("normalizer"),
        ..CrossEntropyOptions::default()
    };
    let made =
        ops::cross_entropy(&pass.cx, hidden, head, ops::Targets::Host(&case.targets("targets")), &options).unwrap();
    pass.made(made.loss)
}

#[test]
fn cross_entropy() {
    check("cross_entropy", &[], |pass| loss(pass, &pass.leaf("x"), &pass.weight("head")));
}

#[test]
fn cross_entropy_through_a_packed_head_hands_on_what_its_input_needs() {
    check("cross_entropy", &["head"], |pass| loss(pass, &pass.leaf("x"), &packed(pass.case, "head")));
}

#[test]
fn cross_entropy_with_the_table_as_head() {
    check("tied_cross_entropy", &[], |pass| {
        let (table, norm) = (pass.weight("table"), pass.leaf("weight"));
        let ids = Indices::new(pass.cx.device, &pass.case.ids("ids")).unwrap();
        let rows = ops::embedding(&pass.cx, &table, &ids, pass.case.number("scale")).unwrap();
        let hidden = ops::rmsnorm(&pass.cx, &rows, &norm, pass.case.number("epsilon")).unwrap();
        loss(pass, &hidden, &table)
    });
}

#[test]
fn sums_that_are_read_twice() {
    check("residual_sums", &[], |pass| {
        let (x, matrix, first, second) =
            (pass.leaf("x"), pass.weight("matrix"), pass.leaf("first"), pass.leaf("second"));
        let epsilon = pass.case.number("epsilon");
        let normed = ops::rmsnorm(&pass.cx, &x, &first, epsilon).unwrap();
        let sum = ops::linear_add(&pass.cx, x, &normed, &matrix).unwrap();
        let normed = ops::rmsnorm(&pass.cx, &sum, &second, epsilon).unwrap();
        pass.made(ops::add(&pass.cx, sum, &normed).unwrap())
    });
}

#[test]
fn gated_rows() {
    check("gated_rows", &[], |pass| {
        let (residual, y, gate) = (pass.leaf("residual"), pass.leaf("y"), pass.leaf("gate"));
        pass.made(ops::add_gated_rows(&pass.cx, residual, &y, &gate).unwrap())
    });
}
