// Attention of few rows, each over its own history, from the raw projections: decoding, verify passes of a speculation,
// short prompts. Queries and keys are normed and turned (attention/turn.cuh), the new keys and values appended to the
// caches, all in one launch.
//
//   out[h] = sum_s softmax_s(scale q[h] . k_s[h / group]) v_s[h / group]      s in max(0, p - window + 1) ..= p
//
// qkv [rows, (heads + 2 kv_heads) * width] in single precision, keys and values bfloat16 and position-major, out in SPLIT
// form. A block takes a chunk of one row's history and a kv head, and serves up to 8 query heads of it, so keys and values
// are read once. How chunks are cut and merged, and which rows may share a sequence: attention/split_history.cuh.
//
// Tensor cores do the sums, as with 8 query heads there are 2,048 multiplications for each 512 bytes. Queries and
// probabilities are taken as two bfloat16 parts (16 bits of mantissa), keys and values are bfloat16 as they are, so
// products are exact and sums are in single precision: the error is that of the SPLIT form of the output.
//
// A warp takes tiles of 16 positions. Each lane copies to shared memory what it needs itself, and reads it from there
// alone, without a barrier or a bank conflict: a product's inner index may be permuted at will, so a lane takes 16 bytes of
// a key row as the pairs of two steps (scores: 16 positions by 8 heads), and of four value rows as the rows of four tiles
// (sums: 16 elements by 8 heads), where byte permutes bring two positions side by side. The next tile's keys are asked for
// when the scores are taken, its values when the sums are. A key of this pass is made by the lanes that would have copied
// it, and the block of the row's last chunk also writes it to the cache.
//
// Bound: bytes of keys and values for many rows and long histories: 64 KiB a block are on their way, two or three blocks a
// multiprocessor. For one row of some hundred positions, latency. The chain, in cycles, of a row with 640 positions (80 a
// block, all copies in flight at once; projections, norms and phases meanwhile):
//   position and addresses 300 -> keys from memory 900 -> scores 8 products deep, 250 -> softmax 200 -> sums 250 ->
//   warps to block 250 -> cluster barrier, merge 500 -> output and end 400: 3,000 in all, 1.7 us.
#include "attention/few_any_width.cuh"
#include "attention/split_history.cuh"
#include "attention/turn.cuh"

// The transpose of an 8x8 matrix of 16-bit elements over a warp: lane 4 g + t gives (g, 2t), (g, 2t + 1).
__device__ __forceinline__ uint32_t transpose(uint32_t pair) {
    uint32_t out;
    asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(out) : "r"(pair));
    return out;
}

__device__ __forceinline__ void copy_eight_bytes(void *shared, const void *global, bool valid) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 8, %2;" ::"r"(shared_address(shared)), "l"(global),
                 "r"(valid ? 8 : 0)
                 : "memory");
}

// The parts of two numbers, packed: high parts and low parts.
struct SplitPair {
    uint32_t high, low;
};

__device__ __forceinline__ SplitPair split_pair(float a, float b) {
    const Split first = split(a), second = split(b);
    return {pack(first.high, second.high), pack(first.low, second.low)};
}

__device__ __forceinline__ uint4 pack_eight(const float (&x)[8]) {
    return make_uint4(pack(x[0], x[1]), pack(x[2], x[3]), pack(x[4], x[5]), pack(x[6], x[7]));
}

