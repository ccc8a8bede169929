// The arithmetic of jspec/ops/distribution.py, bit for bit, on both platforms.
#pragma once

#include <cfloat>
#include <cmath>
#include <cstring>

#include "sample/stochastic.h"

#ifdef __CUDACC__
#define JSPEC_INLINE __host__ __device__ __forceinline__
#else
#define JSPEC_INLINE inline
#endif

namespace jspec {

constexpr uint32_t kOne = 1u << 30;      // a probability of 1
constexpr uint32_t kWeight = 1u << 26;   // a weight of 1
constexpr uint32_t kNone = 0xFFFFFFFFu;  // no token
enum Role : uint32_t { kDraft, kAccept, kResidual, kBonus };

JSPEC_INLINE uint32_t bits_of(float x) {
  uint32_t bits;
  memcpy(&bits, &x, sizeof bits);
  return bits;
}

JSPEC_INLINE float float_of(uint32_t bits) {
  float x;
  memcpy(&x, &bits, sizeof x);
  return x;
}

// A logit as the reference cleans it: NaN counts as minus infinity.
JSPEC_INLINE float cleaned(float x) {
  return x != x ? -INFINITY : x < FLT_MAX ? x : FLT_MAX;
}

// A probability in units of 2^-30.
JSPEC_INLINE uint32_t units(float x) { return static_cast<uint32_t>(x * float(kOne)); }

struct Half {
  uint16_t bits;
};

JSPEC_INLINE float logit_of(float x) { return cleaned(x); }
JSPEC_INLINE float logit_of(Half x) { return cleaned(float_of(uint32_t(x.bits) << 16)); }

JSPEC_INLINE float logit(const void* logits, bool bfloat16, int64_t index) {
  return bfloat16 ? logit_of(static_cast<const Half*>(logits)[index])
                  : logit_of(static_cast<const float*>(logits)[index]);
}

// Logits as integers of the same order; the two zeros are one.
JSPEC_INLINE uint32_t key_of(float x) {
  const uint32_t bits = x == 0 ? 0 : bits_of(x);
  return bits >> 31 ? ~bits : bits | 0x80000000u;
}

JSPEC_INLINE uint32_t product(uint32_t p, uint32_t u) { return (uint64_t(p) * u) >> 32; }

// 2^y = mantissa * 2^(whole - 23).
struct Power {
  uint32_t mantissa;
  float whole;
};

// The polynomial of `exp2_of`, by powers.
constexpr uint32_t kPower5 = 489975;
constexpr uint32_t kPower3 = 2512872;
constexpr uint32_t kPower2 = 3678130;
constexpr uint32_t kPower1 = 5913167;
constexpr uint32_t kPower0 = 4183072;

JSPEC_INLINE Power exp2_of(float y) {
  const float fixed = floorf(y * 0x1p23f), whole = floorf(fixed * 0x1p-23f);
  const uint32_t u = static_cast<uint32_t>(fixed - whole * 0x1p23f) << 8 | 1u << 31;
  uint32_t p = product(kPower5, u);
  p = kPower3 + product(p, u);
  p = kPower2 + product(p, u);
  p = kPower1 + product(p, u);
  p = kPower0 + product(p, u);
  return {p, whole};
}

// The exponent of 2 that a logit stands for; minus infinity stays.
JSPEC_INLINE float power_of(float logit, float rate) {
  if (logit == -INFINITY) return logit;
  return fminf(fmaxf(logit * rate, -0x1p100f), 0x1p100f);
}

JSPEC_INLINE float exponent_of(float top, float rate) { return floorf(power_of(top, rate)); }

JSPEC_INLINE uint32_t weight_of(float power, float exponent) {
  if (power == -INFINITY) return 0;
  const Power value = exp2_of(power);
  const float below = exponent - value.whole;
  const uint32_t weight = value.mantissa * (kWeight >> 23);
  return below < 32 ? weight >> static_cast<uint32_t>(below) : 0;
}

JSPEC_INLINE uint32_t bit_width(uint64_t x) {
#ifdef __CUDA_ARCH__
  return 64 - __clzll(x);
#else
  return 64 - __builtin_clzll(x);
#endif
}

// The distance of a tile's exponent from the row's, as a count of bits.
JSPEC_INLINE uint32_t bits_below(float exponent, float largest) {
  // The last bits of a float32 from 2^23 on hold its whole part.
  return bits_of(fminf(largest - exponent, 63) + 0x1p23f) % 64;
}

// What a tile adds to the row's sum.
JSPEC_INLINE uint64_t mass_in_row(uint64_t sum, float exponent, float largest) {
  return sum * (kOne / kWeight) >> bits_below(exponent, largest);
}

JSPEC_INLINE Norm norm_of(float largest, float exponent, uint64_t sum) {
  if (sum == 0) return {largest, exponent, 0, 0, kNone};
  const uint32_t shift = bit_width(sum) - 31;
  // Rounded down: of double as of integers.
#ifdef __CUDA_ARCH__
  const uint32_t reciprocal = __double2uint_rz(__ddiv_rd(0x1p61, double(sum >> shift)));
#else
  const uint32_t reciprocal = (uint64_t(1) << 61) / (sum >> shift);
#endif
  return {largest, exponent, reciprocal, shift, kNone};
}

// The scale of a tile.
JSPEC_INLINE uint32_t scale_of(const Norm& norm, float exponent) {
  const uint32_t shift = 1 + bits_below(exponent, norm.exponent) + norm.shift;
  return shift < 32 ? norm.reciprocal >> shift : 0;
}

JSPEC_INLINE uint32_t scaled(uint64_t weights, uint32_t scale) {
  return static_cast<uint32_t>(weights * scale / kWeight);
}

JSPEC_INLINE uint32_t rotated(uint32_t x, int by) { return x << by | x >> (32 - by); }

// Threefry-2x32 with 20 rounds (Salmon et al. 2011).
JSPEC_INLINE void threefry(uint32_t key0, uint32_t key1, uint32_t& x0, uint32_t& x1) {
  const uint32_t keys[3] = {key0, key1, key0 ^ key1 ^ 0x1BD11BDA};
  const int rotations[2][4] = {{13, 15, 26, 6}, {17, 29, 16, 24}};
  x0 += key0;
  x1 += key1;
  for (uint32_t i = 0; i < 5; ++i) {
    for (int rotation : rotations[i % 2]) {
      x0 += x1;
      x1 = rotated(x1, rotation) ^ x0;
    }
    x0 += keys[(i + 1) % 3];
    x1 += keys[(i + 2) % 3] + i + 1;
  }
}

// `jspec.ops.sample.number`: 23 random bits.
JSPEC_INLINE uint32_t number_of(uint32_t seed, int32_t position, uint32_t role) {
  uint32_t position0 = 0, position1 = position;
  threefry(0, seed, position0, position1);
  uint32_t role0 = 0, role1 = role;
  threefry(position0, position1, role0, role1);
  uint32_t bits0 = 0, bits1 = 0;
  threefry(role0, role1, bits0, bits1);
  return (bits0 ^ bits1) >> 9;
}

// A draft token stands while u * q < p.
JSPEC_INLINE bool stands(uint32_t number, uint32_t q, uint32_t p) {
  return uint64_t(number) * q < uint64_t(p) << 23;
}

JSPEC_INLINE uint32_t target_of(uint32_t number, uint32_t total) {
  return static_cast<uint32_t>((uint64_t(number) * total) >> 23);
}

// A position's distribution as the workspace holds it.
struct Row {
  const void* logits;  // [vocabulary]
  Cell* cells;         // [tiles]
  uint32_t threshold;
  uint32_t min_p;  // as a weight beside the largest logit
  float rate;
  bool bfloat16;
  int32_t vocabulary;
  int32_t tiles;

