// Blocks of a cluster (sm_90 on): they run at the same time and write into each other's shared memory.
//
// A block may write to another only while that one runs, and not over what it still reads: all threads of a cluster
// arrive once they are ready to receive, and wait before they send. What is sent counts its bytes at the receiver, who
// waits for as many as are due. So no fence stands in the way: an `arrive` that also publishes writes costs one of the
// whole device.
#pragma once

#include "device.cuh"

// Whether the code is compiled for cards with clusters. Without, what is below compiles to nothing and is not called.
#if __CUDA_ARCH__ >= 900
constexpr bool CLUSTERS = true;
#define CLUSTER_OF(BLOCKS) __cluster_dims__(BLOCKS, 1, 1)
#define ON_CLUSTERS(...) asm volatile(__VA_ARGS__)
#else
constexpr bool CLUSTERS = false;
#define CLUSTER_OF(BLOCKS)
#define ON_CLUSTERS(...)
#endif

// Once, by one thread, before the first `arrive_ready`.
__device__ __forceinline__ void prepare_arrivals(uint64_t *arrivals) {
    ON_CLUSTERS("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(shared_address(arrivals)) : "memory");
    ON_CLUSTERS("fence.mbarrier_init.release.cluster;" ::: "memory");
}

// What this thread read before, it has used: whoever passes `wait_until_ready` may write over it.
__device__ __forceinline__ void arrive_ready() { ON_CLUSTERS("barrier.cluster.arrive.relaxed;" ::: "memory"); }

__device__ __forceinline__ void wait_until_ready() { ON_CLUSTERS("barrier.cluster.wait.acquire;" ::: "memory"); }

// By one thread: so many bytes are due, of which some may have come.
__device__ __forceinline__ void expect_arrivals(uint64_t *arrivals, int bytes) {
    ON_CLUSTERS("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(arrivals)), "r"(bytes)
                 : "memory");
}

// Sends to the place that `here`, in this block's shared memory, has in the memory of block `rank` of the cluster.
__device__ __forceinline__ void send(const float4 *here, uint64_t *arrivals, int rank, float4 x) {
    uint32_t there = 0, count = 0;
    ON_CLUSTERS("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(shared_address(here)), "r"(rank));
    ON_CLUSTERS("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(count) : "r"(shared_address(arrivals)), "r"(rank));
    ON_CLUSTERS("st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(
                    there),
                "f"(x.x), "f"(x.y), "f"(x.z), "f"(x.w), "r"(count)
                : "memory");
}

// Waits for all that is due for the `time`-th time, counted from 0.
__device__ __forceinline__ void wait_for_arrivals(uint64_t *arrivals, int time) {
    ON_CLUSTERS("{\n"
                 ".reg .pred done;\n"
                 "again:\n"
                 "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
                 "@!done bra again;\n"
                 "}\n" ::"r"(shared_address(arrivals)),
                 "r"(time % 2)
                 : "memory");
}
