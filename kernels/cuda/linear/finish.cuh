// What a product is asked for and what becomes of its sums: stored, added to a residual, or the gate and the factor of
// a gated activation, out = act(gate x) * (up x), stored as the operand of the product after it.
//
// act is SiLU, x / (1 + e^-x), or the tanh form of GELU, x / (1 + e^-2u) with u = sqrt(2 / pi) (x + 0.044715 x^3).
//
// Besides the sums a lane needs a few words for its outputs: biases, what is there, the weights of the norm that
// follows. They are copied to shared memory without passing registers, of which the stream of weights needs all: the
// constants before the kernel before is done, the rest with the first operands. With them lies the place of the
// outputs, so that little is left to compute after the team's barrier.
#pragma once

#include "../vocabulary/device.cuh"
#include "../vocabulary/tiles.cuh"

namespace linear {

// Rows of x that one tensor-core product serves, and the outputs that it makes.
constexpr int TILE_ROWS_OF_X = 4;
constexpr int TILE_OUTPUTS = TILE_ROWS_OF_X * tiles::ROWS;

// Words that a lane keeps for its outputs of a task (Start), in up to eight warps of a block.
constexpr int START_WORDS = 7, START_WARPS = 8;

// Whether the warps' sums have room twice, so that those of one task are read while those of the next are written. With
// 32 rows it would be 64 KiB, which some cards do not have beside the table of NF4: a second barrier serves instead.
template <int TILES> constexpr bool SUMS_TWICE = TILES < 8;

// Bytes of the factors of a block's teams, before that: one for each row of x, for up to 8 teams.
template <int TILES> constexpr int FACTOR_BYTES = 8 * TILES * TILE_ROWS_OF_X * 4;

// As `Then` in linear.rs.
enum Then { STORE = 0, ADD = 1, GATED_SILU = 2, GATED_GELU_TANH = 3 };

// A row tile of one of the matrices.
struct Part {
    const uint8_t *weights;
    const float *bias;
    int rows, column, tile;
};

// The kernels' argument; `Product` in linear.rs is the same.
struct Product {
    const uint8_t *weights[3];  // of one format and width; gated: gate and up
    const float *bias[3];       // [rows], or null
    const bf16 *x;              // [n, 2, cols]: high parts, low parts
    void *out;                  // f32 [n, out_width]; gated: bf16 [n, 2, out_width]
    int rows[3];                // 0 where there is no matrix
    int column[3];              // of a matrix's first row in out
    int n, cols, out_width;
    int then;
    int split_log2;  // 2^split_log2 warps share the columns of a row tile
    // The norm of x, null for none: sums of squares [n, tiles_of(factor_width)].
    int factor_width;
    const float *factor_squares;
    // The norm of what ADD makes, null for none: weight [out_width], operand [n, 2, out_width] and sums of squares
    // [n, tiles_of(out_width)].
    const float *next_weight;
    bf16 *next_operand;
    float *next_squares;
    float inverse_width, epsilon;  // of the norm of x

    __device__ __forceinline__ bool gated() const { return then >= GATED_SILU; }

    __device__ __forceinline__ static int tiles_of(int rows) { return (rows + tiles::ROWS - 1) / tiles::ROWS; }

    // What a team does at a time: a row tile of any matrix, or of both of a gated pair.
    __device__ __forceinline__ int tasks() const {
        return gated() ? tiles_of(rows[0]) : tiles_of(rows[0]) + tiles_of(rows[1]) + tiles_of(rows[2]);
    }

    __device__ __forceinline__ Part part(int task, int half) const {
        if (gated()) {
            if (half == 0) return {weights[0], bias[0], rows[0], 0, task};
            return {weights[1], bias[1], rows[1], 0, task};
        }
        const int first = tiles_of(rows[0]), second = first + tiles_of(rows[1]);
        if (task < first) return {weights[0], bias[0], rows[0], column[0], task};
        if (task < second) return {weights[1], bias[1], rows[1], column[1], task - first};
        return {weights[2], bias[2], rows[2], column[2], task - second};
    }

    __device__ __forceinline__ void skip_rows(int count) {
        x += size_t(count) * 2 * cols;
        factor_squares += size_t(count) * tiles_of(factor_width);
        skip_outputs(count);
        n -= count;
    }

