// Attention over selected slots on a CPU: one softmax per row, by the definition.
#include <algorithm>
#include <cmath>
#include <vector>

#include "common/bfloat16_cpu.h"
#include "gathered/gathered.h"

namespace jspec {

namespace {

// A head's channels, normed and rotated as the angles of a batch row say.
void rotate(const Gathered& g, int64_t row, const uint16_t* from, const uint16_t* scale, float eps,
            uint16_t* to) {
  const int size = g.channels, half = size / 2;
  std::vector<float> x(size);
  float squares = 0;
  for (int c = 0; c < size; ++c) x[c] = wide(from[c]), squares += x[c] * x[c];
  const float root = 1 / std::sqrt(squares / size + eps);
  for (int c = 0; c < size && scale; ++c) {
    x[c] = wide(narrow(wide(narrow(x[c] * root)) * wide(scale[c])));
  }
  for (int c = 0; c < half; ++c) {
    const float cosine = g.appended.cosine[row * half + c], sine = g.appended.sine[row * half + c];
    to[c] = narrow(x[c] * cosine - x[c + half] * sine);
    to[c + half] = narrow(x[c + half] * cosine + x[c] * sine);
  }
}

// Appends the token of each row. Returns its rotated queries.
std::vector<uint16_t> append(const Gathered& g) {
  const Appended& own = g.appended;
  const int64_t size = g.channels;
  std::vector<uint16_t> queries(int64_t(g.batch) * g.kv_heads * g.group * size);
  for (int64_t row = 0; row < g.batch; ++row) {
    const int position = g.positions[row], entry = position - g.context_len[row];
    const bool is_there = position >= 0 && entry >= 0 && entry < g.tail_count;
    const int64_t slot = is_there ? g.tail[row * g.tail_count + entry] : -1;
    for (int64_t head = 0; head < g.kv_heads; ++head) {
      const int64_t at = row * g.kv_heads + head;
      const uint16_t* from = own.joined + at * (g.group + 2) * size;
      for (int i = 0; i < g.group; ++i, from += size) {
        rotate(g, row, from, own.q_scale, own.q_eps, &queries[(at * g.group + i) * size]);
      }
      if (slot < 0) continue;
      const int64_t place = ((row * g.slots + slot) * g.kv_heads + head) * size;
      rotate(g, row, from, own.k_scale, own.k_eps, own.keys + place);
      std::copy(from + size, from + 2 * size, own.values + place);
    }
  }
  return queries;
}

}  // namespace

const char* gathered_attention(const Gathered& given, Stream) {
  Gathered g = given;
  std::vector<uint16_t> queries;
  if (g.appended.joined) {
    queries = append(g);
    g.q = queries.data();
  }
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
