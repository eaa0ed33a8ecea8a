// Attention of few query rows, each over its own history: decoding, verify passes of a speculation, short prompts.
//
//   out[h] = sum_s softmax_s(scale q[h] . k_s[h / group]) v_s[h / group]      s in max(0, p - window + 1) ..= p
//
// q [rows, heads * width] in single precision, keys and values bfloat16 and position-major, out in SPLIT form. A block
// takes a chunk of one row's history and a kv head, and serves up to 8 query heads of it, so keys and values are read
// once. How chunks are cut and merged: attention/split_history.cuh. Blocks past a row's last chunk leave at once.
//
// Tensor cores do the sums, as with 8 query heads there are 2,048 multiplications for each 512 bytes. Queries and
// probabilities are taken as two bfloat16 parts (16 bits of mantissa), keys and values are bfloat16 as they are, so
// products are exact and sums are in single precision: the error is that of the SPLIT form of the output. Keys and
// values go from global memory to the fragments of `multiply_add` without shared memory: a product's inner index may
// be permuted at will, so each lane takes 16 bytes of a key row as the pairs of two steps (scores: 16 positions by 8
// heads), and of four value rows as the rows of four tiles (sums: 16 elements by 8 heads), where byte permutes bring
// two positions side by side.
//
// Bound: bytes of keys and values. A warp takes tiles of 16 positions, 8 KiB at width 128, all loads of a tile in
// flight at once and the next tile's keys with them; at the usual lengths a warp has one tile, and latency decides:
// one dependent chain position -> keys -> scores -> sums, then the merge.
#include "attention/split_history.cuh"

constexpr int TILE = 16;

// The transpose of an 8x8 matrix of 16-bit elements over a warp: lane 4 g + t gives (g, 2t), (g, 2t + 1).
__device__ __forceinline__ uint32_t transpose(uint32_t pair) {
    uint32_t out;
    asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(out) : "r"(pair));
    return out;
}

// The parts of two numbers, packed: high parts and low parts.
struct SplitPair {
    uint32_t high, low;
};

__device__ __forceinline__ SplitPair split_pair(float a, float b) {
    const Split first = split(a), second = split(b);
    return {pack(first.high, second.high), pack(first.low, second.low)};
}

// Rows: lane 4 g + t. Tiles of values: 64 elements of a row are 4 tiles, a lane's 16 bytes being elements 8 g .. 8 g +
// 8; where 32 are left, 2 tiles, 8 bytes being elements 4 g .. 4 g + 4. Row g of tile i is the lane's element 2 i, row
// g + 8 its element 2 i + 1.
template <int WIDTH> struct Values {
    static constexpr int WIDE = WIDTH / 64, TAIL = WIDTH % 64 / 32;
    uint4 wide[WIDE > 0 ? WIDE : 1][4];
    uint2 tail[4];

    // The positions 2t, 2t + 1, 2t + 8 and 2t + 9 of a tile that starts at `tile`; past the last one, the last again,
    // whose probability is then zero.
    __device__ __forceinline__ void load(const bf16 *values, size_t stride, int tile, int last) {
        const int g = threadIdx.x % WARP / 4, t = threadIdx.x % 4;
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const bf16 *from = values + size_t(min(tile + 2 * t + (i & 1) + 8 * (i / 2), last)) * stride;
#pragma unroll
            for (int j = 0; j < WIDE; j++) wide[j][i] = load_written_streaming(from + 64 * j + 8 * g);
            if constexpr (TAIL > 0) tail[i] = *reinterpret_cast<const uint2 *>(from + 64 * WIDE + 4 * g);
        }
    }

    // Tile `tile`'s rows as the left operand: pairs of positions.
    __device__ __forceinline__ void fragment(int tile, uint32_t (&a)[4]) const {
        const auto word = [&](int i) {
            if (tile < 4 * WIDE) return (&wide[tile / 4][i].x)[tile % 4];
            return (&tail[i].x)[tile % 4];
        };
        a[0] = __byte_perm(word(0), word(1), 0x5410);
        a[1] = __byte_perm(word(0), word(1), 0x7632);
        a[2] = __byte_perm(word(2), word(3), 0x5410);
        a[3] = __byte_perm(word(2), word(3), 0x7632);
    }

    // The element of a head that row g of tile `tile` is; row g + 8 is the next one.
    static __device__ __forceinline__ int element(int tile) {
        const int g = threadIdx.x % WARP / 4;
        if (tile < 4 * WIDE) return tile / 4 * 64 + 8 * g + 2 * (tile % 4);
        return 64 * WIDE + 4 * g + 2 * (tile % 4);
    }
};

