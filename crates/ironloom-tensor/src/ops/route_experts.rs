//! Which experts a row goes to: softmax over all experts, the `k` largest, renormalized on request.

use ironloom_kernels::{self as kernels, Buffer, Form, Gpu};

use crate::{
    Context, Error, Result, Tensor,
    error::expect_count,
    lanes::{dot, exp, maximum, sum},
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
    Cpu { experts: Vec<u32>, weights: Tensor },
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

    /// The experts' weights `[n, per_row]` on the processor, which gradients flow through.
    ///
    /// # Errors
    /// The routing is on another device.
    pub fn weights(&self) -> Result<&Tensor> {
        match &self.place {
            Place::Cpu { weights, .. } => Ok(weights),
            Place::Cuda { .. } => Err(Error::Device {
                operation: "the weights of a routing",
                expected: "the processor",
                found: "on a graphics card",
            }),
        }
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
            Place::Cpu { experts, weights } => Ok((experts.clone(), weights.as_f32()?.to_vec())),
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
/// sum (`norm_topk_prob`). Gradient: through the softmax, and the division where there is one, of the chosen experts' weights.
///
/// # Errors
/// `per_row` is 0 or more than there are experts.
pub fn route_experts(cx: &Context, logits: &Tensor, per_row: usize, normalize: bool) -> Result<Routing> {
    const NAME: &str = "route experts";
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
        cx.without_gradient(NAME)?;
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
    let (mut experts, mut all_weights, mut divisors) = (Vec::new(), Vec::new(), Vec::new());
    let mut order: Vec<u32> = Vec::with_capacity(count);
    for row in logits.as_f32()?.chunks_exact(count) {
        let (probabilities, _) = softmax(row);
        order.clear();
        order.extend(0..count as u32);
        order.sort_by(|&a, &b| probabilities[b as usize].total_cmp(&probabilities[a as usize]).then(a.cmp(&b)));
        let chosen = &mut order[..per_row];
        chosen.sort_unstable();
        let weights = chosen.iter().map(|&expert| probabilities[expert as usize]);
        let divisor: f32 = if normalize { weights.clone().sum() } else { 1.0 };
        all_weights.extend(weights.map(|weight| weight / divisor));
        divisors.push(divisor);
        experts.extend_from_slice(chosen);
    }
    let weights = Tensor::from_f32(all_weights, [rows, per_row])?;
    if let Some((tape, [Some(slot)])) = cx.slots([logits]) {
        let (logits, chosen) = (logits.clone(), experts.clone());
        tape.record(&weights, move |gradient, gradients| {
            let g = gradient.as_f32()?.chunks_exact(per_row).zip(chosen.chunks_exact(per_row));
            let mut found = Vec::with_capacity(rows * count);
            for ((row, (g, chosen)), divisor) in logits.as_f32()?.chunks_exact(count).zip(g).zip(&divisors) {
                let (p, _) = softmax(row);
                let mut to_p = vec![0.0; count];
                for (&expert, g) in chosen.iter().zip(g) {
                    to_p[expert as usize] = *g;
                }
                if normalize {
                    // w = p / S: dp = (g - g . w) / S for the chosen ones.
                    let along: f32 = chosen.iter().zip(g).map(|(&expert, g)| g * p[expert as usize] / divisor).sum();
                    chosen.iter().zip(g).for_each(|(&expert, g)| to_p[expert as usize] = (g - along) / divisor);
                }
                let along = dot(&to_p, &p);
                found.extend(p.iter().zip(&to_p).map(|(p, to_p)| p * (to_p - along)));
            }
            gradients.add(&slot, Tensor::from_f32(found, slot.shape())?)
        });
    }
    Ok(Routing { per_row, rows, place: Place::Cpu { experts, weights } })
}

/// The softmax of a row, and its log-sum-exp.
fn softmax(row: &[f32]) -> (Vec<f32>, f32) {
    let largest = maximum(row);
    let mut probabilities: Vec<f32> = row.iter().map(|logit| exp(logit - largest)).collect();
    let total = sum(&probabilities);
    probabilities.iter_mut().for_each(|p| *p /= total);
    (probabilities, largest + libm::logf(total))
}

/// The weights of a router's own losses.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct RouterLosses {
    /// Of the balance of loads, `E sum_e f_e P_e` (Fedus et al., arXiv 2101.03961): `f_e` the share of choices that fell on expert
    /// `e`, `P_e` its mean probability; 1 when even.
    pub balance: f32,
    /// Of the mean square of the logits' log-sum-exp (Zoph et al., arXiv 2202.08906).
    pub z: f32,
}

/// Adds a router's losses for `logits [n, experts]`, times `scale`, to what the tape differentiates, and notes each expert's share of
/// the rows. Does nothing without a tape.
///
/// # Errors
/// The routing is of another number of rows.
pub fn router_losses(cx: &Context, logits: &Tensor, routing: &Routing, losses: RouterLosses, scale: f32) -> Result<()> {
    const NAME: &str = "router losses";
    let Some(tape) = cx.tape else { return Ok(()) };
    expect_count(NAME, "the number of routed rows", logits.rows(), routing.rows())?;
    cx.cpu(NAME)?;
    let (count, rows) = (logits.width(), logits.rows());
    let (chosen, _) = routing.read()?;
    let mut shares = vec![0.0f32; count];
    chosen.iter().for_each(|expert| shares[*expert as usize] += 1.0);
    shares.iter_mut().for_each(|share| *share /= chosen.len().max(1) as f32);
    let (mut means, mut squares) = (vec![0.0f64; count], 0.0f64);
    for row in logits.as_f32()?.chunks_exact(count) {
        let (p, log_sum) = softmax(row);
        means.iter_mut().zip(&p).for_each(|(mean, p)| *mean += f64::from(*p));
        squares += f64::from(log_sum).powi(2);
    }
    let balance: f64 = shares.iter().zip(&means).map(|(share, mean)| f64::from(*share) * mean).sum();
    let total = f64::from(losses.balance) * balance * count as f64 + f64::from(losses.z) * squares;
    let loss = Tensor::from_f32(vec![(total * f64::from(scale) / rows.max(1) as f64) as f32], [1])?;
    tape.note_expert_load(shares.clone());
    if let Some((tape, [Some(slot)])) = cx.slots([logits]) {
        let logits = logits.clone();
        tape.record(&loss, move |gradient, gradients| {
            let factor = gradient.as_f32()?[0] * scale / rows.max(1) as f32;
            let mut found = Vec::with_capacity(rows * count);
            for row in logits.as_f32()?.chunks_exact(count) {
                let (p, log_sum) = softmax(row);
                let along = dot(&shares, &p);
                found.extend(p.iter().zip(&shares).map(|(p, share)| {
                    let balance = losses.balance * count as f32 * (share - along);
                    factor * p * (balance + 2.0 * losses.z * log_sum)
                }));
            }
            gradients.add(&slot, Tensor::from_f32(found, slot.shape())?)
        });
    }
    tape.add_side_loss(loss)
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
