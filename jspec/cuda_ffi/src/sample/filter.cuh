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

// The largest key such that the amounts of all logits from it on sum to at least `needed`, or 0.
// `amount(x, tile)` is that of a logit. By a block: 11, 11 and 10 bits at a time.
template <typename Amount>
__device__ uint32_t largest_key(const Row& row, uint32_t needed, Amount amount) {
  __shared__ uint32_t bins[kBins];
  __shared__ uint64_t sums[kFilterThreads / 32];
  __shared__ uint32_t found, rest;
  uint32_t prefix = 0;
  for (int shift = 21;; shift -= shift == 10 ? 10 : 11) {
    const uint32_t above = shift == 21 ? 0 : shift == 10 ? 0xFFE00000u : 0xFFFFFC00u;
    const uint32_t count = shift == 0 ? 1024 : kBins;
    for (uint32_t i = threadIdx.x; i < kBins; i += kFilterThreads) bins[i] = 0;
    if (threadIdx.x == 0) found = kNone;
    __syncthreads();
    for (int tile = threadIdx.x / 32; tile < row.tiles; tile += kFilterThreads / 32) {
      const int end = min((tile + 1) * kTile, row.vocabulary);
      for (int token = tile * kTile + threadIdx.x % 32; token < end; token += 32) {
        const float x = logit(row.logits, row.bfloat16, token);
        const uint32_t key = key_of(x);
        if ((key & above) != prefix) continue;
        if (const uint32_t more = amount(x, tile)) {
          atomicAdd(&bins[(key >> shift) & (count - 1)], more);
        }
      }
    }
    __syncthreads();
    // Threads take pairs of bins from the last one down.
    const uint32_t high = kBins - 1 - 2 * threadIdx.x, low = high - 1;
    uint64_t total;
    const uint64_t before = block_before(uint64_t(bins[high]) + bins[low], sums, &total);
    if (before < needed && needed <= before + bins[high]) {
      found = high;
      rest = needed - static_cast<uint32_t>(before);
    } else if (before + bins[high] < needed && needed <= before + bins[high] + bins[low]) {
      found = low;
      rest = needed - static_cast<uint32_t>(before + bins[high]);
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
template <typename Kept>
__device__ void sum_kept(const Row& row, Kept kept) {
  for (int tile = threadIdx.x / 32; tile < row.tiles; tile += kFilterThreads / 32) {
    const Weigher weigher{row.rate, row.cells[tile].exponent};
    const int end = min((tile + 1) * kTile, row.vocabulary);
    uint64_t sum = 0;
    for (int token = tile * kTile + threadIdx.x % 32; token < end; token += 32) {
      const float x = logit(row.logits, row.bfloat16, token);
      if (kept(x)) sum += weigher(x);
    }
    sum = warp_sum(sum);
    if (threadIdx.x % 32 == 0) row.cells[tile].sum = sum;
  }
  __syncthreads();
}

// The norm of a row, by every warp of a block, before any goes on to change its cells.
__device__ inline Norm block_norm(const Row& row) {
  const Norm norm = warp_norm(row, Cells(row, 0));
  __syncthreads();
  return norm;
}

// Finds the threshold of a position and replaces its sums where its row filters, by a block.
__device__ inline void filter(const Sampling& sampling, const Source& source, int64_t batch,
                              int position) {
  const Settings& settings = sampling.settings;
  const int32_t top_k = settings.top_k[batch];
  const uint32_t top_p = units(settings.top_p[batch]);
  const Workspace& workspace = sampling.workspace;
  uint32_t* threshold =
      workspace.thresholds + batch * workspace.positions + source.first + position;
  if (threadIdx.x == 0) *threshold = 0;
  __syncthreads();
  Row row(sampling, source, batch, position);
  if (row.greedy() || (top_k <= 0 && top_p >= kOne && row.min_p == 0)) return;
  const Norm norm = block_norm(row);

  if (top_k > 0) {
    row.threshold = largest_key(row, top_k, [](float, int) { return 1u; });
    sum_kept(row, [&](float x) { return key_of(x) >= row.threshold; });
  }
  if (top_p < kOne) {
    const Norm left = block_norm(row);
    const auto probability = [&](float x, int tile) {
      if (key_of(x) < row.threshold) return 0u;
      const float exponent = row.cells[tile].exponent;
      return scaled(weight_of(power_of(x, row.rate), exponent), scale_of(left, exponent));
    };
    __shared__ unsigned long long total;
    if (threadIdx.x == 0) total = 0;
    __syncthreads();
    uint64_t own = 0;
    for (int tile = threadIdx.x / 32; tile < row.tiles; tile += kFilterThreads / 32) {
      const int end = min((tile + 1) * kTile, row.vocabulary);
      for (int token = tile * kTile + threadIdx.x % 32; token < end; token += 32) {
        own += probability(logit(row.logits, row.bfloat16, token), tile);
      }
    }
    atomicAdd(&total, own);
    __syncthreads();
    const uint64_t needed = (total * max(top_p, 1u) + kOne - 1) >> 30;
    const uint32_t pth = largest_key(row, static_cast<uint32_t>(needed), probability);
    row.threshold = max(row.threshold, pth);
  }
  sum_kept(row, [&](float x) { return row.keeps(x, norm); });
  if (threadIdx.x == 0) *threshold = row.threshold;
}

}  // namespace jspec
