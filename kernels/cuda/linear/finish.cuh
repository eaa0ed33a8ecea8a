// What a product is asked for and what becomes of its sums: stored, added to a residual, or the gate and the factor of
// a gated activation, out = act(gate x) * (up x), stored as the operand of the product after it.
//
// act is SiLU, x / (1 + e^-x), or the tanh form of GELU, x / (1 + e^-2u) with u = sqrt(2 / pi) (x + 0.044715 x^3).
#pragma once

#include "../vocabulary/device.cuh"
#include "../vocabulary/tiles.cuh"

namespace linear {

// Rows of x that one tensor-core product serves, and the outputs that it makes.
constexpr int TILE_ROWS_OF_X = 4;
constexpr int TILE_OUTPUTS = TILE_ROWS_OF_X * tiles::ROWS;

// Whether the warps' sums have room twice, so that those of one task are read while those of the next are written. With 32
// rows it would be 64 KiB, which some cards do not have beside the table of NF4: a second barrier serves instead.
template <int TILES> constexpr bool SUMS_TWICE = TILES < 8;

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
    int padding;

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
        out = static_cast<uint8_t *>(out) + size_t(count) * out_width * 4;
        n -= count;
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

    __device__ __forceinline__ Team(const Product &p, int warp) : Team(p, warp, p.split_log2 + (p.gated() ? 1 : 0)) {}

    // Of 2^log2 warps.
    __device__ __forceinline__ Team(const Product &p, int warp, int log2) {
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

    // The same where there may be sixteen teams of one warp, one more than there are barriers.
    __device__ __forceinline__ void wait_or_sync() const {
        if (warps == 1) {
            __syncwarp();
        } else {
            wait();
        }
    }
};

// Output `slot` of a lane: row (lane / 4) + 8 (slot % 2) of the tile, row 4 (slot / 2) + lane % 4 of x.
struct Output {
    int row, of_x;

    __device__ __forceinline__ Output(const Part &part, int lane, int slot)
        : row(part.tile * tiles::ROWS + lane / 4 + slot % 2 * 8), of_x(slot / 2 * TILE_ROWS_OF_X + lane % 4) {}

    __device__ __forceinline__ bool exists(const Product &p, const Part &part) const {
        return row < part.rows && of_x < p.n;
    }

    __device__ __forceinline__ size_t at(const Product &p, const Part &part) const {
        return size_t(of_x) * p.out_width + part.column + row;
    }
};

// What an output starts from: the bias, and for ADD what is there.
__device__ __forceinline__ float base_of_output(const Product &p, const Part &part, const Output &output) {
    const float bias = part.bias ? part.bias[output.row] : 0.0f;
    if (p.then != ADD) return bias;
    return bias + static_cast<const float *>(p.out)[output.at(p, part)];
}

// The same for a lane's output `slot`. Asked for early, while the weights are on their way.
template <int TILES>
__device__ __forceinline__ float base_of(const Product &p, const Team &team, int task, int lane, int slot) {
    if (slot >= 2 * TILES || p.gated()) return 0.0f;
    const Part part = p.part(task, 0);
    const Output output(part, lane, slot);
    return output.exists(p, part) ? base_of_output(p, part, output) : 0.0f;
}

__device__ __forceinline__ float activation(float x, int then) {
    if (then == GATED_SILU) return x / (1.0f + expf(-x));
    const float u = 0.7978846f * fmaf(x * x * x, 0.044715f, x);
    return x / (1.0f + expf(-2.0f * u));
}

__device__ __forceinline__ float sum_of(const float *first, int count, int step) {
    float total = 0.0f;
#pragma unroll 4
    for (int i = 0; i < count; i++) total += first[i * step];
    return total;
}

// Adds the sums of a task's warps in their order and hands them on. `base` is that of the lane's slot `team.member`.
template <int TILES>
__device__ __forceinline__ void finish(const Product &p, const Team &team, int task, int lane,
                                       const float (&sum)[TILES][2], float base, float *exchange) {
    constexpr int STEP = TILES * TILE_OUTPUTS;  // from one warp's sums to the next's
    float *of_team = exchange + team.index * team.warps * STEP + lane;
#pragma unroll
    for (int nth = 0; nth < TILES; nth++) {
#pragma unroll
        for (int h = 0; h < 2; h++) of_team[team.member * STEP + (2 * nth + h) * WARP] = sum[nth][h];
    }
    team.wait();
    const int warps = 1 << p.split_log2;
    for (int slot = team.member; slot < 2 * TILES; slot += team.warps) {
        const float *first = of_team + slot * WARP;
        float total = sum_of(first, warps, STEP);
        const Part part = p.part(task, 0);
        const Output output(part, lane, slot);
        if (!output.exists(p, part)) continue;
        if (p.gated()) {
            float factor = sum_of(first + warps * STEP, warps, STEP);
            if (p.bias[0]) total += p.bias[0][output.row];
            if (p.bias[1]) factor += p.bias[1][output.row];
            store<SPLIT>(p.out, output.of_x, p.out_width, output.row, activation(total, p.then) * factor);
        } else {
            if (slot != team.member) base = base_of<TILES>(p, team, task, lane, slot);
            static_cast<float *>(p.out)[output.at(p, part)] = base + total;
        }
    }
    if constexpr (!SUMS_TWICE<TILES>) team.wait();
}

}  // namespace linear
