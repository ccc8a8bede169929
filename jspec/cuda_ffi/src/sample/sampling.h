// The arithmetic of jspec/ops/distribution.py, bit for bit, on both platforms. Bit layouts and proofs
// are in docs/sampling.md.
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

constexpr uint32_t kOneBits = 53;
constexpr uint64_t kOne = uint64_t(1) << kOneBits;  // a probability of 1, and a weight of 1
constexpr uint32_t kNone = 0xFFFFFFFFu;             // no token
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

struct Bfloat16 {
  uint16_t bits;
};

// The bits of a logit as float32.
JSPEC_INLINE uint32_t raw_bits(float x) { return bits_of(x); }
JSPEC_INLINE uint32_t raw_bits(Bfloat16 x) { return uint32_t(x.bits) << 16; }

JSPEC_INLINE float logit_of(float x) { return cleaned(x); }
JSPEC_INLINE float logit_of(Bfloat16 x) { return cleaned(float_of(raw_bits(x))); }

JSPEC_INLINE float logit(const void* logits, bool bfloat16, int64_t index) {
  return bfloat16 ? logit_of(static_cast<const Bfloat16*>(logits)[index])
                  : logit_of(static_cast<const float*>(logits)[index]);
}

// Logits as integers of the same order; the two zeros are one.
JSPEC_INLINE uint32_t key_of(float x) {
  const uint32_t bits = x == 0 ? 0 : bits_of(x);
  return bits >> 31 ? ~bits : bits | 0x80000000u;
}

// The logit of a key; minus infinity for what is the key of none.
JSPEC_INLINE float logit_of_key(uint32_t key) {
  return cleaned(float_of(key >> 31 ? key ^ 0x80000000u : ~key));
}

JSPEC_INLINE uint32_t high32(uint32_t a, uint32_t b) { return (uint64_t(a) * b) >> 32; }

// The upper 64 bits of a product.
JSPEC_INLINE uint64_t high64(uint64_t a, uint64_t b) {
#ifdef __CUDA_ARCH__
  return __umul64hi(a, b);
#else
  return static_cast<uint64_t>(static_cast<unsigned __int128>(a) * b >> 64);
#endif
}

JSPEC_INLINE uint32_t bit_width(uint64_t x) {
#ifdef __CUDA_ARCH__
  return 64 - __clzll(x);
#else
  return x == 0 ? 0 : 64 - __builtin_clzll(x);
#endif
}

// x / 2^count, 0 from 64 on.
JSPEC_INLINE uint64_t shifted(uint64_t x, uint32_t count) {
#ifdef __CUDA_ARCH__
  asm("shr.u64 %0, %0, %1;" : "+l"(x) : "r"(count));
  return x;
#else
  return count < 64 ? x >> count : 0;
#endif
}

// logit * rate = whole + fraction * 2^-23, rounded down; within 2^30 of 0.
struct Power {
  int32_t whole;
  uint32_t fraction;
};

JSPEC_INLINE Power power_of(float logit, float rate) {
  const uint32_t x = bits_of(logit), r = bits_of(rate), biased = x >> 23 & 0xFF;
  const uint64_t product =
      uint64_t((x & 0x7FFFFF) | (biased ? 0x800000u : 0)) * ((r & 0x7FFFFF | 0x800000) >> 8);
  // The exponents count from -150 and, behind the shift above, from -142; 23 bits are fraction.
  const int up = static_cast<int>((biased ? biased : 1) + (r >> 23)) - (150 + 142 - 23);
  const bool negative = x >> 31 && product;
  // -n is ~(n - 1), and rounding n - 1 down rounds -n down.
  uint64_t size;
  if (up < 0) {
    size = shifted(product - negative, -up);
  } else if (bit_width(product) + up > 53) {
    size = (uint64_t(1) << 53) - negative;
  } else {
    size = (product << up) - negative;
  }
  const int64_t fixed = negative ? ~size : size;
  return {static_cast<int32_t>(fixed >> 23), static_cast<uint32_t>(fixed) & 0x7FFFFF};
}

JSPEC_INLINE int32_t exponent_of(float top, float rate) { return power_of(top, rate).whole; }

// The polynomial of `exp2_of`, by powers.
constexpr uint32_t kPower5 = 7839600;
constexpr uint32_t kPower3 = 10051532;
constexpr uint32_t kPower2 = 7356243;
constexpr uint32_t kPower1 = 5913159;
constexpr uint32_t kPower0 = 2091539;

// 2^(fraction * 2^-23) in units of 2^-22.
JSPEC_INLINE uint32_t exp2_of(uint32_t fraction) {
  const uint32_t v = (fraction | 0x800000) << 7;
  uint32_t p = high32(kPower5, v);
  p = kPower3 + high32(p, v);
  p = kPower2 + high32(p, v);
  p = kPower1 + high32(p, v);
  return kPower0 + high32(p, v);
}

