// Launches attention on random cases and compares with the same on the host: a program of its own,
// so that compute-sanitizer has nothing else to look at. tests/cuda_ffi/test_driver.py runs it.
#include "device.cuh"

// The host's attention, under another name.
#define attention attention_on_host
#include "attention/attention_cpu.cc"
#undef attention

namespace jspec {
const char* attention(const Attention& attention, Stream stream);
}

using namespace jspec;

// `count` random numbers of a cache: bfloat16, or E4M3 up to 1.875.
std::vector<uint8_t> random_cache(size_t count, bool narrow) {
  std::vector<uint8_t> bytes(count * (narrow ? 1 : 2));
  if (narrow) {
    for (uint8_t& x : bytes) x = random_below(64) | random_below(2) << 7;
  } else {
    std::memcpy(bytes.data(), random_values(count).data(), bytes.size());
  }
  return bytes;
}

bool run(int batch, int slots, int kv_heads, int tokens, int group, int channels, int parts,
         int together_log2, bool scored, bool narrow) {
  const int rows = tokens * group, heads = batch * kv_heads;
  std::vector<uint16_t> q = random_values(size_t(heads) * rows * channels);
  const size_t cached = size_t(heads) * slots * channels;
  std::vector<uint8_t> k = random_cache(cached, narrow), v = random_cache(cached, narrow);
  std::vector<uint16_t> probe = random_values(heads * channels);
  std::vector<int32_t> positions(batch * tokens);
  for (int row = 0; row < batch; ++row) {
    const int length = row ? tokens + random_below(slots - tokens + 1) : slots;
    for (int i = 0; i < tokens; ++i) {
      positions[row * tokens + i] = random_below(6) ? length - tokens + i : -1;
    }
    int last = -1;
    for (int i = 0; i < tokens; ++i) last = std::max(last, positions[row * tokens + i]);
    // What no query reads is NaN.
    const size_t row_bytes = k.size() / batch, begin = row_bytes / slots * (last + 1);
    for (auto* bytes : {&k, &v}) {
      std::memset(bytes->data() + row * row_bytes + begin, 0xff, row_bytes - begin);
    }
  }
  std::vector<uint16_t> out(q.size());
  std::vector<float> lse(heads * rows), scores(size_t(heads) * slots);
  Device<uint16_t> d_q(q), d_probe(probe), d_out(q.size());
  Device<uint8_t> d_k(k), d_v(v);
  Device<int32_t> d_positions(positions);
  Device<float> d_lse(lse.size()), d_scores(scores), partial_sums(size_t(heads) * parts * rows * 2);
  Device<float> partial_out(size_t(heads) * parts * rows * channels);
  const Attention host{q.data(), k.data(), v.data(), positions.data(),
                       scored ? probe.data() : nullptr, out.data(), lse.data(), scores.data(),
                       nullptr, nullptr, batch, slots, kv_heads, tokens, group, channels, parts,
                       together_log2, 0.1f, narrow};
  const Attention device{d_q.data, d_k.data, d_v.data, d_positions.data,
                         scored ? d_probe.data : nullptr, d_out.data, d_lse.data, d_scores.data,
                         partial_out.data, partial_sums.data, batch, slots, kv_heads, tokens, group,
                         channels, parts, together_log2, 0.1f, narrow};
  launched(attention_on_host(host, nullptr));
  launched(attention(device, nullptr));
  // Scores past a row's end are not specified: there the host left 0.
  std::vector<float> got(scores.size());
  cudaMemcpy(got.data(), d_scores.data, got.size() * 4, cudaMemcpyDeviceToHost);
  bool good = near(d_out, out, 0.02f, wide) &&
              near(d_lse, lse, 1e-3f, [](float x) { return x; });
  for (size_t i = 0; scored && i < got.size(); ++i) {
    good &= scores[i] == 0 || std::abs(got[i] - scores[i]) <= 1e-2f;
  }
  if (!good) {
    std::printf("wrong: B=%d S=%d K=%d T=%d G=%d H=%d parts=%d together=2^%d ", batch, slots, kv_heads,
                tokens, group, channels, parts, together_log2);
    std::printf("scored=%d narrow=%d\n", scored, narrow);
  }
  return good;
}

int main() {
  // Every arrangement of tiles, with few and with several items per program, and with more blocks
  // than are in flight; small, so that racecheck takes seconds.
  const int cases[][7] = {
      {2, 400, 2, 1, 4, 128, 16},  {2, 520, 2, 8, 4, 128, 16},  {1, 1504, 1, 10, 4, 128, 2},
      {1, 600, 1, 16, 4, 128, 16}, {1, 1000, 1, 10, 8, 128, 2}, {5, 272, 4, 1, 1, 128, 8},
      {2, 400, 1, 15, 8, 64, 16},  {1, 640, 2, 12, 8, 64, 4},   {2, 520, 3, 10, 4, 64, 32},
      {1, 152, 2, 7, 9, 64, 1}};
  int wrong = 0;
  for (const auto& c : cases) {
    for (int kind = 0; kind < 3; ++kind) {
      wrong += !run(c[0], c[1], c[2], c[3], c[4], c[5], c[6], kind, kind > 0, kind > 1);
    }
  }
  std::printf("%d wrong\n", wrong);
  return wrong != 0;
}
