// Top-k, top-p and min-p, by a block for each position: the smallest key that all filters keep (the
// threshold), and the sums of the weights that they keep in each tile. Keys are those of `key_of`:
// integers in the order of the logits.
#pragma once

#include "sample/tile.cuh"

namespace jspec {

constexpr int kFilterThreads = 1024;
constexpr int kBins = 2048;
constexpr int kMostListed = 1024;

// Sums of 64 bits, each in two words: shared memory has fast atomic additions of 32 bits alone.
struct Bins {
  uint32_t low[kBins], high[kBins];

  __device__ void add(uint32_t bin, uint64_t more) {
    const uint32_t before = atomicAdd(&low[bin], uint32_t(more));
    const uint32_t carried = uint32_t(more >> 32) + (before + uint32_t(more) < before);
    if (carried) atomicAdd(&high[bin], carried);
  }
  __device__ uint64_t operator[](uint32_t bin) const {
    return uint64_t(high[bin]) << 32 | low[bin];
  }
};

// What the threads of a block share while they filter a position.
struct FilterShared {
  Bins bins;
  uint64_t sums[kFilterThreads / 32];  // of each warp
  uint64_t rest;                       // what the bin `found` must add to reach `needed`
  unsigned long long total;
  uint32_t found, min_p_threshold;
  // The tokens that top-k may keep, in any order, and their logits: `listed` of them, kNone where
  // they are more than kMostListed or there is no list.
  uint32_t tokens[kMostListed], count, listed;
  float logits[kMostListed];
};

// The sum of `x` over the threads before this one; `total` becomes that over all of the block.
__device__ inline uint64_t block_before(uint64_t x, FilterShared& shared, uint64_t* total) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const uint64_t reached = warp_reached(x);
  __syncthreads();
  if (lane == 31) shared.sums[warp] = reached;
  __syncthreads();
  uint64_t before = reached - x;
  *total = 0;
  for (int i = 0; i < kFilterThreads / 32; ++i) {
    if (i < warp) before += shared.sums[i];
    *total += shared.sums[i];
  }
  return before;
}

// Calls body(token, x), where x is the token's logit, for all tokens of each tile whose largest key
// is at least `least`. Each warp takes every 32nd tile.
template <typename Logit, typename Body>
__device__ __forceinline__ void each_in_tiles(const Position& from, uint32_t least, Body body) {
  for (int tile = threadIdx.x / 32; tile < from.tiles; tile += kFilterThreads / 32) {
    if (key_of(from.cells[tile].top) < least) continue;
    const int first = tile * kTile, left = from.vocabulary - first;
    const Logit* logits = static_cast<const Logit*>(from.logits) + first;
    if (!is_aligned(logits) || left < kTile) {
      for (int i = threadIdx.x % 32; i < min(left, kTile); i += 32) {
        body(uint32_t(first + i), logit_of(logits[i]));
      }
      continue;
    }
    // A few vectors are in flight at once: more would take too many registers.
    constexpr int kVector = 16 / sizeof(Logit), kLoaded = 4, kRun = 32 * kVector;
#pragma unroll 1
    for (int begin = threadIdx.x % 32 * kVector; begin < kTile; begin += kLoaded * kRun) {
      Logit loaded[kLoaded][kVector];
#pragma unroll
      for (int i = 0; i < kLoaded; ++i) {
        const uint4 vector = __ldg(reinterpret_cast<const uint4*>(logits + begin + i * kRun));
        memcpy(loaded[i], &vector, sizeof vector);
      }
#pragma unroll
      for (int i = 0; i < kLoaded; ++i) {
#pragma unroll
        for (int j = 0; j < kVector; ++j) {
          body(uint32_t(first + begin + i * kRun + j), logit_of(loaded[i][j]));
        }
      }
    }
  }
}

// Calls body(token, x) for all tokens that top-k may keep and whose key is at least `least`, and
// for some others: `body` has to compare.
template <typename Body>
__device__ __forceinline__ void each_token(const Position& from, const FilterShared& shared,
                                           uint32_t least, Body body) {
  if (shared.listed != kNone) {
    for (uint32_t i = threadIdx.x; i < shared.listed; i += kFilterThreads) {
      body(shared.tokens[i], shared.logits[i]);
    }
  } else if (from.bfloat16) {
    each_in_tiles<Bfloat16>(from, least, body);
  } else {
    each_in_tiles<float>(from, least, body);
  }
}

