// Attention of few rows, each over its own history, from the raw projections: decoding, verify passes of a speculation,
// short prompts. Queries and keys are normed and turned (attention/turn.cuh), the new keys and values appended to the
// caches, all in one launch.
//
//   out[h] = sum_s softmax_s(scale q[h] . k_s[h / group]) v_s[h / group]      s in max(0, p - window + 1) ..= p
//
// qkv [rows, (heads + 2 kv_heads) * width] in single precision, keys and values bfloat16 and position-major, out in
// SPLIT form. A block takes a chunk of one row's history and a kv head, and serves up to 8 query heads of it, so keys
// and values are read once. How chunks are cut and merged, and which rows may share a sequence:
// attention/split_history.cuh.
//
// Tensor cores do the sums, as with 8 query heads there are 2,048 multiplications for each 512 bytes. Queries and
// probabilities are taken as two bfloat16 parts (16 bits of mantissa), keys and values are bfloat16 as they are, so
// products are exact and sums are in single precision: the error is that of the SPLIT form of the output.
//
// A warp takes tiles of 16 positions. Each lane copies to shared memory what it needs itself, and reads it from there
// alone, without a barrier or a bank conflict: a product's inner index may be permuted at will, so a lane takes 16
// bytes of a key row as the pairs of two steps (scores: 16 positions by 8 heads), and of four value rows as the rows of
// four tiles (sums: 16 elements by 8 heads), where byte permutes bring two positions side by side. The next tile's keys
// are asked for when the scores are taken, its values when the sums are. A key of this pass is made by the warp that
// would have copied it, and the block of the row's last chunk also writes it to the cache.
//
// Bound: bytes of keys and values for many rows and long histories: 64 KiB a block are on their way, two blocks a
// multiprocessor. For one row of some hundred positions, latency. The chain, in cycles, of a row with 640 positions (80
// a block: all copies in flight at once; projections, norms and phases meanwhile):
//   which heads: before the kernel before has ended
//   position and addresses, which rows are of the sequence  400
//   keys from memory                                        900
//   scores, 4 chains of 4 products                          250   values have come meanwhile
//   softmax                                                 250
//   sums, 8 tiles of 2 products                             250
//   warps to block, by shared memory                        300
//   blocks to row, by the cluster                           400   a ticket in global memory: 2,000
//   output and end                                          400
// 3,200 in all: 1.8 us, and what a launch costs. Instructions count as much as loads, as a warp issues one in three or
// so cycles: on this path are no divisions of positions, and code that one row never needs is out of line.
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

