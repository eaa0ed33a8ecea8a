// The norm of the whole gradient, and whether a step may be learned from, without a word of the host.
//
//   sum_of_squares   partial[b] = sum g^2 over the elements of block b
//   judge_step       norm = sqrt(sum partial),   loss = loss_scale * nll,
//                    side_loss = side_losses + loss_scale * z_loss * lse_squared
//                    apply = loss + side_loss finite, at most loss_limit, and norm finite
//                    gradient_factor = max_gradient_norm / norm where the norm is larger, else 1
//
// Squares of single-precision values neither overflow nor vanish in double precision, so the norm is infinite or not a number
// only when an element is. A sum has one order: which block takes an element depends on the number of elements alone.
// Bound: the gradient's bytes; the conversions to double precision are, at 16 a cycle of a multiprocessor, a third of that time
// on an H200.

#include "optimizer/elements.cuh"
#include "optimizer/squares.cuh"

constexpr int SUM_THREADS = 256, JUDGE_THREADS = 1024;

__device__ __forceinline__ void add_square(double &to, float x) { to = fma(double(x), double(x), to); }

extern "C" __global__ void __launch_bounds__(SUM_THREADS)
    sum_of_squares(const float *gradient, double *__restrict__ partial, size_t count) {
    let_next_kernel_start();
    wait_for_previous_kernel();
    const size_t thread = size_t(blockIdx.x) * SUM_THREADS + threadIdx.x, threads = size_t(gridDim.x) * SUM_THREADS;
    const size_t vectors = count / 4;
    double lanes[4] = {};
#pragma unroll 4
    for (size_t vector = thread; vector < vectors; vector += threads) {
        const float4 v = reinterpret_cast<const float4 *>(gradient)[vector];
        add_square(lanes[0], v.x);
        add_square(lanes[1], v.y);
        add_square(lanes[2], v.z);
        add_square(lanes[3], v.w);
    }
    if (thread < count % 4) add_square(lanes[0], gradient[vectors * 4 + thread]);
    const double total = block_total<SUM_THREADS>((lanes[0] + lanes[1]) + (lanes[2] + lanes[3]));
    if (threadIdx.x == 0) partial[blockIdx.x] = total;
}

// What the host says of a step; `StepLimits` in src/gradient_norm.rs.
struct StepLimits {
    double loss_scale, z_loss, loss_limit, max_gradient_norm;
};

// What the loss of a step's batches came to, unscaled; `LossTotals` in src/gradient_norm.rs.
struct LossTotals {
    double nll, lse_squared, counted, correct;
};

// What the host reads; `StepResult` in src/gradient_norm.rs.
struct StepResult {
    double loss, side_loss, gradient_norm, counted, correct;
    uint32_t applied, reserved;
};

extern "C" __global__ void __launch_bounds__(JUDGE_THREADS)
    judge_step(const double *partial, int pieces, const LossTotals *totals, const double *side_losses,
               const StepLimits *limits, StepValues *__restrict__ step, StepResult *__restrict__ result) {
    let_next_kernel_start();
    wait_for_previous_kernel();
    const double squares = sum_of_pieces<JUDGE_THREADS>(partial, pieces);
    if (threadIdx.x != 0) return;
    const double norm = sqrt(squares), largest = limits->max_gradient_norm;
    const double loss = limits->loss_scale * totals->nll;
    const double of_outputs = limits->z_loss == 0.0 ? 0.0 : limits->loss_scale * limits->z_loss * totals->lse_squared;
    const double side_loss = (side_losses == nullptr ? 0.0 : side_losses[0]) + of_outputs;
    const bool apply = isfinite(loss + side_loss) && isfinite(norm) && loss + side_loss <= limits->loss_limit;
    step->gradient_factor = norm > largest ? float(largest / norm) : 1.0f;
    step->apply = apply;
    *result = {loss, side_loss, norm, totals->counted, totals->correct, apply, 0};
}
