// Attention of many query rows on a CPU: one softmax per row, by the definition.
#include <algorithm>
#include <cmath>
#include <vector>

#include "attention/attention.h"
#include "common/bfloat16_cpu.h"

namespace jspec {
namespace {

float product(const uint16_t* x, const uint16_t* y, int channels) {
  float sum = 0;
  for (int i = 0; i < channels; ++i) sum += wide(x[i]) * wide(y[i]);
  return sum;
}

}  // namespace

const char* attention(const Attention& a, Stream) {
  const int channels = a.channels;
  const int64_t heads = int64_t(a.kv_heads) * a.group, stride = int64_t(a.kv_heads) * channels;
  std::vector<float> weights(a.slots), sums(channels);
  for (int64_t row = 0; row < a.batch; ++row) {
    const uint16_t* keys = a.k + row * a.slots * stride;
    const uint16_t* values = a.v + row * a.slots * stride;
    const int32_t* positions = a.positions + row * a.tokens;
    for (int64_t i = 0; i < a.tokens * heads; ++i) {
      const int64_t head = i % heads / a.group, query = row * a.tokens * heads + i;
      const int count = std::min(positions[i / heads] + 1, a.slots);
      float top = -INFINITY, total = 0;
      for (int key = 0; key < count; ++key) {
        const uint16_t* at = keys + key * stride + head * channels;
        weights[key] = product(a.q + query * channels, at, channels) * a.scale;
        top = std::max(top, weights[key]);
      }
      std::fill(sums.begin(), sums.end(), 0.0f);
      for (int key = 0; key < count; ++key) {
        const float weight = std::exp(weights[key] - top);
        const uint16_t* at = values + key * stride + head * channels;
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
        const uint16_t* at = keys + key * stride + head * channels;
        const float score = product(a.probe + place * channels, at, channels);
        a.scores[place * a.slots + key] = score * a.scale;
      }
    }
  }
  return nullptr;
}

}  // namespace jspec
