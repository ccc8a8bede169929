// Selection among rows whose keys fit the registers of a block, or of the few blocks of a cluster,
// which read each other's histograms in shared memory.
#pragma once

#include "common/ptx_hopper.cuh"
#include "select/take.cuh"

namespace jspec {

// Shared memory of such a block: a histogram of each digit, and its sums of 64 counts.
struct ClusterShared {
  __align__(16) uint32_t counters[kMostBins + 2 * 1024];
  uint32_t totals[3][64];
  uint32_t sums[kWarps];
  Place place;
};

// All threads of a cluster meet. Before compute capability 9.0 it is one block.
__device__ __forceinline__ void sync_cluster() {
#if __CUDA_ARCH__ >= 900
  cluster_arrive();
  cluster_wait();
#else
  __syncthreads();
#endif
}

// Two words of shared memory of a block of the cluster.
__device__ __forceinline__ uint2 words_in(int block, const uint32_t* shared) {
#if __CUDA_ARCH__ >= 900
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

// A cluster takes a row, and each of its blocks `counted` slots, whose keys stay in registers.
template <typename Key>
__global__ void __launch_bounds__(kThreads, kBlocks)
    cluster_kernel(const __grid_constant__ Work work, Key key) {
  __shared__ ClusterShared shared;
  const Digits& digits = work.plan.digits;
  const int blocks = work.plan.chunks, block = blockIdx.x % blocks;
  const Row<Key> row(work, blockIdx.x / blocks);
  if (block == 0) row.write_forced();
  if (row.taken.need == 0) return;
  const Held<Key> held = row.tile(block * work.cut.counted, work.cut.counted);
  clear(shared.counters, kMostBins + 2 * 1024);
  clear(shared.totals[0], 3 * 64);
  __syncthreads();
  uint32_t threshold = 0;  // the digits found, as the highest bits of a key
  int need = row.taken.need;
  Before before{0, 0};
  uint32_t* counters = shared.counters;
  for (int level = 0; level < digits.levels; ++level) {
    const int shift = digits.shift[level], bins = digits.bins[level];
    const int width = level > 0 ? digits.shift[level - 1] - shift : 0;
    const uint32_t mask = level > 0 ? (1u << width) - 1 : ~0u;
    held.items.each([&](int i) {
      const uint32_t own = key(held.raw[i]);
      if (level == 0 || own >> (shift + width) == threshold) {
        atomicAdd(counters + (own >> shift & mask), 1);
      }
    });
    __syncthreads();
    add_segments(counters, bins / 64, shared.totals[level]);
    sync_cluster();
    if (threadIdx.x < 32) {
      const Place found =
          find_in_cluster(counters, shared.totals[level], bins, blocks, block, need);
      if (threadIdx.x == 0) shared.place = found;
    }
    __syncthreads();
    const Place place = shared.place;
    threshold = level > 0 ? threshold << width | place.found.digit : place.found.digit;
    need = place.found.need;
    before = {before.over + place.over, place.at};
    counters += bins;
  }
  row.take(
      held.items, threshold, need, before, shared.sums,
      [&](int i) { return key(held.raw[i]); }, [&](int at) { return at; });
  sync_cluster();  // no block ends while another reads its histograms
}

}  // namespace jspec
