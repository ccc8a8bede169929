// Selects by hash codes, alone and inside a layer, on the device and on the host and compares: a
// program of its own, so that compute-sanitizer has nothing else to look at.
// tests/cuda_ffi/test_driver.py compiles and runs it.
#define hash_select hash_select_on_cpu
#define hash_attention hash_attention_on_cpu
#define hash_append_select hash_append_select_on_cpu
#include "hashed/hashed_cpu.cc"
#undef hash_select
#undef hash_attention
#undef hash_append_select

#include "device.cuh"

namespace jspec {
const char* hash_select(const Hash& hash, const HashCut& cut, void* workspace, Stream stream);
const char* hash_attention(const Hash& hash, const Layer& layer, const HashCut& cut,
                           void* workspace, Stream stream);
const char* hash_append_select(const Hash& hash, const Layer& layer, const HashCut& cut,
                               void* workspace, Stream stream);
}  // namespace jspec

using namespace jspec;

int failures = 0, calls = 0;

void expect(bool right, const char* what, const Hash& hash, const HashCut& cut) {
  ++calls;
  if (right) return;
  ++failures;
  std::printf("wrong: %s batch=%d tokens=%d heads=%d group=%d words=%d n=%d k=%d sinks=%d recent=%d "
              "chunk=%d parts=%d\n",
              what, int(hash.batch), hash.tokens, hash.heads, hash.group, hash.words, hash.rows.n,
              hash.rows.k, hash.rows.sinks, hash.rows.recent, cut.chunk, cut.parts);
}

uint32_t any_word() { return std::rand() * 2u ^ std::rand(); }

std::vector<uint32_t> some_codes(int64_t count, bool any) {
  const uint32_t few[] = {0, 1, 0x80000000u, ~0u, 0xFF00FFu};
  std::vector<uint32_t> codes(count);
  for (uint32_t& x : codes) x = any ? any_word() : few[random_below(5)];
  return codes;
}

void try_select(int batch, int tokens, int heads, int group, int words, int n, int k, int sinks,
                int recent, HashCut cut) {
  const bool any = n % 2;
  const auto q = some_codes(int64_t(batch) * tokens * heads * group * words, any);
  const auto codes = some_codes(int64_t(batch) * n * heads * words, any);
  const int rows = batch * heads;
  const std::vector<int32_t> counts = some_counts(rows, k), lengths = some_counts(rows, n);
  std::vector<int32_t> want(int64_t(rows) * k);
  const Device<uint32_t> d_q(q), d_codes(codes);
  const Device<int32_t> d_counts(counts), d_lengths(lengths), d_slots(want.size());
  Hash host{q.data(), codes.data(), batch, tokens, heads, group, words,
            {counts.data(), lengths.data(), want.data(), rows, n, k, sinks, recent}};
  Hash device = host;
  device.q_codes = d_q.data;
  device.k_codes = d_codes.data;
  device.rows.counts = d_counts.data;
  device.rows.lengths = d_lengths.data;
  device.rows.slots = d_slots.data;
  const HashPlan plan(host.highest(), n, cut, 0);
  const Device<uint32_t> workspace(plan.words * rows);
  hash_select_on_cpu(host, cut, nullptr, nullptr);
  launched(hash_select(device, cut, workspace.data, nullptr));
  expect(d_slots.holds(want), "hash_select", host, cut);
}

// Small whole numbers: products, and with them codes and scores, are exact in any order.
std::vector<uint16_t> some_floats(int64_t count) {
  std::vector<uint16_t> x(count);
  for (uint16_t& value : x) value = narrow(float(random_below(9)) / 4 - 1);
  return x;
}

bool close(const std::vector<float>& got, const std::vector<float>& want, float within) {
  for (size_t i = 0; i < want.size(); ++i) {
    if (got[i] == want[i]) continue;
    if (!(std::abs(got[i] - want[i]) <= within)) return false;
  }
  return true;
}

template <typename T>
std::vector<T> host_of(const Device<T>& device) {
  std::vector<T> host(device.size);
  cudaMemcpy(host.data(), device.data, host.size() * sizeof(T), cudaMemcpyDeviceToHost);
  return host;
}

std::vector<float> widened(const std::vector<uint16_t>& x) {
  std::vector<float> out(x.size());
  for (size_t i = 0; i < x.size(); ++i) out[i] = wide(x[i]);
  return out;
}