// Keys and values of a tile, each piece with the lane 4 g + t that needs it. Keys: positions g and g + 8, elements 32 s +
// 8 t .. + 8. Values: positions 2t, 2t + 1, 2t + 8, 2t + 9; of 64 elements, a lane's are 8 g .. 8 g + 8; where 32 are left,
// 4 g .. 4 g + 4. Of the 4 (2) tiles of sums that 64 (32) elements make, row g of tile i is the lane's element 2 i, row
// g + 8 its element 2 i + 1.
template <int WIDTH> struct Tile {
    static constexpr int SEGMENTS = WIDTH / 32, WIDE = WIDTH / 64, TAIL = WIDTH % 64 / 32;
    uint4 keys[2][SEGMENTS][WARP];
    uint4 wide[4][WIDE][WARP];
    // Where 32 elements are left, their pieces follow.

    static __device__ __forceinline__ int key_position(int i) { return threadIdx.x % WARP / 4 + 8 * i; }
    static __device__ __forceinline__ int value_position(int i) { return threadIdx.x % 4 * 2 + i % 2 + 8 * (i / 2); }
    __device__ __forceinline__ uint2 &tail(int i) {
        return reinterpret_cast<uint2 *>(this + 1)[i * WARP + threadIdx.x % WARP];
    }

    // Starts the copies of the positions from `tile` on that are before `first_new`; zeros for those from `end` on.
    __device__ __forceinline__ void copy_keys(const bf16 *from, size_t stride, int tile, int end, int first_new) {
        const int lane = threadIdx.x % WARP;
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const int position = tile + key_position(i);
            if (position >= first_new && position < end) continue;
            const bf16 *row = from + size_t(min(position, end - 1)) * stride + lane % 4 * 8;
#pragma unroll
            for (int s = 0; s < SEGMENTS; s++) copy_async(&keys[i][s][lane], row + 32 * s, position < end);
        }
    }

    __device__ __forceinline__ void copy_values(const bf16 *from, size_t stride, int tile, int end, int first_new) {
        const int lane = threadIdx.x % WARP, g = lane / 4;
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const int position = tile + value_position(i);
            if (position >= first_new && position < end) continue;
            const bf16 *row = from + size_t(min(position, end - 1)) * stride;
#pragma unroll
            for (int j = 0; j < WIDE; j++) copy_async(&wide[i][j][lane], row + 64 * j + 8 * g, position < end);
            if constexpr (TAIL > 0) copy_eight_bytes(&tail(i), row + 64 * WIDE + 4 * g, position < end);
        }
    }

    // Makes the keys and values of positions `first_new` .. `end`, and appends those of the row's own position.
    __device__ __forceinline__ void make_new(const Call &call, const Job &job, int tile, int end) {
        const int lane = threadIdx.x % WARP, g = lane / 4, t = lane % 4;
        const size_t stride = size_t(call.kv_heads) * WIDTH;
#pragma unroll 1
        for (int i = 0; i < 2; i++) {
            const int position = tile + key_position(i);
            const bool is_new = position >= job.first_new && position < end;
            const float *head = projection(call, job, position, call.heads + job.kv_head, WIDTH);
            const float factor = call.k_norm != nullptr ? norm_factor<WIDTH>(head, call.epsilon, is_new) : 1.0f;
            if (!is_new) continue;
#pragma unroll 2
            for (int s = 0; s < SEGMENTS; s++) {
                Piece piece;
                float turned[8];
                piece.load(head, row_phases(call, job, position), call.half, 32 * s + 8 * t);
                piece.turn(call.k_norm, factor, turned);
                const uint4 rounded = pack_eight(turned);
                keys[i][s][lane] = rounded;
                if (job.appends && position == job.position) {
                    *reinterpret_cast<uint4 *>(job.keys + position * stride + 32 * s + 8 * t) = rounded;
                }
            }
        }
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const int position = tile + value_position(i);
            if (position < job.first_new || position >= end) continue;
            const bool appends = job.appends && position == job.position;
            const float *head = projection(call, job, position, call.heads + call.kv_heads + job.kv_head, WIDTH);
            bf16 *cache = job.values + position * stride;
#pragma unroll
            for (int j = 0; j < WIDE; j++) {
                float x[8];
                load_eight(head + 64 * j + 8 * g, x);
                wide[i][j][lane] = pack_eight(x);
                if (appends) *reinterpret_cast<uint4 *>(cache + 64 * j + 8 * g) = pack_eight(x);
            }
            if constexpr (TAIL > 0) {
                const float4 x = *reinterpret_cast<const float4 *>(head + 64 * WIDE + 4 * g);
                const uint2 rounded = make_uint2(pack(x.x, x.y), pack(x.z, x.w));
                tail(i) = rounded;
                if (appends) *reinterpret_cast<uint2 *>(cache + 64 * WIDE + 4 * g) = rounded;
            }
        }
    }

    // sums += values^T p for all tiles of elements; p is in two parts, for positions below 8 and from 8 on.
    __device__ __forceinline__ void add_values(float (&sums)[WIDTH / 16][4], const uint32_t (&high)[2],
                                               const uint32_t (&low)[2]) {
        const int lane = threadIdx.x % WARP;
        const auto add = [&](float(&sum)[4], uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
            const uint32_t rows[4] = {__byte_perm(a, b, 0x5410), __byte_perm(a, b, 0x7632), __byte_perm(c, d, 0x5410),
                                      __byte_perm(c, d, 0x7632)};
            multiply_add(sum, rows, high[0], high[1]);
            multiply_add(sum, rows, low[0], low[1]);
        };
#pragma unroll
        for (int j = 0; j < WIDE; j++) {
            const uint4 a = wide[0][j][lane], b = wide[1][j][lane], c = wide[2][j][lane], d = wide[3][j][lane];
            add(sums[4 * j], a.x, b.x, c.x, d.x);
            add(sums[4 * j + 1], a.y, b.y, c.y, d.y);
            add(sums[4 * j + 2], a.z, b.z, c.z, d.z);
            add(sums[4 * j + 3], a.w, b.w, c.w, d.w);
        }
        if constexpr (TAIL > 0) {
            const uint2 a = tail(0), b = tail(1), c = tail(2), d = tail(3);
            add(sums[4 * WIDE], a.x, b.x, c.x, d.x);
            add(sums[4 * WIDE + 1], a.y, b.y, c.y, d.y);
        }
    }

    // The element of a head that row g of tile `i` of sums is; row g + 8 is the next one.
    static __device__ __forceinline__ int element(int i) {
        const int g = threadIdx.x % WARP / 4;
        if (i < 4 * WIDE) return i / 4 * 64 + 8 * g + 2 * (i % 4);
        return 64 * WIDE + 4 * g + 2 * (i % 4);
    }
};

