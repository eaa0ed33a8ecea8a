//! Routing against a full sort, with ties, inactive rows and logits that are not numbers.

use ironloom_kernels::{RouteExperts, route_experts};

use crate::{buffer, gpu, normals, read_f32, read_i32, upload_f32, upload_i32};

/// Experts in ascending order and their weights.
fn expected(logits: &[f32], per_row: usize, normalize: bool) -> Vec<(usize, f64)> {
    let largest = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let weights: Vec<f64> = logits.iter().map(|&logit| f64::from(logit - largest).exp()).collect();
    let total: f64 = weights.iter().sum();
    let mut order: Vec<usize> = (0..logits.len()).collect();
    order.sort_by(|&a, &b| logits[b].total_cmp(&logits[a]).then(a.cmp(&b)));
    order.truncate(per_row);
    let divisor = if normalize { order.iter().map(|&e| weights[e]).sum() } else { total };
    order.sort_unstable();
    order.iter().map(|&e| (e, weights[e] / divisor)).collect()
}

#[test]
fn the_most_probable_experts_come_in_ascending_order() {
    let Some(gpu) = gpu() else { return };
    for (experts, per_row) in [(4, 2), (8, 2), (8, 8), (32, 1), (60, 4), (64, 6), (128, 8), (256, 8), (512, 10)] {
        for rows in [1usize, 7, 64, 1000] {
            // Eighths, so that ties are common and the order of distinct ones is beyond rounding; no negative zero, which the
            // sort below would tell from zero.
            let logits: Vec<f32> = normals(9, rows * experts).iter().map(|x| (x * 8.0).round() / 8.0 + 0.0).collect();
            let positions: Vec<i32> = (0..rows as i32).map(|row| if row % 6 == 5 { -1 } else { row }).collect();
            let (device_logits, device_positions) = (upload_f32(&gpu, &logits), upload_i32(&gpu, &positions));
            for (normalize, with_positions) in [(true, true), (false, false)] {
                let (ids, gates) = (buffer(&gpu, rows * per_row * 4), buffer(&gpu, rows * per_row * 4));
                let call = RouteExperts {
                    logits: device_logits.slice(),
                    positions: with_positions.then(|| device_positions.slice()),
                    ids: ids.slice(),
                    gates: gates.slice(),
                    rows,
                    experts,
                    per_row,
                    normalize,
                };
                route_experts(&gpu, &call).unwrap();
                let (ids, gates) = (read_i32(&gpu, &ids, rows * per_row), read_f32(&gpu, &gates, rows * per_row));
                for row in 0..rows {
                    let span = row * per_row..(row + 1) * per_row;
                    let (ids, gates) = (&ids[span.clone()], &gates[span]);
                    if with_positions && positions[row] < 0 {
                        assert!(ids.iter().all(|&id| id == -1) && gates.iter().all(|&gate| gate == 0.0));
                        continue;
                    }
                    let expected = expected(&logits[row * experts..(row + 1) * experts], per_row, normalize);
                    for ((id, gate), (expert, weight)) in ids.iter().zip(gates).zip(expected) {
                        assert_eq!(*id, expert as i32, "row {row} of {rows}, {per_row} of {experts}");
                        assert!((f64::from(*gate) - weight).abs() < 2e-6 * weight, "{gate} {weight}");
                    }
                }
            }
        }
    }
}

#[test]
fn logits_that_are_no_numbers_still_give_distinct_experts() {
    let Some(gpu) = gpu() else { return };
    let mut logits = vec![f32::NAN; 64];
    logits.extend([f32::NEG_INFINITY; 64]);
    logits.extend((0..64).map(|i| if i == 40 { f32::INFINITY } else { i as f32 }));
    let device_logits = upload_f32(&gpu, &logits);
    let (ids, gates) = (buffer(&gpu, 3 * 8 * 4), buffer(&gpu, 3 * 8 * 4));
    let call = RouteExperts {
        logits: device_logits.slice(),
        positions: None,
        ids: ids.slice(),
        gates: gates.slice(),
        rows: 3,
        experts: 64,
        per_row: 8,
        normalize: true,
    };
    route_experts(&gpu, &call).unwrap();
    for row in read_i32(&gpu, &ids, 24).chunks_exact(8) {
        assert!(row.windows(2).all(|pair| pair[0] < pair[1]) && row[0] >= 0 && row[7] < 64, "{row:?}");
    }
    for (experts, per_row) in [(64, 0), (64, 65), (513, 2)] {
        assert!(route_experts(&gpu, &RouteExperts { experts, per_row, ..call }).is_err());
    }
}