void try_layer(int batch, int heads, int group, int words, int size, int n, int k, int sinks,
               int recent, bool normed, HashCut cut) {
  const int rows = batch * heads, bits = words * 32;
  const auto joined = some_floats(int64_t(rows) * (group + 2) * size);
  std::vector<float> cosine(batch * size / 2), sine(cosine.size()), scales(size);
  for (size_t i = 0; i < cosine.size(); ++i) {  // by 0, 90, 180 and 270 degrees, no sum is rounded
    const int turn = random_below(4);
    cosine[i] = turn % 2 ? 0 : 1 - turn, sine[i] = turn % 2 ? 2 - turn : 0;
  }
  for (float& x : scales) x = float(random_below(3) + 1) / 2;
  std::vector<float> w(int64_t(heads) * size * bits);
  for (float& x : w) x = float(random_below(15)) - 7;
  auto keys = some_floats(int64_t(batch) * n * heads * size), values = some_floats(keys.size());
  auto codes = some_codes(int64_t(batch) * n * heads * words, n % 2);
  std::vector<int32_t> positions(batch), until(batch), lengths(rows), counts = some_counts(rows, k);
  const int tail = 3;
  for (int i = 0; i < batch; ++i) {
    positions[i] = i == 1 ? -1 : random_below(n);
    until[i] = std::max(positions[i] - int(random_below(tail)), 0);
    if (i == 0) positions[i] = n - 1, until[i] = n - 1;
    // What is behind a row's end is read by nobody.
    for (int64_t at = std::max(positions[i], 0) * int64_t(heads) * size + size * heads;
         at < int64_t(n) * heads * size; ++at) {
      keys[int64_t(i) * n * heads * size + at] = values[int64_t(i) * n * heads * size + at] = 0x7FC0;
    }
    for (int head = 0; head < heads; ++head) lengths[i * heads + head] = until[i];
  }
  const int64_t queries = int64_t(rows) * group;
  std::vector<uint16_t> turned(queries * size), out(turned.size());
  std::vector<uint32_t> q_codes(queries * words);
  std::vector<float> lse(queries);
  std::vector<int32_t> slots(int64_t(rows) * k);
  const Device<uint16_t> d_joined(joined), d_keys(keys), d_values(values), d_turned(turned.size()),
      d_out(out.size());
  const Device<float> d_cosine(cosine), d_sine(sine), d_scales(scales), d_w(w), d_lse(lse.size());
  const Device<uint32_t> d_codes(codes), d_q_codes(q_codes.size());
  const Device<int32_t> d_positions(positions), d_until(until), d_lengths(lengths), d_counts(counts),
      d_slots(slots.size());
  const float scale = 1 / std::sqrt(float(size)), eps = 1e-6f;
  const Hash host{q_codes.data(), codes.data(), batch, 1, heads, group, words,
                  {counts.data(), lengths.data(), slots.data(), rows, n, k, sinks, recent}};
  const Layer layer{joined.data(), cosine.data(), sine.data(), normed ? scales.data() : nullptr,
                    normed ? scales.data() : nullptr, eps, eps, scale, w.data(), positions.data(),
                    until.data(), keys.data(), values.data(), codes.data(), turned.data(),
                    q_codes.data(), out.data(), lse.data(), size, tail};
  Hash device = host;
  device.q_codes = d_q_codes.data, device.k_codes = d_codes.data;
  device.rows = {d_counts.data, d_lengths.data, d_slots.data, rows, n, k, sinks, recent};
  const Layer on_device{d_joined.data, d_cosine.data, d_sine.data, normed ? d_scales.data : nullptr,
                        normed ? d_scales.data : nullptr, eps, eps, scale, d_w.data,
                        d_positions.data, d_until.data, d_keys.data, d_values.data, d_codes.data,
                        d_turned.data, d_q_codes.data, d_out.data, d_lse.data, size, tail};
  const HashPlan plan(host.highest(), n, cut, floats_of(group, size));
  const Device<uint32_t> workspace(plan.words * rows);
  hash_attention_on_cpu(host, layer, cut, nullptr, nullptr);
  launched(hash_attention(device, on_device, cut, workspace.data, nullptr));
  if (!normed) {  // a norm's root may round otherwise, and a bit of a code with it
    expect(d_codes.holds(codes), "codes", host, cut);
    expect(d_q_codes.holds(q_codes), "q_codes", host, cut);
    expect(d_slots.holds(slots), "slots", host, cut);
    expect(close(widened(host_of(d_out)), widened(out), 0.01f), "out", host, cut);
    expect(close(host_of(d_lse), lse, 1e-3f), "lse", host, cut);
  }
  expect(close(widened(host_of(d_turned)), widened(turned), normed ? 0.02f : 0), "q", host, cut);
  expect(d_values.holds(values), "values", host, cut);
  // Attention aside, the same again.
  cudaMemset(d_slots.data, 0xA5, slots.size() * sizeof(int32_t));
  launched(hash_append_select(device, on_device, cut, workspace.data, nullptr));
  if (!normed) expect(d_slots.holds(slots), "slots without attention", host, cut);
}

int main() {
  for (const int words : {1, 2, 4, 8}) {
    const int codes[][5] = {{1, 1, 1, 1, 1},     {2, 1, 8, 4, 3000}, {1, 3, 5, 2, 777},
                            {2, 1, 40, 1, 2050}, {1, 1, 3, 6, 9001}, {2, 3, 2, 3, 601},
                            {1, 1, 2, 31, 900},  {1, 1, 1, 127, 300}, {1, 1, 4, 1, 40001}};
    for (const auto& c : codes) {
      for (const HashCut cut : {HashCut{256, 1}, HashCut{512, 3}, HashCut{2048, 4}}) {
        if (c[1] * c[3] * 32 * words < 4096) {
          try_select(c[0], c[1], c[2], c[3], words, c[4], std::min(c[4], 300), c[4] > 9, c[4] > 9,
                     cut);
        }
      }
    }
  }
  for (const int size : {64, 128, 256}) {
    for (const HashCut cut : {HashCut{256, 1}, HashCut{256, 3}, HashCut{1024, 8}}) {
      for (const bool normed : {false, true}) {
        try_layer(1, 1, 1, 4, size, 2, 1, 0, 0, normed, cut);
        try_layer(3, 2, 4, 4, size, 1500, 64, 4, 16, normed, cut);
        try_layer(2, 8, 1, 2, size, 901, 1000, 1, 1, normed, cut);
        try_layer(2, 3, 7, 1, size, 300, 33, 0, 2, normed, cut);
        try_layer(2, 4, 2, 8, size, 2100, 128, 0, 0, normed, cut);
      }
    }
  }
  // More blocks than a device holds at once.
  try_layer(40, 8, 4, 4, 64, 700, 90, 4, 16, false, {256, 8});
  std::printf("%d of %d wrong\n", failures, calls);
  return failures != 0;
}
