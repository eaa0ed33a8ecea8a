// Blocks of a cluster (sm_90 on): they run at the same time and write into each other's shared memory.
//
// A block may write to another only while that one runs. So all threads of a cluster arrive once when their shared
// memory is ready, and wait before they write to others; then arrive after the last write, and wait before they read
// what others wrote. The two take turns on the one barrier of a cluster.
#pragma once

#include "../vocabulary/device.cuh"

// Whether the code is compiled for cards with clusters.
#if __CUDA_ARCH__ >= 900
constexpr bool CLUSTERS = true;
#define CLUSTER_OF(BLOCKS) __cluster_dims__(BLOCKS, 1, 1)
#else
constexpr bool CLUSTERS = false;
#define CLUSTER_OF(BLOCKS)
#endif

// What this thread wrote before is visible to those who wait for the barrier.
__device__ __forceinline__ void arrive_at_cluster_barrier() {
#if __CUDA_ARCH__ >= 900
    asm volatile("barrier.cluster.arrive.release;" ::: "memory");
#endif
}

__device__ __forceinline__ void wait_at_cluster_barrier() {
#if __CUDA_ARCH__ >= 900
    asm volatile("barrier.cluster.wait.acquire;" ::: "memory");
#endif
}

// Writes to the place that `here`, in this block's shared memory, has in the memory of block `rank` of the cluster.
__device__ __forceinline__ void store_in_block(const float *here, int rank, float x) {
#if __CUDA_ARCH__ >= 900
    uint32_t there;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(shared_address(here)), "r"(rank));
    asm volatile("st.shared::cluster.f32 [%0], %1;" ::"r"(there), "f"(x) : "memory");
#endif
}
