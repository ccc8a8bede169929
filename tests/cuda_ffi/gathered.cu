// Launches gathered attention on random cases and compares with the same on the host: a program of
// its own, so that compute-sanitizer has nothing else to look at. Run by
// tests/cuda_ffi/test_driver.py.
#include <algorithm>
#include <numeric>

#include "device.cuh"

// The host's attention, under another name.
#define gathered_attention gathered_attention_on_host
#include "gathered/gathered_cpu.cc"
#undef gathered_attention

namespace jspec {
const char* gathered_attention(const Gathered& gathered, Stream stream);
}

using namespace jspec;

struct Sizes {
  int batch, slots, kv_heads, tokens, group, channels, selected, tail, parts, stages, warps;
};

bool run(const Sizes& s, bool per_head) {
  const int rows = s.tokens * s.group, heads = s.batch * s.kv_heads;
  const int lists = per_head ? s.kv_heads : 1;
  std::vector<uint16_t> q = random_values(size_t(heads) * rows * s.channels);
  std::vector<uint16_t> k = random_values(size_t(heads) * s.slots * s.channels);
  std::vector<uint16_t> v = random_values(k.size());
  std::vector<int32_t> positions(s.batch * s.tokens), context_len(s.batch);
  std::vector<int32_t> tail(s.batch * s.tail), selected;
  std::vector<bool> read(size_t(heads) * s.slots);
  const std::vector<int32_t> counts = some_counts(s.batch * lists, s.selected);
  for (int row = 0; row < s.batch; ++row) {
    std::vector<int32_t> slots(s.slots);
    std::iota(slots.begin(), slots.end(), 0);
    for (int i = s.slots - 1; i > 0; --i) std::swap(slots[i], slots[random_below(i + 1)]);
    context_len[row] = random_below(1000);
    const int first = context_len[row] + std::max(s.tail - s.tokens, 0) - row % 2;
    int newest = -1;
    for (int i = 0; i < s.tokens; ++i) {
      int32_t& position = positions[row * s.tokens + i];
      position = random_below(6) ? std::max(first + i, 0) : -1;
      newest = std::max(newest, position);
    }
    const auto mark = [&](int slot, int head) {
      read[(size_t(row) * s.slots + slot) * s.kv_heads + head] = true;
    };
    for (int i = 0; i < s.tail; ++i) {
      tail[row * s.tail + i] = slots[i];
      for (int head = 0; context_len[row] + i <= newest && head < s.kv_heads; ++head) {
        mark(slots[i], head);
      }
    }
    for (int list = 0; list < lists; ++list) {
      std::rotate(slots.begin() + s.tail, slots.begin() + s.tail + 7, slots.end());
      for (int i = 0; i < s.selected; ++i) {
        const int slot = random_below(8) ? slots[s.tail + i] : -1;
        selected.push_back(slot);
        if (slot < 0 || i >= counts[row * lists + list] || newest < 0) continue;
        for (int head = 0; head < s.kv_heads; ++head) {
          if (lists == 1 || head == list) mark(slot, head);
        }
      }
    }
  }
  // What no query reads is NaN.
  for (size_t i = 0; i < k.size(); ++i) {
    if (!read[i / s.channels]) k[i] = v[i] = 0x7fc0;
  }
  std::vector<uint16_t> out(q.size());
  std::vector<float> lse(heads * rows);
  Device<uint16_t> d_q(q), d_k(k), d_v(v), d_out(q.size());
  Device<int32_t> d_positions(positions), d_selected(selected), d_tail(tail);
  Device<int32_t> d_context_len(context_len), d_counts(counts);
  Device<float> d_lse(lse.size()), partial_sums(size_t(heads) * s.parts * rows * 2);
  Device<float> partial_out(size_t(heads) * s.parts * rows * s.channels);
  const Gathered host{q.data(), k.data(), v.data(), positions.data(), selected.data(), tail.data(),
                      context_len.data(), counts.data(), out.data(), lse.data(), nullptr, nullptr,
                      s.batch, s.slots, s.kv_heads, s.tokens, s.group, s.channels, lists,
                      s.selected, s.tail, s.parts, s.stages, s.warps, 0.1f};
  const Gathered device{d_q.data, d_k.data, d_v.data, d_positions.data, d_selected.data,
                        d_tail.data, d_context_len.data, d_counts.data, d_out.data, d_lse.data,
                        partial_out.data, partial_sums.data, s.batch, s.slots, s.kv_heads,
                        s.tokens, s.group, s.channels, lists, s.selected, s.tail, s.parts,
                        s.stages, s.warps, 0.1f};
  launched(gathered_attention_on_host(host, nullptr));
  launched(gathered_attention(device, nullptr));
  const bool good = near(d_out, out, 0.02f, wide) &&
                    near(d_lse, lse, 1e-3f, [](float x) { return x; });
  if (!good) {
    std::printf("wrong: B=%d S=%d K=%d T=%d G=%d H=%d n=%d m=%d parts=%d stages=%d lists=%d\n",
                s.batch, s.slots, s.kv_heads, s.tokens, s.group, s.channels, s.selected, s.tail,
                s.parts, s.stages, lists);
  }
  return good;
}

int main() {
  // Teams of one, two and four warps; parts of one tile, and of more tiles than there are stages.
  const Sizes cases[] = {
      {3, 900, 8, 1, 4, 128, 500, 3, 4, 3, 8},    {2, 900, 3, 1, 1, 128, 512, 1, 32, 3, 4},
      {2, 700, 2, 5, 4, 128, 300, 6, 2, 6, 4},    {3, 2000, 4, 10, 4, 128, 1000, 12, 3, 8, 4},
      {2, 500, 1, 20, 8, 128, 333, 24, 4, 2, 8},  {3, 400, 2, 1, 7, 64, 300, 1, 1, 5, 8},
      {2, 600, 3, 8, 4, 64, 400, 9, 8, 2, 4},     {2, 300, 2, 12, 8, 64, 200, 12, 5, 4, 8},
      {2, 700, 2, 2, 4, 128, 600, 3, 1, 2, 16}};
  int wrong = 0;
  for (const Sizes& sizes : cases) {
    for (const bool per_head : {false, true}) wrong += !run(sizes, per_head);
  }
  std::printf("%d wrong\n", wrong);
  return wrong != 0;
}
