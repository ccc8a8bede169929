// The kernels of a selection. Rows of many chunks: `count_kernel` leaves a histogram of the first
// digit for each chunk; `place_kernel` finds the digit that the row needs and writes the slots, or
// for keys of several digits a list of what may be taken; `finish_kernel` takes the slots out of the
// list, of which each block of a cluster has a share. Rows of one chunk: `row_kernel` does all of it.
#pragma once

#include "common/dependent.cuh"
#include "select/cluster.cuh"

namespace jspec {

// Blocks of a multiprocessor: a thread holds up to 32 words of keys.
constexpr int kBlocks = 2;

// What the kernels are given. Rows of scores are `stride` elements apart.
struct Work {
  const void* scores;
  int64_t stride;
  bool aligned;  // every row begins at a multiple of 16 bytes
  Rows rows;
  Plan plan;
  Cut cut;
  uint32_t* workspace;
};

// Shared memory of `count_kernel`.
struct Counting {
  __align__(16) uint32_t counters[kMostBins];
  uint32_t totals[64];
};

// Shared memory of `place_kernel`.
struct Placing {
  Finding finding;
  uint32_t sums[2 * kWarps];
};

// A row as its blocks see it: what it takes, and which of its chunks hold slots whose scores count.
template <typename Key>
struct Row {
  using Type = typename Key::Type;

  const Work& work;
  int64_t row;
  Taken taken;
  int begin, end;
  const Type* scores;
  uint32_t* workspace;

  __device__ __forceinline__ Row(const Work& work, int64_t row)
      : work(work), row(row), taken(taken_of(work.rows, row)),
        begin(taken.low / work.cut.counted),
        end((taken.high + work.cut.counted - 1) / work.cut.counted),
        scores(static_cast<const Type*>(work.scores) + row * work.stride),
        workspace(work.workspace + row * work.plan.words) {}

  __device__ __forceinline__ uint16_t* record(int chunk) const {
    return reinterpret_cast<uint16_t*>(workspace + work.plan.records +
                                       chunk * work.plan.record_words());
  }

  // The slots whose first digit is at least the one that was found, ascending, and their keys.
  __device__ __forceinline__ int32_t* list() const {
    return reinterpret_cast<int32_t*>(workspace + work.plan.list);
  }
  __device__ __forceinline__ uint32_t* listed_keys() const {
    return workspace + work.plan.list + work.plan.listed;
  }

  __device__ __forceinline__ Found* found() const {
    return reinterpret_cast<Found*>(workspace + work.plan.found);
  }

  __device__ __forceinline__ int32_t* slots() const {
    return work.rows.slots + row * work.rows.k + taken.first;
  }

  // The tile from slot `first` on, of a chunk of `length` slots, its keys on their way.
  __device__ __forceinline__ Held<Key> tile(int first, int length) const {
    Held<Key> own{{first, min(length, kTile), taken.low, taken.high}};
    own.load(scores, work.aligned);
    return own;
  }

  // Adds the first digits of the `length` slots from `first` on to the counters, which are 0.
  __device__ __forceinline__ void count(Key key, int first, int length,
                                        uint32_t* counters) const {
    const int shift = work.plan.digits.shift[0];
    for (int at = 0; at < length && first + at < taken.high; at += kTile) {
      const Held<Key> held = tile(first + at, length);
      if (at == 0) __syncthreads();  // the counters are clear
      held.items.each([&](int i) { atomicAdd(counters + (key(held.raw[i]) >> shift), 1); });
    }
    __syncthreads();
  }

  // Writes the slots that are taken whatever their scores, and what lies behind the last one.
  __device__ __forceinline__ void write_forced() const {
    int32_t* slots = work.rows.slots + row * work.rows.k;
    for (int i = threadIdx.x; i < work.rows.k; i += kThreads) {
      const int behind = i - taken.first - taken.need;
      if (i < taken.first) slots[i] = i;
      if (behind >= 0) slots[i] = behind < taken.last ? taken.high + behind : -1;
    }
  }

  // Takes what is over `threshold`, and the first `need` at it, of the items of a tile, whose keys are
  // `key_of(i)`, and the slot of the item at a place `slot_at(place)`; `before` says what lies before
  // the tile. Returns what lies before the next.
  template <int V, typename KeyOf, typename SlotAt>
  __device__ __forceinline__ Before take(const Items<V>& items, uint32_t threshold, int need,
                                         Before before, uint32_t* sums, KeyOf key_of,
                                         SlotAt slot_at) const {
    uint32_t over = 0, ties = 0;
    items.each([&](int i) {
      const uint32_t own = key_of(i);
      if (own > threshold) over |= 1u << i;
      if (own == threshold) ties |= 1u << i;
    });
    int32_t* slots = this->slots();
    return before + in_order<V>(over, ties, sums, [&](int offset, Before own, bool tied) {
             own = before + own;
             if (!tied || own.at < need) {
               slots[own.over + min(own.at, need)] = slot_at(items.base + offset);
             }
           });
  }

