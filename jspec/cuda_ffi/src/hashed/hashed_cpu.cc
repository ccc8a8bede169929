// Selection by hash codes on a CPU, and a layer around it, by the definitions.
#include <cmath>

#include "common/bfloat16_cpu.h"
#include "hashed/hashed.h"
#include "select/row_cpu.h"

namespace jspec {
namespace {

// A vector of `size` channels, normed and rotated, as bfloat16 holds it.
std::vector<uint16_t> turned(const Layer& layer, const uint16_t* from, int64_t batch,
                             const float* scale, float eps) {
  const int size = layer.size, half = size / 2;
  std::vector<float> x(size);
  float squares = 0;
  for (int c = 0; c < size; ++c) x[c] = wide(from[c]), squares += x[c] * x[c];
  if (scale) {
    const float root = 1 / std::sqrt(squares / size + eps);
    for (int c = 0; c < size; ++c) x[c] = wide(narrow(wide(narrow(x[c] * root)) * scale[c]));
  }
  std::vector<uint16_t> out(size);
  for (int c = 0; c < half; ++c) {
    const float cosine = layer.cosine[batch * half + c], sine = layer.sine[batch * half + c];
    out[c] = narrow(x[c] * cosine - x[c + half] * sine);
    out[c + half] = narrow(x[c + half] * cosine + x[c] * sine);
  }
  return out;
}

void encode(const Hash& hash, const Layer& layer, const std::vector<uint16_t>& x, int64_t head,
            uint32_t* code) {
  const int bits = hash.words * 32;
  for (int bit = 0; bit < bits; ++bit) {
    float sum = 0;
    for (int c = 0; c < layer.size; ++c) {
      sum += wide(x[c]) * layer.w[(head * layer.size + c) * bits + bit];
    }
    if (bit % 32 == 0) code[bit / 32] = 0;
    code[bit / 32] |= uint32_t(sum > 0) << bit % 32;
  }
}

void append(const Hash& hash, const Layer& layer, int64_t batch, int64_t head) {
  const int64_t row = batch * hash.heads + head, size = layer.size;
  const uint16_t* from = layer.joined + row * (hash.group + 2) * size;
  for (int64_t i = 0; i < hash.group; ++i, from += size) {
    const auto query = turned(layer, from, batch, layer.q_scale, layer.q_eps);
    std::copy(query.begin(), query.end(), layer.queries + (row * hash.group + i) * size);
    encode(hash, layer, query, head, layer.q_codes + (row * hash.group + i) * hash.words);
  }
  const int32_t position = layer.positions[batch];
  if (position < 0 || position >= hash.rows.n) return;
  const int64_t place = (batch * hash.rows.n + position) * hash.heads + head;
  const auto key = turned(layer, from, batch, layer.k_scale, layer.k_eps);
  std::copy(key.begin(), key.end(), layer.keys + place * size);
  std::copy(from + size, from + 2 * size, layer.values + place * size);
  encode(hash, layer, key, head, layer.codes + place * hash.words);
}

// Attention of the queries of a KV head over `slots`.
void attend(const Hash& hash, const Layer& layer, int64_t batch, int64_t head,
            const std::vector<int32_t>& slots) {
  const int64_t size = layer.size;
  const auto place = [&](int32_t slot) {
    return ((batch * hash.rows.n + slot) * hash.heads + head) * size;
  };
  for (int64_t i = 0; i < hash.group; ++i) {
    const int64_t at = (batch * hash.heads + head) * hash.group + i;
    std::vector<float> scores, sums(size);
    float top = -INFINITY, total = 0;
    for (int32_t slot : slots) {
      float sum = 0;
      for (int64_t c = 0; c < size; ++c) {
        sum += wide(layer.queries[at * size + c]) * wide(layer.keys[place(slot) + c]);
      }
      scores.push_back(sum * layer.scale);
      top = std::max(top, scores.back());
    }
    for (size_t j = 0; j < slots.size(); ++j) {
      const float weight = std::exp(scores[j] - top);
      total += weight;
      for (int64_t c = 0; c < size; ++c) sums[c] += weight * wide(layer.values[place(slots[j]) + c]);
    }
    for (int64_t c = 0; c < size; ++c) {
      layer.out[at * size + c] = narrow(slots.empty() ? 0 : sums[c] / total);
    }
    layer.lse[at] = slots.empty() ? -INFINITY : top + std::log(total);
  }
}

}  // namespace

const char* hash_select(const Hash& hash, const HashCut&, void*, Stream) {
  const int64_t query = int64_t(hash.heads) * hash.group * hash.words;  // words of a token
  std::vector<uint32_t> keys(hash.rows.n);
  for (int64_t row = 0; row < hash.rows.rows; ++row) {
    const int64_t batch = row / hash.heads, head = row % hash.heads;
    const uint32_t* q =
        hash.q_codes + batch * hash.tokens * query + head * hash.group * hash.words;
    const uint32_t* k = hash.k_codes + (batch * hash.rows.n * hash.heads + head) * hash.words;
    for (int32_t slot = 0; slot < hash.rows.n; ++slot, k += hash.heads * hash.words) {
      int64_t distance = 0;
      for (int32_t token = 0; token < hash.tokens; ++token) {
        for (int32_t i = 0; i < hash.group * hash.words; ++i) {
          distance += __builtin_popcount(q[token * query + i] ^ k[i % hash.words]);
        }
      }
      keys[slot] = static_cast<uint32_t>(hash.highest() - distance);
    }
    select_row(hash.rows, row, [&](int32_t slot) { return keys[slot]; });
  }
  return nullptr;
}

const char* hash_append_select(const Hash& hash, const Layer& layer, const HashCut& cut,
                               void* workspace, Stream stream) {
  for (int64_t row = 0; row < hash.rows.rows; ++row) {
    append(hash, layer, row / hash.heads, row % hash.heads);
  }
  return hash_select(hash, cut, workspace, stream);
}

const char* hash_attention(const Hash& hash, const Layer& layer, const HashCut& cut,
                           void* workspace, Stream stream) {
  hash_append_select(hash, layer, cut, workspace, stream);
  for (int64_t row = 0; row < hash.rows.rows; ++row) {
    const int64_t batch = row / hash.heads;
    const int32_t position = layer.positions[batch], until = layer.until[batch];
    std::vector<int32_t> slots;
    if (position >= 0) {
      const int32_t* chosen = hash.rows.slots + row * hash.rows.k;
      std::copy_if(chosen, chosen + hash.rows.k, std::back_inserter(slots),
                   [](int32_t slot) { return slot >= 0; });
      const int64_t end = std::min({int64_t(position) + 1, int64_t(until) + layer.tail,
                                    int64_t(hash.rows.n)});
      for (int64_t slot = until; slot < end; ++slot) slots.push_back(static_cast<int32_t>(slot));
    }
    attend(hash, layer, batch, row % hash.heads, slots);
  }
  return nullptr;
}

}  // namespace jspec