template <int WIDTH> struct Shared {
    static constexpr int WARPS = WIDTH > 128 ? 4 : 8;  // so that tiles take 64 KiB at most
    union OfWarp {
        Tile<WIDTH> tile;
        uint4 bytes[WIDTH * TILE / 4];
        float sums[HEADS][WIDTH + 2];  // the warp's result, when it is done; the two spread the banks
        __device__ OfWarp() {}
    };
    OfWarp warps[WARPS];
    uint4 queries[2][WIDTH / 32][WARP];  // high parts, low parts: a lane's right operands of two steps
    Received<WIDTH> received;
    float maximum[WARPS][HEADS], denominator[WARPS][HEADS];
    HeadSums heads;
    bool last;
};

// The queries of a block, in the order of the keys' elements: lane 4 g + t has head g. A warp takes some segments of 32
// elements of all heads.
template <int WIDTH> struct Queries {
    static constexpr int WARPS = Shared<WIDTH>::WARPS, SEGMENTS = WIDTH / 32, MINE = (SEGMENTS + WARPS - 1) / WARPS;
    Piece pieces[MINE];
    const float *head;
    bool active;

    __device__ __forceinline__ void load(const Call &call, const Job &job) {
        const int warp = threadIdx.x / WARP, g = threadIdx.x % WARP / 4, t = threadIdx.x % 4;
        active = g < job.group;
        head = call.qkv + (int64_t(job.row) * (call.heads + 2 * call.kv_heads) + job.first_head + g) * WIDTH;
        const float *phases = call.phases + int64_t(job.row) * 2 * call.half;
#pragma unroll
        for (int i = 0; i < MINE; i++) {
            const int s = warp + i * WARPS;
            if (active && s < SEGMENTS) pieces[i].load(head, phases, call.half, 32 * s + 8 * t);
        }
    }

    __device__ __forceinline__ void store(const Call &call, Shared<WIDTH> &shared) {
        const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
        if (warp >= SEGMENTS) return;
        const float factor = call.q_norm != nullptr ? norm_factor<WIDTH>(head, call.epsilon, active) : 1.0f;
#pragma unroll
        for (int i = 0; i < MINE; i++) {
            const int s = warp + i * WARPS;
            if (s >= SEGMENTS) break;
            float q[8] = {};
            if (active) pieces[i].turn(call.q_norm, factor, q);
            SplitPair pairs[4];
#pragma unroll
            for (int j = 0; j < 4; j++) pairs[j] = split_pair(q[2 * j] * call.scale, q[2 * j + 1] * call.scale);
            shared.queries[0][s][lane] = make_uint4(pairs[0].high, pairs[1].high, pairs[2].high, pairs[3].high);
            shared.queries[1][s][lane] = make_uint4(pairs[0].low, pairs[1].low, pairs[2].low, pairs[3].low);
        }
    }
};

