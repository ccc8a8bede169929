// Greedy verification on a GPU: a warp a sequence, or, as the baseline, a thread a sequence.
#include "verify/ballot.cuh"
#include "verify/row.h"

namespace jspec {
namespace {

template <typename Token, int chunks>
__global__ void ballot_kernel(const Greedy greedy) {
  const int row = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32;
  if (row < greedy.batch) verify_warp<Token, chunks>(greedy, row, [](int, int, bool) {});
}

template <typename Token>
__global__ void naive_kernel(const Greedy greedy) {
  const int64_t row = int64_t(blockIdx.x) * blockDim.x + threadIdx.x;
  if (row < greedy.batch) verify_row<Token>(greedy, row);
}

}  // namespace

const char* verify_ballot(const Greedy& greedy, int warps, Stream stream) {
  const unsigned blocks = (greedy.batch + warps - 1) / warps;
  return for_greedy(greedy, [&](auto token, auto chunks) {
    ballot_kernel<decltype(token), chunks.value><<<blocks, warps * 32, 0, stream>>>(greedy);
    return launch_error();
  });
}

const char* verify_naive(const Greedy& greedy, int warps, Stream stream) {
  const int threads = warps * 32;
  const unsigned blocks = (greedy.batch + threads - 1) / threads;
  if (greedy.wide) {
    naive_kernel<int64_t><<<blocks, threads, 0, stream>>>(greedy);
  } else {
    naive_kernel<int32_t><<<blocks, threads, 0, stream>>>(greedy);
  }
  return launch_error();
}

}  // namespace jspec