    __device__ __forceinline__ void skip_outputs(int count) {
        out = static_cast<uint8_t *>(out) + size_t(count) * out_width * 4;
        next_operand += size_t(count) * 2 * out_width;
        next_squares += size_t(count) * tiles_of(out_width);
    }
};

// A warp's place in the block: teams of warps that share a task, for a gated pair two halves, one on each matrix.
struct Team {
    int teams;   // of the block
    int index;   // of this team
    int warps;   // of a team
    int member;  // of the warp in its team
    int half;    // 1: the second matrix of a gated pair
    int share;   // which of the warps on its matrix it is

    __device__ __forceinline__ Team(const Product &p, int warp) {
        const int log2 = p.split_log2 + (p.gated() ? 1 : 0);
        teams = int(blockDim.x) / WARP >> log2;
        index = warp >> log2;
        warps = 1 << log2;
        member = warp & (warps - 1);
        half = member >> p.split_log2;
        share = member & ((1 << p.split_log2) - 1);
    }

    // A barrier of the team alone.
    __device__ __forceinline__ void wait() const {
        asm volatile("bar.sync %0, %1;" ::"r"(index + 1), "r"(warps * WARP) : "memory");
    }
};

// The two outputs of a lane for one tensor-core product of a task: rows lane / 4 and lane / 4 + 8 of the tile, row
// 4 nth + lane % 4 of x. In one word, the place of the first in out as f32 [n, out_width], and in the upper bits
// whether each exists.
struct Outputs {
    static constexpr uint32_t FIRST = 1u << 31, SECOND = 1u << 30;
    uint32_t word;

    __device__ __forceinline__ static Outputs of(const Product &p, const Part &part, int lane, int nth) {
        const int row = part.tile * tiles::ROWS + lane / 4, of_x = nth * TILE_ROWS_OF_X + lane % 4;
        const uint32_t at = uint32_t(of_x) * p.out_width + part.column + row;
        const bool in_x = of_x < p.n;
        return {(at & ~(FIRST | SECOND)) | (in_x && row < part.rows ? FIRST : 0) |
                (in_x && row + 8 < part.rows ? SECOND : 0)};
    }

    __device__ __forceinline__ uint32_t at() const { return word & ~(FIRST | SECOND); }
    __device__ __forceinline__ bool exist(int h) const { return word & (h == 0 ? FIRST : SECOND); }
};

// What a lane's outputs need besides the sums.
struct Start {
    float first[2];   // the bias; gated: of the gate
    float second[2];  // what is there before ADD; gated: the bias of the factor
    float weight[2];  // in the norm that follows
    Outputs outputs;

    // Where they come from: take(word, address, whether there is one).
    template <class Take>
    __device__ __forceinline__ static void constants(const Product &p, const Part &part, Outputs outputs, int lane,
                                                     const Take &take) {
#pragma unroll
        for (int h = 0; h < 2; h++) {
            const int row = part.tile * tiles::ROWS + lane / 4 + 8 * h;
            take(h, part.bias + row, part.bias && outputs.exist(h));
            if (p.gated()) take(2 + h, p.bias[1] + row, p.bias[1] && outputs.exist(h));
            if (p.next_weight) take(4 + h, p.next_weight + row, outputs.exist(h));
        }
    }

    template <class Take>
    __device__ __forceinline__ static void residual(const Product &p, const float *from, Outputs outputs,
                                                    const Take &take) {
        if (p.gated()) return;
#pragma unroll
        for (int h = 0; h < 2; h++) take(2 + h, from + 8 * h, p.then == ADD && outputs.exist(h));
    }

    __device__ __forceinline__ static const float *residual_at(const Product &p, Outputs outputs) {
        return static_cast<const float *>(p.out) + outputs.at();
    }

    // At once.
    __device__ __forceinline__ static Start of(const Product &p, const Part &part, int lane, int nth) {
        Start start = {};
        start.outputs = Outputs::of(p, part, lane, nth);
        const auto take = [&](int word, const float *from, bool valid) {
            float *to = word < 2 ? start.first : word < 4 ? start.second : start.weight;
            to[word % 2] = valid ? *from : 0.0f;
        };
        constants(p, part, start.outputs, lane, take);
        residual(p, residual_at(p, start.outputs), start.outputs, take);
        return start;
    }

