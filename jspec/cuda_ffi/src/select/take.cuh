// The kernels of a selection, level by level: a histogram of the first digit; the digit that the row
// needs, and a list of what reaches it with a histogram of the next; and the slots themselves.
#pragma once

#include <type_traits>

#include "select/chunk.cuh"

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

// A row as its blocks see it: what it takes, and which of its chunks hold slots with a score that
// counts.
struct Row {
  const Work& work;
  int64_t row;
  Taken taken;
  int begin, end;
  uint32_t* workspace;

  __device__ __forceinline__ Row(const Work& work, int64_t row)
      : work(work), row(row), taken(taken_of(work.rows, row)),
        begin(taken.low / work.cut.counted),
        end((taken.high + work.cut.counted - 1) / work.cut.counted),
        workspace(work.workspace + row * work.plan.words) {}

  template <typename Key>
  __device__ __forceinline__ const typename Key::Type* scores() const {
    return static_cast<const typename Key::Type*>(work.scores) + row * work.stride;
  }

  __device__ __forceinline__ uint16_t* record(int level, int chunk) const {
    const int64_t at = work.plan.records[level] + chunk * work.plan.record_words(level);
    return reinterpret_cast<uint16_t*>(workspace + at);
  }

  __device__ __forceinline__ uint16_t* list(int chunk) const {
    return reinterpret_cast<uint16_t*>(workspace + work.plan.lists) +
           int64_t(chunk) * work.cut.counted;
  }

  __device__ __forceinline__ Found* found(int level) const {
    return reinterpret_cast<Found*>(workspace + work.plan.found) + level;
  }

  // The digit of a level whose records are there. One block of the row keeps it for later kernels.
  __device__ __forceinline__ Found find_digit(int level, int chunk, Finding& shared) const {
    const int need = level == 0 ? taken.need : found(level - 1)->need;
    const Found own = find(record(level, 0), work.plan.digits.bins[level], begin, end, need, shared);
    if (chunk == begin && threadIdx.x == 0) *found(level) = own;
    return own;
  }

  // The digits down to `level`, whose own is `last`, as the highest bits of a key.
  __device__ __forceinline__ uint32_t prefix(int level, int32_t last) const {
    const Digits& digits = work.plan.digits;
    uint32_t key = 0;
    for (int i = 0; i < level; ++i) key |= uint32_t(found(i)->digit) << digits.shift[i];
    return (key | uint32_t(last) << digits.shift[level]) >> digits.shift[level];
  }

  // A chunk of `length` slots, its keys on their way.
  template <typename Key>
  __device__ __forceinline__ Held<Key> held(int chunk, int length) const {
    Held<Key> own;
    own.first = chunk * length;
    own.length = length;
    own.low = taken.low;
    own.high = taken.high;
    own.load(scores<Key>(), work.aligned);
    return own;
  }

  // The list of a chunk: its items are distances from the chunk's first slot.
  __device__ __forceinline__ Held<Uint16Key> listed(int chunk) const {
    const int bins = work.plan.digits.bins[0];
    Held<Uint16Key> own;
    own.first = own.low = 0;
    own.length = work.cut.counted;
    own.high = reaching(record(0, chunk), found(0)->digit, bins);
    own.load(list(chunk), true);
    return own;
  }
};

// Sets `count` counters of a block to 0.
__device__ __forceinline__ void clear(uint32_t* counters, int count) {
  for (int i = threadIdx.x; i < count; i += kThreads) counters[i] = 0;
}

// Level 0: a block a chunk.
template <typename Key>
__global__ void __launch_bounds__(kThreads, kBlocks)
    count_kernel(const __grid_constant__ Work work, Key key) {
  __shared__ __align__(16) uint32_t counters[kMostBins], totals[64];
  const int chunk = blockIdx.x % work.plan.chunks;
  const Row row(work, blockIdx.x / work.plan.chunks);
  if (row.taken.need == 0 || chunk < row.begin || chunk >= row.end) return;
  const Held<Key> held = row.held<Key>(chunk, work.cut.counted);
  const int bins = work.plan.digits.bins[0], shift = work.plan.digits.shift[0];
  clear(counters, bins);
  __syncthreads();
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    if (held.counts(i)) atomicAdd(counters + (key(held.raw[i]) >> shift), 1);
  }
  __syncthreads();
  write_records(counters, bins, 1, totals, [&](int) { return row.record(0, chunk); });
}

