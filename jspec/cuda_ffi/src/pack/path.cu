// Packing of a path on a GPU: a block a row of a column.
#include <algorithm>

#include "common/copy.cuh"
#include "common/dependent.cuh"
#include "pack/path.h"

namespace jspec {
namespace {

constexpr int kPathThreads = 128;
constexpr int kMostBlocks = 65536;
constexpr int kTogether = 8;  // loads of a thread in flight

// A thread moves the same bytes of all entries. It stores only what it has loaded itself, so no
// thread waits for another; and no entry is the source of a move after the one that overwrote it.
template <typename Access>
__device__ void move_entries(char* entries, int bytes, const int32_t* source,
                             const int32_t* target, int count) {
  const int size = bytes / static_cast<int>(sizeof(Access));
  Access* all = reinterpret_cast<Access*>(entries);
  for (int at = threadIdx.x; at < size; at += kPathThreads) {
    for (int first = 0; first < count; first += kTogether) {
      Access loaded[kTogether];
#pragma unroll
      for (int i = 0; i < kTogether; ++i) {
        const int move = first + i;
        if (move < count && source[move] != target[move]) {
          loaded[i] = all[int64_t(source[move]) * size + at];
        }
      }
#pragma unroll
      for (int i = 0; i < kTogether; ++i) {
        const int move = first + i;
        if (move < count && source[move] != target[move]) {
          all[int64_t(target[move]) * size + at] = loaded[i];
        }
      }
    }
  }
}

__global__ void __launch_bounds__(kPathThreads) path_kernel(const __grid_constant__ Path path) {
  for (int64_t at = blockIdx.x; at < path.batch * path.columns; at += gridDim.x) {
    const PathColumn column = path.column[at % path.columns];
    const int64_t row = at / path.columns;
    const int count = min(max(path.counts[row], 0), path.moves);
    const int32_t* source = path.source + row * path.moves;
    const int32_t* target = path.target + row * path.moves;
    char* entries = column.entries + row * path.slots * column.bytes;
    switch (column.access) {
      case 16: move_entries<uint4>(entries, column.bytes, source, target, count); break;
      case 8: move_entries<uint2>(entries, column.bytes, source, target, count); break;
      case 4: move_entries<uint32_t>(entries, column.bytes, source, target, count); break;
      case 2: move_entries<uint16_t>(entries, column.bytes, source, target, count); break;
      default: move_entries<uint8_t>(entries, column.bytes, source, target, count);
    }
  }
}

}  // namespace

const char* pack_path(const Path& given, Stream stream) {
  Path path = given;
  for (int c = 0; c < path.columns; ++c) {
    PathColumn& column = path.column[c];
    column.access = access_bytes(column.entries, column.entries, column.bytes);
  }
  const int blocks = static_cast<int>(std::min<int64_t>(path.batch * path.columns, kMostBlocks));
  return launch_behind(path_kernel, blocks, kPathThreads, 0, false, stream, path);
}

}  // namespace jspec
