//! A router's losses and the gradient of its logits against double precision, with rows that are padding and padding's logits
//! that are no numbers.

use ironloom_kernels::{
    Gpu, RouteExperts, RoutedSort, RouterGradient, RouterLosses, route_experts, routed_sort, router_gradient,
    router_losses, router_losses_workspace,
};

use crate::{
    buffer, gemm::seconds, gpu, normals, read_bf16, read_f32, read_i32, relative_error, upload_f32, upload_i32,
};

#[derive(Clone, Copy)]
struct Case {
    rows: usize,
    experts: usize,
    per_row: usize,
    normalize: bool,
    balance: f32,
    z: f32,
}

const SHARE: f32 = 0.375;
const BEFORE: f64 = 2.5;

/// Every sixth row.
fn is_padding(row: usize) -> bool {
    row % 6 == 5
}

/// What the device makes of logits and of the weights' gradients.
struct Found {
    ids: Vec<i32>,
    side_loss: f64,
    shares: Vec<f32>,
    /// With what stands behind each row.
    dlogits: Vec<f32>,
}

/// Elements of a row of the logits' gradient: one more piece of eight than it needs.
fn stride_of(experts: usize) -> usize {
    experts.next_multiple_of(8) + 8
}

fn run(gpu: &Gpu, case: &Case, logits: &[f32], dgates: &[f32]) -> Found {
    let Case { rows, experts, per_row, normalize, balance, z } = *case;
    let slots = rows * per_row;
    let positions: Vec<i32> = (0..rows).map(|row| if is_padding(row) { -1 } else { row as i32 }).collect();
    let (logits, positions) = (upload_f32(gpu, logits), upload_i32(gpu, &positions));
    let (ids, gates) = (buffer(gpu, slots * 4), buffer(gpu, slots * 4));
    let call = RouteExperts {
        logits: logits.slice(),
        positions: Some(positions.slice()),
        ids: ids.slice(),
        gates: gates.slice(),
        rows,
        experts,
        per_row,
        normalize,
    };
    route_experts(gpu, &call).unwrap();
    let (places, sources, offsets) = (buffer(gpu, slots * 4), buffer(gpu, slots * 4), buffer(gpu, (experts + 1) * 4));
    let call = RoutedSort {
        ids: ids.slice(),
        places: places.slice(),
        sources: sources.slice(),
        offsets: offsets.slice(),
        rows,
        per_row,
        experts,
    };
    routed_sort(gpu, &call).unwrap();
    let (share, side_loss) = (upload_f32(gpu, &[SHARE]), gpu.upload(&BEFORE.to_ne_bytes(), "a test").unwrap());
    let (shares, workspace) = (buffer(gpu, experts * 4), buffer(gpu, router_losses_workspace(experts)));
    let call = RouterLosses {
        logits: logits.slice(),
        ids: ids.slice(),
        offsets: offsets.slice(),
        share: share.slice(),
        side_loss: side_loss.slice(),
        shares: shares.slice(),
        workspace: workspace.slice(),
        rows,
        experts,
        per_row,
        balance,
        z,
    };
    router_losses(gpu, &call).unwrap();
    // The gradients of the weights by place, times the weights.
    let (host_places, host_gates) = (read_i32(gpu, &places, slots), read_f32(gpu, &gates, slots));
    let mut by_place = vec![f32::NAN; slots];
    for ((&place, gate), dgate) in host_places.iter().zip(host_gates).zip(dgates).filter(|((place, _), _)| **place >= 0)
    {
        by_place[place as usize] = gate * dgate;
    }
    let (dots, stride) = (upload_f32(gpu, &by_place), stride_of(experts));
    let dlogits = buffer(gpu, rows * stride * 2);
    let call = RouterGradient {
        logits: logits.slice(),
        ids: ids.slice(),
        places: places.slice(),
        gates: gates.slice(),
        dots: dots.slice(),
        offsets: offsets.slice(),
        shares: shares.slice(),
        share: share.slice(),
        dlogits: dlogits.slice(),
        dlogits_stride: stride,
        rows,
        experts,
        per_row,
        normalize,
        balance,
        z,
    };
    router_gradient(gpu, &call).unwrap();
    let mut loss = [0; 8];
    gpu.read(side_loss.slice(), &mut loss).unwrap();
    Found {
        ids: read_i32(gpu, &ids, slots),
        side_loss: f64::from_ne_bytes(loss),
        shares: read_f32(gpu, &shares, experts),
        dlogits: read_bf16(gpu, &dlogits, rows * stride),
    }
}

struct Expected {
    loss: f64,
    shares: Vec<f64>,
    dlogits: Vec<f64>,
}

