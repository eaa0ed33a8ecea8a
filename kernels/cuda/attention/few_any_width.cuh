// Attention of few rows for any width of a head up to MOST_WIDTH, and any number of turned pairs, on the plain
// arithmetic units: a thread scores one position for half of the heads, then sums values for its own elements.
#pragma once

#include "split_history.cuh"
#include "turn.cuh"

constexpr int ANY_WIDTH_THREADS = 128;
constexpr int ANY_WIDTH_TILE = 64;
constexpr int MOST_WIDTH = 256;

struct SharedAnyWidth {
    float queries[HEADS][MOST_WIDTH];  // at the end: the sums
    float scores[HEADS][ANY_WIDTH_TILE];
    float factor[HEADS];
    HeadSums heads;
    bf16 new_keys[ANY_WIDTH_TILE][MOST_WIDTH];  // of the tile's positions that are of this pass
    bool last;
};

// One chunk; the block's sums are left in `shared.queries`.
__device__ __forceinline__ void attend_chunk_any_width(const Call &call, const Job &job, int begin, int end,
                                                       SharedAnyWidth &shared) {
    constexpr int THREADS = ANY_WIDTH_THREADS, WARPS = THREADS / WARP, ELEMENTS = HEADS * MOST_WIDTH / THREADS;
    constexpr int TILE_LENGTH = ANY_WIDTH_TILE, HALF = HEADS / 2;
    static_assert(2 * TILE_LENGTH == THREADS && TILE_LENGTH == 2 * WARP, "two threads score a position");
    const int width = call.width, warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    const size_t stride = size_t(call.kv_heads) * width;

    for (int head = warp; head < HEADS; head += WARPS) {
        float *to = shared.queries[head];
        if (head < job.group) {
            turn_head(projection(call, job, job.position, job.first_head + head, width), call.q_norm, call.epsilon,
                      row_phases(call, job, job.position), call.half, width,
                      [&](int i, float y) { to[i] = y * call.scale; });
        } else {
            for (int i = lane; i < width; i += WARP) to[i] = 0.0f;
        }
        if (lane == 0) {
            shared.heads.maximum[head] = -INFINITY;
            shared.heads.denominator[head] = 0.0f;
        }
    }
    float sums[ELEMENTS] = {};
    for (int tile = begin; tile < end; tile += TILE_LENGTH) {
        const int count = min(TILE_LENGTH, end - tile);
        for (int s = max(job.first_new - tile, 0) + warp; s < count; s += WARPS) {
            const int position = tile + s;
            const bool appends = job.appends && position == job.position;
            turn_head(projection(call, job, position, call.heads + job.kv_head, width), call.k_norm, call.epsilon,
                      row_phases(call, job, position), call.half, width, [&](int i, float y) {
                          const bf16 rounded = __float2bfloat16_rn(y);
                          shared.new_keys[s][i] = rounded;
                          if (appends) job.keys[position * stride + i] = rounded;
                      });
            if (!appends) continue;
            const float *value = projection(call, job, position, call.heads + call.kv_heads + job.kv_head, width);
            for (int i = lane; i < width; i += WARP) job.values[position * stride + i] = __float2bfloat16_rn(value[i]);
        }
        __syncthreads();
        {
            const int s = threadIdx.x % TILE_LENGTH, first = threadIdx.x / TILE_LENGTH * HALF;
            float dots[HALF] = {};
            if (s < count) {
                const bf16 *key = tile + s < job.first_new ? job.keys + size_t(tile + s) * stride : shared.new_keys[s];
                for (int i = 0; i < width; i++) {
                    const float k = __bfloat162float(key[i]);
#pragma unroll
                    for (int h = 0; h < HALF; h++) dots[h] = fmaf(shared.queries[first + h][i], k, dots[h]);
                }
            }
#pragma unroll
            for (int h = 0; h < HALF; h++) shared.scores[first + h][s] = s < count ? dots[h] : -INFINITY;
        }
        __syncthreads();
        for (int head = warp; head < HEADS; head += WARPS) {
            const float a = shared.scores[head][lane], b = shared.scores[head][lane + WARP];
            const float before = shared.heads.maximum[head];
            const float greatest = fmaxf(before, warp_maximum(fmaxf(a, b)));
            const float factor = exp2_hardware(before - greatest);
            const float p = exp2_hardware(a - greatest), q = exp2_hardware(b - greatest);
            const float total = warp_sum(p + q);
            shared.scores[head][lane] = p;
            shared.scores[head][lane + WARP] = q;
            __syncwarp();  // all lanes have read the maximum
            if (lane == 0) {
                shared.factor[head] = factor;
                shared.heads.maximum[head] = greatest;
                shared.heads.denominator[head] = fmaf(shared.heads.denominator[head], factor, total);
            }
        }
        __syncthreads();
#pragma unroll
        for (int i = 0; i < ELEMENTS; i++) {
            const int element = threadIdx.x + i * THREADS;
            if (element >= job.group * width) break;
            const int head = element / width, column = element % width;
            float sum = sums[i] * shared.factor[head];
            for (int s = 0; s < count; s++) {
                const int position = tile + s;
                const int place = call.heads + call.kv_heads + job.kv_head;
                const bf16 value = position < job.first_new
                                       ? job.values[size_t(position) * stride + column]
                                       : __float2bfloat16_rn(projection(call, job, position, place, width)[column]);
                sum = fmaf(shared.scores[head][s], __bfloat162float(value), sum);
            }
            sums[i] = sum;
        }
    }
#pragma unroll
    for (int i = 0; i < ELEMENTS; i++) {
        const int element = threadIdx.x + i * THREADS;
        if (element < job.group * width) shared.queries[element / width][element % width] = sums[i];
    }
    __syncthreads();
}

static_assert(sizeof(SharedAnyWidth) <= 44 << 10, "what the launcher gives");

__device__ __forceinline__ void attend_any_width(const Call &call) {
    extern __shared__ __align__(16) unsigned char arena[];
    SharedAnyWidth &shared = *reinterpret_cast<SharedAnyWidth *>(arena);
    Job job;
    find_heads(call, job);
    wait_for_previous_kernel();
    if (!find_history(call, job, call.width)) return;
    for (int leaf = blockIdx.z; job.has_chunk(job.first_chunk(leaf)); leaf += gridDim.z) {
        const int chunk = job.first_chunk(leaf);
        attend_chunk_any_width(call, job, job.begin(chunk), job.end(chunk), shared);
        const auto each = [&](const auto &take) {
#pragma unroll 1
            for (int i = threadIdx.x; i < job.group * call.width; i += ANY_WIDTH_THREADS) take(i);
        };
        finish_by_tickets<false, float>(
            call, job, chunk, each,
            [&](int element) { return shared.queries[element / call.width][element % call.width]; }, shared.heads,
            call.width, shared.last);
        __syncthreads();
    }
}
