// A router in training: its own losses, and the gradient of its logits from those and from the chosen experts' weights.
// route_experts.cu chooses; routed_sort of routed.cu counts.
//
//   p = softmax(logits[i, :]),  l_i = log sum exp(logits[i, :]),  over the N rows that are no padding
//   f_e = share of all choices that fell on expert e,  P_e = mean of p_e
//   side_loss += share (balance E sum_e f_e P_e + z mean_i l_i^2)        (Fedus et al., arXiv 2101.03961;
//                                                                         Zoph et al., arXiv 2202.08906)
//   dlogits = p (dp - dp . p) + share / N p (balance E (f - f . p) + 2 z l)
//   dp of a chosen expert = its dgate, or (dgate - sum of dgates gates) / S where the weights are p over the sum S of
//   the chosen; of another 0
//   dgate of slot (i, j) = dots[places[i, j]] / gates[i, j], dots being of gradients that the gate multiplied
//
// logits [rows, experts] F32, experts <= 512; ids [rows, per_row] i32, -1 in a row that is padding, whose gradient is
// 0; gates [rows, per_row] F32, dots [places] F32, places [rows, per_row] i32 of routed_sort. A gate that is 0 has the
// gradient 0: its expert's p is 0, and so is what goes on from there. dlogits are bfloat16, with a stride. offsets [experts + 1] i32 of routed_sort: counts of choices, so f is exact, and N =
// their sum / per_row. `share` is one F32, side_loss one F64.
//
// The sums over rows come in two stages: as many blocks as the number of rows says, each over rows that lie
// equally far apart in F32, then one block over those sums in F64, in order.
//
// Bound: latency; the logits of 32,768 rows and 64 experts are 8 MiB. A row takes 8, 16 or 32 lanes, which hold all of
// it.

#include "vocabulary/device.cuh"

namespace {

// The sum and the maximum over a group of LANES neighbouring lanes, in each of them.
template <int LANES> __device__ __forceinline__ float group_sum(float x) {
#pragma unroll
    for (int offset = LANES / 2; offset > 0; offset /= 2) x += __shfl_xor_sync(FULL_WARP, x, offset);
    return x;
}

template <int LANES> __device__ __forceinline__ float group_maximum(float x) {
#pragma unroll
    for (int offset = LANES / 2; offset > 0; offset /= 2) x = fmaxf(x, __shfl_xor_sync(FULL_WARP, x, offset));
    return x;
}

// The softmax of a row, of which lane l holds experts l, LANES + l, ..., and its log-sum-exp.
template <int LANES, int EACH>
__device__ __forceinline__ float softmax(const float *logits, int experts, float (&p)[EACH]) {
    const int lane = threadIdx.x % LANES;
    float largest = -INFINITY, total = 0.0f;
#pragma unroll
    for (int e = 0; e < EACH; e++) {
        const int expert = e * LANES + lane;
        p[e] = expert < experts ? logits[expert] : -INFINITY;
        largest = fmaxf(largest, p[e]);
    }
    largest = group_maximum<LANES>(largest);
#pragma unroll
    for (int e = 0; e < EACH; e++) {
        p[e] = e * LANES + lane < experts ? expf(p[e] - largest) : 0.0f;
        total += p[e];
    }
    total = group_sum<LANES>(total);
#pragma unroll
    for (int e = 0; e < EACH; e++) p[e] /= total;
    return largest + logf(total);
}

constexpr int FIGURE_THREADS = 512, LOSS_THREADS = 1024, GRADIENT_THREADS = 256;

// A block's sums of p and of the squares of log-sum-exps: partial[block][experts + 1].
template <int LANES, int EACH>
__device__ __forceinline__ void figures(const float *logits, const int *ids, float *__restrict__ partial, int rows,
                                        int experts, int per_row) {
    constexpr int GROUPS = FIGURE_THREADS / LANES, WIDTH = LANES * EACH;
    __shared__ float sums[GROUPS][WIDTH + 1];
    let_next_kernel_start();
    wait_for_previous_kernel();
    const int lane = threadIdx.x % LANES, group = threadIdx.x / LANES;
    float sum[EACH] = {}, squares = 0.0f;
    // All groups of a block go the same number of times round, the lanes of a warp together.
    for (int base = blockIdx.x * GROUPS; base < rows; base += gridDim.x * GROUPS) {
        const int row = min(base + group, rows - 1);
        const bool counts = base + group < rows && ids[size_t(row) * per_row] >= 0;
        float p[EACH];
        const float log_sum = softmax<LANES>(logits + size_t(row) * experts, experts, p);
#pragma unroll
        for (int e = 0; e < EACH; e++) sum[e] += counts ? p[e] : 0.0f;
        squares += counts ? log_sum * log_sum : 0.0f;
    }
#pragma unroll
    for (int e = 0; e < EACH; e++) sums[group][e * LANES + lane] = sum[e];
    if (lane == 0) sums[group][WIDTH] = squares;
    __syncthreads();
    for (int column = threadIdx.x; column <= experts; column += FIGURE_THREADS) {
        float total = 0.0f;
        for (int i = 0; i < GROUPS; i++) total += sums[i][column < experts ? column : WIDTH];
        partial[size_t(blockIdx.x) * (experts + 1) + column] = total;
    }
}

// What router_gradient works on: `RouterGradientCall` in src/route_training.rs.
struct RouterGradient {
    const float *logits;
    const int *ids, *places;
    const float *gates, *dots;
    const int *offsets;
    const float *shares, *share;
    bf16 *dlogits;
    int dlogits_stride, rows, experts, per_row, normalize;
    float balance, z;
    int unused;
};

// The gradient of a row's logits.
template <int LANES, int EACH> __device__ __forceinline__ void gradient(const RouterGradient &call) {
    let_next_kernel_start();
    wait_for_previous_kernel();
    const int experts = call.experts, per_row = call.per_row;
    const int lane = threadIdx.x % LANES, wanted = blockIdx.x * (GRADIENT_THREADS / LANES) + threadIdx.x / LANES;
    const int row = min(wanted, call.rows - 1);
    const int *ids = call.ids + size_t(row) * per_row, *places = call.places + size_t(row) * per_row;
    const float *gates = call.gates + size_t(row) * per_row;
    const bool counts = ids[0] >= 0;
    float p[EACH], dp[EACH] = {}, f[EACH];
    const float log_sum = softmax<LANES>(call.logits + size_t(row) * experts, experts, p);

    float chosen = 0.0f, along = 0.0f; // the chosen experts' p, and dgates . p
    for (int j = 0; j < per_row; j++) {
        const int id = ids[j];
        const float g = places[j] >= 0 && gates[j] > 0.0f ? call.dots[places[j]] / gates[j] : 0.0f;
#pragma unroll
        for (int e = 0; e < EACH; e++) {
            if (id != e * LANES + lane) continue;
            dp[e] = g;
            chosen += p[e];
            along = fmaf(g, p[e], along);
        }
    }
    if (call.normalize != 0) {
        chosen = group_sum<LANES>(chosen);
        along = group_sum<LANES>(along) / chosen;
        for (int j = 0; j < per_row; j++) {
            const int id = ids[j];
#pragma unroll
            for (int e = 0; e < EACH; e++) {
                if (id == e * LANES + lane) dp[e] = (dp[e] - along) / chosen;
            }
        }
    }
    float to_p = 0.0f, even = 0.0f; // dp . p and f . p
#pragma unroll
    for (int e = 0; e < EACH; e++) {
        const int expert = e * LANES + lane;
        f[e] = expert < experts ? call.shares[expert] : 0.0f;
        to_p = fmaf(dp[e], p[e], to_p);
        even = fmaf(f[e], p[e], even);
    }
    to_p = group_sum<LANES>(to_p);
    even = group_sum<LANES>(even);
    if (wanted >= call.rows) return;
    const float factor = *call.share / float(max(call.offsets[experts] / per_row, 1));
    bf16 *dlogits = call.dlogits + size_t(row) * call.dlogits_stride;
#pragma unroll
    for (int e = 0; e < EACH; e++) {
        const int expert = e * LANES + lane;
        if (expert >= experts) continue;
        const float losses = factor * (call.balance * float(experts) * (f[e] - even) + 2.0f * call.z * log_sum);
        dlogits[expert] = __float2bfloat16_rn(counts ? p[e] * (dp[e] - to_p + losses) : 0.0f);
    }
    // Up to a multiple of eight, which products take.
    const int end = min((experts + 7) / 8 * 8, call.dlogits_stride);
    for (int column = experts + lane; column < end; column += LANES) dlogits[column] = __float2bfloat16_rn(0.0f);
}

} // namespace