// Starts the copies of each warp's first tile of a chunk, positions begin .. end.
template <int WIDTH>
__device__ __forceinline__ void start_chunk(const Call &call, const Job &job, int begin, int end, Shared<WIDTH> &shared) {
    const size_t stride = size_t(call.kv_heads) * WIDTH;
    Tile<WIDTH> &slots = shared.warps[threadIdx.x / WARP].tile;
    const int tile = begin + threadIdx.x / WARP * TILE;
    if (tile < end) slots.copy_keys(job.keys, stride, tile, end, job.first_new);
    commit_copies();
    if (tile < end) slots.copy_values(job.values, stride, tile, end, job.first_new);
    commit_copies();
}

// The chunk: its warps' sums, relative to the block's greatest scores, and the block's maxima and denominators are left in
// shared memory.
template <int WIDTH>
__device__ __forceinline__ void attend_chunk(const Call &call, const Job &job, int begin, int end, Shared<WIDTH> &shared) {
    constexpr int WARPS = Shared<WIDTH>::WARPS, STEP = WARPS * TILE, TILES = WIDTH / 16;
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP, g = lane / 4, t = lane % 4;
    const size_t stride = size_t(call.kv_heads) * WIDTH;
    Tile<WIDTH> &slots = shared.warps[warp].tile;

    // Heads 2t and 2t + 1: the running maximum, this lane's part of the denominator, and the sums.
    float maximum[2] = {-INFINITY, -INFINITY}, denominator[2] = {0.0f, 0.0f};
    float sums[TILES][4] = {};
    for (int tile = begin + warp * TILE; tile < end; tile += STEP) {
        if (tile + TILE > job.first_new) slots.make_new(call, job, tile, end);
        wait_for_copies<1>();
        // Scores of positions g and g + 8 and heads 2t and 2t + 1, in four chains of products.
        float scores[4][4] = {};
#pragma unroll
        for (int s = 0; s < WIDTH / 32; s++) {
            const uint4 a = slots.keys[0][s][lane], b = slots.keys[1][s][lane];
            const uint32_t first_step[4] = {a.x, b.x, a.y, b.y}, second_step[4] = {a.z, b.z, a.w, b.w};
#pragma unroll
            for (int part = 0; part < 2; part++) {
                const uint4 q = shared.queries[part][s][lane];
                multiply_add(scores[2 * part], first_step, q.x, q.y);
                multiply_add(scores[2 * part + 1], second_step, q.z, q.w);
            }
        }
        const int next = tile + STEP;
        if (next < end) slots.copy_keys(job.keys, stride, next, end, job.first_new);
        commit_copies();

        float p[4];
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const float score = (scores[0][i] + scores[1][i]) + (scores[2][i] + scores[3][i]);
            p[i] = tile + g + 8 * (i / 2) < end ? score : -INFINITY;
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
        wait_for_copies<1>();
        slots.add_values(sums, high, low);
        if (next < end) slots.copy_values(job.values, stride, next, end, job.first_new);
        commit_copies();
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
            *reinterpret_cast<float2 *>(&shared.warps[warp].sums[head][Tile<WIDTH>::element(j)]) =
                make_float2(sums[j][i] * factor, sums[j][i + 2] * factor);
        }
    }
    if (threadIdx.x < HEADS) {
        float greatest = shared.maximum[0][threadIdx.x], total = 0.0f;
#pragma unroll
        for (int w = 1; w < WARPS; w++) greatest = fmaxf(greatest, shared.maximum[w][threadIdx.x]);
#pragma unroll
        for (int w = 0; w < WARPS; w++) {
            total = fmaf(shared.denominator[w][threadIdx.x], exp2_hardware(shared.maximum[w][threadIdx.x] - greatest), total);
        }
        shared.heads.maximum[threadIdx.x] = greatest;
        shared.heads.denominator[threadIdx.x] = total;
    }
    __syncthreads();
}