  JSPEC_INLINE Row(const Sampling& sampling, const Source& source, int64_t batch, int32_t position)
      : threshold(0),
        min_p(0),
        rate(sampling.settings.rate[batch]),
        bfloat16(source.bfloat16),
        vocabulary(sampling.vocabulary),
        tiles(sampling.tiles) {
    const Workspace& workspace = sampling.workspace;
    const int64_t kept = batch * workspace.positions + source.first + position;
    const int64_t begin = (batch * source.positions + position) * int64_t(vocabulary);
    logits = static_cast<const char*>(source.logits) + begin * (bfloat16 ? 2 : 4);
    cells = workspace.cells + kept * tiles;
    if (sampling.filtered) {
      threshold = workspace.thresholds[kept];
      min_p = units(sampling.settings.min_p[batch]) / (kOne / kWeight);
    }
  }

  JSPEC_INLINE bool greedy() const { return rate == 0; }

  JSPEC_INLINE bool filters() const { return threshold > 0 || min_p > 0; }

  // Whether the filters keep a logit.
  JSPEC_INLINE bool keeps(float x, const Norm& norm) const {
    if (key_of(x) < threshold) return false;
    return min_p == 0 || weight_of(power_of(x - norm.largest, rate), 0) >= min_p;
  }
};

}  // namespace jspec
