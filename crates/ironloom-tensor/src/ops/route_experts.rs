//! Which experts a row goes to: softmax over all experts, the `k` largest, renormalized on request.

use ironloom_kernels::{self as kernels, Buffer, Form, Gpu};

use crate::{
    Context, Error, Result, Tensor,
    lanes::{exp, maximum, sum},
};

/// Where rows go: the experts of each row, ascending, and their weights, both `[n, per_row]`.
#[derive(Clone, Debug)]
pub struct Routing {
    per_row: usize,
    rows: usize,
    place: Place,
}

#[derive(Clone, Debug)]
pub(super) enum Place {
    Cpu { experts: Vec<u32>, weights: Vec<f32> },
    Cuda { gpu: Gpu, experts: Buffer, weights: Buffer },
}

impl Routing {
    /// Experts of a row.
    pub fn per_row(&self) -> usize {
        self.per_row
    }

    /// How many rows there are.
    pub fn rows(&self) -> usize {
        self.rows
    }

    pub(super) fn place(&self) -> &Place {
        &self.place
    }

    /// The experts and their weights, read from the device.
    ///
    /// # Errors
    /// The device fails.
    pub fn read(&self) -> Result<(Vec<u32>, Vec<f32>)> {
        match &self.place {
            Place::Cpu { experts, weights } => Ok((experts.clone(), weights.clone())),
            Place::Cuda { gpu, experts, weights } => {
                let count = self.rows * self.per_row;
                let (mut ids, mut gates) = (vec![0; count], vec![0.0; count]);
                gpu.read(experts.slice(), bytemuck::cast_slice_mut::<u32, u8>(&mut ids))?;
                gpu.read(weights.slice(), bytemuck::cast_slice_mut::<f32, u8>(&mut gates))?;
                Ok((ids, gates))
            }
        }
    }
}

/// Routes rows by `logits [n, experts]`: `p = softmax(logits)`, then the `per_row` largest; `normalize` divides them by their
/// sum (`norm_topk_prob`).
///
/// # Errors
/// `per_row` is 0 or more than there are experts, or a tape records.
pub fn route_experts(cx: &Context, logits: &Tensor, per_row: usize, normalize: bool) -> Result<Routing> {
    const NAME: &str = "route experts";
    cx.without_gradient(NAME)?;
    let (count, rows) = (logits.width(), logits.rows());
    if per_row == 0 || per_row > count {
        return Err(Error::Count {
            operation: NAME,
            what: "the number of experts a row",
            expected: count,
            found: per_row,
        });
    }
    if let Some(gpu) = cx.gpu() {
        let experts = gpu.allocate(4 * rows * per_row, NAME)?;
        let weights = gpu.allocate(4 * rows * per_row, NAME)?;
        let call = kernels::RouteExperts {
            logits: logits.cuda(NAME, Form::F32)?,
            positions: None,
            ids: experts.slice(),
            gates: weights.slice(),
            rows,
            experts: count,
            per_row,
            normalize,
        };
        kernels::route_experts(gpu, &call)?;
        return Ok(Routing { per_row, rows, place: Place::Cuda { gpu: gpu.clone(), experts, weights } });
    }
    let (mut experts, mut all_weights) = (Vec::new(), Vec::new());
    let mut order: Vec<u32> = Vec::with_capacity(count);
    for row in logits.as_f32()?.chunks_exact(count) {
        let largest = maximum(row);
        let mut probabilities: Vec<f32> = row.iter().map(|logit| exp(logit - largest)).collect();
        let total = sum(&probabilities);
        probabilities.iter_mut().for_each(|p| *p /= total);
        order.clear();
        order.extend(0..count as u32);
        order.sort_by(|&a, &b| probabilities[b as usize].total_cmp(&probabilities[a as usize]).then(a.cmp(&b)));
        let chosen = &mut order[..per_row];
        chosen.sort_unstable();
        let weights = chosen.iter().map(|&expert| probabilities[expert as usize]);
        let divisor: f32 = if normalize { weights.clone().sum() } else { 1.0 };
        all_weights.extend(weights.map(|weight| weight / divisor));
        experts.extend_from_slice(chosen);
    }
    Ok(Routing { per_row, rows, place: Place::Cpu { experts, weights: all_weights } })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Device;

    #[test]
    fn the_largest_probabilities_win_and_are_normalized_on_request() {
        let device = Device::cpu(1);
        let cx = Context::inference(&device);
        let logits = Tensor::from_f32(vec![0.0, 2.0f32.ln(), 0.0, 5.0f32.ln()], [1, 4]).unwrap();
        let (experts, weights) = route_experts(&cx, &logits, 2, false).unwrap().read().unwrap();
        assert_eq!(experts, [1, 3]);
        assert!((weights[0] - 2.0 / 9.0).abs() < 1e-6 && (weights[1] - 5.0 / 9.0).abs() < 1e-6);
        let (experts, weights) = route_experts(&cx, &logits, 3, true).unwrap().read().unwrap();
        assert_eq!(experts, [0, 1, 3], "ties go to the lower number");
        assert!((weights.iter().sum::<f32>() - 1.0).abs() < 1e-6);
        assert!(route_experts(&cx, &logits, 5, true).is_err());
        assert!(route_experts(&cx, &logits, 0, true).is_err());
    }
}
