// Top-k, top-p and min-p: the threshold of a position, and the sums of what it keeps.
#pragma once

#include "sample/tile.cuh"

namespace jspec {

constexpr int kFilterThreads = 1024;
constexpr int kBins = 2048;

// The sum over the threads before this one, and over all of the block in `total`.
__device__ inline uint64_t block_before(uint64_t x, uint64_t (&sums)[kFilterThreads / 32],
                                        uint64_t* total) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const uint64_t reached = warp_reached(x);
  __syncthreads();
  if (lane == 31) sums[warp] = reached;
  __syncthreads();
  uint64_t before = reached - x;
  *total = 0;
  for (int i = 0; i < kFilterThreads / 32; ++i) {
    if (i < warp) before += sums[i];
    *total += sums[i];
  }
  return before;
}

// Bins of 64 bits in two words each, since shared memory adds 32 bits at once.
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

// The largest key such that the amounts of all logits from it on sum to at least `needed`, or 0.
// `amount(token, x)` is that of a logit. By a block: 11, 11 and 10 bits at a time.
template <typename Amount>
__device__ uint32_t largest_key(const Position& from, uint64_t needed, Amount amount) {
  __shared__ Bins bins;
  __shared__ uint64_t sums[kFilterThreads / 32];
  __shared__ uint64_t rest;
  __shared__ uint32_t found;
  uint32_t prefix = 0;
  for (int shift = 21;; shift -= shift == 10 ? 10 : 11) {
    const uint32_t above = shift == 21 ? 0 : shift == 10 ? 0xFFE00000u : 0xFFFFFC00u;
    const uint32_t count = shift == 0 ? 1024 : kBins;
    for (uint32_t i = threadIdx.x; i < kBins; i += kFilterThreads) bins.low[i] = bins.high[i] = 0;
    if (threadIdx.x == 0) found = kNone;
    __syncthreads();
    for (int token = threadIdx.x; token < from.vocabulary; token += kFilterThreads) {
      const float x = logit(from.logits, from.bfloat16, token);
      const uint32_t key = key_of(x);
      if ((key & above) != prefix) continue;
      if (const uint64_t more = amount(token, x)) bins.add((key >> shift) & (count - 1), more);
    }
    __syncthreads();
    // Threads take pairs of bins from the last one down.
    const uint32_t high = kBins - 1 - 2 * threadIdx.x, low = high - 1;
    uint64_t total;
    const uint64_t before = block_before(bins[high] + bins[low], sums, &total);
    if (before < needed && needed <= before + bins[high]) {
      found = high;
      rest = needed - before;
    } else if (before + bins[high] < needed && needed <= before + bins[high] + bins[low]) {
      found = low;
      rest = needed - (before + bins[high]);
    }
    __syncthreads();
    if (found == kNone) return 0;
    prefix |= found << shift;
    needed = rest;
    if (shift == 0) return prefix;
    __syncthreads();
  }
}

// Replaces the sum of each tile by that of what is kept of it, a warp a tile.
__device__ inline void sum_kept(const Position& from) {
  for (int tile = threadIdx.x / 32; tile < from.tiles; tile += kFilterThreads / 32) {
    const Weigher weigher{from.rate, from.cells[tile].exponent};
    const int end = min((tile + 1) * kTile, from.vocabulary);
    uint64_t sum = 0;
    for (int token = tile * kTile + threadIdx.x % 32; token < end; token += 32) {
      const float x = logit(from.logits, from.bfloat16, token);
      if (from.keeps(x)) sum += weigher(x);
    }
    sum = warp_sum(sum);
    if (threadIdx.x % 32 == 0) from.cells[tile].sum = sum;
  }
  __syncthreads();
}

// The scale of a position, by every warp of a block, before any goes on to change its cells.
__device__ inline Scale block_scale(const Position& from) {
  const Scale scale = warp_scale(from, Cells(from, 0));
  __syncthreads();
  return scale;
}

// The threshold of top-p over what `from` keeps, by a block.
__device__ inline uint32_t top_p_threshold(const Position& from, float top_p) {
  const Scale scale = block_scale(from);
  const auto probability = [&](int token, float x) {
    return Prober(from, scale, from.cells[token / kTile].exponent)(token, x);
  };
  __shared__ unsigned long long total;
  if (threadIdx.x == 0) total = 0;
  __syncthreads();
  uint64_t own = 0;
  for (int token = threadIdx.x; token < from.vocabulary; token += kFilterThreads) {
    own += probability(token, logit(from.logits, from.bfloat16, token));
  }
  atomicAdd(&total, own);
  __syncthreads();
  return largest_key(from, needed_of(total, top_p), probability);
}

// The threshold of min-p beside the largest logit, by a warp: 2 bits of the key, then 5 at a time.
__device__ inline uint32_t warp_min_p_threshold(float largest, float min_p, float rate) {
  const uint32_t lane = threadIdx.x % 32, top = key_of(largest);
  uint32_t dropped = 0;  // the largest key that is known to be dropped
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
__device__ inline uint32_t min_p_threshold(const Position& from, float min_p) {
  __shared__ uint32_t threshold;
  if (threadIdx.x < 32) {
    const float largest = warp_largest(from, Cells(from, 0));
    const uint32_t found = warp_min_p_threshold(largest, min_p, from.rate);
    if (threadIdx.x == 0) threshold = found;
  }
  __syncthreads();
  return threshold;
}

// Finds the threshold of a position and replaces its sums where its row filters, by a block.
__device__ inline void filter(const Sampling& sampling, const Source& source, int64_t batch,
                              int position) {
  const Settings& settings = sampling.settings;
  const int32_t top_k = settings.top_k[batch];
  const float top_p = settings.top_p[batch], min_p = settings.min_p[batch];
  const Workspace& workspace = sampling.workspace;
  uint32_t* threshold =
      workspace.thresholds + batch * workspace.positions + source.first + position;
  if (threadIdx.x == 0) *threshold = 0;
  __syncthreads();
  Position from(sampling, source, batch, position);
  if (from.greedy() || (top_k <= 0 && top_p >= 1 && min_p <= 0)) return;
  if (block_scale(from).certain != kNone) return;

  const uint32_t least = min_p > 0 ? min_p_threshold(from, min_p) : 0;
  if (top_k > 0) {
    from.threshold = largest_key(from, top_k, [](int, float) { return uint64_t(1); });
    sum_kept(from);
  }
  if (top_p < 1) from.threshold = max(from.threshold, top_p_threshold(from, top_p));
  from.threshold = max(from.threshold, least);
  sum_kept(from);
  if (threadIdx.x == 0) *threshold = from.threshold;
}

}  // namespace jspec
