// Histograms that the few blocks of a cluster keep, each in its shared memory, and read of each other.
#pragma once

#include "common/ptx_hopper.cuh"
#include "select/tile.cuh"

namespace jspec {

// Of the digits behind the first: a histogram of each, and a place for slots of a higher first digit.
constexpr int kLaterBins = 2 * 1024 + 64;

// Shared memory of such a block: a histogram of each digit, and its sums of 64 counts.
struct ClusterShared {
  __align__(16) uint32_t counters[kMostBins + kLaterBins];
  uint32_t totals[3][64];
  uint32_t sums[2 * kWarps];
  Place place;
};

// All threads of a cluster meet. Before compute capability 9.0 it is one block.
__device__ __forceinline__ void sync_cluster() {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
  cluster_arrive();
  cluster_wait();
#else
  __syncthreads();
#endif
}

// Two words of shared memory of a block of the cluster.
__device__ __forceinline__ uint2 words_in(int block, const uint32_t* shared) {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
  return load_in(address_in(block, shared));
#else
  return *reinterpret_cast<const uint2*>(shared);
#endif
}

// The sums over `blocks` of 64 words that each has at `shared`, two for each lane, and those over the
// blocks before `block`.
struct Sums {
  uint2 all{0, 0}, before{0, 0};

  __device__ __forceinline__ Sums(const uint32_t* shared, int count, int blocks, int block) {
    const int at = 2 * (static_cast<int>(threadIdx.x) % 32);
    if (at >= count) return;
#pragma unroll
    for (int i = 0; i < kMaxClusterBlocks; ++i) {
      if (i >= blocks) break;
      const uint2 own = words_in(i, shared + at);
      all.x += own.x, all.y += own.y;
      if (i < block) before.x += own.x, before.y += own.y;
    }
  }

  // What the blocks before have in the places for which `counts` holds. By all lanes of a warp.
  template <typename Counts>
  __device__ __forceinline__ int before_where(Counts counts) const {
    const int at = 2 * (static_cast<int>(threadIdx.x) % 32);
    return __reduce_add_sync(kAllLanes,
                             (counts(at) ? before.x : 0) + (counts(at + 1) ? before.y : 0));
  }
};

// The highest digit that at least `need` of the slots of all blocks reach, and what the blocks before
// `block` have above it and at it, by one warp.
__device__ __forceinline__ Place find_in_cluster(const uint32_t* counters, const uint32_t* totals,
                                               int bins, int blocks, int block, int need) {
  const Sums coarse(totals, bins / 64, blocks, block);
  const int2 segment = pick(coarse.all.x, coarse.all.y, 0, need);
  const Sums fine(counters + segment.x * 64, 64, blocks, block);
  const int2 digit = pick(fine.all.x, fine.all.y, segment.y, need);
  return {{segment.x * 64 + digit.x, need - digit.y, digit.y},
          coarse.before_where([&](int at) { return at > segment.x; }) +
              fine.before_where([&](int at) { return at > digit.x; }),
          fine.before_where([&](int at) { return at == digit.x; })};
}

// The same of digit `level`, called by all threads of a cluster once each has counted its slots.
__device__ __forceinline__ Place find_in_cluster(ClusterShared& shared, const uint32_t* counters,
                                                 int level, int bins, int blocks, int block,
                                                 int need) {
  __syncthreads();
  add_segments(counters, bins / 64, shared.totals[level]);
  sync_cluster();
  if (threadIdx.x < 32) {
    const Place found =
        find_in_cluster(counters, shared.totals[level], bins, blocks, block, need);
    if (threadIdx.x == 0) shared.place = found;
  }
  __syncthreads();
  return shared.place;
}

}  // namespace jspec