// The weight of a logit in a tile, in units of 2^-53.
JSPEC_INLINE uint64_t weight_of(float logit, float rate, int32_t exponent) {
  if (logit == -INFINITY) return 0;
  const Power power = power_of(logit, rate);
  const uint32_t below = uint32_t(exponent) - uint32_t(power.whole);
  return below < 32 ? uint64_t(exp2_of(power.fraction)) << (31 - below) : 0;
}

// 2^(the power of a logit - that of the largest), or 0 where that is below 2^-126.
JSPEC_INLINE float relative_of(float logit, float largest, float rate) {
  if (logit == -INFINITY) return 0;
  const Power here = power_of(logit, rate), top = power_of(largest, rate);
  const uint32_t below = top.whole - here.whole + (here.fraction < top.fraction);
  if (below > 126) return 0;
  const uint32_t mantissa = exp2_of((here.fraction - top.fraction) & 0x7FFFFF);
  return float_of(((127 - below) << 23) + ((mantissa - (1u << 22)) << 1));
}

// Bits by which the mass of a tile must shrink for the sum over all tiles to fit.
JSPEC_INLINE uint32_t guard_bits(int32_t tiles) { return bit_width(tiles - 1); }

// How far the weights of a tile are shifted to become masses.
JSPEC_INLINE uint32_t mass_shift(int32_t largest, int32_t exponent, uint32_t guard) {
  return uint32_t(largest) - uint32_t(exponent) + guard;
}

// Of a position whose masses sum to `total`.
JSPEC_INLINE Scale scale_of(int32_t exponent, uint64_t total) {
  if (total == 0) return {exponent, 0, 0, 0};
  const uint32_t width = bit_width(total);
  const uint32_t upper = static_cast<uint32_t>(total >> (width - 32));
#ifdef __CUDA_ARCH__
  // Rounded down: of double as of integers.
  const uint32_t reciprocal = __double2uint_rz(__ddiv_rd(0x1p62, double(upper)));
#else
  const uint32_t reciprocal = (uint64_t(1) << 62) / upper;
#endif
  return {exponent, reciprocal, width - (kOneBits + 1), kNone};
}

// A weight as a probability, in units of 2^-53: `shift` makes it a mass.
JSPEC_INLINE uint64_t probability_of(uint64_t weight, const Scale& scale, uint32_t shift) {
  // The upper half of the product is weight * reciprocal * 2^-31.
  const uint64_t scaled = high64(weight << 10, uint64_t(scale.reciprocal) << 23);
  return shifted(scaled, shift + scale.rescale);
}

// top_p of a total, at least 1 unit.
JSPEC_INLINE uint64_t needed_of(uint64_t total, float top_p) {
  const uint32_t share = static_cast<uint32_t>(top_p * 0x1p32f);
  const uint64_t needed = high64(total, uint64_t(share) << 32);
  return needed ? needed : 1;
}

// Whether min-p drops the logit of a key, where `top` is the key of the largest.
JSPEC_INLINE bool min_p_drops(uint32_t key, uint32_t top, float min_p, float rate) {
  return key <= top && relative_of(logit_of_key(key), logit_of_key(top), rate) < min_p;
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

// `jspec.ops.sample.number`: 64 random bits of a seed's upper and lower words.
JSPEC_INLINE uint64_t number_of(const uint32_t* seed, int32_t position, uint32_t role) {
  uint32_t position0 = 0, position1 = position;
  threefry(seed[0], seed[1], position0, position1);
  uint32_t role0 = 0, role1 = role;
  threefry(position0, position1, role0, role1);
  uint32_t high = 0, low = 0;
  threefry(role0, role1, high, low);
  return uint64_t(high) << 32 | low;
}

// The product of two probabilities, rounded down.
JSPEC_INLINE uint64_t times(uint64_t a, uint64_t b) { return high64(a << 10, b << 1); }

// `jspec.ops.block`: min(chance * p / q, 1), rounded down; 1 where only q is 0.
JSPEC_INLINE uint64_t chance_of(uint64_t chance, uint64_t p, uint64_t q) {
  const unsigned __int128 product = static_cast<unsigned __int128>(chance) * p;
  if (product == 0) return 0;
  return times(chance, p) >= q ? kOne : static_cast<uint64_t>(product / q);
}

// Whether a draft is accepted up to here and no further, where `mass` is left of `chance` by what the
// draft has behind it.
JSPEC_INLINE bool ends_block(uint64_t number, uint64_t chance, uint64_t mass) {
  return chance == kOne || high64(number, mass + (kOne - chance)) < mass;
}

// Whether a draft is accepted whole.
JSPEC_INLINE bool takes_block(uint64_t number, uint64_t chance) {
  return high64(number, kOne) < chance;
}

// Whether a draft token is accepted: u * q < p.
JSPEC_INLINE bool accepts(uint64_t number, uint64_t q, uint64_t p) { return high64(number, q) < p; }

}  // namespace jspec