    __device__ __forceinline__ static Start read(const float *words, int step) {
        return {{words[0], words[step]},
                {words[2 * step], words[3 * step]},
                {words[4 * step], words[5 * step]},
                {__float_as_uint(words[6 * step])}};
    }
};

// Four bytes to shared memory; zero where there are none.
__device__ __forceinline__ void copy_word_async(float *shared, const float *global, bool valid) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(shared_address(shared)), "l"(global),
                 "r"(valid ? 4 : 0)
                 : "memory");
}

// A lane's words on their way to `words`, where they lie `step` apart: the constants, then the rest.
__device__ __forceinline__ Outputs ask_for_constants(float *words, int step, const Product &p, int task, int lane,
                                                    int nth) {
    const Part part = p.part(task, 0);
    const Outputs outputs = Outputs::of(p, part, lane, nth);
    words[6 * step] = __uint_as_float(outputs.word);
    Start::constants(p, part, outputs, lane, [&](int word, const float *from, bool valid) {
        copy_word_async(words + word * step, from, valid);
    });
    return outputs;
}

__device__ __forceinline__ void ask_for_residual(float *words, int step, const Product &p, const float *from,
                                                 Outputs outputs) {
    Start::residual(p, from, outputs, [&](int word, const float *at, bool valid) {
        copy_word_async(words + word * step, at, valid);
    });
}

__device__ __forceinline__ float activation(float x, int then) {
    if (then == GATED_SILU) return x / (1.0f + expf(-x));
    const float u = 0.7978846f * fmaf(x * x * x, 0.044715f, x);
    return x / (1.0f + expf(-2.0f * u));
}

// The sums of 2^log2 warps for one tensor-core product: two of each lane and warp, those of a lane side by side, so
// that sixteen bytes are those of two warps. Sixteen bytes change places such that the lanes meet in no bank.
struct Sums {
    float *first;
    int log2;

    // As pairs, where those of a warp are.
    __device__ __forceinline__ int at(int lane, int warp) const {
        const int quads_log2 = max(log2 - 1, 0), quads = 1 << quads_log2;
        const int turned = warp / 2 ^ (lane >> (3 - quads_log2) & (quads - 1));
        return (lane << log2) + (2 * turned + warp % 2);
    }

    __device__ __forceinline__ void put(int lane, int warp, const float (&sum)[2]) const {
        reinterpret_cast<float2 *>(first)[at(lane, warp)] = make_float2(sum[0], sum[1]);
    }

    // In the order of the warps. Four loads at once: the stream of weights leaves registers for no more.
    __device__ __forceinline__ void total(float (&total)[2], int lane) const {
        if (log2 == 0) {
            const float2 sum = reinterpret_cast<const float2 *>(first)[lane];
            total[0] = sum.x, total[1] = sum.y;
            return;
        }
        total[0] = total[1] = 0.0f;
#pragma unroll 4
        for (int warp = 0; warp < 1 << log2; warp += 2) {
            const float4 two = *reinterpret_cast<const float4 *>(first + 2 * at(lane, warp));
            total[0] += two.x, total[1] += two.y;
            total[0] += two.z, total[1] += two.w;
        }
    }
};

// Over the lanes of one row of x.
__device__ __forceinline__ float sum_of_rows(float x) {
#pragma unroll
    for (int offset = 4; offset < WARP; offset *= 2) x += __shfl_xor_sync(FULL_WARP, x, offset);
    return x;
}

// Stores an element of an operand [n, 2, width], whose place is `at` in [n, width].
__device__ __forceinline__ void store_split(bf16 *operand, int width, uint32_t at, int of_x, float x) {
    const Split parts = split(x);
    bf16 *to = operand + (at + uint32_t(of_x) * width);
    to[0] = parts.high;
    to[width] = parts.low;
}

// For the norm that follows: x, which is new in the residual, times its weights, and the sum of squares of a tile.
__device__ __forceinline__ void prepare_next(const Product &p, const Start &start, const float (&x)[2], int tile,
                                             int of_x) {
#pragma unroll
    for (int h = 0; h < 2; h++) {
        if (!start.outputs.exist(h)) continue;
        store_split(p.next_operand, p.out_width, start.outputs.at() + 8 * h, of_x, x[h] * start.weight[h]);
    }
    const float upper = start.outputs.exist(0) ? x[0] : 0.0f, lower = start.outputs.exist(1) ? x[1] : 0.0f;
    const float sum = sum_of_rows(fmaf(lower, lower, upper * upper));
    const size_t tiles = Product::tiles_of(p.out_width);
    if (threadIdx.x % WARP < 4 && of_x < p.n) p.next_squares[of_x * tiles + tile] = sum;
}