template <int WIDTH> struct Keys {
    static constexpr int SEGMENTS = WIDTH / 32;
    uint4 low[SEGMENTS], high[SEGMENTS];  // positions g and g + 8 of a tile, elements 32 s + 8 t .. + 8

    __device__ __forceinline__ void load(const bf16 *keys, size_t stride, int tile, int last) {
        const int g = threadIdx.x % WARP / 4, t = threadIdx.x % 4;
        const bf16 *first = keys + size_t(min(tile + g, last)) * stride + 8 * t;
        const bf16 *second = keys + size_t(min(tile + g + 8, last)) * stride + 8 * t;
#pragma unroll
        for (int s = 0; s < SEGMENTS; s++) {
            low[s] = load_written_streaming(first + 32 * s);
            high[s] = load_written_streaming(second + 32 * s);
        }
    }
};

template <int WIDTH> struct Shared {
    union {
        uint4 queries[2][WIDTH / 32][WARP];   // high parts, low parts: a lane's right operands of two steps
        float sums[WARPS][HEADS][WIDTH + 2];  // the warps' results; the two spread the banks
    };
    float maximum[WARPS][HEADS], denominator[WARPS][HEADS];
    HeadSums heads;
};

template <int WIDTH> __device__ __forceinline__ void attend(const Call &call) {
    constexpr int SEGMENTS = WIDTH / 32, TILES = WIDTH / 16, ELEMENTS = (HEADS * WIDTH + THREADS - 1) / THREADS;
    __shared__ Shared<WIDTH> shared;
    Job job;
    if (!find_job(call, job)) return;
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP, g = lane / 4, t = lane % 4;
    const size_t stride = size_t(call.kv_heads) * WIDTH;
    const int last = job.end - 1;

    // Loaded before anything else waits: most warps have one tile, and its latency is the kernel's.
    Keys<WIDTH> keys;
    Values<WIDTH> values;
    int tile = job.begin + warp * TILE;
    if (tile < job.end) {
        keys.load(job.keys, stride, tile, last);
        values.load(job.values, stride, tile, last);
    }

    // The queries, times the scale, in the order of the keys' elements: lane 4 g + t has head g.
    for (int s = warp; s < SEGMENTS; s += WARPS) {
        float q[8] = {};
        if (g < job.group) {
            const size_t head = size_t(job.row) * call.heads + job.first_head + g;
            const float *from = call.queries + head * WIDTH + 32 * s + 8 * t;
#pragma unroll
            for (int i = 0; i < 2; i++) {
                const float4 four = *reinterpret_cast<const float4 *>(from + 4 * i);
                q[4 * i] = four.x * call.scale;
                q[4 * i + 1] = four.y * call.scale;
                q[4 * i + 2] = four.z * call.scale;
                q[4 * i + 3] = four.w * call.scale;
            }
        }
        SplitPair pairs[4];
#pragma unroll
        for (int i = 0; i < 4; i++) pairs[i] = split_pair(q[2 * i], q[2 * i + 1]);
        shared.queries[0][s][lane] = make_uint4(pairs[0].high, pairs[1].high, pairs[2].high, pairs[3].high);
        shared.queries[1][s][lane] = make_uint4(pairs[0].low, pairs[1].low, pairs[2].low, pairs[3].low);
    }
    __syncthreads();

    // Heads 2t and 2t + 1: the running maximum, this lane's part of the denominator, and the sums.
    float maximum[2] = {-INFINITY, -INFINITY}, denominator[2] = {0.0f, 0.0f};
    float sums[TILES][4] = {};
    for (; tile < job.end; tile += WARPS * TILE) {
        // Scores of positions g and g + 8 and heads 2t and 2t + 1; products with high and low parts apart.
        float scores[2][4] = {};
#pragma unroll
        for (int s = 0; s < SEGMENTS; s++) {
            const uint32_t first[4] = {keys.low[s].x, keys.high[s].x, keys.low[s].y, keys.high[s].y};
            const uint32_t second[4] = {keys.low[s].z, keys.high[s].z, keys.low[s].w, keys.high[s].w};
#pragma unroll
            for (int part = 0; part < 2; part++) {
                const uint4 q = shared.queries[part][s][lane];
                multiply_add(scores[part], first, q.x, q.y);
                multiply_add(scores[part], second, q.z, q.w);
            }
        }
        const int next = tile + WARPS * TILE;
        if (next < job.end) keys.load(job.keys, stride, next, last);

        float p[4];
#pragma unroll
        for (int i = 0; i < 4; i++) {
            p[i] = tile + g + 8 * (i / 2) < job.end ? scores[0][i] + scores[1][i] : -INFINITY;
        }
#pragma unroll
        for (int i = 0; i < 2; i++) {
            float greatest = fmaxf(p[i], p[i + 2]);
#pragma unroll
            for (int offset = 4; offset < WARP; offset *= 2) {
                greatest = fmaxf(greatest, __shfl_xor_sync(FULL_WARP, greatest, offset));
            }
            // A tile has a position that is seen, so the new maximum is finite.
            greatest = fmaxf(maximum[i], greatest);
            const float factor = exp2_hardware(maximum[i] - greatest);
            maximum[i] = greatest;
            p[i] = exp2_hardware(p[i] - greatest);
            p[i + 2] = exp2_hardware(p[i + 2] - greatest);
            denominator[i] = fmaf(denominator[i], factor, p[i] + p[i + 2]);
#pragma unroll
            for (int j = 0; j < TILES; j++) {
                sums[j][i] *= factor;
                sums[j][i + 2] *= factor;
            }
        }
        const SplitPair low_positions = split_pair(p[0], p[1]), high_positions = split_pair(p[2], p[3]);
        const uint32_t high[2] = {transpose(low_positions.high), transpose(high_positions.high)};
        const uint32_t low[2] = {transpose(low_positions.low), transpose(high_positions.low)};
#pragma unroll
        for (int j = 0; j < TILES; j++) {
            uint32_t a[4];
            values.fragment(j, a);
            multiply_add(sums[j], a, high[0], high[1]);
            multiply_add(sums[j], a, low[0], low[1]);
        }
        if (next < job.end) values.load(job.values, stride, next, last);
    }

    // The warps' results become the block's, in the order of warps. A warp without a tile has the maximum -infinity:
    // factor 0.
#pragma unroll
    for (int i = 0; i < 2; i++) {
#pragma unroll
        for (int offset = 4; offset < WARP; offset *= 2) {
            denominator[i] += __shfl_xor_sync(FULL_WARP, denominator[i], offset);
        }
        if (g == 0) {
            shared.maximum[warp][2 * t + i] = maximum[i];
            shared.denominator[warp][2 * t + i] = denominator[i];
        }
    }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const int head = 2 * t + i;
        float greatest = shared.maximum[0][head];
#pragma unroll
        for (int w = 1; w < WARPS; w++) greatest = fmaxf(greatest, shared.maximum[w][head]);
        const float factor = exp2_hardware(maximum[i] - greatest);
#pragma unroll
        for (int j = 0; j < TILES; j++) {
            *reinterpret_cast<float2 *>(&shared.sums[warp][head][Values<WIDTH>::element(j)]) =
                make_float2(sums[j][i] * factor, sums[j][i + 2] * factor);
        }
    }
    if (threadIdx.x < HEADS) {
        float greatest = shared.maximum[0][threadIdx.x], total = 0.0f;
#pragma unroll
        for (int w = 1; w < WARPS; w++) greatest = fmaxf(greatest, shared.maximum[w][threadIdx.x]);
#pragma unroll
        for (int w = 0; w < WARPS; w++) {
            total += shared.denominator[w][threadIdx.x] * exp2_hardware(shared.maximum[w][threadIdx.x] - greatest);
        }
        shared.heads.maximum[threadIdx.x] = greatest;
        shared.heads.denominator[threadIdx.x] = total;
    }
    __syncthreads();
    float block_sums[ELEMENTS];