// The digit of level 0, the lists of what reaches it, and level 1 of what has it.
template <typename Key>
__global__ void __launch_bounds__(kThreads, kBlocks)
    narrow_kernel(const __grid_constant__ Work work, Key key) {
  __shared__ __align__(16) uint32_t counters[kMostBins], totals[64];
  __shared__ uint32_t sums[kWarps];
  __shared__ Finding finding;
  const int chunk = blockIdx.x % work.plan.chunks;
  const Row row(work, blockIdx.x / work.plan.chunks);
  if (row.taken.need == 0 || chunk < row.begin || chunk >= row.end) return;
  const Held<Key> held = row.held<Key>(chunk, work.cut.counted);
  const Digits& digits = work.plan.digits;
  const int bins = digits.bins[1], shift = digits.shift[1];
  const uint32_t mask = (1u << (digits.shift[0] - shift)) - 1;
  clear(counters, bins);
  const uint32_t digit = row.find_digit(0, chunk, finding).digit;
  uint32_t over = 0, ties = 0;
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    if (!held.counts(i)) continue;
    const uint32_t own = key(held.raw[i]), top = own >> digits.shift[0];
    over |= uint32_t(top > digit) << i;
    ties |= uint32_t(top == digit) << i;
    if (top == digit) atomicAdd(counters + (own >> shift & mask), 1);
  }
  uint16_t* list = row.list(chunk);
  in_order<Held<Key>::V>(over, ties, sums, [&](int i, Before before, bool) {
    list[before.over + before.at] = static_cast<uint16_t>(held.index(i));
  });
  __syncthreads();
  write_records(counters, bins, 1, totals, [&](int) { return row.record(1, chunk); });
}

// The digit of level 1, and level 2 of what has it.
template <typename Key>
__global__ void __launch_bounds__(kThreads, kBlocks)
    refine_kernel(const __grid_constant__ Work work, Key key) {
  __shared__ __align__(16) uint32_t counters[kMostBins], totals[64];
  __shared__ Finding finding;
  const int chunk = blockIdx.x % work.plan.chunks;
  const Row row(work, blockIdx.x / work.plan.chunks);
  if (row.taken.need == 0 || chunk < row.begin || chunk >= row.end) return;
  const Held<Uint16Key> listed = row.listed(chunk);
  const Digits& digits = work.plan.digits;
  const int bins = digits.bins[2];
  clear(counters, bins);
  const uint32_t prefix = row.prefix(1, row.find_digit(1, chunk, finding).digit);
  const typename Key::Type* scores = row.scores<Key>() + chunk * work.cut.counted;
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    if (!listed.counts(i)) continue;
    const uint32_t own = key(scores[listed.raw[i]]);
    if (own >> digits.shift[1] == prefix) {
      atomicAdd(counters + (own & ((1u << digits.shift[1]) - 1)), 1);
    }
  }
  __syncthreads();
  write_records(counters, bins, 1, totals, [&](int) { return row.record(2, chunk); });
}

// What the chunks of a row before `chunk` take. Called by all threads; `shared` is 0.
__device__ __forceinline__ Before before_chunk(const Row& row, int chunk, int32_t last, int* shared) {
  const Digits& digits = row.work.plan.digits;
  int over = 0, at = 0;
  for (int i = row.begin + threadIdx.x; i < chunk; i += kThreads) {
    for (int level = 0; level < digits.levels; ++level) {
      const bool is_last = level + 1 == digits.levels;
      const int digit = is_last ? last : row.found(level)->digit;
      const uint16_t* record = row.record(level, i);
      const int beyond = reaching(record, digit + 1, digits.bins[level]);
      over += beyond;
      if (is_last) at += record[digit] - beyond;
    }
  }
  over = __reduce_add_sync(kAllLanes, over);
  at = __reduce_add_sync(kAllLanes, at);
  if (threadIdx.x % 32 == 0 && (over || at)) {
    atomicAdd(shared, over);
    atomicAdd(shared + 1, at);
  }
  __syncthreads();
  return {shared[0], shared[1]};
}

