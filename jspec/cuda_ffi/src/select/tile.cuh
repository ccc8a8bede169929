// A block's pass over a tile of slots: keys held in registers, and slots written in order.
#pragma once

#include "select/histogram.cuh"

namespace jspec {

// Items that a thread holds of a tile: the warps of a block take one run of them each.
constexpr int kEach = 32, kTile = kEach * kThreads;
static_assert(kTile == kRegisterSlots);

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

  // Calls `run(i)` for each item that counts. A vector that counts as a whole is tested once.
  template <typename Run>
  __device__ __forceinline__ void each(Run run) const {
#pragma unroll
    for (int i = 0; i < kEach; i += V) {
      if (at(i) >= low && at(i) + V <= high) {
#pragma unroll
        for (int j = 0; j < V; ++j) run(i + j);
      } else if (at(i) < high && at(i) + V > low) {
#pragma unroll
        for (int j = 0; j < V; ++j) {
          if (counts(i + j)) run(i + j);
        }
      }
    }
  }
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

// Of each vector of a thread how many bits are set, as fields of one word. A warp has at most 32 V in
// a vector's place, which a field holds.
template <int V>
struct Fields {
  static constexpr int kCount = kEach / V, kBits = 64 / kCount;
  static_assert(32 * V < 1 << kBits);

  uint64_t before, all;  // in the lanes before this one, and in all of them

  __device__ __forceinline__ Fields(uint32_t bits) {
    uint64_t own = 0;
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      own |= uint64_t(__popc(bits >> i * V & ((1u << V) - 1))) << i * kBits;
    }
    const uint64_t sum = prefix_sum(own);
    before = sum - own;
    all = __shfl_sync(kAllLanes, sum, 31);
  }

  static __device__ __forceinline__ int field(uint64_t word, int i) {
    return static_cast<int>(word >> i * kBits & ((uint64_t(1) << kBits) - 1));
  }
};

// Calls `emit(offset, before, tied)` for each item of a thread whose bit is set in `over` or `ties`:
// where it lies behind the thread's first, and what comes before it in the tile. That is: warps one
// behind the other, in each vectors of V, then lanes, then items. Returns what the tile has. Called
// by all threads; `sums` is shared memory that was not in use since the last barrier.
template <int V, typename Emit>
__device__ __forceinline__ Before in_order(uint32_t over, uint32_t ties, uint32_t* sums,
                                           Emit emit) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const uint32_t own = static_cast<uint32_t>(__popc(over)) |
                       static_cast<uint32_t>(__popc(ties)) << 16;
  const uint32_t total = __reduce_add_sync(kAllLanes, own);
  if (lane == 0) sums[warp] = total;
  __syncthreads();
  const uint32_t sum = lane < kWarps ? sums[lane] : 0;
  const Before all = unpacked(__reduce_add_sync(kAllLanes, sum));
  if (total == 0) return all;
  Before base = unpacked(__reduce_add_sync(kAllLanes, lane < warp ? sum : 0));
  const Fields<V> overs(over), tied(ties);
#pragma unroll
  for (int i = 0; i < Fields<V>::kCount; ++i) {
    constexpr uint32_t kVector = (1u << V) - 1;
    const uint32_t ones = over >> i * V & kVector;
    Before before = base + Before{overs.field(overs.before, i), tied.field(tied.before, i)};
    for (uint32_t left = ones | (ties >> i * V & kVector); left; left &= left - 1) {
      const int j = __ffs(left) - 1;
      const bool is_over = ones >> j & 1;
      emit(offset_of<V>(i * V) + j, before, !is_over);
      if (is_over) {
        ++before.over;
      } else {
        ++before.at;
      }
    }
    base = base + Before{overs.field(overs.all, i), tied.field(tied.all, i)};
  }
  return all;
}

}  // namespace jspec
