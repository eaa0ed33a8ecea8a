//! `linear_many`, `linear_add` and `gated_linear`: several products of one input, a product added to the residual stream, and
//! `act(gate(x)) * up(x)`.

use anyhow::Result;
use ironloom_core::DType;
use ironloom_quant::WeightFormat;
use ironloom_tensor::{
    Device, Tensor, Weight,
    ops::{self, Activation, Projection},
};

use super::{
    gated_activation::gated,
    linear::multiply,
    weights::{self, FAST_FORMATS, Matrix},
};
use crate::check_parity::{
    case::{Bound, Case, Results},
    inputs::Inputs,
    place::Place,
};

/// Rows of x and its width; widths are whole blocks of every format.
const SHAPES: [[usize; 2]; 7] = [[1, 256], [3, 512], [7, 256], [16, 768], [64, 256], [65, 512], [130, 256]];
/// Outputs of queries, keys and values: parts of a tile of 16 rows among them.
const OUTPUTS: [usize; 3] = [72, 24, 24];

type Format = (DType, WeightFormat);

pub(super) fn cases(device: &Device) -> Vec<Case> {
    let mut cases = Vec::new();
    for place in Place::each(device) {
        for [n, cols] in SHAPES.into_iter().filter(|[n, _]| place.takes(*n)) {
            let kept = |dtype| (dtype, WeightFormat::Keep);
            // As files of mixed types have them, and one without a fast kernel between two with one.
            let mixed = [
                [kept(DType::Q4_K), kept(DType::Q4_K), kept(DType::Q6_K)],
                [kept(DType::Q8_0), kept(DType::Q5_K), kept(DType::Q8_0)],
            ];
            for formats in FAST_FORMATS.map(|format| [format; 3]).into_iter().chain(mixed) {
                cases.push(many(place.clone(), formats, [n, cols], Weights::Apart));
                if !place.is_cpu() {
                    cases.push(many(place.clone(), formats, [n, cols], Weights::Joined));
                }
            }
            for format in FAST_FORMATS.into_iter().chain([kept(DType::F32), kept(DType::Q5_0)]) {
                cases.push(add(place.clone(), format, [n, cols]));
                let activation = if n % 2 == 0 { Activation::GeluTanh } else { Activation::Silu };
                cases.push(gated_pair(place.clone(), format, [n, cols], activation));
            }
        }
    }
    cases
}

/// A matrix of a product with its bias.
struct Layer {
    weight: Weight,
    bias: Tensor,
    bias_values: Vec<f32>,
    held: Vec<f32>,
}

impl Layer {
    fn random(place: &Place, format: Format, [rows, cols]: [usize; 2], inputs: &mut Inputs) -> Result<Self> {
        let matrix = Matrix::random(format, [rows, cols], inputs)?;
        let bias_values = inputs.normal(rows);
        let bias = place.vector(bias_values.clone())?;
        Ok(Self { weight: matrix.weight(&place.device)?, bias, bias_values, held: matrix.held(&place.device)? })
    }

    fn projection(&self) -> Projection<'_> {
        Projection { weight: &self.weight, bias: Some(&self.bias), adapter: None }
    }

    /// The reference.
    fn exact(&self, x: &[f32], cols: usize) -> Vec<f64> {
        let bias = self.bias_values.iter().cycle();
        multiply::<f64>(x, &self.held, cols).into_iter().zip(bias).map(|(sum, &bias)| sum + f64::from(bias)).collect()
    }

    /// The plain version before the bias.
    fn plain(&self, place: &Place, x: &[f32], cols: usize) -> Vec<f32> {
        multiply(&place.operands().round(x), &place.weights(&self.held), cols)
    }

    fn plus_bias(&self, sums: &[f32]) -> Vec<f32> {
        sums.iter().zip(self.bias_values.iter().cycle()).map(|(sum, bias)| sum + bias).collect()
    }
}

/// Whether weights lie as a loaded model has those of one input: on a card, joined.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Weights {
    Apart,
    Joined,
}

