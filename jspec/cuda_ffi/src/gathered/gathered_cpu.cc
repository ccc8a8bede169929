// Attention over selected slots on a CPU: one softmax per row, by the definition.
#include <algorithm>
#include <cmath>
#include <vector>

#include "common/bfloat16_cpu.h"
#include "gathered/gathered.h"

namespace jspec {

const char* gathered_attention(const Gathered& g, Stream) {
  const int channels = g.channels, heads = g.kv_heads * g.group;
  const int64_t stride = int64_t(g.kv_heads) * channels;
  std::vector<int> slots;
  std::vector<float> weights, sums(channels);
  for (int64_t query = 0; query < int64_t(g.batch) * g.tokens * heads; ++query) {
    const int64_t at_token = query / heads, row = at_token / g.tokens;
    const int64_t head = query % heads / g.group, list = row * g.lists + (g.lists > 1 ? head : 0);
    const int position = g.positions[at_token];
    const int count = g.counts ? std::min(g.counts[list], g.selected_count) : g.selected_count;
    slots.clear();
    for (int i = 0; i < g.tail_count && g.context_len[row] + i <= position; ++i) {
      slots.push_back(g.tail[row * g.tail_count + i]);
    }
    for (int i = 0; i < count && position >= 0; ++i) {
      slots.push_back(g.selected ? g.selected[list * g.selected_count + i] : i);
    }
    slots.erase(std::remove_if(slots.begin(), slots.end(), [](int x) { return x < 0; }),
                slots.end());
    weights.assign(slots.size(), 0);
    float top = -INFINITY, total = 0;
    for (size_t i = 0; i < slots.size(); ++i) {
      const uint16_t* key = g.k + (row * g.slots + slots[i]) * stride + head * channels;
      for (int c = 0; c < channels; ++c) {
        weights[i] += wide(g.q[query * channels + c]) * wide(key[c]);
      }
      weights[i] *= g.scale;
      top = std::max(top, weights[i]);
    }
    std::fill(sums.begin(), sums.end(), 0.0f);
    for (size_t i = 0; i < slots.size(); ++i) {
      const uint16_t* value = g.v + (row * g.slots + slots[i]) * stride + head * channels;
      const float weight = std::exp(weights[i] - top);
      total += weight;
      for (int c = 0; c < channels; ++c) sums[c] += weight * wide(value[c]);
    }
    for (int c = 0; c < channels; ++c) {
      g.out[query * channels + c] = narrow(total > 0 ? sums[c] / total : 0);
    }
    g.lse[query] = total > 0 ? top + std::log(total) : -INFINITY;
  }
  return nullptr;
}

}  // namespace jspec
