// Hamming scores and encoding on a CPU, by the definitions.
#include <cmath>
#include <vector>

#include "codes/codes.h"
#include "common/bfloat16_cpu.h"

namespace jspec {
namespace {

float number(const void* from, Float type, int64_t at) {
  if (type == Float::kFloat32) return static_cast<const float*>(from)[at];
  return wide(static_cast<const uint16_t*>(from)[at]);
}

// Writes the code of the vector that begins at `at` of `from`.
void encode(const Encoding& encoding, const void* from, int64_t at, int64_t head, uint32_t* code) {
  const int64_t bits = 32 * encoding.words;
  std::vector<float> sums(bits);
  for (int64_t c = 0; c < encoding.size; ++c) {
    const float x = number(from, encoding.x_type, at + c);
    for (int64_t bit = 0; bit < bits; ++bit) {
      const int64_t place = (head * encoding.size + c) * bits + bit;
      sums[bit] += x * number(encoding.w, encoding.w_type, place);
    }
  }
  for (int64_t bit = 0; bit < bits; ++bit) {
    if (bit % 32 == 0) code[bit / 32] = 0;
    code[bit / 32] |= uint32_t(sums[bit] > 0) << bit % 32;
  }
}

}  // namespace

const char* hamming_scores(const KeyScores& scores, Stream) {
  const int64_t heads = scores.heads, words = scores.words, queries = heads * scores.group * words;
  const int64_t highest = int64_t(scores.tokens) * scores.group * 32 * words;
  for (int64_t row = 0; row < scores.batch * heads; ++row) {
    const int64_t batch = row / heads, head = row % heads;
    const uint32_t* q =
        scores.q_codes + batch * scores.tokens * queries + head * scores.group * words;
    for (int64_t slot = 0; slot < scores.n; ++slot) {
      const int64_t key = (batch * scores.n + slot) * heads + head;
      int64_t distance = 0;
      for (int64_t token = 0; token < scores.tokens; ++token) {
        for (int64_t i = 0; i < scores.group * words; ++i) {
          const uint32_t code = scores.k_codes[key * words + i % words];
          distance += __builtin_popcount(q[token * queries + i] ^ code);
        }
      }
      const bool read = slot < scores.lengths[batch];
      if (scores.norms) {
        const float estimate = float(highest - 2 * distance) / float(32 * words);
        static_cast<float*>(scores.scores)[row * scores.n + slot] =
            read ? scores.norms[key] * estimate : -INFINITY;
      } else {
        static_cast<int32_t*>(scores.scores)[row * scores.n + slot] =
            read ? int32_t(highest - distance) : -1;
      }
    }
  }
  return nullptr;
}

const char* hash_encode(const Encoding& encoding, Stream) {
  const int64_t heads = encoding.heads, group = encoding.group, size = encoding.size;
  for (int64_t row = 0; row < encoding.tokens * heads; ++row) {
    for (int64_t i = row * group; i < (row + 1) * group; ++i) {
      encode(encoding, encoding.q, i * size, row % heads, encoding.q_codes + i * encoding.words);
    }
    if (encoding.k) {
      encode(encoding, encoding.k, row * size, row % heads,
             encoding.k_codes + row * encoding.words);
    }
  }
  return nullptr;
}

}  // namespace jspec
