// The end of a decoding step, on the device: what was sampled becomes the next step's input, and the host is told.
//
// For each row i with positions[i] >= 0: positions[i] += 1; tokens[i] = ids[i]; histories[i][positions[i]] = ids[i]
// where there is a table of histories (addresses of u32 buffers; 0 = none). For every row: ring[step % ring_length][i]
// = ids[i]. Then the step's number, `*step` + 1, is stored in device memory and in `*published`.
//
// ids, tokens [rows] u32; positions [rows] i32, -1 for a row that is not in use (left alone). `ring` [ring_length,
// rows] u32 and `published` u64 lie in the host's memory, mapped for the device: the host polls `published` and then
// reads the ring. u32::MAX in place of an id (a row without a usable logit) goes to the ring as it is, for the host to
// complain, and to the next step as token 0, which every vocabulary has.
//
// Bound: latency. Each thread's writes to the ring are made visible to the host before the barrier, and the number is
// written after it: whoever sees the number sees the ids.

#include "vocabulary/device.cuh"

extern "C" __global__ void __launch_bounds__(64)
    advance(const uint32_t *ids, uint32_t *__restrict__ tokens, int *__restrict__ positions, const uint64_t *histories,
            uint32_t *__restrict__ ring, int ring_length, uint64_t *__restrict__ step, volatile uint64_t *published,
            int rows) {
    let_next_kernel_start();
    wait_for_previous_kernel();
    const uint64_t number = *step;
    uint32_t *slot = ring + (number % ring_length) * rows;
    for (int row = threadIdx.x; row < rows; row += blockDim.x) {
        const uint32_t id = ids[row], token = id == UINT32_MAX ? 0 : id;
        const int position = positions[row];
        slot[row] = id;
        if (position < 0) continue;
        tokens[row] = token;
        positions[row] = position + 1;
        if (histories != nullptr && histories[row] != 0) {
            reinterpret_cast<uint32_t *>(histories[row])[position + 1] = token;
        }
    }
    __threadfence_system();
    __syncthreads();
    if (threadIdx.x == 0) {
        *step = number + 1;
        __threadfence_system();
        *published = number + 1;
    }
}
