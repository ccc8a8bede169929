// What kernels of attention over selected slots share: a part of a list, and its keys and values on
// their way into shared memory.
#pragma once

#include "attention/softmax.cuh"
#include "common/dependent.cuh"
#include "gathered/gathered.h"

namespace jspec {
namespace {

constexpr int kTile = 16;  // slots
constexpr int kLoads = 4;  // of slots by a thread at once

// Bytes of keys and values of a tile. A slot's row has units of 16 bytes, of which unit u of row r
// is stored as unit u ^ r % 8, so that eight rows of a unit are in different banks.
template <int kChannels>
constexpr int kTileBytes = 2 * kTile * kChannels * 2;

template <int kChannels>
JSPEC_HOST_DEVICE constexpr int place_of(int row, int unit) {
  return (row * (kChannels / 8) + (unit ^ row % 8)) * 16;
}

// How many tiles each of `parts` parts of a list has at most.
JSPEC_HOST_DEVICE inline int max_tiles(const Gathered& g, int parts) {
  const int tiles = (g.tail_count + g.selected_count + kTile - 1) / kTile;
  return (tiles + parts - 1) / parts;
}

// A part of a list, the tail first, which kThreads threads read: every `parts`-th tile. Its slots,
// and a ring of `g.stages` tiles of keys and values, are in shared memory.
//
// All that a block does before its first copy delays every one: hence so little arithmetic.
template <int kChannels, int kThreads>
struct Part {
  static constexpr int kUnits = kChannels / 8;
  static constexpr int kRows = kThreads / kUnits;  // that all threads copy at once
  const Gathered& g;
  const int thread, first, parts;  // first: the number of the part's first tile in the list
  const int slot_bytes;
  char* const ring;
  int* const listed;  // the slots of the part, -1 for none
  int entries;        // of the list: the slots of the tail, then those that were selected
  const char *keys, *values;  // what this thread copies of the first slot
  int to;                     // where it puts that in a tile
  // The tile that is copied next: its number in the list, its slots, and its place in the ring.
  int next, next_listed = 0, next_place = 0;
  int place = 0;  // of the tile that is read next

  // Part `part` of `parts`. Its slots are stored when the threads have met.
  __device__ __forceinline__ Part(const Gathered& g, int batch_row, int head, int part, int parts,
                                  char* ring, int* listed, int thread)
      : g(g),
        thread(thread),
        first(part),
        parts(parts),
        slot_bytes(g.kv_heads * kChannels * 2),
        ring(ring),
        listed(listed),
        next(part) {
    const int64_t list = int64_t(batch_row) * g.lists + (g.lists > 1 ? head : 0);
    const int count = g.counts ? min(max(g.counts[list], 0), g.selected_count) : g.selected_count;
    entries = g.tail_count + count;
    const int32_t* tail = g.tail + int64_t(batch_row) * g.tail_count;
    const int64_t offset = list * g.selected_count - g.tail_count;
    const auto slot_at = [&](int entry) {
      if (entry < g.tail_count) return __ldg(tail + entry);
      return g.selected ? __ldg(g.selected + offset + entry) : entry - g.tail_count;
    };
    // A few loads at once: none waits for another.
#pragma unroll 1
    for (int at = thread, entry = first_entry(); entry < end();) {
      int slots[kLoads];
#pragma unroll
      for (int i = 0; i < kLoads; ++i) {
        const int there = entry + i * parts * kThreads;
        slots[i] = there < entries ? slot_at(there) : -1;
      }
#pragma unroll
      for (int i = 0; i < kLoads; ++i, at += kThreads, entry += parts * kThreads) {
        if (entry < end()) listed[at] = slots[i];
      }
    }
    const int row = thread / kUnits, unit = thread % kUnits;
    to = place_of<kChannels>(row, unit);
    const int64_t from =
        (int64_t(batch_row) * g.slots * g.kv_heads + head) * (kChannels * 2) + unit * 16;
    keys = reinterpret_cast<const char*>(g.k) + from;
    values = reinterpret_cast<const char*>(g.v) + from;
  }

  // The number in the list of the first slot that this thread stores; the next one is the slot
  // `parts` * kThreads further on.
  __device__ __forceinline__ int first_entry() const {
    return (first + thread / kTile * parts) * kTile + thread % kTile;
  }

  // Of the entries, in whole tiles.
  __device__ __forceinline__ int end() const { return (entries + kTile - 1) / kTile * kTile; }

  // The position of slot `at` of the part, number `entry` of the list: 0 for one that all queries
  // read, the highest for none. `context_len`: the position of the first slot of the tail.
  __device__ __forceinline__ int position_at(int at, int entry, int context_len) const {
    if (listed[at] < 0) return INT32_MAX;
    return entry < g.tail_count ? context_len + entry : 0;
  }

  // Whether some of the part's slots are the tail's.
  __device__ __forceinline__ bool has_tail() const { return first * kTile < g.tail_count; }

  // Drops the slots that no query up to position `newest` reads: such a slot may hold anything, and
  // 0 * NaN is NaN. Each thread drops those that it stored.
  __device__ __forceinline__ void drop_after(int newest, int context_len) {
#pragma unroll 1
    for (int at = thread, entry = first_entry(); entry < end();
         at += kThreads, entry += parts * kThreads) {
      if (position_at(at, entry, context_len) > newest) listed[at] = -1;
    }
  }

  __device__ __forceinline__ void copy_next() {
    if (next * kTile < entries) {
      char* const tile = ring + next_place * kTileBytes<kChannels>;
      const int* const slots = listed + next_listed + thread / kUnits;
#pragma unroll
      for (int i = 0; i < kTile / kRows; ++i) {
        // Row i * kRows after the thread's first: its units are swapped as place_of() says.
        char* const row = tile + (to ^ i * kRows % 8 * 16) + i * kRows * kUnits * 16;
        const int slot = slots[i * kRows];
        const uint64_t from = uint64_t(unsigned(max(slot, 0))) * unsigned(slot_bytes);
        copy_async(row, keys + from, slot >= 0);
        copy_async(row + kTileBytes<kChannels> / 2, values + from, slot >= 0);
      }
    }
    commit_copies();  // of nothing too, so that the number of groups does not depend on the list
    next += parts;
    next_listed += kTile;
    next_place = next_place + 1 == g.stages ? 0 : next_place + 1;
  }

  // Fills the ring but for one tile.
  __device__ __forceinline__ void begin_copies() {
#pragma unroll 1
    for (int i = 0; i + 1 < g.stages; ++i) copy_next();
  }

  // The tile that is read next: its keys, then its values.
  __device__ __forceinline__ char* read_next() {
    char* const tile = ring + place * kTileBytes<kChannels>;
    place = place + 1 == g.stages ? 0 : place + 1;
    return tile;
  }
};

// The shared memory that a block may have.
inline int shared_limit() { return device_attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin); }

// Launches blocks of so many bytes of shared memory, of which a multiprocessor has room for
// several: the L1 cache has nothing to hold. `cluster`: blocks of a cluster, which differ in x.
template <typename... Parameters>
const char* launch_with_rings(void (*kernel)(Parameters...), int cluster, dim3 blocks, int threads,
                              int bytes, Stream stream, const Parameters&... arguments) {
  cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout,
                       cudaSharedmemCarveoutMaxShared);
  return launch_clusters(kernel, cluster, blocks, threads, bytes, false, stream, arguments...);
}

}  // namespace
}  // namespace jspec
