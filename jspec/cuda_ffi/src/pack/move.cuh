// The kernel that moves accepted KV rows, and what tells it where they go.
//
// A Place has `find(row)`: called by all threads of a block, it returns where the rows of `row` go
// and how many bytes; `record(row, target)` for the one thread that writes down what it returned;
// where it `verifies`, `verify(row)` for a warp; where it does not, `bytes(row)`, which are known.
#pragma once

#include "common/copy.cuh"
#include "pack/count.cuh"
#include "pack/kv.h"

namespace jspec {

struct Target {
  char* to;
  int64_t bytes;
  int offset, count;
};

// The sum of `before` over a block, and the `own` that one thread has found, to all threads.
__device__ inline int2 share(int before, int own) {
  __shared__ int sums[32], owns[32];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  before = __reduce_add_sync(kAllLanes, before);
  own = __reduce_add_sync(kAllLanes, own);
  if (lane == 0) {
    sums[warp] = before;
    owns[warp] = own;
  }
  __syncthreads();
  const bool some = lane < blockDim.x / 32;
  return {__reduce_add_sync(kAllLanes, some ? sums[lane] : 0),
          __reduce_add_sync(kAllLanes, some ? owns[lane] : 0)};
}

// A packed buffer: behind the rows before.
struct Packing {
  Pack pack;

  __device__ Target target(int offset, int count) const {
    return {pack.packed + offset * pack.row_bytes, count * pack.row_bytes, offset, count};
  }

  __device__ void record(int row, const Target& target) const {
    pack.offsets[row] = target.offset;
    if (row == pack.batch - 1) *pack.total = target.offset + target.count;
  }
};

// Packing by counts that an earlier kernel has left.
struct Given : Packing {
  static constexpr bool verifies = false;

  __device__ int count(int row) const { return max(0, min(pack.accepted[row], pack.gamma)); }

  __device__ int64_t bytes(int row) const { return count(row) * pack.row_bytes; }

  __device__ Target find(int row) const {
    int before = 0, own = 0;
    for (int r = threadIdx.x; r <= row; r += blockDim.x) (r < row ? before : own) += count(r);
    const int2 found = share(before, own);
    return target(found.x, found.y);
  }
};

// Packing where each block counts for itself what it must know, which suits few tokens.
template <typename Token, int chunks>
struct Counting : Packing {
  static constexpr bool verifies = true;
  Greedy greedy;

  __device__ void verify(int row) const { verify_warp<Token, chunks>(greedy, row, [](int, int, bool) {}); }

  __device__ Target find(int row) const {
    int before = 0, own = 0;
    count_rows<Token, chunks, 4>(greedy, 0, row + 1, threadIdx.x / 32, blockDim.x / 32,
                                 [&](int r, int count) { (r < row ? before : own) += count; });
    const int2 found = share(before, own);
    return target(found.x, found.y);
  }
};

// The first blocks of a Place that verifies do that, a warp a row. Each of the others moves one
// piece of what was accepted of one row, `capacity` bytes at most. With `eager` it loads the piece
// before it knows whether it was; where that is known, before it knows where it goes.
template <typename Place>
__global__ void __launch_bounds__(kMostThreads, 1)
    move_kernel(const Place place, const char* kv, int batch, int64_t capacity, bool eager,
                int pieces, int access) {
  const int warps = blockDim.x / 32;
  const int verifying = Place::verifies ? (batch + warps - 1) / warps : 0;
  const int block = blockIdx.x - verifying;
  if (block < 0) {
    if constexpr (Place::verifies) {
      const int row = blockIdx.x * warps + threadIdx.x / 32;
      if (row < batch) place.verify(row);
    }
  } else {
    const int row = block / pieces, piece = block % pieces;
    const int64_t start = piece * Piece::bytes(blockDim.x);
    const char* from = kv + row * capacity + start;
    int64_t most = capacity;
    bool early = eager;
    if constexpr (!Place::verifies) {
      if (!eager) most = place.bytes(row);
      if (piece > 0 && start >= most) return;
      early = access == 16;
    }
    Piece held;
    if (early) held.load(from, most - start);
    const Target target = place.find(row);
    if (access == 16) {
      if (!early) held.load(from, target.bytes - start);
      held.store(target.to + start, target.bytes - start);
    } else {
      const int64_t bytes = min(Piece::bytes(blockDim.x), target.bytes - start);
      copy(from, target.to + start, bytes, access, threadIdx.x, blockDim.x);
    }
    if (piece == 0 && threadIdx.x == 0) place.record(row, target);
  }
}

// Launches the kernel over `batch` rows of up to `capacity` bytes.
template <typename Place>
const char* launch_move(const Place& place, const char* kv, const void* to, int64_t batch,
                        int64_t capacity, int64_t row_bytes, const Cut& cut, Stream stream) {
  const int access = access_bytes(kv, to, row_bytes);
  const int64_t bytes = Piece::bytes(cut.threads);
  const int64_t pieces = capacity > bytes ? (capacity + bytes - 1) / bytes : 1;
  const int warps = cut.threads / 32;
  const int64_t blocks = batch * pieces + (Place::verifies ? (batch + warps - 1) / warps : 0);
  if (blocks > INT32_MAX) return "KV rows of more than 2^31 blocks: cut the batch";
  move_kernel<<<blocks, cut.threads, 0, stream>>>(place, kv, batch, capacity,
                                                  cut.eager && access == 16,
                                                  static_cast<int>(pieces), access);
  return launch_error();
}

}  // namespace jspec