// Writes the slots that are taken whatever their scores, and what lies behind the last one.
__device__ __forceinline__ void write_forced(const Row& row) {
  const Taken& taken = row.taken;
  const Rows& rows = row.work.rows;
  int32_t* slots = rows.slots + row.row * rows.k;
  for (int i = threadIdx.x; i < rows.k; i += kThreads) {
    const int behind = i - taken.first - taken.need;
    if (i < taken.first) slots[i] = i;
    if (behind >= 0) slots[i] = behind < taken.last ? taken.high + behind : -1;
  }
}

// The last digit, and the slots of a row in order: a block looks at `taken` slots, or at the list of
// a chunk.
template <typename Key, bool lists>
__global__ void __launch_bounds__(kThreads, kBlocks)
    take_kernel(const __grid_constant__ Work work, Key key, int chunks) {
  __shared__ uint32_t sums[kWarps];
  __shared__ int base[2];
  __shared__ Finding finding;
  const int chunk = blockIdx.x % chunks, ratio = work.cut.taken / work.cut.counted;
  const Row row(work, blockIdx.x / chunks);
  if (chunk == 0) write_forced(row);
  const int first = chunk * (lists ? 1 : ratio), last = first + (lists ? 1 : ratio);
  if (row.taken.need == 0 || last <= row.begin || first >= row.end) return;

  const int level = work.plan.digits.levels - 1;
  const int length = lists ? work.cut.counted : work.cut.taken;
  int32_t* slots = work.rows.slots + row.row * work.rows.k + row.taken.first;
  const auto take = [&](const auto& held, auto key_of, auto slot_of) {
    if (threadIdx.x < 2) base[threadIdx.x] = 0;
    const Found found = row.find_digit(level, first, finding);
    const Before earlier = before_chunk(row, first, found.digit, base);
    const uint32_t threshold = row.prefix(level, found.digit);
    uint32_t over = 0, ties = 0;
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      if (!held.counts(i)) continue;
      const uint32_t own = key_of(i);
      over |= uint32_t(own > threshold) << i;
      ties |= uint32_t(own == threshold) << i;
    }
    in_order<std::remove_reference_t<decltype(held)>::V>(
        over, ties, sums, [&](int i, Before before, bool tied) {
          const int at = earlier.at + before.at;
          if (tied && at >= found.need) return;
          slots[earlier.over + before.over + min(at, found.need)] = slot_of(i);
        });
  };
  if constexpr (lists) {
    const Held<Uint16Key> listed = row.listed(chunk);
    const typename Key::Type* scores = row.scores<Key>() + chunk * length;
    take(listed, [&](int i) { return key(scores[listed.raw[i]]); },
         [&](int i) { return chunk * length + listed.raw[i]; });
  } else {
    const Held<Key> held = row.held<Key>(chunk, length);
    take(held, [&](int i) { return key(held.raw[i]); },
         [&](int i) { return held.first + held.index(i); });
  }
}

// Launches what follows the records of level 0.
template <typename Key>
const char* take(const Work& work, Key key, Stream stream) {
  if constexpr (Key::kLeastLevels == 1) {
    if (work.plan.digits.levels == 1) {
      const int chunks = work.rows.n > 0 ? (work.rows.n - 1) / work.cut.taken + 1 : 1;
      const unsigned blocks = work.rows.rows * chunks;
      take_kernel<Key, false><<<blocks, kThreads, 0, stream>>>(work, key, chunks);
      return launch_error();
    }
  }
  if constexpr (Key::kMostLevels > 1) {
    const unsigned blocks = work.rows.rows * work.plan.chunks;
    narrow_kernel<<<blocks, kThreads, 0, stream>>>(work, key);
    if constexpr (Key::kMostLevels > 2) {
      if (work.plan.digits.levels > 2) {
        refine_kernel<<<blocks, kThreads, 0, stream>>>(work, key);
      }
    }
    take_kernel<Key, true><<<blocks, kThreads, 0, stream>>>(work, key, work.plan.chunks);
  }
  return launch_error();
}

}  // namespace jspec
