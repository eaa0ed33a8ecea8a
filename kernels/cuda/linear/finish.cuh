// What a product is asked for and what becomes of its sums: stored, added to a residual, or the gate and the factor of
// a gated activation, out = act(gate x) * (up x), stored as the operand of the product after it.
//
// act is SiLU, x / (1 + e^-x), or the tanh form of GELU, x / (1 + e^-2u) with u = sqrt(2 / pi) (x + 0.044715 x^3).
//
// A root-mean-square norm between two products takes no kernel of its own: with s = 1 / sqrt(mean(x^2) + epsilon),
//   norm(x) W^T = s * ((x * weight) W^T).
// The product that ends with x, a sum on a residual, owns every element of it once: it stores x * weight as an operand,
// and for each 16 elements the sum of their squares (`next`). The product that takes the operand adds those sums, which
// are width / 16 numbers, and multiplies its own results by s (`factor`).
#pragma once

#include "../vocabulary/device.cuh"
#include "../vocabulary/tiles.cuh"

namespace linear {

// Rows of x that one tensor-core product serves, and the outputs that it makes.
constexpr int TILE_ROWS_OF_X = 4;
constexpr int TILE_OUTPUTS = TILE_ROWS_OF_X * tiles::ROWS;

// Whether the warps' sums have room twice, so that those of one task are read while those of the next are written. With
// 32 rows it would be 64 KiB, which some cards do not have beside the table of NF4: a second barrier serves instead.
template <int TILES> constexpr bool SUMS_TWICE = TILES < 8;

// Bytes of the factors of a block's teams, before the warps' sums: one for each row of x, for up to 8 teams.
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
// 4 nth + lane % 4 of x.
struct Outputs {
    int first_row, of_x;
    bool exist[2];
    size_t at;  // of the first in out