fn many(place: Place, formats: [Format; 3], [n, cols]: [usize; 2], weights: Weights) -> Case {
    let names = if formats[0] == formats[2] && formats[0] == formats[1] {
        weights::name(formats[0])
    } else {
        formats.map(weights::name).join(", ")
    };
    let [q, k, v] = OUTPUTS;
    let joined = if weights == Weights::Joined { ", joined" } else { "" };
    let shape = format!("{names}, {n} x [{q} + {k} + {v}, {cols}]{joined}");
    Case::new("linear_many", place.shape(&shape), Bound::TwicePlain, move |kernel| {
        let mut inputs = Inputs::of("linear_many", &shape);
        let x = inputs.normal(n * cols);
        let mut layers = Vec::new();
        for (format, rows) in formats.into_iter().zip(OUTPUTS) {
            layers.push(Layer::random(&place, format, [rows, cols], &mut inputs)?);
        }
        if weights == Weights::Joined {
            join(&place, &mut layers)?;
        }
        let given = place.operand(kernel.inputs(&x), [n, cols])?;
        let projections = [0, 1, 2].map(|i: usize| layers[i].projection());
        let mut ours = Vec::new();
        for out in ops::linear_many(&place.context(), &given, projections)? {
            ours.extend(out.into_f32()?);
        }
        let held = place.activations();
        let reference = layers.iter().flat_map(|layer| layer.exact(&x, cols)).collect();
        let plain =
            layers.iter().flat_map(|layer| held.round(&layer.plus_bias(&held.round(&layer.plain(&place, &x, cols)))));
        Ok(Results::new(reference, plain.collect(), ours).in_precision(place.operands()))
    })
}

fn join(place: &Place, layers: &mut [Layer]) -> Result<()> {
    let matrices = Weight::join(&place.device, layers.iter().map(|layer| layer.weight.clone()).collect())?;
    let biases = Tensor::join(&place.device, layers.iter().map(|layer| layer.bias.clone()).collect())?;
    for (layer, (weight, bias)) in layers.iter_mut().zip(matrices.into_iter().zip(biases)) {
        (layer.weight, layer.bias) = (weight, bias);
    }
    Ok(())
}

fn add(place: Place, format: Format, [n, cols]: [usize; 2]) -> Case {
    let rows = OUTPUTS[0];
    let shape = format!("{}, {n} x [{rows}, {cols}]", weights::name(format));
    Case::new("linear_add", place.shape(&shape), Bound::TwicePlain, move |kernel| {
        let mut inputs = Inputs::of("linear_add", &shape);
        let (x, residual) = (inputs.normal(n * cols), inputs.normal(n * rows));
        let layer = Layer::random(&place, format, [rows, cols], &mut inputs)?;
        let given = place.operand(kernel.inputs(&x), [n, cols])?;
        let onto = place.tensor(residual.clone(), [n, rows])?;
        let ours = ops::linear_add(&place.context(), onto, &given, layer.projection())?;
        let reference = layer.exact(&x, cols).into_iter().zip(&residual).map(|(sum, &y)| sum + f64::from(y)).collect();
        let plain = layer.plus_bias(&layer.plain(&place, &x, cols));
        let plain = plain.into_iter().zip(&residual).map(|(sum, y)| sum + y).collect();
        Ok(Results::new(reference, plain, ours.into_f32()?).in_precision(place.operands()))
    })
}

fn gated_pair(place: Place, format: Format, [n, cols]: [usize; 2], activation: Activation) -> Case {
    let rows = OUTPUTS[0];
    let shape = format!("{activation:?} {}, {n} x 2 x [{rows}, {cols}]", weights::name(format));
    Case::new("gated_linear", place.shape(&shape), Bound::TwicePlain, move |kernel| {
        let mut inputs = Inputs::of("gated_linear", &shape);
        // Of the size that norms give, over the square root of the width: gates of about one.
        let x: Vec<f32> = inputs.normal(n * cols).iter().map(|x| x / (cols as f32).sqrt()).collect();
        let layers = [
            Layer::random(&place, format, [rows, cols], &mut inputs)?,
            Layer::random(&place, format, [rows, cols], &mut inputs)?,
        ];
        let given = place.operand(kernel.inputs(&x), [n, cols])?;
        let halves = [layers[0].projection(), layers[1].projection()];
        let ours = ops::gated_linear(&place.context(), &given, halves, activation)?;
        let [gate, up] = layers.each_ref().map(|layer| layer.exact(&x, cols));
        let held = place.activations();
        let halves =
            layers.each_ref().map(|layer| held.round(&layer.plus_bias(&held.round(&layer.plain(&place, &x, cols)))));
        let plain = place.operands().round(&gated(&halves[0], &halves[1], activation));
        let results = Results::new(gated(&gate, &up, activation), plain, ours.into_f32()?);
        Ok(results.in_precision(place.operands()))
    })
}