  // Writes the slots of a tile, or, for keys of several digits, those that reach the first digit into
  // the list.
  __device__ __forceinline__ Before place(Key key, const Held<Key>& held, const Found& found,
                                          Before before, uint32_t* sums) const {
    const int shift = work.plan.digits.shift[0];
    if constexpr (!Key::kSeveral) {
      return take(
          held.items, found.digit, found.need, before, sums,
          [&](int i) { return key(held.raw[i]); }, [&](int at) { return at; });
    } else {
      uint32_t reaching = 0;
      held.items.each([&](int i) {
        if (int(key(held.raw[i]) >> shift) >= found.digit) reaching |= 1u << i;
      });
      int32_t* list = this->list();
      uint32_t* keys = this->listed_keys();
      return before + in_order<Held<Key>::V>(
                          reaching, 0, sums, [&](int offset, Before own, bool) {
                            const int at = before.over + own.over, slot = held.items.base + offset;
                            list[at] = slot;
                            keys[at] = key(scores[slot]);
                          });
    }
  }

  // Takes the slots out of a list of `length`, by the digits behind the first one, `first`. Each of
  // the `blocks` of a cluster has a share of the list. Called by all their threads once the list is
  // there.
  __device__ __forceinline__ void finish(int first, int length, int blocks, int block,
                                         ClusterShared& shared) const {
    const Digits& digits = work.plan.digits;
    const int32_t* list = this->list();
    const uint32_t* listed_keys = this->listed_keys();
    const int share = (length - 1) / blocks + 1;
    const int begin = min(block * share, length), end = min(begin + share, length);
    const bool is_held = end - begin <= kTile;
    uint32_t keys[kEach];
    const auto items_from = [&](int start) {
      return Items<4>(start, min(kTile, (end - start + 63) / 64 * 64), 0, end);
    };
    // No branch comes between the loads, so that all are on their way at once.
    const auto load = [&](const Items<4>& items) {
#pragma unroll
      for (int i = 0; i < kEach; ++i) keys[i] = listed_keys[min(items.at(i), length - 1)];
    };
    load(items_from(begin));
    uint32_t* counters = shared.counters + kMostBins;
    clear(counters, kLaterBins);
    clear(shared.totals[1], 2 * 64);
    __syncthreads();
    uint32_t threshold = first;  // the digits found, as the highest bits of a key
    int need = taken.need;
    Before before{0, 0};
    for (int level = 1; level < digits.levels; ++level) {
      const int shift = digits.shift[level], width = digits.shift[level - 1] - shift;
      const int bins = digits.bins[level] + (level == 1 ? 64 : 0);
      uint32_t higher = 0;  // slots of a higher first digit, which count behind the last one here
      for (int start = begin; start < end; start += kTile) {
        const Items<4> items = items_from(start);
        if (!is_held) load(items);
        items.each([&](int i) {
          const uint32_t known = keys[i] >> (shift + width);
          if (known == threshold) {
            atomicAdd(counters + (keys[i] >> shift & ((1u << width) - 1)), 1);
          } else if (known > threshold) {
            ++higher;
          }
        });
      }
      if (level == 1) {
        higher = __reduce_add_sync(kAllLanes, higher);
        if (threadIdx.x % 32 == 0) atomicAdd(counters + (1 << width), higher);
      }
      const Place place =
          find_in_cluster(shared, counters, level, bins, blocks, block, need);
      threshold = threshold << width | place.found.digit;
      need = place.found.need;
      before = {before.over + place.over, place.at};
      counters += bins;
    }
    for (int start = begin, at = 0; start < end; start += kTile, ++at) {
      const Items<4> items = items_from(start);
      if (!is_held) load(items);
      before = take(
          items, threshold, need, before, shared.sums + at % 2 * kWarps,
          [&](int i) { return keys[i]; }, [&](int at) { return list[at]; });
    }
    sync_cluster();  // no block ends while another reads its histograms
  }
};

template <typename Key>
__global__ void __launch_bounds__(kThreads, kBlocks)
    count_kernel(const __grid_constant__ Work work, Key key) {
  Counting& shared = shared_memory<Counting>();
  let_next_start();
  const int chunk = blockIdx.x % work.plan.chunks, bins = work.plan.digits.bins[0];
  const Row<Key> row(work, blockIdx.x / work.plan.chunks);
  if (row.taken.need == 0 || chunk < row.begin || chunk >= row.end) return;
  clear(shared.counters, bins);
  row.count(key, chunk * work.cut.counted, work.cut.counted, shared.counters);
  write_records(shared.counters, bins, 1, shared.totals, [&](int) { return row.record(chunk); });
}

// A block has `taken` slots, a multiple of a record's.
template <typename Key>
__global__ void __launch_bounds__(kThreads, kBlocks)
    place_kernel(const __grid_constant__ Work work, Key key, int blocks) {
  Placing& shared = shared_memory<Placing>();
  const int block = blockIdx.x % blocks, ratio = work.cut.taken / work.cut.counted;
  const Row<Key> row(work, blockIdx.x / blocks);
  const int chunk = block * ratio, first = block * work.cut.taken;
  let_next_start();
  if (block == 0) row.write_forced();
  const bool works = row.taken.need > 0 && first < row.taken.high && chunk + ratio > row.begin;
  Held<Key> held = row.tile(first, work.cut.taken);
  wait_for_kernels_ahead();
  if (!works) return;
  const Place place = find(row.record(0), work.plan.digits.bins[0], row.begin, row.end, chunk,
                           row.taken.need, shared.finding);
  Before before{place.over, place.at};
  if constexpr (Key::kSeveral) {
    before = {place.over + place.at, 0};
    if (threadIdx.x == 0 && chunk <= row.begin) *row.found() = place.found;
  }
  for (int at = 0;;) {
    before = row.place(key, held, place.found, before, shared.sums + at / kTile % 2 * kWarps);
    at += kTile;
    if (at >= work.cut.taken || first + at >= row.taken.high) break;
    held = row.tile(first + at, work.cut.taken);
  }
  if constexpr (Key::kSeveral) {
    // The block of the last slots knows the length of the list.
    if (threadIdx.x == 0 && first + work.cut.taken >= row.taken.high) {
      reinterpret_cast<int32_t*>(row.found() + 1)[0] = before.over;
    }
  }
}

// The `blocks` of a cluster share a row's list.
template <typename Key>
__global__ void __launch_bounds__(kThreads, 1)
    finish_kernel(const __grid_constant__ Work work, int blocks) {
  ClusterShared& shared = shared_memory<ClusterShared>();
  const Row<Key> row(work, blockIdx.x / blocks);
  wait_for_kernels_ahead();
  if (row.taken.need == 0) return;
  const int4 known = *reinterpret_cast<const int4*>(row.found());
  row.finish(known.x, known.w, blocks, blockIdx.x % blocks, shared);
}

template <typename Key>
__global__ void __launch_bounds__(kThreads, kBlocks)
    row_kernel(const __grid_constant__ Work work, Key key) {
  ClusterShared& shared = shared_memory<ClusterShared>();
  const Row<Key> row(work, blockIdx.x);
  const int bins = work.plan.digits.bins[0], length = work.cut.counted;
  row.write_forced();
  if (row.taken.need == 0) return;
  clear(shared.counters, bins);
  const int first = row.taken.low / kTile * kTile;
  row.count(key, first, length - first, shared.counters);
  const Found found =
      find(shared.counters, bins, row.taken.need, shared.totals[0], shared.place.found);
  Before before{0, 0};
  for (int at = first; at < row.taken.high; at += kTile) {
    const Held<Key> held = row.tile(at, length);
    before = row.place(key, held, found, before, shared.sums + at / kTile % 2 * kWarps);
  }
  if constexpr (Key::kSeveral) {
    __syncthreads();  // the list is there
    row.finish(found.digit, before.over, 1, 0, shared);
  }
}

// Launches what follows the records, each kernel before the one ahead has ended.
template <typename Key>
const char* place(const Work& work, Key key, Stream stream) {
  const int each = work.rows.n > 0 ? (work.rows.n - 1) / work.cut.taken + 1 : 1;
  const char* error = launch_behind(place_kernel<Key>, work.rows.rows * each, kThreads,
                                    sizeof(Placing), true, stream, work, key, each);
  if constexpr (Key::kSeveral) {
    if (error != nullptr) return error;
    const int64_t rows = work.rows.rows, processors = is_hopper_or_newer() ? multiprocessors() : 0;
    int blocks = 1;  // of a cluster; more of them than are at once would not be faster
    while (blocks < kMaxClusterBlocks && 2 * blocks * rows <= processors) blocks *= 2;
    error = launch_clusters(finish_kernel<Key>, blocks, rows * blocks, kThreads,
                            sizeof(ClusterShared), true, stream, work, blocks);
  }
  return error;
}

}  // namespace jspec