// Keys and values of a tile, each piece with the lane 4 g + t that needs it. Keys: positions g and g + 8, elements 32 s
// + 8 t .. + 8. Values: positions 2t, 2t + 1, 2t + 8, 2t + 9; of 64 elements, a lane's are 8 g .. 8 g + 8; where 32 are
// left, 4 g .. 4 g + 4. Of the 4 (2) tiles of sums that 64 (32) elements make, row g of tile i is the lane's element 2
// i, row g + 8 its element 2 i + 1.
template <int WIDTH> struct Tile {
    static constexpr int SEGMENTS = WIDTH / 32, WIDE = WIDTH / 64, TAIL = WIDTH % 64 / 32;
    uint4 keys[2][SEGMENTS][WARP];
    uint4 wide[4][WIDE][WARP];
    // Where 32 elements are left, their pieces follow.

    static __device__ __forceinline__ int key_position(int i) { return threadIdx.x % WARP / 4 + 8 * i; }
    static __device__ __forceinline__ int value_position(int i) { return threadIdx.x % 4 * 2 + i % 2 + 8 * (i / 2); }
    __device__ __forceinline__ uint2 &tail(int i, int lane) {
        return reinterpret_cast<uint2 *>(this + 1)[i * WARP + lane];
    }

    // Starts the copies of the positions from `tile` on that are before `first_new`; zeros, and no read, for those from
    // `end` on.
    __device__ __forceinline__ void copy_keys(const bf16 *from, size_t stride, int tile, int end, int first_new) {
        const int lane = threadIdx.x % WARP;
        const bf16 *row = from + size_t(tile + key_position(0)) * stride + lane % 4 * 8;
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const int position = tile + key_position(i);
            const bool old = position < end;
            if (!old || position < first_new) {
#pragma unroll
                for (int s = 0; s < SEGMENTS; s++) copy_async(&keys[i][s][lane], row + 32 * s, old);
            }
            row += 8 * stride;
        }
    }

    __device__ __forceinline__ void copy_values(const bf16 *from, size_t stride, int tile, int end, int first_new) {
        const int lane = threadIdx.x % WARP, g = lane / 4;
        const bf16 *first = from + size_t(tile + value_position(0)) * stride;
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const int position = tile + value_position(i);
            const bf16 *row = first + (i % 2 + 8 * (i / 2)) * stride;
            const bool old = position < end;
            if (old && position >= first_new) continue;
#pragma unroll
            for (int j = 0; j < WIDE; j++) copy_async(&wide[i][j][lane], row + 64 * j + 8 * g, old);
            if constexpr (TAIL > 0) copy_eight_bytes(&tail(i, lane), row + 64 * WIDE + 4 * g, old);
        }
    }

    // Makes the keys and values of positions `first_new` .. `end`, and appends those of the row's own position. The
    // warp takes a position at a time, whose pieces belong to several lanes.
    __device__ __forceinline__ void make_new(const Call &call, const Job &job, int tile, int end) {
        using Head = WarpHead<WIDTH>;
        const size_t stride = size_t(call.kv_heads) * WIDTH;
        const int stop = min(tile + TILE, end);
        __syncwarp();
#pragma unroll 1
        for (int position = max(tile, job.first_new); position < stop; position++) {
            const float *key = projection(call, job, position, call.heads + job.kv_head, WIDTH);
            const float *value = key + size_t(call.kv_heads) * WIDTH;
            Head head;
            head.load(key, call.k_norm, row_phases(call, job, position), call.half);
            float4 v[Head::QUADS], k[Head::QUADS];
#pragma unroll
            for (int q = 0; q < Head::QUADS; q++) {
                if (Head::element(q) < WIDTH) v[q] = Head::four(value + Head::element(q));
            }
            head.turn(call.k_norm, call.epsilon, k);
            const bool appends = job.appends && position == job.position;
            const int place = position - tile, t = place % 8 / 2, i = place % 2 + place / 8 * 2;
#pragma unroll
            for (int q = 0; q < Head::QUADS; q++) {
                const int e = Head::element(q);
                if (e >= WIDTH) continue;
                const uint2 key_bits = make_uint2(pack(k[q].x, k[q].y), pack(k[q].z, k[q].w));
                const uint2 value_bits = make_uint2(pack(v[q].x, v[q].y), pack(v[q].z, v[q].w));
                uint4 *piece = &keys[place / 8][e / 32][place % 8 * 4 + e % 32 / 8];
                reinterpret_cast<uint2 *>(piece)[e / 4 % 2] = key_bits;
                if (TAIL > 0 && e >= 64 * WIDE) {
                    tail(i, e % 64 / 4 * 4 + t) = value_bits;
                } else {
                    reinterpret_cast<uint2 *>(&wide[i][e / 64][e % 64 / 8 * 4 + t])[e / 4 % 2] = value_bits;
                }
                if (appends) {
                    *reinterpret_cast<uint2 *>(job.keys + position * stride + e) = key_bits;
                    *reinterpret_cast<uint2 *>(job.values + position * stride + e) = value_bits;
                }
            }
        }
        __syncwarp();
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
            const uint2 a = tail(0, lane), b = tail(1, lane), c = tail(2, lane), d = tail(3, lane);
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

// A warp's tile, and its result, when it is done; the two elements more spread the banks.
template <int WIDTH> union TileOrSums {
    Tile<WIDTH> tile;
    uint4 bytes[WIDTH * TILE / 4];
    float sums[HEADS][WIDTH + 2];
    __device__ TileOrSums() {}
};

template <int WIDTH> struct Shared {
    static constexpr int WARPS = WIDTH > 128 ? 4 : 8;  // so that tiles take 64 KiB at most
    TileOrSums<WIDTH> warps[WARPS];
    uint4 queries[2][WIDTH / 32][WARP];  // high parts, low parts: a lane's right operands of two steps
    Received<WIDTH> received;
    float maximum[WARPS][HEADS], denominator[WARPS][HEADS];
    HeadSums heads;
    bool last;
};

// The queries of a block, in the order of the keys' elements: lane 4 g + t has head g. A warp makes a head at a time.
template <int WIDTH> struct Queries {
    using Head = WarpHead<WIDTH>;
    static constexpr int WARPS = Shared<WIDTH>::WARPS, MINE = HEADS / WARPS;
    Head heads[MINE];

    __device__ __forceinline__ void load(const Call &call, const Job &job) {
#pragma unroll
        for (int i = 0; i < MINE; i++) {
            const int head = threadIdx.x / WARP + i * WARPS;
            if (head >= job.group) continue;
            heads[i].load(projection(call, job, job.position, job.first_head + head, WIDTH), call.q_norm,
                          row_phases(call, job, job.position), call.half);
        }
    }

    __device__ __forceinline__ void store(const Call &call, const Job &job, Shared<WIDTH> &shared) {
#pragma unroll
        for (int i = 0; i < MINE; i++) {
            const int head = threadIdx.x / WARP + i * WARPS;
            float4 turned[Head::QUADS] = {};
            if (head < job.group) heads[i].turn(call.q_norm, call.epsilon, turned);
#pragma unroll
            for (int q = 0; q < Head::QUADS; q++) {
                const int e = Head::element(q);
                if (e >= WIDTH) continue;
                const SplitPair first = split_pair(turned[q].x * call.scale, turned[q].y * call.scale);
                const SplitPair second = split_pair(turned[q].z * call.scale, turned[q].w * call.scale);
                const int lane = 4 * head + e % 32 / 8, place = e / 4 % 2;
                uint4 *high = &shared.queries[0][e / 32][lane], *low = &shared.queries[1][e / 32][lane];
                reinterpret_cast<uint2 *>(high)[place] = make_uint2(first.high, second.high);
                reinterpret_cast<uint2 *>(low)[place] = make_uint2(first.low, second.low);
            }
        }
    }
};

// Starts the copies of each warp's first tile of a chunk, positions begin .. end.
template <int WIDTH>
__device__ __forceinline__ void start_chunk(const Call &call, const Job &job, int begin, int end,
                                            Shared<WIDTH> &shared) {
    const size_t stride = size_t(call.kv_heads) * WIDTH;
    Tile<WIDTH> &slots = shared.warps[threadIdx.x / WARP].tile;
    const int tile = begin + threadIdx.x / WARP * TILE;
    if (tile < end) slots.copy_keys(job.keys, stride, tile, end, job.first_new);
    commit_copies();
    if (tile < end) slots.copy_values(job.values, stride, tile, end, job.first_new);
    commit_copies();
}

// The chunk: its warps' sums, relative to the block's greatest scores, and the block's maxima and denominators are left
// in shared memory.
template <int WIDTH>
__device__ __forceinline__ void attend_chunk(const Call &call, const Job &job, int begin, int end,
                                             Shared<WIDTH> &shared) {
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
            const float factor = exp2_hardware(shared.maximum[w][threadIdx.x] - greatest);
            total = fmaf(shared.denominator[w][threadIdx.x], factor, total);
        }
        shared.heads.maximum[threadIdx.x] = greatest;
        shared.heads.denominator[threadIdx.x] = total;
    }
    __syncthreads();
}