fn expected(case: &Case, logits: &[f32], dgates: &[f32], ids: &[i32]) -> Expected {
    let Case { rows, experts, per_row, normalize, balance, z } = *case;
    let (balance, z) = (f64::from(balance) * experts as f64, f64::from(z));
    let counted = (0..rows).filter(|&row| !is_padding(row)).count() as f64;
    let mut shares = vec![0.0; experts];
    ids.iter().filter(|id| **id >= 0).for_each(|&id| shares[id as usize] += 1.0 / (counted * per_row as f64));
    let factor = f64::from(SHARE) / counted;
    let (mut loss, mut dlogits) = (0.0, vec![0.0; rows * experts]);
    for row in (0..rows).filter(|&row| !is_padding(row)) {
        let logits: Vec<f64> = logits[row * experts..][..experts].iter().map(|&x| x.into()).collect();
        let (ids, dgates) = (&ids[row * per_row..][..per_row], &dgates[row * per_row..][..per_row]);
        let total: f64 = logits.iter().map(|x| x.exp()).sum();
        let log_sum = total.ln();
        let p: Vec<f64> = logits.iter().map(|x| x.exp() / total).collect();
        let even: f64 = p.iter().zip(&shares).map(|(p, share)| p * share).sum();
        loss += factor * (balance * even + z * log_sum * log_sum);
        let sum = if normalize { ids.iter().map(|&id| p[id as usize]).sum() } else { 1.0 };
        let along = if normalize {
            ids.iter().zip(dgates).map(|(&id, &g)| f64::from(g) * p[id as usize] / sum).sum()
        } else {
            0.0
        };
        let mut dp = vec![0.0; experts];
        ids.iter().zip(dgates).for_each(|(&id, &g)| dp[id as usize] = (f64::from(g) - along) / sum);
        let to_p: f64 = dp.iter().zip(&p).map(|(dp, p)| dp * p).sum();
        for (expert, found) in dlogits[row * experts..][..experts].iter_mut().enumerate() {
            let losses = factor * (balance * (shares[expert] - even) + 2.0 * z * log_sum);
            *found = p[expert] * (dp[expert] - to_p + losses);
        }
    }
    Expected { loss, shares, dlogits }
}

/// Logits of which those of padding are no numbers, and gradients of the weights.
fn inputs(case: &Case) -> (Vec<f32>, Vec<f32>) {
    let mut logits: Vec<f32> = normals(1, case.rows * case.experts).iter().map(|x| 2.0 * x + 0.5).collect();
    let mut dgates = normals(2, case.rows * case.per_row);
    for row in (0..case.rows).filter(|&row| is_padding(row)) {
        logits[row * case.experts..][..case.experts].fill(f32::NAN);
        dgates[row * case.per_row..][..case.per_row].fill(0.0);
    }
    (logits, dgates)
}

#[test]
fn losses_and_gradients_agree_with_double_precision() {
    let Some(gpu) = gpu() else { return };
    let sizes =
        [(8, 2), (5, 1), (8, 8), (16, 3), (31, 4), (60, 4), (64, 6), (100, 7), (128, 8), (250, 8), (256, 1), (512, 10)];
    for (experts, per_row) in sizes {
        for rows in [1usize, 45, 700, 5000] {
            // Small weights of the gates' gradient would hide the losses', so they are each tried alone as well.
            for (normalize, balance, z, gates) in
                [(true, 0.5, 0.25, 1.0), (false, 0.5, 0.25, 1.0), (true, 1.0, 0.0, 0.0), (false, 0.0, 1.0, 0.0)]
            {
                let case = Case { rows, experts, per_row, normalize, balance, z };
                let (logits, mut dgates) = inputs(&case);
                dgates.iter_mut().for_each(|g| *g *= gates);
                let found = run(&gpu, &case, &logits, &dgates);
                let expected = expected(&case, &logits, &dgates, &found.ids);
                let name = format!("{rows} rows, {per_row} of {experts}, {normalize}, {balance}, {z}");
                let loss = found.side_loss - BEFORE;
                assert!((loss - expected.loss).abs() < 2e-6 * expected.loss, "{name}: {loss} {}", expected.loss);
                let error = relative_error(&found.shares, &expected.shares);
                assert!(error < 1e-6, "{name}: shares {error:.2e}");
                let stride = stride_of(experts);
                let mut dlogits = Vec::with_capacity(rows * experts);
                for (row, found) in found.dlogits.chunks_exact(stride).enumerate() {
                    let (found, behind) = found.split_at(experts);
                    assert!(!is_padding(row) || found.iter().all(|&g| g == 0.0), "{name}: row {row} is padding");
                    let (zeros, kept) = behind.split_at(experts.next_multiple_of(8) - experts);
                    assert!(zeros.iter().all(|&x| x == 0.0) && kept.iter().all(|x| x.is_nan()), "{name}: row {row}");
                    dlogits.extend_from_slice(found);
                }
                // What is left of a sum whose terms cancel, where every expert is chosen, has few bits.
                let terms: f64 = expected.dlogits.iter().map(|g| g * g).sum::<f64>().sqrt();
                let difference = dlogits.iter().zip(&expected.dlogits);
                let difference = difference.map(|(&f, &e)| (f64::from(f) - e).powi(2)).sum::<f64>().sqrt();
                let floor = 5e-7 * f64::from(gates + SHARE / rows as f32) * (rows as f64).sqrt();
                assert!(difference < 3e-3 * terms + floor, "{name}: {difference:.2e} of {terms:.2e}");
                let again = run(&gpu, &case, &logits, &dgates);
                let same = again.dlogits.iter().zip(&found.dlogits).all(|(a, b)| a.to_bits() == b.to_bits());
                assert!(same && again.side_loss.to_bits() == found.side_loss.to_bits(), "{name}: two runs");
            }
        }
    }
}

