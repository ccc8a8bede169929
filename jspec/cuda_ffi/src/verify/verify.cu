// Greedy verification on a GPU, a warp a sequence; and the acceptance scan by a warp a sequence or,
// as the baseline, by a thread a sequence.
#include "common/dependent.cuh"
#include "verify/ballot.cuh"
#include "verify/scan.h"

namespace jspec {
namespace {

template <typename Token, int chunks>
__global__ void ballot_kernel(const Greedy greedy) {
  const int row = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32;
  if (row < greedy.batch) verify_warp<Token, chunks>(greedy, row, [](int, int, bool) {});
}

// One lane a position, as in `verify_warp`, without what the scan does not write.
__global__ void scan_ballot_kernel(const Scan scan) {
  constexpr int kChunks = 4;  // of 32 positions, whose loads are in flight together
  const int64_t row = int64_t(blockIdx.x) * (blockDim.x / 32) + threadIdx.x / 32;
  if (row >= scan.batch) return;
  const int lane = threadIdx.x % 32, gamma = scan.gamma;
  const int32_t* draft = scan.draft_tokens + row * gamma;
  const int32_t* target = scan.target_tokens + row * (gamma + 1);
  int32_t next = target[gamma];
  int accepted = gamma;
  for (int start = 0; start < gamma; start += kChunks * 32) {
    int32_t drafted[kChunks], expected[kChunks];
#pragma unroll
    for (int c = 0; c < kChunks; ++c) {
      const int at = start + c * 32 + lane;
      drafted[c] = at < gamma ? draft[at] : 0;
      expected[c] = at < gamma ? target[at] : 0;
    }
    int first = gamma;
#pragma unroll
    for (int c = kChunks - 1; c >= 0; --c) {
      const unsigned differs = __ballot_sync(kAllLanes, drafted[c] != expected[c]);
      if (differs) first = start + c * 32 + __ffs(differs) - 1;
    }
    accepted = min(accepted, first);
#pragma unroll
    for (int c = 0; c < kChunks; ++c) {
      if (start + c * 32 + lane == accepted && accepted < gamma) next = expected[c];
    }
  }
  if (lane == accepted % 32) {
    scan.accepted[row] = accepted;
    scan.mismatch[row] = accepted < gamma;
    scan.next_token[row] = next;
  }
}

__global__ void scan_naive_kernel(const Scan scan) {
  const int64_t row = int64_t(blockIdx.x) * blockDim.x + threadIdx.x;
  if (row < scan.batch) scan_row(scan, row);
}

}  // namespace

const char* verify_ballot(const Greedy& greedy, int warps, Stream stream) {
  const unsigned blocks = (greedy.batch + warps - 1) / warps;
  return for_greedy(greedy, [&](auto token, auto chunks) {
    return launch_behind(ballot_kernel<decltype(token), chunks.value>, blocks, warps * 32, 0,
                         false, stream, greedy);
  });
}

const char* scan_ballot(const Scan& scan, int warps, Stream stream) {
  const int blocks = (scan.batch + warps - 1) / warps;
  return launch_behind(scan_ballot_kernel, blocks, warps * 32, 0, false, stream, scan);
}

const char* scan_naive(const Scan& scan, int warps, Stream stream) {
  const int threads = warps * 32;
  const int blocks = (scan.batch + threads - 1) / threads;
  return launch_behind(scan_naive_kernel, blocks, threads, 0, false, stream, scan);
}

}  // namespace jspec