// A warp's view of the shared memory behind a decoder's table. It is made anew where it is used: addresses that last
// would take registers from the stream of weights.
template <class Decoder, int TILES> struct Workspace {
    static constexpr int WORD_STEP = Decoder::WORD_STEP;
    float *factors;   // of the team's rows of x
    float *exchange;  // the sums of the block's warps, from one task to the next in turn
    float *words;     // the lane's, WORD_STEP apart

    __device__ __forceinline__ Workspace(uint8_t *shared, const Team &team, int lane, int turn) {
        const int floats = int(blockDim.x) / WARP * TILES * TILE_OUTPUTS;
        factors = reinterpret_cast<float *>(shared + Decoder::BYTES);
        exchange = factors + FACTOR_BYTES<TILES> / 4;
        words = WORD_STEP > WARP ? reinterpret_cast<float *>(shared) + WARP
                                 : exchange + (SUMS_TWICE<TILES> ? 2 : 1) * floats;
        factors += team.index * TILES * TILE_ROWS_OF_X;
        if (SUMS_TWICE<TILES>) exchange += turn * floats;
        words += (team.index * min(TILES, team.warps) + team.member) * START_WORDS * WORD_STEP + lane;
    }
};

// The number of the thread, which the compiler does not know to be the same as before.
__device__ __forceinline__ int thread_anew() {
    int thread = threadIdx.x;
    asm volatile("" : "+r"(thread));
    return thread;
}

// Adds the sums of a task's warps in their order and hands them on; then asks for what the outputs of the next task
// need, if there is one.
template <class Decoder, int TILES>
__device__ __forceinline__ void finish(const Product &p, uint8_t *shared, int turn, int task, int next_task,
                                       const float (&sum)[TILES][2], bool has_factors) {
    const int thread = thread_anew(), lane = thread % WARP;
    const Team team(p, thread / WARP);
    const Workspace<Decoder, TILES> workspace(shared, team, lane, turn);
    float *of_team = workspace.exchange + team.index * team.warps * TILES * TILE_OUTPUTS;
    const int of_product = TILE_OUTPUTS << p.split_log2;
    const auto sums = [&](int half, int nth) {
        return Sums{of_team + (half * TILES + nth) * of_product, p.split_log2};
    };
#pragma unroll
    for (int nth = 0; nth < TILES; nth++) sums(team.half, nth).put(lane, team.share, sum[nth]);
    wait_for_copies<0>();
    team.wait();
    for (int nth = team.member; nth < TILES && nth * TILE_ROWS_OF_X < p.n; nth += team.warps) {
        const bool asked = TILES == 1 || nth == team.member;
        const Start start = asked ? Start::read(workspace.words, workspace.WORD_STEP)
                                  : Start::of(p, p.part(task, 0), lane, nth);
        const int of_x = nth * TILE_ROWS_OF_X + lane % 4;
        const uint32_t at = start.outputs.at();
        const float factor = has_factors ? workspace.factors[of_x] : 1.0f;
        float y[2];
        sums(0, nth).total(y, lane);
        if (p.gated()) {
            float up[2];
            sums(1, nth).total(up, lane);
#pragma unroll
            for (int h = 0; h < 2; h++) {
                y[h] = activation(fmaf(y[h], factor, start.first[h]), p.then) * fmaf(up[h], factor, start.second[h]);
                if (!start.outputs.exist(h)) continue;
                store_split(static_cast<bf16 *>(p.out), p.out_width, at + 8 * h, of_x, y[h]);
            }
            continue;
        }
        float *out = static_cast<float *>(p.out) + at;
#pragma unroll
        for (int h = 0; h < 2; h++) {
            y[h] = fmaf(y[h], factor, start.first[h] + start.second[h]);
            if (start.outputs.exist(h)) out[8 * h] = y[h];
        }
        if (p.next_weight) prepare_next(p, start, y, task, of_x);
    }
    if constexpr (!SUMS_TWICE<TILES>) team.wait();
    if (team.member < TILES && next_task < p.tasks()) {
        const Outputs next =
            ask_for_constants(workspace.words, workspace.WORD_STEP, p, next_task, lane, team.member);
        ask_for_residual(workspace.words, workspace.WORD_STEP, p, Start::residual_at(p, next), next);
    }
}

}  // namespace linear
