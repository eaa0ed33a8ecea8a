//! Which experts a row goes to: softmax over all experts, the `k` largest, renormalized on request.

use crate::{
    Context, Error, Result, Tensor,
    lanes::{exp, maximum, sum},
};

/// Where rows go.
#[derive(Clone, Debug, PartialEq)]
pub struct Routing {
    /// Experts of each row: `[n, k]`, the most probable first; ties go to the lower number.
    pub experts: Vec<u32>,
    /// Their weights, `[n, k]`.
    pub weights: Vec<f32>,
    /// `k`.
    pub per_row: usize,
}

/// Routes rows by `logits [n, experts]`: `p = softmax(logits)`, then the `per_row` largest; `normalize` divides them by their
/// sum (`norm_topk_prob`).
///
/// # Errors
/// `per_row` is 0 or more than there are experts, or a tape records.
pub fn route_experts(cx: &Context, logits: &Tensor, per_row: usize, normalize: bool) -> Result<Routing> {
    cx.without_gradient("route experts")?;
    let count = logits.width();
    if per_row == 0 || per_row > count {
        return Err(Error::Count {
            operation: "route experts",
            what: "the number of experts a row",
            expected: count,
            found: per_row,
        });
    }
    let mut routing = Routing { experts: Vec::new(), weights: Vec::new(), per_row };
    let mut order: Vec<u32> = Vec::with_capacity(count);
    for row in logits.as_f32()?.chunks_exact(count) {
        let largest = maximum(row);
        let mut probabilities: Vec<f32> = row.iter().map(|logit| exp(logit - largest)).collect();
        let total = sum(&probabilities);
        probabilities.iter_mut().for_each(|p| *p /= total);
        order.clear();
        order.extend(0..count as u32);
        order.sort_by(|&a, &b| probabilities[b as usize].total_cmp(&probabilities[a as usize]).then(a.cmp(&b)));
        let chosen = &order[..per_row];
        let weights = chosen.iter().map(|&expert| probabilities[expert as usize]);
        let divisor: f32 = if normalize { weights.clone().sum() } else { 1.0 };
        routing.experts.extend_from_slice(chosen);
        routing.weights.extend(weights.map(|weight| weight / divisor));
    }
    Ok(routing)
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
        let plain = route_experts(&cx, &logits, 2, false).unwrap();
        assert_eq!(plain.experts, [3, 1]);
        assert!((plain.weights[0] - 5.0 / 9.0).abs() < 1e-6 && (plain.weights[1] - 2.0 / 9.0).abs() < 1e-6);
        let normalized = route_experts(&cx, &logits, 3, true).unwrap();
        assert_eq!(normalized.experts, [3, 1, 0], "ties go to the lower number");
        assert!((normalized.weights.iter().sum::<f32>() - 1.0).abs() < 1e-6);
        assert!(route_experts(&cx, &logits, 5, true).is_err());
        assert!(route_experts(&cx, &logits, 0, true).is_err());
    }
}
