//! `route_experts`: `softmax(logits)`, the `k` largest, divided by their sum on request.

use ironloom_tensor::{Device, ops};

use crate::check_parity::{
    case::{Bound, Case, Results},
    inputs::Inputs,
    place::Place,
    real::Real,
};

pub(super) fn cases(device: &Device) -> Vec<Case> {
    let mut cases = Vec::new();
    for [rows, experts, chosen] in [[1, 4, 1], [3, 8, 2], [5, 60, 4], [17, 128, 8], [64, 8, 2], [130, 256, 8]] {
        for normalize in [false, true] {
            // One expert divided by itself is 1 whatever the logits are: nothing could fail.
            if chosen == 1 && normalize {
                continue;
            }
            let shape = format!("{chosen} of [{rows}, {experts}]{}", if normalize { ", normalized" } else { "" });
            let logits = Inputs::of("route_experts", &shape).normal(rows * experts);
            let place = Place::single(device);
            cases.push(Case::new("route_experts", shape, Bound::TwicePlain, move |kernel| {
                let given = place.tensor(kernel.inputs(&logits), [rows, experts])?;
                let routing = ops::route_experts(&place.context(), &given, chosen, normalize)?;
                let mut ours = vec![0.0; rows * experts];
                let (experts_of, weights) = routing.read()?;
                for (i, (&expert, &weight)) in experts_of.iter().zip(&weights).enumerate() {
                    ours[i / chosen * experts + expert as usize] = weight;
                }
                Ok(Results::new(
                    route::<f64>(&logits, experts, chosen, normalize),
                    route::<f32>(&logits, experts, chosen, normalize),
                    ours,
                ))
            }));
        }
    }
    cases
}

/// The weight of each expert in each row, `[rows, experts]`; 0 where it is not chosen.
pub(super) fn route<R: Real>(logits: &[f32], experts: usize, chosen: usize, normalize: bool) -> Vec<R> {
    let mut out = Vec::new();
    for logits in R::all(logits).chunks_exact(experts) {
        let largest = logits.iter().copied().fold(logits[0], |a, b| if b > a { b } else { a });
        let powers: Vec<R> = logits.iter().map(|&logit| (logit - largest).exp()).collect();
        let total: R = powers.iter().copied().sum();
        let rank =
            |i: usize| (0..experts).filter(|&j| logits[j] > logits[i] || (logits[j] == logits[i] && j < i)).count();
        let kept: Vec<R> =
            (0..experts).map(|i| if rank(i) < chosen { powers[i] / total } else { R::of(0.0) }).collect();
        let divisor = if normalize { kept.iter().copied().sum() } else { R::of(1.0) };
        out.extend(kept.into_iter().map(|weight| weight / divisor));
    }
    out
}