// MERGES_IN_CLUSTERS: the blocks of a leaf are a cluster, where there are any.
template <int WIDTH, bool MERGES_IN_CLUSTERS> __device__ __forceinline__ void attend(const Call &call) {
    constexpr int WARPS = Shared<WIDTH>::WARPS, THREADS = WARPS * WARP, FOURS = HEADS * WIDTH / 4;
    constexpr bool IN_CLUSTERS = CLUSTERS && MERGES_IN_CLUSTERS;
    extern __shared__ __align__(16) unsigned char arena[];
    Shared<WIDTH> &shared = *reinterpret_cast<Shared<WIDTH> *>(arena);
    // Four sums of the block.
    const auto block_sums = [&](int head, int element) {
        float4 sum = {};
#pragma unroll
        for (int w = 0; w < WARPS; w++) {
            const float2 *from = reinterpret_cast<const float2 *>(&shared.warps[w].sums[head][element]);
            sum.x += from[0].x, sum.y += from[0].y, sum.z += from[1].x, sum.w += from[1].y;
        }
        return sum;
    };
    Job job;
    find_heads(call, job);
    if (IN_CLUSTERS && threadIdx.x == 0) prepare_arrivals(&shared.received.arrivals);
    wait_for_previous_kernel();
    if (!find_history(call, job, WIDTH)) return;
    const bool in_cluster = IN_CLUSTERS && !job.one_chunk();
    if (in_cluster) arrive_ready();
    const auto start = [&](int chunk) { start_chunk(call, job, job.begin(chunk), job.end(chunk), shared); };
    if (job.has_chunk(job.first_chunk(blockIdx.z))) {
        // Asked for before the chunk, whose many copies would delay them; idle blocks ask for nothing.
        Queries<WIDTH> queries;
        queries.load(call, job);
        start(job.first_chunk(blockIdx.z));
        queries.store(call, job, shared);
        __syncthreads();
    }
    for (int leaf = blockIdx.z, time = 0;; time++) {
        const int chunk = job.first_chunk(leaf);
        const bool has_chunk = job.has_chunk(chunk);
        if (has_chunk) attend_chunk(call, job, job.begin(chunk), job.end(chunk), shared);
        if (in_cluster) {
            begin_leaf(job, leaf, shared.received);
            if (has_chunk) send_chunk<THREADS>(job, chunk, block_sums, shared.heads, shared.received);
            merge_leaf<THREADS>(call, job, leaf, time, shared.received, shared.last);
        } else if (has_chunk) {
            const auto each = [&](const auto &take) {
#pragma unroll
                for (int first = 0; first < FOURS; first += THREADS) {
                    const int element = 4 * (first + threadIdx.x);
                    if (element < job.group * WIDTH) take(element);
                }
            };
            finish_by_tickets<IN_CLUSTERS, float4>(
                call, job, chunk, each,
                [&](int element) { return block_sums(element / WIDTH, element % WIDTH); }, shared.heads, WIDTH,
                shared.last);
        }
        leaf += gridDim.z;
        if (!job.has_leaf(leaf)) return;
        if (in_cluster) arrive_ready();
        if (job.has_chunk(job.first_chunk(leaf))) {
            __syncthreads();
            start(job.first_chunk(leaf));
        }
    }
}

