// Rows of columns that lie in pinned memory of the host: a GPU reads and writes them in place, over
// the bus, by the address that the driver maps them to.
#include <cuda_runtime.h>

#include <algorithm>
#include <mutex>
#include <unordered_map>

#include "common/copy.cuh"
#include "common/warp.cuh"
#include "host/rows.h"

namespace jspec {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;
constexpr int kMostBlocks = 4096;
// Of what is fetched while other kernels run: enough loads in flight to fill the bus, and few
// enough warps to leave the multiprocessors to the others.
constexpr int kAheadBlocks = 64;

// The place of `slot` among the ascending slots of a row that are there, -1 if it is not one of
// them. The lanes of a warp probe together: two rounds for up to 1024 slots.
__device__ int64_t place_of(const There& there, int64_t group, int32_t slot, int lane) {
  if (!there.slots) return -1;
  const int64_t count = there.count;
  const int32_t* slots = there.slots + group * count;
  int64_t low = 0, end = count;
  while (low < end) {
    const int64_t step = (end - low + 31) / 32;
    const int64_t at = low + (lane + 1) * step - 1;  // the last of this lane's share
    // As unsigned numbers -1 comes behind all slots.
    const bool before = at < end && uint32_t(slots[at]) < uint32_t(slot);
    low += __popc(__ballot_sync(kAllLanes, before)) * step;
    if (step == 1) break;
    end = min(low + step, end);
  }
  return low < count && slots[low] == slot ? low : -1;
}

// A warp a row; of two columns each half of a warp has its own.
__global__ void __launch_bounds__(kThreads) fetch_kernel(const Fetch fetch, const int2 access) {
  const int lane = threadIdx.x % 32;
  const int share = 32 / fetch.columns, c = lane / share;
  const int64_t bytes = fetch.bytes[c], rows = fetch.batch * fetch.heads * fetch.wanted;
  for (int64_t row = int64_t(blockIdx.x) * kWarps + threadIdx.x / 32; row < rows;
       row += int64_t(gridDim.x) * kWarps) {
    const int64_t group = row / fetch.wanted, i = row % fetch.wanted;
    const int64_t b = group / fetch.heads, head = group % fetch.heads;
    const int32_t slot = fetch.wanted_slots[row];
    char* to = fetch.rows[c] + ((b * fetch.wanted + i) * fetch.heads + head) * bytes;
    const char* from = nullptr;
    int64_t count = fetch.slots, place = slot;
    if (slot >= 0 && slot < fetch.slots) {
      from = fetch.column[c];
      if (const int64_t near = place_of(fetch.near, group, slot, lane); near >= 0) {
        from = fetch.near.rows[c], count = fetch.near.count, place = near;
      } else if (const int64_t ahead = place_of(fetch.ahead, group, slot, lane); ahead >= 0) {
        from = fetch.ahead.rows[c], count = fetch.ahead.count, place = ahead;
      }
    }
    if (!from) {
      for (int64_t at = lane % share; at < bytes; at += share) to[at] = 0;
      continue;
    }
    from += ((b * count + place) * fetch.heads + head) * bytes;
    copy(from, to, bytes, c ? access.y : access.x, lane % share, share);
  }
}

__global__ void __launch_bounds__(kThreads) store_kernel(const Store store, const int2 access) {
  const int lane = threadIdx.x % 32;
  const int64_t tokens = store.batch * store.tokens, count = tokens * store.columns;
  for (int64_t at = int64_t(blockIdx.x) * kWarps + threadIdx.x / 32; at < count;
       at += int64_t(gridDim.x) * kWarps) {
    const int c = static_cast<int>(at / tokens);
    const int64_t token = at % tokens, bytes = store.bytes[c];
    const int32_t slot = store.into[token];
    if (slot < 0 || slot >= store.slots) continue;
    char* to = store.column[c] + (token / store.tokens * store.slots + slot) * bytes;
    copy(store.rows[c] + token * bytes, to, bytes, c ? access.y : access.x, lane, 32);
  }
}

// The stream of a device on which rows are fetched ahead, and the events between it and another.
struct Side {
  cudaStream_t stream = nullptr;
  cudaEvent_t asked = nullptr, arrived = nullptr;
};

const char* message(cudaError_t error) {
  return error == cudaSuccess ? nullptr : cudaGetErrorString(error);
}

// That of the current device, made when first asked; null and the reason where it cannot be made.
Side* side_of_device(const char*& error) {
  static std::mutex mutex;
  static auto* sides = new std::unordered_map<int, Side>();  // never freed: CUDA may be gone first
  int device = 0;
  if ((error = message(cudaGetDevice(&device)))) return nullptr;
  const std::lock_guard<std::mutex> lock(mutex);
  Side& side = (*sides)[device];
  if (side.arrived) return &side;
  int least = 0, greatest = 0;
  if ((error = message(cudaDeviceGetStreamPriorityRange(&least, &greatest)))) return nullptr;
  // Before other kernels' blocks: these are few, and wait for the bus most of the time.
  if (!side.stream && (error = message(cudaStreamCreateWithPriority(
                           &side.stream, cudaStreamNonBlocking, greatest)))) {
    return nullptr;
  }
  if (!side.asked &&
      (error = message(cudaEventCreateWithFlags(&side.asked, cudaEventDisableTiming)))) {
    return nullptr;
  }
  error = message(cudaEventCreateWithFlags(&side.arrived, cudaEventDisableTiming));
  return error ? nullptr : &side;
}

// The address at which a GPU reads and writes `pointer`.
template <typename Pointer>
const char* map(Pointer& pointer) {
  cudaPointerAttributes found;
  if (const char* error = message(cudaPointerGetAttributes(&found, pointer))) return error;
  if (!found.devicePointer) return "a column lies in memory that the GPU cannot address";
  pointer = static_cast<Pointer>(found.devicePointer);
  return nullptr;
}

const char* launch(Fetch fetch, int most_blocks, cudaStream_t stream) {
  for (int c = 0; c < fetch.columns; ++c) {
    if (const char* error = map(fetch.column[c])) return error;
  }
  int access[kMostColumns] = {1, 1};
  for (int c = 0; c < fetch.columns; ++c) {
    access[c] = access_bytes(fetch.column[c], fetch.rows[c], fetch.bytes[c]);
    for (const There& there : {fetch.near, fetch.ahead}) {
      if (!there.rows[c]) continue;
      access[c] = std::min(access[c], access_bytes(there.rows[c], fetch.rows[c], fetch.bytes[c]));
    }
  }
  const int64_t rows = fetch.batch * fetch.heads * fetch.wanted;
  if (!rows) return nullptr;
  const int64_t blocks = std::min<int64_t>((rows + kWarps - 1) / kWarps, most_blocks);
  fetch_kernel<<<blocks, kThreads, 0, stream>>>(fetch, int2{access[0], access[1]});
  return launch_error();
}

}  // namespace