// The largest key for which the amounts of it and of all larger keys sum to at least `needed`; 0
// where those of all keys sum to less. `each(least, add)` calls add(key, amount) for every token
// whose key is at least `least`, and for any others; amount() is what the token adds.
//
// The key is found from its highest bits on, in passes of 11, 11 and 10 bits. A pass sums the
// amounts of the keys that begin with the bits known so far, in a bin for each value of the next
// bits; the bin in which the sum from the largest key down reaches `needed` gives these bits.
template <typename Each>
__device__ __forceinline__ uint32_t largest_key(FilterShared& shared, uint64_t needed, Each each) {
  Bins& bins = shared.bins;
  uint32_t prefix = 0;
#pragma unroll 1
  for (int shift = 21;; shift -= shift == 10 ? 10 : 11) {
    const uint32_t above = shift == 21 ? 0 : shift == 10 ? 0xFFE00000u : 0xFFFFFC00u;
    const uint32_t count = shift == 0 ? 1024 : kBins;
    for (uint32_t i = threadIdx.x; i < kBins; i += kFilterThreads) bins.low[i] = bins.high[i] = 0;
    if (threadIdx.x == 0) shared.found = kNone;
    __syncthreads();
    each(prefix, [&](uint32_t key, auto amount) {
      if ((key & above) != prefix) return;
      if (const uint64_t more = amount()) bins.add((key >> shift) & (count - 1), more);
    });
    __syncthreads();
    // Each thread takes two bins, the first thread the last two.
    const uint32_t high = kBins - 1 - 2 * threadIdx.x, low = high - 1;
    uint64_t total;
    const uint64_t before = block_before(bins[high] + bins[low], shared, &total);
    if (before < needed && needed <= before + bins[high]) {
      shared.found = high;
      shared.rest = needed - before;
    } else if (before + bins[high] < needed && needed <= before + bins[high] + bins[low]) {
      shared.found = low;
      shared.rest = needed - (before + bins[high]);
    }
    __syncthreads();
    if (shared.found == kNone) return 0;
    prefix |= shared.found << shift;
    needed = shared.rest;
    if (shift == 0) return prefix;
    __syncthreads();
  }
}

// Lists the tokens that may be among the `count` largest, if they are at most kMostListed. Let L be
// the `count`-th largest of the tiles' largest logits. Each of the `count` tiles up to it has a
// token of at least L, so no smaller token is among the `count` largest: the list has all tokens
// from L on. A tile without a finite logit counts as -FLT_MAX. If that is L, the list lacks tokens
// of minus infinity alone, which have no weight.
__device__ __forceinline__ void list_largest(const Position& from, FilterShared& shared,
                                             int32_t count) {
  const uint32_t least = largest_key(shared, count, [&](uint32_t, auto add) {
    for (int tile = threadIdx.x; tile < from.tiles; tile += kFilterThreads) {
      add(key_of(from.cells[tile].top), [] { return uint64_t(1); });
    }
  });
  if (least == 0) return;  // there are less than `count` tiles
  if (threadIdx.x == 0) shared.count = 0;
  __syncthreads();
  each_token(from, shared, least, [&](uint32_t token, float x) {
    if (key_of(x) < least) return;
    const uint32_t at = atomicAdd(&shared.count, 1);
    if (at < kMostListed) shared.tokens[at] = token, shared.logits[at] = x;
  });
  __syncthreads();
  if (threadIdx.x == 0 && shared.count <= kMostListed) shared.listed = shared.count;
  __syncthreads();
}

// Replaces the sum of each tile by that of the weights that `from.threshold` keeps.
__device__ __forceinline__ void sum_kept(const Position& from, const FilterShared& shared) {
  for (int tile = threadIdx.x; tile < from.tiles; tile += kFilterThreads) from.cells[tile].sum = 0;
  __syncthreads();
  each_token(from, shared, from.threshold, [&](uint32_t token, float x) {
    if (!from.keeps(x)) return;
    Cell& cell = from.cells[token / kTile];
    const uint64_t weight = Weigher{from.rate, cell.exponent}(x);
    atomicAdd(reinterpret_cast<unsigned long long*>(&cell.sum), weight);
  });
  __syncthreads();
}