#define PARAMETERS                                                                                                    \
    const float *qkv, const float *q_norm, const float *k_norm, const float *phases, const uint64_t *kv_table,        \
        const int *positions, bf16 *out, float *partials, unsigned *tickets, float epsilon, float scale, int half,    \
        int window, int heads, int kv_heads, int group, int width, int head_blocks, int most_chunks, int most_leaves

#define CALL                                                                                                          \
    Call {                                                                                                            \
        qkv, q_norm, k_norm, phases, kv_table, positions, out, partials, tickets, epsilon, scale, half, window, heads, \
            kv_heads, group, width, head_blocks, most_chunks, most_leaves                                             \
    }

#define ATTENTION_FEW(NAME, WIDTH, IN_CLUSTERS, ATTRIBUTES, SHARED_BYTES)                                              \
    static_assert(sizeof(Shared<WIDTH>) <= SHARED_BYTES, "what the launcher gives");                                  \
    extern "C" __global__ void ATTRIBUTES __launch_bounds__(Shared<WIDTH>::WARPS *WARP, 2) NAME(PARAMETERS) {         \
        let_next_kernel_start();                                                                                      \
        attend<WIDTH, IN_CLUSTERS>(CALL);                                                                             \
    }
#define BOTH_WAYS(WIDTH, SHARED_BYTES)                                                                                \
    ATTENTION_FEW(attention_few_##WIDTH, WIDTH, true, CLUSTER_OF(LEAF), SHARED_BYTES)                                 \
    ATTENTION_FEW(attention_few_##WIDTH##_by_tickets, WIDTH, false, , SHARED_BYTES)

BOTH_WAYS(64, 38 << 10)
BOTH_WAYS(96, 57 << 10)
BOTH_WAYS(128, 74 << 10)
BOTH_WAYS(256, 82 << 10)

extern "C" __global__ void __launch_bounds__(ANY_WIDTH_THREADS) attention_few_any_width(PARAMETERS) {
    let_next_kernel_start();
    attend_any_width(CALL);
}