// A kernel's name ends in the largest number of experts it takes.
#define ROUTER(LARGEST, LANES)                                                                                         \
    extern "C" __global__ void __launch_bounds__(FIGURE_THREADS, 1)                                                     \
        router_figures_##LARGEST(const float *logits, const int *ids, float *__restrict__ partial, int rows,           \
                                 int experts, int per_row) {                                                           \
        figures<LANES, LARGEST / LANES>(logits, ids, partial, rows, experts, per_row);                                 \
    }                                                                                                                  \
    extern "C" __global__ void __launch_bounds__(GRADIENT_THREADS) router_gradient_##LARGEST(RouterGradient call) {     \
        gradient<LANES, LARGEST / LANES>(call);                                                                        \
    }

ROUTER(8, 8)
ROUTER(16, 16)
ROUTER(32, 32)
ROUTER(64, 32)
ROUTER(128, 32)
ROUTER(256, 32)
ROUTER(512, 32)

// The experts' shares, and the losses from the sums of all blocks: one block. A column (an expert, or the squares) has
// as many threads as fit, each of which takes every so many-th block in order; the first of them adds the others' sums.
extern "C" __global__ void __launch_bounds__(LOSS_THREADS)
    router_losses(const float *partial, const int *offsets, const float *share, double *__restrict__ side_loss,
                  float *__restrict__ shares, int blocks, int experts, int per_row, float balance, float z) {
    __shared__ double sums[LOSS_THREADS];
    let_next_kernel_start();
    wait_for_previous_kernel();
    const int columns = experts + 1, turns = LOSS_THREADS / columns;
    const int column = threadIdx.x % columns, turn = threadIdx.x / columns, choices = offsets[experts];
    double sum = 0.0;
    if (turn < turns) {
        for (int block = turn; block < blocks; block += turns) sum += double(partial[size_t(block) * columns + column]);
    }
    sums[threadIdx.x] = sum;
    __syncthreads();
    if (threadIdx.x < columns) {
        for (int i = 1; i < turns; i++) sum += sums[i * columns + threadIdx.x];
        if (threadIdx.x < experts) {
            const int count = offsets[threadIdx.x + 1] - offsets[threadIdx.x];
            shares[threadIdx.x] = float(count) / float(max(choices, 1));
            sum *= double(balance) * experts * count / max(choices, 1);
        } else {
            sum *= double(z);
        }
    }
    __syncthreads();
    if (threadIdx.x < columns) sums[threadIdx.x] = sum;
    __syncthreads();
    if (threadIdx.x != 0) return;
    double total = 0.0;
    for (int i = 0; i < columns; i++) total += sums[i];
    *side_loss += total * double(*share) / max(choices / per_row, 1);
}