// The scale of a position, which each warp computes. After it cells may be changed: the barrier
// waits until all warps have read them.
__device__ inline Scale block_scale(const Position& from) {
  const Scale scale = warp_scale(from, Cells(from, 0));
  __syncthreads();
  return scale;
}

// The threshold of top-p: of the probability of the tokens that `from.threshold` keeps.
__device__ __forceinline__ uint32_t top_p_threshold(const Position& from, FilterShared& shared,
                                                    float top_p) {
  const Scale scale = block_scale(from);
  const auto probability = [&](uint32_t token, float x) {
    return Prober(from, scale, from.cells[token / kTile].exponent)(token, x);
  };
  if (threadIdx.x == 0) shared.total = 0;
  __syncthreads();
  uint64_t own = 0;
  each_token(from, shared, from.threshold,
             [&](uint32_t token, float x) { own += probability(token, x); });
  atomicAdd(&shared.total, own);
  __syncthreads();
  const uint64_t needed = needed_of(shared.total, top_p);
  return largest_key(shared, needed, [&](uint32_t least, auto add) {
    each_token(from, shared, least, [&](uint32_t token, float x) {
      add(key_of(x), [&] { return probability(token, x); });
    });
  });
}

// The threshold of min-p: one more than the largest key that it drops, as it drops all smaller
// ones. A warp finds that key from its highest bits on, first 2 bits and then 5 at a time: each
// lane tries one value of them, and the largest value that is dropped gives them.
__device__ inline uint32_t warp_min_p_threshold(float largest, float min_p, float rate) {
  const uint32_t lane = threadIdx.x % 32, top = key_of(largest);
  uint32_t dropped = 0;  // the bits known so far, followed by zeros: a key that is dropped
#pragma unroll 1
  for (int shift = 30; shift >= 0; shift -= 5) {
    const bool counts = shift < 30 || lane < 4;
    const uint32_t key = dropped | lane << shift;
    const bool drops = counts && min_p_drops(key, top, min_p, rate);
    dropped |= (31 - __clz(__ballot_sync(kAllLanes, drops))) << shift;
  }
  return dropped + 1;
}

// The threshold of min-p, by a block.
__device__ inline uint32_t min_p_threshold(const Position& from, FilterShared& shared,
                                           float min_p) {
  if (threadIdx.x < 32) {
    const float largest = warp_largest(from, Cells(from, 0));
    const uint32_t found = warp_min_p_threshold(largest, min_p, from.rate);
    if (threadIdx.x == 0) shared.min_p_threshold = found;
  }
  __syncthreads();
  return shared.min_p_threshold;
}

// Writes the threshold of a position and, where its row has a filter, replaces the sums of its
// tiles.
__device__ inline void filter(const Sampling& sampling, const Source& source, int64_t batch,
                              int position) {
  __shared__ FilterShared shared;
  const Settings& settings = sampling.settings;
  const int32_t top_k = settings.top_k[batch];
  const float top_p = settings.top_p[batch], min_p = settings.min_p[batch];
  const Workspace& workspace = sampling.workspace;
  uint32_t* threshold =
      workspace.thresholds + batch * workspace.positions + source.first + position;
  if (threadIdx.x == 0) *threshold = 0, shared.listed = kNone;
  __syncthreads();
  Position from(sampling, source, batch, position);
  if (from.greedy() || (top_k <= 0 && top_p >= 1 && min_p <= 0)) return;
  if (block_scale(from).certain != kNone) return;

  const uint32_t least = min_p > 0 ? min_p_threshold(from, shared, min_p) : 0;
  if (top_k > 0) {
    list_largest(from, shared, top_k);
    from.threshold = largest_key(shared, top_k, [&](uint32_t least, auto add) {
      each_token(from, shared, least, [&](uint32_t, float x) {
        add(key_of(x), [] { return uint64_t(1); });
      });
    });
    sum_kept(from, shared);
  }
  if (top_p < 1) from.threshold = max(from.threshold, top_p_threshold(from, shared, top_p));
  from.threshold = max(from.threshold, least);
  sum_kept(from, shared);
  if (threadIdx.x == 0) *threshold = from.threshold;
}

}  // namespace jspec
