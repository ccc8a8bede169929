// The arithmetic of jspec/ops/distribution.py, bit for bit, on both platforms.
#pragma once

#include <cfloat>
#include <cmath>
#include <cstring>

#include "stochastic.h"

#ifdef __CUDACC__
#define JSPEC_INLINE __host__ __device__ __forceinline__
#else
#define JSPEC_INLINE inline
#endif

namespace jspec {

constexpr uint32_t kOne = 1u << 30;      // a probability of 1, and the largest weight
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

// 2^y = mantissa * 2^-(23 + shift) for y <= 0, cut at -40.
struct Power {
  uint32_t mantissa;
  uint32_t shift;
};

JSPEC_INLINE uint32_t product(uint32_t p, uint32_t f) { return (uint64_t(p) * f) >> 32; }

JSPEC_INLINE Power exp2_of(float y) {
  const int32_t fixed = static_cast<int32_t>(floorf((y > -40 ? y : -40) * 16777216.0f));
  const uint32_t f = fixed & 0xFFFFFF;
  uint32_t p = 9653981 + product(16143315, f << 5);
  p = 14983716 + product(p, f << 6);
  p &= ~uint32_t(p >= 1 << 24);
  p = 16116816 + product(p, f << 6);
  p &= ~uint32_t(p >= 1 << 24);
  p = 11629155 + product(p, f << 6);
  p = (1 << 23) + product(p, f << 7);
  return {p, uint32_t(-(fixed >> 24))};
}

JSPEC_INLINE uint32_t weight_of(float y) {
  const Power power = exp2_of(y);
  return power.shift < 32 ? (power.mantissa << 7) >> power.shift : 0;
}

JSPEC_INLINE uint32_t bit_width(uint64_t x) {
#ifdef __CUDA_ARCH__
  return 64 - __clzll(x);
#else
  return 64 - __builtin_clzll(x);
#endif
}

JSPEC_INLINE uint64_t shift_right(uint64_t x, uint32_t count) { return count < 64 ? x >> count : 0; }

// A row's normalisation: its largest logit, and 2^61 / (sum * 2^-exponent) of its weights.
struct Norm {
  float largest;
  uint32_t reciprocal;  // 0 for a row without mass
  uint32_t exponent;
};

// What a tile adds to the row's sum.
JSPEC_INLINE uint64_t mass_in_row(uint64_t sum, float top, float largest, float rate) {
  const Power factor = exp2_of((top - largest) * rate);
  return shift_right(sum * factor.mantissa, 23 + factor.shift);
}

JSPEC_INLINE Norm norm_of(float largest, uint64_t sum) {
  if (sum == 0) return {largest, 0, 0};
  const uint32_t exponent = bit_width(sum) - 31;
  return {largest, static_cast<uint32_t>((uint64_t(1) << 61) / (sum >> exponent)), exponent};
}

// The scale of a tile.
JSPEC_INLINE uint32_t scale_of(const Norm& norm, float top, float rate) {
  const Power factor = exp2_of((top - norm.largest) * rate);
  const uint64_t scaled = uint64_t(factor.mantissa) * norm.reciprocal;
  return static_cast<uint32_t>(shift_right(scaled, 24 + factor.shift + norm.exponent));
}

JSPEC_INLINE uint32_t scaled(uint64_t weights, uint32_t scale) {
  return static_cast<uint32_t>((weights * scale) >> 30);
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

// Where the workspace of a batch row keeps what: for each position of the sources and each tile, the
// sum of the weights and the largest logit; the threshold of each position; then for a draft with
// logits the norms at the first rejected position, and the residual's mass in each tile.
struct Workspace {
  uint64_t* sums;        // [positions, tiles]; a greedy row's: the first largest token, or kNone
  float* tops;           // [positions, tiles]
  uint32_t* thresholds;  // [positions]
  uint32_t* accepted;    // [1]
  uint32_t* rejected;    // [1]
  Norm* norms;           // [2]: the target's and the draft's
  uint32_t* residual;    // [tiles]

  JSPEC_INLINE Workspace(const Sampling& sampling, int64_t row) {
    const int64_t positions = sampling.target.positions + sampling.draft.positions;
    const int64_t cells = positions * sampling.tiles;
    uint32_t* words = sampling.workspace + row * sampling.words;
    sums = reinterpret_cast<uint64_t*>(words);
    tops = reinterpret_cast<float*>(words + 2 * cells);
    thresholds = words + 3 * cells;
    accepted = thresholds + positions;
    rejected = accepted + 1;
    norms = reinterpret_cast<Norm*>(rejected + 1);
    residual = rejected + 7;
  }

  static int64_t words(int64_t positions, int64_t tiles) {
    const int64_t count = (3 * positions + 1) * tiles + positions + 8;
    return count + count % 2;
  }
};

// A position's distribution as the workspace holds it.
struct Row {
  const void* logits;  // [vocabulary]
  const uint64_t* sums;
  const float* tops;
  uint32_t threshold;
  uint32_t min_p;
  float rate;
  bool bfloat16;
  int32_t vocabulary;
  int32_t tiles;

  JSPEC_INLINE Row(const Sampling& sampling, const Source& source, bool bfloat16, int64_t batch,
                   int32_t position)
      : rate(sampling.settings.rate[batch]),
        bfloat16(bfloat16),
        vocabulary(sampling.vocabulary),
        tiles(sampling.tiles) {
    const Workspace workspace(sampling, batch);
    const int64_t begin = (batch * source.positions + position) * int64_t(vocabulary);
    logits = static_cast<const char*>(source.logits) + begin * (bfloat16 ? 2 : 4);
    sums = workspace.sums + int64_t(source.first + position) * tiles;
    tops = workspace.tops + int64_t(source.first + position) * tiles;
    threshold = sampling.filtered ? workspace.thresholds[source.first + position] : 0;
    min_p = sampling.filtered ? units(sampling.settings.min_p[batch]) : 0;
  }

  JSPEC_INLINE bool greedy() const { return rate == 0; }

  // The weight of a token, filters applied.
  JSPEC_INLINE uint32_t weight(int32_t token, const Norm& norm) const {
    const float x = logit(logits, bfloat16, token);
    if (key_of(x) < threshold) return 0;
    if (min_p > 0 && weight_of((x - norm.largest) * rate) < min_p) return 0;
    return weight_of((x - tops[token / kTile]) * rate);
  }

  JSPEC_INLINE uint32_t scale(int32_t tile, const Norm& norm) const {
    return scale_of(norm, tops[tile], rate);
  }

  // A token's probability; `best` is the token of a greedy row.
  JSPEC_INLINE uint32_t probability(int32_t token, const Norm& norm, uint32_t best) const {
    if (greedy()) return uint32_t(token) == best ? kOne : 0;
    if (token >= vocabulary) return 0;
    return scaled(weight(token, norm), scale(token / kTile, norm));
  }
};

// Writes all results of a row, which `following` ends.
JSPEC_INLINE void commit(const Stochastic& stochastic, int64_t row, int32_t length,
                         int32_t accepted, int32_t following) {
  const int32_t* draft = stochastic.draft_tokens + row * stochastic.gamma;
  const int32_t* stops = stochastic.stop_tokens + row * stochastic.stops;
  int32_t* tokens = stochastic.tokens + row * (stochastic.gamma + 1);
  int32_t committed = 0;
  bool stopped = false;
  while (!stopped && committed <= accepted) {
    const int32_t token = committed < accepted ? draft[committed] : following;
    for (int32_t i = 0; i < stochastic.stops; ++i) stopped |= token >= 0 && token == stops[i];
    tokens[committed++] = token;
  }
  for (int32_t i = committed; i <= stochastic.gamma; ++i) tokens[i] = -1;
  const bool cut = committed <= accepted;
  stochastic.accepted[row] = cut ? committed : accepted;
  stochastic.committed[row] = committed;
  stochastic.mismatch[row] = !cut && accepted < length;
  stochastic.next_token[row] = cut ? -1 : following;
  stochastic.stopped[row] = stopped;
}

}  // namespace jspec