#pragma unroll
    for (int i = 0; i < ELEMENTS; i++) {
        const int element = threadIdx.x + i * THREADS;
        block_sums[i] = 0.0f;
        if (element < job.group * WIDTH) {
#pragma unroll
            for (int w = 0; w < WARPS; w++) block_sums[i] += shared.sums[w][element / WIDTH][element % WIDTH];
        }
    }
    finish(call, job, block_sums, shared.heads, WIDTH);
}

// Any width up to MOST_WIDTH, on the plain arithmetic units: a thread scores one position for half of the heads, then
// sums values for its own elements.
constexpr int MOST_WIDTH = 256;

struct SharedAnyWidth {
    float queries[HEADS][MOST_WIDTH];
    float scores[HEADS][CHUNK];
    float factor[HEADS];
    HeadSums heads;
};

__device__ __forceinline__ void attend_any_width(const Call &call) {
    constexpr int ELEMENTS = HEADS * MOST_WIDTH / THREADS, HALF = HEADS / 2;
    static_assert(2 * CHUNK == THREADS, "two threads score a position");
    __shared__ SharedAnyWidth shared;
    Job job;
    if (!find_job(call, job)) return;
    const int width = call.width, warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    const size_t stride = size_t(call.kv_heads) * width;

    for (int head = warp; head < HEADS; head += WARPS) {
        const float *from = call.queries + (size_t(job.row) * call.heads + job.first_head + head) * width;
        for (int i = lane; i < width; i += WARP) {
            shared.queries[head][i] = head < job.group ? from[i] * call.scale : 0.0f;
        }
        if (lane == 0) {
            shared.heads.maximum[head] = -INFINITY;
            shared.heads.denominator[head] = 0.0f;
        }
    }
    float sums[ELEMENTS] = {};
    for (int tile = job.begin; tile < job.end; tile += CHUNK) {
        const int count = min(CHUNK, job.end - tile);
        __syncthreads();
        {
            const int position = threadIdx.x % CHUNK, first = threadIdx.x / CHUNK * HALF;
            float dots[HALF] = {};
            if (position < count) {
                const bf16 *key = job.keys + size_t(tile + position) * stride;
                for (int i = 0; i < width; i++) {
                    const float k = __bfloat162float(key[i]);
#pragma unroll
                    for (int h = 0; h < HALF; h++) dots[h] = fmaf(shared.queries[first + h][i], k, dots[h]);
                }
            }
#pragma unroll
            for (int h = 0; h < HALF; h++) shared.scores[first + h][position] = position < count ? dots[h] : -INFINITY;
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
            const int head = element / width;
            const bf16 *value = job.values + size_t(tile) * stride + element % width;
            float sum = sums[i] * shared.factor[head];
            for (int s = 0; s < count; s++) {
                sum = fmaf(shared.scores[head][s], __bfloat162float(value[size_t(s) * stride]), sum);
            }
            sums[i] = sum;
        }
    }
    finish(call, job, sums, shared.heads, width);
}

#define ATTENTION_FEW(NAME, BODY)                                                                                     \
    extern "C" __global__ void __launch_bounds__(THREADS)                                                             \
        NAME(const float *queries, const uint64_t *kv_table, const int *positions, bf16 *out, float *partials,        \
             unsigned *tickets, float scale, int window, int heads, int kv_heads, int width, int head_blocks,         \
             int most_chunks) {                                                                                       \
        let_next_kernel_start();                                                                                      \
        wait_for_previous_kernel();                                                                                   \
        BODY(Call{queries, kv_table, positions, out, partials, tickets, scale, window, heads, kv_heads, width,        \
                  head_blocks, most_chunks});                                                                         \
    }

ATTENTION_FEW(attention_few_64, attend<64>)
ATTENTION_FEW(attention_few_96, attend<96>)
ATTENTION_FEW(attention_few_128, attend<128>)
ATTENTION_FEW(attention_few_256, attend<256>)
ATTENTION_FEW(attention_few_any_width, attend_any_width)
