// Attention of many query rows over one history: prompts, and full passes without a cache. The kernel and its bounds:
// attention/flash_forward.cuh. One instance for each width of a head and number of query rows a block: the small
// blocks are for grids that would leave multiprocessors without work; a row's bits are the same in both.
//
// Registers hold the output, WIDTH / 2 a lane and row tile, and the scores, KEYS / 2: two row tiles fit up to width
// 128, at width 64 with twice the keys. Shared memory stays within 99 KiB, which every supported device has.
#include "attention/flash_forward.cuh"

#define ATTENTION(NAME, WIDTH, ROW_TILES, KEYS)                                                                       \
    extern "C" __global__ void __launch_bounds__(THREADS, 2)                                                          \
        NAME(const bf16 *queries, const bf16 *keys, const bf16 *values, bf16 *out, float *log_sum_exp,                \
             int64_t query_stride, int64_t query_batch_stride, int64_t kv_stride, int64_t kv_batch_stride, int rows,  \
             int length, int heads, int kv_heads, float scale, int causal, int window) {                              \
        let_next_kernel_start();                                                                                      \
        wait_for_previous_kernel();                                                                                   \
        FlashForward<WIDTH, ROW_TILES, KEYS>::run(Call{queries, keys, values, out, log_sum_exp, query_stride,         \
                                                       query_batch_stride, kv_stride, kv_batch_stride, rows, length,  \
                                                       heads, kv_heads, scale, causal, window});                      \
    }

ATTENTION(attention_64_rows_128, 64, 2, 128)
ATTENTION(attention_64_rows_64, 64, 1, 128)
ATTENTION(attention_96_rows_128, 96, 2, 64)
ATTENTION(attention_96_rows_64, 96, 1, 64)
ATTENTION(attention_128_rows_128, 128, 2, 64)
ATTENTION(attention_128_rows_64, 128, 1, 64)
ATTENTION(attention_256_rows_64, 256, 1, 64)
