// Which experts a row goes to: softmax over all experts, the `per_row` most probable, in ascending order of their
// numbers.
//
//   p = softmax(logits[i, :]); the per_row largest p, ties to the lower number; gates = p, or p / their sum (normalize)
//
// logits [rows, experts] F32, experts <= 512; ids [rows, per_row] i32; gates [rows, per_row] F32. Where `positions` is
// given and positions[i] is negative the row is not in use: its ids are -1 and its gates 0. Ascending order lets the
// product of routed experts add a row's experts in an order that does not depend on how probable each was.
//
// Bound: latency. One warp a row holds the whole row in registers; each choice is two warp-wide integer reductions (the
// bits of a probability order as it does). Ids are distinct and in range whatever the logits are, NaN included. The sum
// of the chosen is taken from the most probable on.

#include "vocabulary/device.cuh"

constexpr int ROWS_PER_BLOCK = 4;

// Lane l holds experts l, 32 + l, ...: EACH of them.
template <int EACH>
__device__ __forceinline__ void route(const float *logits, const int *positions, int *__restrict__ ids,
                                      float *__restrict__ gates, int rows, int experts, int per_row, int normalize) {
    let_next_kernel_start();
    wait_for_previous_kernel();
    const int row = blockIdx.x * ROWS_PER_BLOCK + threadIdx.x / WARP, lane = threadIdx.x % WARP;
    if (row >= rows) return;
    ids += size_t(row) * per_row;
    gates += size_t(row) * per_row;
    if (positions != nullptr && positions[row] < 0) {
        for (int i = lane; i < per_row; i += WARP) ids[i] = -1, gates[i] = 0.0f;
        return;
    }
    logits += size_t(row) * experts;
    float p[EACH];
    float largest = -INFINITY, total = 0.0f;
#pragma unroll
    for (int e = 0; e < EACH; e++) {
        const int expert = e * WARP + lane;
        p[e] = expert < experts ? logits[expert] : -INFINITY;
        largest = fmaxf(largest, p[e]);
    }
    largest = warp_maximum(largest);
#pragma unroll
    for (int e = 0; e < EACH; e++) {
        p[e] = e * WARP + lane < experts ? expf(p[e] - largest) : 0.0f;
        total += p[e];
    }
    total = warp_sum(total);
    unsigned open = 0, chosen = 0;  // a bit for each expert of this lane
#pragma unroll
    for (int e = 0; e < EACH; e++) {
        p[e] /= total;
        if (e * WARP + lane < experts) open |= 1u << e;
    }
    float sum = 0.0f;
    for (int choice = 0; choice < per_row; choice++) {
        unsigned best = 0, best_id = UINT32_MAX;
#pragma unroll
        for (int e = 0; e < EACH; e++) {
            const unsigned bits = __float_as_uint(p[e]);
            if ((open >> e & 1) != 0 && (best_id == UINT32_MAX || bits > best)) best = bits, best_id = e * WARP + lane;
        }
        const unsigned winner = __reduce_max_sync(FULL_WARP, best);
        const unsigned id = __reduce_min_sync(FULL_WARP, best == winner ? best_id : UINT32_MAX);
        if (id % WARP == lane) open &= ~(1u << (id / WARP)), chosen |= 1u << (id / WARP);
        sum += __uint_as_float(winner);
    }
    const float divisor = normalize != 0 ? sum : 1.0f;
    int place = 0;
#pragma unroll
    for (int e = 0; e < EACH; e++) {
        const bool mine = (chosen >> e & 1) != 0;
        const unsigned lanes = __ballot_sync(FULL_WARP, mine);
        if (mine) {
            const int at = place + __popc(lanes & ((1u << lane) - 1));
            ids[at] = e * WARP + lane;
            gates[at] = p[e] / divisor;
        }
        place += __popc(lanes);
    }
}

// A kernel's name ends in the largest number of experts it takes.
#define ROUTE_EXPERTS(LARGEST)                                                                                         \
    extern "C" __global__ void __launch_bounds__(ROWS_PER_BLOCK *WARP)                                                 \
        route_experts_##LARGEST(const float *logits, const int *positions, int *__restrict__ ids,                      \
                                float *__restrict__ gates, int rows, int experts, int per_row, int normalize) {        \
        route<LARGEST / WARP>(logits, positions, ids, gates, rows, experts, per_row, normalize);                       \
    }

ROUTE_EXPERTS(32)
ROUTE_EXPERTS(64)
ROUTE_EXPERTS(128)
ROUTE_EXPERTS(256)
ROUTE_EXPERTS(512)
