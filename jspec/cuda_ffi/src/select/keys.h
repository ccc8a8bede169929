// The arithmetic of selection on both platforms: keys in the order of the scores, their digits, and
// the slots of a row that are taken whatever their scores.
#pragma once

#include <cstring>

#include "common/host_device.h"
#include "select/select.h"

namespace jspec {

// A key is a number in 0..count - 1 that is ordered, and equal, as the scores are.

// From the bits of a float32. NaN has the lowest key, below minus infinity; the two zeros are equal.
JSPEC_HOST_DEVICE inline uint32_t key_of_float(uint32_t bits) {
  const uint32_t magnitude = bits & 0x7FFFFFFFu;
  if (magnitude > 0x7F800000u) return 0;
  if (magnitude == 0) return 0x80000000u;
  return bits >> 31 ? ~bits : bits | 0x80000000u;
}

// From the bits of a float of 16 bits whose infinity is `infinity`.
JSPEC_HOST_DEVICE inline uint32_t key_of_half(uint32_t bits, uint32_t infinity) {
  const uint32_t magnitude = bits & 0x7FFFu;
  if (magnitude > infinity) return 0;
  if (magnitude == 0) return 0x8000u;
  return bits >> 15 ? ~bits & 0xFFFFu : bits | 0x8000u;
}

// Traits of each kind of score: the type that is loaded, its key, and whether that has several digits.
struct Int32Key {
  using Type = int32_t;
  static constexpr bool kSeveral = true;
  JSPEC_HOST_DEVICE uint32_t operator()(int32_t x) const { return uint32_t(x) ^ 0x80000000u; }
};

struct BoundedKey {
  using Type = int32_t;
  static constexpr bool kSeveral = false;
  int32_t highest;
  JSPEC_HOST_DEVICE uint32_t operator()(int32_t x) const {
    return uint32_t((x < -1 ? -1 : x > highest ? highest : x) + 1);
  }
};

struct Float32Key {
  using Type = uint32_t;
  static constexpr bool kSeveral = true;
  JSPEC_HOST_DEVICE uint32_t operator()(uint32_t x) const { return key_of_float(x); }
};

struct HalfKey {
  using Type = uint16_t;
  static constexpr bool kSeveral = true;
  uint32_t infinity;
  JSPEC_HOST_DEVICE uint32_t operator()(uint16_t x) const { return key_of_half(x, infinity); }
};

constexpr int kMostBins = 4096;  // of a histogram

// Whether integer scores are known to have so few values that a histogram holds them.
inline bool bounded(const Select& select) {
  return select.highest >= 0 && select.highest <= kMostBins - 2;
}

// Calls `run(key)` with the traits of these scores.
template <typename Run>
auto for_scores(const Select& select, Run run) {
  switch (select.type) {
    case Scores::kFloat32: return run(Float32Key());
    case Scores::kBfloat16: return run(HalfKey{0x7F80u});
    case Scores::kFloat16: return run(HalfKey{0x7C00u});
    default: return bounded(select) ? run(BoundedKey{select.highest}) : run(Int32Key());
  }
}

// How many keys there are.
inline int64_t keys_of(const Select& select) {
  if (bounded(select)) return select.highest + 2;
  const bool half = select.type == Scores::kBfloat16 || select.type == Scores::kFloat16;
  return int64_t(1) << (half ? 16 : 32);
}

// How a key is cut into digits, from the highest: digit i is `key >> shift[i]` without the bits
// above it. Each is found by a histogram of `bins[i]`, a multiple of 64.
struct Digits {
  int levels;
  int shift[3], bins[3];
};

inline Digits digits_of(int64_t keys) {
  if (keys <= kMostBins) return {1, {0}, {static_cast<int>((keys + 63) / 64 * 64)}};
  if (keys <= 1 << 16) return {2, {4, 0}, {kMostBins, 64}};
  return {3, {20, 10, 0}, {kMostBins, 1024, 1024}};
}

// What a row takes: the slots 0..first - 1, `need` of low..high - 1 by their scores, and the slots
// high..high + last - 1.
struct Taken {
  int32_t low, high, first, need, last;
};

JSPEC_HOST_DEVICE inline Taken taken_of(const Rows& rows, int64_t row) {
  const auto within = [](int32_t x, int32_t most) { return x < 0 ? 0 : x < most ? x : most; };
  const int32_t length = within(rows.lengths[row / rows.share], rows.n);
  const int32_t count = within(within(rows.counts[row / rows.share], rows.k), length);
  const int32_t low = within(rows.sinks, length);
  const int32_t high = length - rows.recent > low ? length - rows.recent : low;
  const int32_t forced = low + length - high;
  if (count >= forced) return {low, high, low, count - forced, length - high};
  const int32_t first = within(low, count);
  return {low, high, first, 0, count - first};
}

}  // namespace jspec
