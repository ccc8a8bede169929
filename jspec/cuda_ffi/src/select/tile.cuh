// A block's pass over a tile of slots: keys held in registers, and slots written in order.
#pragma once

#include "select/histogram.cuh"

namespace jspec {

// Items that a thread holds of a tile: the warps of a block take one run of them each.
constexpr int kEach = 32, kTile = kEach * kThreads;

// Where item i of a thread lies behind its item 0: vectors of V items, a lane behind the other.
template <int V>
constexpr __device__ __forceinline__ int offset_of(int i) {
  return i / V * 32 * V + i % V;
}

// The items of a thread in a tile: item i is at `base + offset_of<V>(i)`, and counts where that is in
// low..high - 1.
template <int V>
struct Items {
  int base, low, high;

  // Of the tile from `first` on, which has `length` items, a multiple of 16 V; of these, those count
  // that are in low..high - 1.
  __device__ __forceinline__ Items(int first, int length, int low, int high) : low(low) {
    const int run = length / kWarps, start = first + static_cast<int>(threadIdx.x) / 32 * run;
    base = start + static_cast<int>(threadIdx.x) % 32 * V;
    this->high = min(high, start + run);
  }

  __device__ __forceinline__ int at(int i) const { return base + offset_of<V>(i); }
  __device__ __forceinline__ bool counts(int i) const { return at(i) >= low && at(i) < high; }
};

// Scores of a tile as a thread holds them.
template <typename Key>
struct Held {
  using Type = typename Key::Type;
  static constexpr int V = 16 / sizeof(Type);

  Items<V> items;
  Type raw[kEach];

  // Loads all vectors at once. `aligned`: rows begin at multiples of 16 bytes.
  __device__ __forceinline__ void load(const Type* row, bool aligned) {
#pragma unroll
    for (int i = 0; i < kEach; i += V) {
      const int at = items.at(i);
      if (at >= items.high || at + V <= items.low) continue;
      if (aligned) {
        *reinterpret_cast<uint4*>(raw + i) = *reinterpret_cast<const uint4*>(row + at);
      } else {
#pragma unroll
        for (int j = 0; j < V; ++j) {
          if (items.counts(i + j)) raw[i + j] = row[at + j];
        }
      }
    }
  }
};

// How many slots before this one lie above the threshold, and how many at it.
struct Before {
  int over, at;

  __device__ __forceinline__ Before operator+(Before other) const {
    return {over + other.over, at + other.at};
  }
};

// Two counts in one word: a tile has 2^14 items.
__device__ __forceinline__ Before unpacked(uint32_t counts) {
  return {static_cast<int>(counts & 0xFFFFu), static_cast<int>(counts >> 16)};
}

// Calls `emit(i, before, tied)` for each item i of a thread whose bit is set in `over` or `ties`,
// with what comes before it in the tile: warps one behind the other, in each vectors of V, then
// lanes, then items. Returns what the tile has. Called by all threads; `sums` is shared memory that
// was not in use since the last barrier.
template <int V, typename Emit>
__device__ __forceinline__ Before in_order(uint32_t over, uint32_t ties, uint32_t* sums,
                                           Emit emit) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const auto counts = [](uint32_t over, uint32_t ties) {
    return static_cast<uint32_t>(__popc(over)) | static_cast<uint32_t>(__popc(ties)) << 16;
  };
  const uint32_t total = __reduce_add_sync(kAllLanes, counts(over, ties));
  if (lane == 0) sums[warp] = total;
  __syncthreads();
  const uint32_t sum = lane < kWarps ? sums[lane] : 0;
  const uint32_t all = __reduce_add_sync(kAllLanes, sum);
  if (total == 0) return unpacked(all);
  uint32_t base = __reduce_add_sync(kAllLanes, lane < warp ? sum : 0);
#pragma unroll
  for (int i = 0; i < kEach; i += V) {
    constexpr uint32_t kVector = (1u << V) - 1;
    const uint32_t some = over >> i & kVector, tied = ties >> i & kVector;
    if (!__any_sync(kAllLanes, some | tied)) continue;
    const uint32_t own = counts(some, tied);
    uint32_t before = own;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      const uint32_t other = __shfl_up_sync(kAllLanes, before, step);
      if (lane >= step) before += other;
    }
    const uint32_t vector = __shfl_sync(kAllLanes, before, 31);
    before += base - own;
#pragma unroll
    for (int j = 0; j < V; ++j) {
      const bool is_over = some >> j & 1, is_tied = tied >> j & 1;
      if (is_over || is_tied) {
        emit(i + j, unpacked(before), is_tied);
        before += is_over ? 1 : 1 << 16;
      }
    }
    base += vector;
  }
  return unpacked(all);
}

}  // namespace jspec
