// Attention of many query rows on a CPU: one softmax per row, by the definition.
#include <algorithm>
#include <cmath>
#include <vector>

#include "attention/attention.h"
#include "common/bfloat16_cpu.h"

namespace jspec {
namespace {

template <typename Cached>
float product(const uint16_t* x, const Cached* y, int channels) {
  float sum = 0;
  for (int i = 0; i < channels; ++i) sum += wide(x[i]) * wide(y[i]);
  return sum;
}

// `all_keys`, `all_values`: of all rows.
template <typename Cached>
void attend(const Attention& a, const Cached* all_keys, const Cached* all_values) {
  const int channels = a.channels;
  const int64_t heads = int64_t(a.kv_heads) * a.group, stride = int64_t(a.kv_heads) * channels;
  std::vector<float> weights(a.slots), sums(channels);
  for (int64_t row = 0; row < a.batch; ++row) {
    const Cached* keys = all_keys + row * a.slots * stride;
    const Cached* values = all_values + row * a.slots * stride;
    const int32_t* positions = a.positions + row * a.tokens;
    for (int64_t i = 0; i < a.tokens * heads; ++i) {
      const int64_t head = i % heads / a.group, query = row * a.tokens * heads + i;
      const int count = std::min(positions[i / heads] + 1, a.slots);
      float top = -INFINITY, total = 0;
      for (int key = 0; key < count; ++key) {
        const Cached* at = keys + key * stride + head * channels;
        weights[key] = product(a.q + query * channels, at, channels) * a.scale;
        top = std::max(top, weights[key]);
      }
      std::fill(sums.begin(), sums.end(), 0.0f);
      for (int key = 0; key < count; ++key) {
        const float weight = std::exp(weights[key] - top);
        const Cached* at = values + key * stride + head * channels;
        total += weight;
        for (int c = 0; c < channels; ++c) sums[c] += weight * wide(at[c]);
      }
      for (int c = 0; c < channels; ++c) {
        a.out[query * channels + c] = narrow(count > 0 ? sums[c] / total : 0);
      }
      a.lse[query] = count > 0 ? top + std::log(total) : -INFINITY;
    }
    if (!a.probe) continue;
    const int last = *std::max_element(positions, positions + a.tokens);
    const int end = std::min(last + 1, a.slots);
    for (int64_t head = 0; head < a.kv_heads; ++head) {
      const int64_t place = row * a.kv_heads + head;
      for (int key = 0; key < end; ++key) {
        const Cached* at = keys + key * stride + head * channels;
        const float score = product(a.probe + place * channels, at, channels);
        a.scores[place * a.slots + key] = score * a.scale;
      }
    }
  }
}

}  // namespace

const char* attention(const Attention& a, Stream) {
  if (a.narrow) {
    attend(a, static_cast<const uint8_t*>(a.k), static_cast<const uint8_t*>(a.v));
  } else {
    attend(a, static_cast<const uint16_t*>(a.k), static_cast<const uint16_t*>(a.v));
  }
  return nullptr;
}

}  // namespace jspec
