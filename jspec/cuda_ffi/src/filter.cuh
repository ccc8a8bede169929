// Top-k, top-p and min-p: the threshold of a position, and the sums of what it keeps.
#pragma once

#include "tile.cuh"

namespace jspec {

constexpr int kFilterThreads = 1024;
constexpr int kBins = 2048;

// The largest key such that the amounts of all logits from it on sum to at least `needed`, or 0.
// `amount(x, tile, scale)` is that of a logit. By a block: 11, 11 and 10 bits at a time.
template <typename Amount>
__device__ uint32_t largest_key(const Row& row, const Norm& norm, uint32_t needed, Amount amount) {
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
      const uint32_t scale = row.scale(tile, norm);
      const int end = min((tile + 1) * kTile, row.vocabulary);
      for (int token = tile * kTile + threadIdx.x % 32; token < end; token += 32) {
        const float x = logit(row.logits, row.bfloat16, token);
        const uint32_t key = key_of(x);
        if ((key & above) != prefix) continue;
        if (const uint32_t more = amount(x, tile, scale)) {
          atomicAdd(&bins[(key >> shift) & (count - 1)], more);
        }
      }
    }
    __syncthreads();
    // Threads take pairs of bins from the last one down.
    const uint32_t high = kBins - 1 - 2 * threadIdx.x, low = high - 1;
    uint64_t total;
    const uint64_t before =
        block_before<kFilterThreads>(uint64_t(bins[high]) + bins[low], sums, &total);
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

// The sums of what is kept of each tile, a warp a tile.
template <typename Kept>
__device__ void sum_kept(const Row& row, uint64_t* sums, Kept kept) {
  for (int tile = threadIdx.x / 32; tile < row.tiles; tile += kFilterThreads / 32) {
    const int end = min((tile + 1) * kTile, row.vocabulary);
    uint64_t sum = 0;
    for (int token = tile * kTile + threadIdx.x % 32; token < end; token += 32) {
      const float x = logit(row.logits, row.bfloat16, token);
      if (kept(x)) sum += weight_in_tile((x - row.tops[tile]) * row.rate);
    }
    sum = warp_sum(sum);
    if (threadIdx.x % 32 == 0) sums[tile] = sum;
  }
  __syncthreads();
}

// Finds the threshold of each position of a row that filters, and replaces its sums; a block a
// position.
__global__ void __launch_bounds__(kFilterThreads) filter_kernel(const Sampling sampling) {
  __shared__ Norm norm;
  const Settings& settings = sampling.settings;
  const bool drafted = int(blockIdx.x) >= sampling.target.positions;
  const Source& source = drafted ? sampling.draft : sampling.target;
  const int position = blockIdx.x - source.first;
  for (int64_t batch = blockIdx.y; batch < sampling.batch; batch += gridDim.y) {
    const int32_t top_k = settings.top_k[batch];
    const uint32_t top_p = units(settings.top_p[batch]);
    const int last = sampling.lengths ? sampling.lengths[batch] : INT32_MAX;
    const Workspace workspace(sampling, batch);
    if (threadIdx.x == 0) workspace.thresholds[blockIdx.x] = 0;
    __syncthreads();
    const bool bfloat16 = drafted ? sampling.draft_bfloat16 : sampling.bfloat16;
    Row row(sampling, source, bfloat16, batch, position);
    const bool filters = top_k > 0 || top_p < kOne || row.min_p > 0;
    const bool read = drafted ? position < last : position == 0 || position <= last;
    if (!filters || !read || row.greedy()) continue;
    uint64_t* sums = workspace.sums + int64_t(blockIdx.x) * row.tiles;
    uint32_t best;
    if (threadIdx.x < 32) {
      const Norm all = warp_norm(row, &best);
      if (threadIdx.x == 0) norm = all;
    }
    __syncthreads();

    if (top_k > 0) {
      row.threshold = largest_key(row, norm, top_k, [](float, int, uint32_t) { return 1u; });
      sum_kept(row, sums, [&](float x) { return key_of(x) >= row.threshold; });
    }
    if (top_p < kOne) {
      if (threadIdx.x < 32) {
        const Norm left = warp_norm(row, &best);
        if (threadIdx.x == 0) norm = left;
      }
      __syncthreads();
      const auto probability = [&](float x, int tile, uint32_t scale) {
        if (key_of(x) < row.threshold) return 0u;
        return scaled(weight_in_tile((x - row.tops[tile]) * row.rate), scale);
      };
      __shared__ unsigned long long total;
      if (threadIdx.x == 0) total = 0;
      __syncthreads();
      uint64_t own = 0;
      for (int tile = threadIdx.x / 32; tile < row.tiles; tile += kFilterThreads / 32) {
        const uint32_t scale = row.scale(tile, norm);
        const int end = min((tile + 1) * kTile, row.vocabulary);
        for (int token = tile * kTile + threadIdx.x % 32; token < end; token += 32) {
          own += probability(logit(row.logits, row.bfloat16, token), tile, scale);
        }
      }
      atomicAdd(&total, own);
      __syncthreads();
      const uint64_t needed = (total * max(top_p, 1u) + kOne - 1) >> 30;
      const uint32_t pth = largest_key(row, norm, static_cast<uint32_t>(needed), probability);
      row.threshold = max(row.threshold, pth);
    }
    sum_kept(row, sums, [&](float x) { return kept(row, norm, x); });
    if (threadIdx.x == 0) workspace.thresholds[blockIdx.x] = row.threshold;
  }
}

}  // namespace jspec
