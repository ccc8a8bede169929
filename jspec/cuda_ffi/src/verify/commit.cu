// Greedy verification with the bookkeeping of a step on a GPU: a block a row, whose warps find the
// target's tokens, and whose first warp then verifies by ballots. Of large vocabularies a kernel
// ahead finds the largest logit of each part of a position, a warp a part.
#include "common/dependent.cuh"
#include "verify/ballot.cuh"
#include "verify/commit.h"

namespace jspec {
namespace {

__device__ __forceinline__ float logit_of(float logit) { return logit; }
__device__ __forceinline__ float logit_of(uint16_t bits) {
  return __uint_as_float(uint32_t(bits) << 16);
}

// The largest of all lanes' logits, the lowest token of equal ones.
__device__ __forceinline__ Largest largest_of_warp(Largest mine) {
#pragma unroll
  for (int step = 16; step > 0; step /= 2) {
    const float top = __shfl_xor_sync(kAllLanes, mine.top, step);
    const int32_t token = __shfl_xor_sync(kAllLanes, mine.token, step);
    if (top > mine.top || (top == mine.top && token < mine.token)) {
      mine.top = top;
      mine.token = token;
    }
  }
  return mine;
}

// The largest of the logits [begin, end) of a position, of which there is one at least, by a warp.
// A bfloat16 logit is its bits.
template <typename Logit>
__device__ Largest largest_logit(const Logit* logits, int32_t begin, int32_t end) {
  constexpr int kVector = 16 / sizeof(Logit), kLoads = 8;
  const int lane = threadIdx.x % 32;
  Largest largest(begin);
  int32_t vectors = 0;  // that lie on 16 bytes
  if (reinterpret_cast<uintptr_t>(logits + begin) % 16 == 0) vectors = (end - begin) / kVector;
  const uint4* aligned = reinterpret_cast<const uint4*>(logits + begin);
  for (int32_t first = lane; first < vectors; first += kLoads * 32) {
    // All loads are on their way before the first is waited for.
    uint4 loaded[kLoads];
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      if (first + i * 32 < vectors) loaded[i] = __ldg(aligned + first + i * 32);
    }
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      if (first + i * 32 >= vectors) break;
      const uint32_t words[] = {loaded[i].x, loaded[i].y, loaded[i].z, loaded[i].w};
      const int32_t token = begin + (first + i * 32) * kVector;
#pragma unroll
      for (int j = 0; j < kVector; ++j) {
        const float logit = sizeof(Logit) == 4
                                ? __uint_as_float(words[j * sizeof(Logit) / 4])
                                : logit_of(uint16_t(words[j / 2] >> j % 2 * 16));
        largest.take(logit, token + j);
      }
    }
  }
#pragma unroll 4
  for (int32_t token = begin + vectors * kVector + lane; token < end; token += 32) {
    largest.take(logit_of(logits[token]), token);
  }
  return largest_of_warp(largest);
}

template <typename Logit>
__global__ void parts_kernel(const Commit commit) {
  let_next_start();
  const int warps = blockDim.x / 32, blocks = (commit.parts + warps - 1) / warps;  // of a position
  const int64_t position = blockIdx.x / blocks;
  const int part = blockIdx.x % blocks * warps + threadIdx.x / 32;
  if (part >= commit.parts) return;
  const Logit* logits = static_cast<const Logit*>(commit.logits) + position * commit.vocabulary;
  const int32_t begin = part * commit.part;
  const Largest largest =
      largest_logit(logits, begin, min(begin + commit.part, commit.vocabulary));
  if (threadIdx.x % 32 == 0) {
    commit.tops[position * commit.parts + part] = largest.top;
    commit.firsts[position * commit.parts + part] = largest.token;
  }
}

// The target's token at a position, by a warp.
template <typename Logit>
__device__ int32_t target_token(const Commit& commit, int64_t position) {
  if (!commit.parts) {
    const Logit* logits = static_cast<const Logit*>(commit.logits) + position * commit.vocabulary;
    return largest_logit(logits, 0, commit.vocabulary).token;
  }
  const float* tops = commit.tops + position * commit.parts;
  const int32_t* firsts = commit.firsts + position * commit.parts;
  Largest largest(0);
#pragma unroll 4
  for (int part = threadIdx.x % 32; part < commit.parts; part += 32) {
    largest.take(tops[part], firsts[part]);
  }
  return largest_of_warp(largest).token;
}

template <typename Logit, int chunks>
__global__ void commit_kernel(const Commit commit) {
  extern __shared__ char memory[];
  Ended* ended = reinterpret_cast<Ended*>(memory);
  int32_t* target = reinterpret_cast<int32_t*>(ended + 1);  // [gamma + 1]
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int64_t row = blockIdx.x;
  const int32_t positions = commit.greedy.gamma + 1;
  const int32_t cached = commit.cached[row];
  const bool done = commit.done[row];
  wait_for_kernels_ahead();
  for (int32_t at = warp; at < positions; at += blockDim.x / 32) {
    const int32_t token = target_token<Logit>(commit, row * positions + at);
    if (lane == 0) target[at] = token;
  }
  __syncthreads();
  if (warp > 0) return;
  verify_warp<int32_t, chunks>(
      row_alone(commit.greedy, row, target), 0,
      [&](int accepted, int committed, bool stopped) { *ended = {accepted, committed, stopped}; });
  __syncwarp();
  commit_row(commit, row, target, *ended, cached, done, lane, 32);
}

template <typename Logit>
const char* launch(const Commit& commit, int warps, Stream stream) {
  const int64_t batch = commit.greedy.batch, positions = commit.greedy.gamma + 1;
  if (commit.parts) {
    const int64_t blocks = batch * positions * ((commit.parts + warps - 1) / warps);
    const char* error =
        launch_behind(parts_kernel<Logit>, blocks, warps * 32, 0, false, stream, commit);
    if (error) return error;
  }
  return for_greedy(commit.greedy, [&](auto, auto chunks) {
    return launch_behind(commit_kernel<Logit, chunks.value>, batch, warps * 32,
                         sizeof(Ended) + positions * 4, commit.parts > 0, stream, commit);
  });
}

}  // namespace

const char* verify_and_commit(const Commit& commit, int warps, Stream stream) {
  return commit.bfloat16 ? launch<uint16_t>(commit, warps, stream)
                         : launch<float>(commit, warps, stream);
}

}  // namespace jspec
