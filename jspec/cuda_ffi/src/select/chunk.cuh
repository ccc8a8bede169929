// A block's pass over the slots of a chunk: keys held in registers, and slots written in order.
#pragma once

#include "select/histogram.cuh"

namespace jspec {

// Slots that a thread looks at, at most, and a warp: the warps of a block take one run of them each.
constexpr int kEach = kMostChunk / kThreads;

// Keys of a chunk as a thread holds them. Item i is at `index(i)` in the chunk: vectors of V slots,
// a lane behind the other.
template <typename Key>
struct Held {
  using Type = typename Key::Type;
  static constexpr int V = 16 / sizeof(Type);

  Type raw[kEach];
  int first;    // slot of the chunk's first
  int length;   // slots of the chunk
  int low, high;  // of which those from low to high - 1 count

  // The place of item i in the chunk, and whether there is one.
  __device__ __forceinline__ int index(int i) const {
    const int run = length / kWarps;
    const int within = (i / V * 32 + static_cast<int>(threadIdx.x) % 32) * V + i % V;
    return within < run ? static_cast<int>(threadIdx.x) / 32 * run + within : -1;
  }

  __device__ __forceinline__ bool counts(int i) const {
    const int at = index(i), slot = first + at;
    return at >= 0 && slot >= low && slot < high;
  }

  // Loads all vectors at once. `aligned`: rows begin at multiples of 16 bytes.
  __device__ __forceinline__ void load(const Type* row, bool aligned) {
#pragma unroll
    for (int i = 0; i < kEach; i += V) {
      const int at = index(i), slot = first + at;
      if (at < 0 || slot >= high || slot + V <= low) continue;
      if (aligned) {
        *reinterpret_cast<uint4*>(raw + i) = *reinterpret_cast<const uint4*>(row + slot);
      } else {
#pragma unroll
        for (int j = 0; j < V; ++j) {
          if (slot + j >= low && slot + j < high) raw[i + j] = row[slot + j];
        }
      }
    }
  }
};

// How many slots before this one are taken for certain, and how many stand at the threshold.
struct Before {
  int over, at;
};

// Calls `emit(i, before, ties)` for each item i of a thread whose bit is set in `over` or `ties`, in
// no order, with what comes before it in the chunk. Items of a warp are ordered by vectors of V, by
// lane, then by item; warps one behind the other. Called by all threads. `sums` is shared memory.
template <int V, typename Emit>
__device__ __forceinline__ void in_order(uint32_t over, uint32_t ties, uint32_t* sums, Emit emit) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  // Two counts in one word: a chunk has at most 2^14 slots.
  const auto counts = [](uint32_t over, uint32_t ties) {
    return static_cast<uint32_t>(__popc(over)) | static_cast<uint32_t>(__popc(ties)) << 16;
  };
  const uint32_t total = __reduce_add_sync(kAllLanes, counts(over, ties));
  if (lane == 0) sums[warp] = total;
  __syncthreads();
  if (total == 0) return;
  uint32_t base = __reduce_add_sync(kAllLanes, lane < warp ? sums[lane] : 0);
#pragma unroll
  for (int i = 0; i < kEach; i += V) {
    constexpr uint32_t kVector = V == 32 ? ~0u : (1u << V) - 1;
    const uint32_t some = over >> i & kVector, tied = ties >> i & kVector;
    if (!__any_sync(kAllLanes, some | tied)) continue;
    const uint32_t own = counts(some, tied);
    uint32_t sum = own;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      const uint32_t before = __shfl_up_sync(kAllLanes, sum, step);
      if (lane >= step) sum += before;
    }
    uint32_t before = base + sum - own;
#pragma unroll
    for (int j = 0; j < V; ++j) {
      const bool is_over = some >> j & 1, is_tied = tied >> j & 1;
      if (is_over || is_tied) {
        emit(i + j, Before{static_cast<int>(before & 0xFFFFu), static_cast<int>(before >> 16)},
             is_tied);
        before += is_over ? 1 : 1 << 16;
      }
    }
    base += __shfl_sync(kAllLanes, sum, 31);
  }
}

}  // namespace jspec