template <int WIDTH> __device__ __forceinline__ void attend(const Call &call) {
    constexpr int THREADS = Shared<WIDTH>::WARPS * WARP;
    extern __shared__ __align__(16) unsigned char arena[];
    Shared<WIDTH> &shared = *reinterpret_cast<Shared<WIDTH> *>(arena);
    const auto block_sum = [&](int element) {
        float sum = 0.0f;
#pragma unroll
        for (int w = 0; w < Shared<WIDTH>::WARPS; w++) sum += shared.warps[w].sums[element / WIDTH][element % WIDTH];
        return sum;
    };
    Job job;
    find_heads(call, job);
    {
        Queries<WIDTH> queries;
        queries.load(call, job);
        if (!find_history(call, job, WIDTH)) return;
        if (job.rank < job.leaf_chunks(blockIdx.z)) {
            start_chunk(call, job, job.begin(blockIdx.z), job.end(blockIdx.z), shared);
            queries.store(call, shared);
            __syncthreads();
        }
    }
    const bool in_cluster = CLUSTERS && job.chunks > 1;
    for (int leaf = blockIdx.z, next; leaf < job.leaves; leaf = next) {
        const bool has_chunk = job.rank < job.leaf_chunks(leaf);
        // What this block receives is free to be written: the leaf before is done.
        if (in_cluster) arrive_at_cluster_barrier();
        if (has_chunk) attend_chunk(call, job, job.begin(leaf), job.end(leaf), shared);
        if (in_cluster) {
            finish_in_cluster<THREADS>(call, job, leaf, has_chunk, block_sum, shared.heads, shared.received, shared.last);
        } else if (has_chunk) {
            finish_by_tickets<THREADS>(call, job, leaf, block_sum, shared.heads, WIDTH, shared.last);
        }
        next = leaf + gridDim.z;
        if (next < job.leaves && job.rank < job.leaf_chunks(next)) {
            __syncthreads();
            start_chunk(call, job, job.begin(next), job.end(next), shared);
        }
    }
}

#define PARAMETERS                                                                                                    \
    const float *qkv, const float *q_norm, const float *k_norm, const float *phases, const uint64_t *kv_table,        \
        const int *positions, bf16 *out, float *partials, unsigned *tickets, float epsilon, float scale, int half,    \
        int window, int heads, int kv_heads, int width, int head_blocks, int most_chunks, int most_leaves

#define CALL                                                                                                          \
    Call {                                                                                                            \
        qkv, q_norm, k_norm, phases, kv_table, positions, out, partials, tickets, epsilon, scale, half, window, heads, \
            kv_heads, width, head_blocks, most_chunks, most_leaves                                                    \
    }

#define ATTENTION_FEW(WIDTH, SHARED_BYTES)                                                                            \
    static_assert(sizeof(Shared<WIDTH>) <= SHARED_BYTES, "what the launcher gives");                                  \
    extern "C" __global__ void CLUSTER_OF(LEAF) __launch_bounds__(Shared<WIDTH>::WARPS *WARP, 2)                      \
        attention_few_##WIDTH(PARAMETERS) {                                                                           \
        let_next_kernel_start();                                                                                      \
        wait_for_previous_kernel();                                                                                   \
        attend<WIDTH>(CALL);                                                                                          \
    }

ATTENTION_FEW(64, 38 << 10)
ATTENTION_FEW(96, 57 << 10)
ATTENTION_FEW(128, 74 << 10)
ATTENTION_FEW(256, 82 << 10)

extern "C" __global__ void __launch_bounds__(ANY_WIDTH_THREADS) attention_few_any_width(PARAMETERS) {
    let_next_kernel_start();
    wait_for_previous_kernel();
    attend_any_width(CALL);
}
