// Blocks that work together: those of a cluster, which see each other's shared memory (from compute
// capability 9.0 on). Below that a cluster is one block.
#pragma once

#include <cstdint>

namespace jspec {

// Which block of its cluster this one is.
__device__ __forceinline__ int rank_in_cluster() {
#if __CUDA_ARCH__ >= 900
  uint32_t rank;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return static_cast<int>(rank);
#else
  return 0;
#endif
}

// How many blocks a cluster has.
__device__ __forceinline__ int blocks_of_cluster() {
#if __CUDA_ARCH__ >= 900
  uint32_t count;
  asm("mov.u32 %0, %%cluster_nctarank;" : "=r"(count));
  return static_cast<int>(count);
#else
  return 1;
#endif
}

// Waits for all threads of a cluster, and sees what they wrote into shared memory.
__device__ __forceinline__ void sync_cluster() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
#else
  __syncthreads();
#endif
}

// What block `rank` of the cluster has where this one has `here`, which is shared memory.
__device__ __forceinline__ uint32_t read_cluster(const uint32_t* here, int rank) {
#if __CUDA_ARCH__ >= 900
  uint32_t there, value;
  const uint32_t own = static_cast<uint32_t>(__cvta_generic_to_shared(here));
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(own), "r"(rank));
  asm volatile("ld.shared::cluster.u32 %0, [%1];" : "=r"(value) : "r"(there) : "memory");
  return value;
#else
  return *here;
#endif
}

}  // namespace jspec