    __device__ __forceinline__ Outputs(const Product &p, const Part &part, int lane, int nth)
        : first_row(part.tile * tiles::ROWS + lane / 4), of_x(nth * TILE_ROWS_OF_X + lane % 4),
          at(size_t(of_x) * p.out_width + part.column + first_row) {
        exist[0] = of_x < p.n && first_row < part.rows;
        exist[1] = of_x < p.n && first_row + 8 < part.rows;
    }
};

// What a lane's outputs start from: the bias, and for ADD what is there; and their weights in the norm that follows.
struct Start {
    float value[2], weight[2];
};

// The constant part of it, asked for before the kernel before is done. Warp `nth` of a team has the outputs of product
// `nth`, and a warp past them none.
template <int TILES>
__device__ __forceinline__ Start constants_of(const Product &p, int task, int lane, int nth) {
    Start start = {};
    if (nth >= TILES || p.gated()) return start;
    const Part part = p.part(task, 0);
    const Outputs outputs(p, part, lane, nth);
#pragma unroll
    for (int h = 0; h < 2; h++) {
        if (part.bias && outputs.exist[h]) start.value[h] = __ldg(part.bias + outputs.first_row + 8 * h);
        if (p.next_weight && outputs.exist[h]) start.weight[h] = __ldg(p.next_weight + outputs.first_row + 8 * h);
    }
    return start;
}

// What is there before ADD, to be added to the values once it has come.
struct Residual {
    float value[2];
};

template <int TILES>
__device__ __forceinline__ Residual residual_of(const Product &p, int task, int lane, int nth) {
    Residual residual = {};
    if (nth >= TILES || p.then != ADD) return residual;
    const Part part = p.part(task, 0);
    const Outputs outputs(p, part, lane, nth);
    const float *from = static_cast<const float *>(p.out) + outputs.at;
#pragma unroll
    for (int h = 0; h < 2; h++) {
        if (outputs.exist[h]) residual.value[h] = from[8 * h];
    }
    return residual;
}

__device__ __forceinline__ void add_residual(Start &start, const Residual &residual) {
    start.value[0] += residual.value[0];
    start.value[1] += residual.value[1];
}

// The sum of squares of row `of_x` over four lanes' share of its tiles, then over the lanes 4 apart: the order depends
// on the width alone.
__device__ __forceinline__ float sum_of_squares(const float *squares, int tiles, int lane, bool exists) {
    float total = 0.0f;
    if (exists && tiles % 4 == 0) {
        const float4 *from = reinterpret_cast<const float4 *>(squares);
        float4 sum = {};
        for (int first = lane / 4; first < tiles / 4; first += 32) {
            // Four loads at once: 2,048 elements of x.
            float4 four[4];
#pragma unroll
            for (int i = 0; i < 4; i++) four[i] = first + 8 * i < tiles / 4 ? from[first + 8 * i] : float4{};
#pragma unroll
            for (int i = 0; i < 4; i++) {
                sum = {sum.x + four[i].x, sum.y + four[i].y, sum.z + four[i].z, sum.w + four[i].w};
            }
        }
        total = (sum.x + sum.y) + (sum.z + sum.w);
    } else if (exists) {
        for (int tile = lane / 4; tile < tiles; tile += 8) total += squares[tile];
    }
    return total;
}

__device__ __forceinline__ float sum_of_rows(float x) {
#pragma unroll
    for (int offset = 4; offset < WARP; offset *= 2) x += __shfl_xor_sync(FULL_WARP, x, offset);
    return x;
}

// What each result of a row of x is multiplied by, for the rows that this warp has the outputs of. Kept in shared
// memory, by the lanes that will read it.
template <int TILES>
__device__ __forceinline__ void find_factors(float *factors, const Product &p, const Team &team, int lane) {
    for (int nth = team.member; nth < TILES && nth * TILE_ROWS_OF_X < p.n; nth += team.warps) {
        const int of_x = nth * TILE_ROWS_OF_X + lane % 4, tiles = Product::tiles_of(p.factor_width);
        const float sum =
            sum_of_rows(sum_of_squares(p.factor_squares + size_t(of_x) * tiles, tiles, lane, of_x < p.n));
        if (lane < 4) factors[of_x] = rsqrtf(fmaf(sum, p.inverse_width, p.epsilon));
    }
    __syncwarp();
}

__device__ __forceinline__ float activation(float x, int then) {
    if (then == GATED_SILU) return x / (1.0f + expf(-x));
    const float u = 0.7978846f * fmaf(x * x * x, 0.044715f, x);
    return x / (1.0f + expf(-2.0f * u));
}

__device__ __forceinline__ void sum_of(float (&total)[2], const float *first, int count, int step) {
    total[0] = total[1] = 0.0f;
#pragma unroll 8
    for (int i = 0; i < count; i++) {
        total[0] += first[i * step];
        total[1] += first[i * step + WARP];
    }
}

// Stores x, which is new in the residual, times the weights of the norm after it, and the sum of squares of a tile.
__device__ __forceinline__ void prepare_next(const Product &p, const Part &part, const Outputs &outputs,
                                             const float (&x)[2], const float (&weight)[2], int lane) {
#pragma unroll
    for (int h = 0; h < 2; h++) {
        if (!outputs.exist[h]) continue;
        store<SPLIT>(p.next_operand, outputs.of_x, p.out_width, outputs.first_row + 8 * h, x[h] * weight[h]);
    }
    const float lower = outputs.exist[1] ? x[1] : 0.0f, upper = outputs.exist[0] ? x[0] : 0.0f;
    const float sum = sum_of_rows(fmaf(lower, lower, upper * upper));
    const int tiles = Product::tiles_of(p.out_width);
    if (lane < 4 && outputs.of_x < p.n) p.next_squares[size_t(outputs.of_x) * tiles + part.tile] = sum;
}

// Adds the sums of a task's warps in their order and hands them on. `start` is that of product `team.member`; `factors`
// are those of the team, or null.
template <int TILES>
__device__ __forceinline__ void finish(const Product &p, const Team &team, int task, int lane,
                                       const float (&sum)[TILES][2], Start start, const float *factors,
                                       float *exchange) {
    constexpr int STEP = TILES * TILE_OUTPUTS;  // from one warp's sums to the next's
    float *of_team = exchange + team.index * team.warps * STEP + lane;
#pragma unroll
    for (int nth = 0; nth < TILES; nth++) {
#pragma unroll
        for (int h = 0; h < 2; h++) of_team[team.member * STEP + (2 * nth + h) * WARP] = sum[nth][h];
    }
    team.wait();
    const int warps = 1 << p.split_log2;
    for (int nth = team.member; nth < TILES && nth * TILE_ROWS_OF_X < p.n; nth += team.warps) {
        const float *first = of_team + 2 * nth * WARP;
        const Part part = p.part(task, 0);
        const Outputs outputs(p, part, lane, nth);
        const float factor = factors ? factors[outputs.of_x] : 1.0f;
        float y[2];
        sum_of(y, first, warps, STEP);
        if (p.gated()) {
            float up[2];
            sum_of(up, first + warps * STEP, warps, STEP);
#pragma unroll
            for (int h = 0; h < 2; h++) {
                if (!outputs.exist[h]) continue;
                const int row = outputs.first_row + 8 * h;
                y[h] = fmaf(y[h], factor, p.bias[0] ? __ldg(p.bias[0] + row) : 0.0f);
                up[h] = fmaf(up[h], factor, p.bias[1] ? __ldg(p.bias[1] + row) : 0.0f);
                store<SPLIT>(p.out, outputs.of_x, p.out_width, row, activation(y[h], p.then) * up[h]);
            }
            continue;
        }
        if (nth != team.member) {
            start = constants_of<TILES>(p, task, lane, nth);
            add_residual(start, residual_of<TILES>(p, task, lane, nth));
        }
        float *out = static_cast<float *>(p.out) + outputs.at;
#pragma unroll
        for (int h = 0; h < 2; h++) {
            y[h] = fmaf(y[h], factor, start.value[h]);
            if (outputs.exist[h]) out[8 * h] = y[h];
        }
        if (p.next_weight) prepare_next(p, part, outputs, y, start.weight, lane);
    }
    if constexpr (!SUMS_TWICE<TILES>) team.wait();
}

}  // namespace linear