#[test]
fn what_a_router_cannot_be_is_refused() {
    let Some(gpu) = gpu() else { return };
    let memory = buffer(&gpu, 1 << 20);
    let slice = memory.slice();
    let losses = RouterLosses {
        logits: slice,
        ids: slice,
        offsets: slice,
        share: slice,
        side_loss: slice,
        shares: slice,
        workspace: slice,
        rows: 4,
        experts: 8,
        per_row: 2,
        balance: 1.0,
        z: 1.0,
    };
    for wrong in [
        RouterLosses { experts: 513, ..losses },
        RouterLosses { per_row: 0, ..losses },
        RouterLosses { per_row: 9, ..losses },
        RouterLosses { rows: 1 << 20, ..losses },
        RouterLosses { workspace: slice.part(0, 64).unwrap(), ..losses },
        RouterLosses { side_loss: slice.part(4, 8).unwrap(), ..losses },
    ] {
        assert!(router_losses(&gpu, &wrong).is_err(), "{wrong:?}");
    }
    let gradient = RouterGradient {
        logits: slice,
        ids: slice,
        places: slice,
        gates: slice,
        dots: slice,
        offsets: slice,
        shares: slice,
        share: slice,
        dlogits: slice,
        dlogits_stride: 8,
        rows: 4,
        experts: 8,
        per_row: 2,
        normalize: true,
        balance: 1.0,
        z: 1.0,
    };
    for wrong in [
        RouterGradient { dlogits_stride: 7, ..gradient },
        RouterGradient { dlogits: slice.part(0, 32).unwrap(), ..gradient },
        RouterGradient { experts: 600, ..gradient },
        RouterGradient { per_row: 0, ..gradient },
    ] {
        assert!(router_gradient(&gpu, &wrong).is_err(), "{wrong:?}");
    }
}

#[test]
#[ignore = "prints times"]
fn speed_of_a_router_in_training() {
    let Some(gpu) = gpu() else { return };
    for (rows, experts, per_row) in [(4096, 8, 2), (32_768, 8, 2), (32_768, 64, 8), (32_768, 256, 8)] {
        let slots = rows * per_row;
        let logits = upload_f32(&gpu, &normals(1, rows * experts));
        let (ids, gates) = (buffer(&gpu, slots * 4), buffer(&gpu, slots * 4));
        let (places, sources, offsets) =
            (buffer(&gpu, slots * 4), buffer(&gpu, slots * 4), buffer(&gpu, (experts + 1) * 4));
        let (share, side_loss) = (upload_f32(&gpu, &[1.0]), upload_f32(&gpu, &[0.0, 0.0]));
        let (shares, workspace) = (buffer(&gpu, experts * 4), buffer(&gpu, router_losses_workspace(experts)));
        let (dots, dlogits) = (upload_f32(&gpu, &vec![0.5; slots]), buffer(&gpu, rows * experts * 2));
        let route = RouteExperts {
            logits: logits.slice(),
            positions: None,
            ids: ids.slice(),
            gates: gates.slice(),
            rows,
            experts,
            per_row,
            normalize: true,
        };
        let sort = RoutedSort {
            ids: ids.slice(),
            places: places.slice(),
            sources: sources.slice(),
            offsets: offsets.slice(),
            rows,
            per_row,
            experts,
        };
        let losses = RouterLosses {
            logits: logits.slice(),
            ids: ids.slice(),
            offsets: offsets.slice(),
            share: share.slice(),
            side_loss: side_loss.slice(),
            shares: shares.slice(),
            workspace: workspace.slice(),
            rows,
            experts,
            per_row,
            balance: 0.01,
            z: 0.001,
        };
        let gradient = RouterGradient {
            logits: logits.slice(),
            ids: ids.slice(),
            places: places.slice(),
            gates: gates.slice(),
            dots: dots.slice(),
            offsets: offsets.slice(),
            shares: shares.slice(),
            share: share.slice(),
            dlogits: dlogits.slice(),
            dlogits_stride: experts,
            rows,
            experts,
            per_row,
            normalize: true,
            balance: 0.01,
            z: 0.001,
        };
        let times = [
            seconds(&gpu, || route_experts(&gpu, &route).unwrap()),
            seconds(&gpu, || routed_sort(&gpu, &sort).unwrap()),
            seconds(&gpu, || router_losses(&gpu, &losses).unwrap()),
            seconds(&gpu, || router_gradient(&gpu, &gradient).unwrap()),
        ];
        let [route, sort, losses, gradient] = times.map(|time| time * 1e6);
        println!(
            "{rows} rows, {per_row} of {experts}: route {route:.1} us, sort {sort:.1} us, losses {losses:.1} us, gradient \
             {gradient:.1} us"
        );
    }
}