const char* fetch_rows(const Fetch& fetch, Stream stream) {
  if (fetch.ahead.slots) {
    const char* error = nullptr;
    Side* side = side_of_device(error);
    if (!side) return error;
    // What another thread records in between comes later on the same stream.
    if ((error = message(cudaStreamWaitEvent(stream, side->arrived, 0)))) return error;
  }
  return launch(fetch, kMostBlocks, stream);
}

const char* fetch_ahead(const Fetch& fetch, Stream stream) {
  const char* error = nullptr;
  Side* side = side_of_device(error);
  if (!side) return error;
  if ((error = message(cudaEventRecord(side->asked, stream)))) return error;
  if ((error = message(cudaStreamWaitEvent(side->stream, side->asked, 0)))) return error;
  if ((error = launch(fetch, kAheadBlocks, side->stream))) return error;
  return message(cudaEventRecord(side->arrived, side->stream));
}

const char* store_rows(const Store& given, Stream stream) {
  Store store = given;
  int access[kMostColumns] = {1, 1};
  for (int c = 0; c < store.columns; ++c) {
    if (const char* error = map(store.column[c])) return error;
    access[c] = access_bytes(store.rows[c], store.column[c], store.bytes[c]);
  }
  const int64_t count = store.batch * store.tokens * store.columns;
  if (!count) return nullptr;
  const int64_t blocks = std::min<int64_t>((count + kWarps - 1) / kWarps, kMostBlocks);
  store_kernel<<<blocks, kThreads, 0, stream>>>(store, int2{access[0], access[1]});
  return launch_error();
}

}  // namespace jspec
