// Draws and verifies small random cases on a GPU and compares with the functions of the CPU: a
// program of its own, so that compute-sanitizer has nothing else to look at.
// tests/cuda_ffi/test_driver.py compiles and runs it.
#include "device.cuh"
#include "sample/stochastic.h"

// The functions of the CPU under other names.
#define verify_stochastic verify_on_cpu
#define sample sample_on_cpu
#include "sample/stochastic_cpu.cc"
#undef verify_stochastic
#undef sample

namespace jspec {
const char* verify_on_cpu(const Stochastic& stochastic, Stream stream);
const char* sample_on_cpu(const Draws& draws, Stream stream);
}  // namespace jspec

using namespace jspec;

struct Case {
  int batch, gamma, vocabulary;
  bool bfloat16, draft, draft_bfloat16, filtered;
};

int failures = 0;

double random_in(double low, double high) { return low + (high - low) * std::rand() / RAND_MAX; }

// Of `count` positions, of which one in eight has no finite logit.
std::vector<char> logits_of(size_t count, int vocabulary, bool bfloat16) {
  std::vector<char> bytes(count * vocabulary * (bfloat16 ? 2 : 4));
  for (size_t i = 0; i < count * vocabulary; ++i) {
    float x = static_cast<float>(random_in(-6, 6) + (std::rand() % 40 ? 0 : 6));
    if (std::rand() % 50 == 0 || i / vocabulary % 8 == 5) x = std::rand() % 2 ? -INFINITY : NAN;
    if (std::rand() % (10 * vocabulary) == 0) x = INFINITY;
    uint32_t bits = bits_of(x);
    if (bfloat16) bits >>= 16;
    std::memcpy(&bytes[i * (bfloat16 ? 2 : 4)], &bits, bfloat16 ? 2 : 4);
  }
  return bytes;
}

void check(bool right, const char* what, const Case& c) {
  if (right) return;
  ++failures;
  std::printf("wrong: %s, B=%d gamma=%d V=%d bfloat16=%d draft=%d,%d filtered=%d\n", what, c.batch,
              c.gamma, c.vocabulary, c.bfloat16, c.draft, c.draft_bfloat16, c.filtered);
}

void run(const Case& c) {
  const int targets = c.gamma + 1, drafted = c.draft ? c.gamma : 0, stops = 2;
  const int tiles = (c.vocabulary + kTile - 1) / kTile;
  const std::vector<char> target = logits_of(c.batch * targets, c.vocabulary, c.bfloat16);
  const std::vector<char> draft = logits_of(c.batch * drafted, c.vocabulary, c.draft_bfloat16);
  std::vector<float> rate(c.batch), top_p(c.batch, 1), min_p(c.batch, 0);
  std::vector<int32_t> top_k(c.batch, 0), lengths(c.batch), positions(c.batch * targets);
  std::vector<int32_t> tokens(c.batch * c.gamma), stop_tokens(c.batch * stops);
  std::vector<uint32_t> seeds(2 * c.batch);
  for (int row = 0; row < c.batch; ++row) {
    rate[row] = row % 4 == 3 ? 0 : static_cast<float>(random_in(0.3, 3));
    if (row % 8 == 6) rate[row] = 1e7;
    rate[row] = float_of(bits_of(rate[row]) & 0xFFFFFF00);  // 16 bits, as settings have
    lengths[row] = std::rand() % 3 ? c.gamma : std::rand() % (c.gamma + 1);
    if (c.filtered && row % 3) top_k[row] = 1 + std::rand() % (row % 2 ? c.vocabulary : 30);
    if (c.filtered && row % 2) top_p[row] = static_cast<float>(random_in(0.1, 1));
    if (c.filtered && row % 5) min_p[row] = static_cast<float>(random_in(0, 0.3));
  }
  for (uint32_t& word : seeds) word = std::rand();
  for (int32_t& position : positions) position = std::rand() % 1000;
  for (int32_t& token : tokens) token = std::rand() % (c.vocabulary + 1) - 1;
  for (int32_t& token : stop_tokens) token = std::rand() % c.vocabulary;

  const Device<char> d_target(target), d_draft(draft);
  const Device<float> d_rate(rate), d_top_p(top_p), d_min_p(min_p);
  const Device<int32_t> d_top_k(top_k), d_lengths(lengths), d_positions(positions);
  const Device<int32_t> d_tokens(tokens), d_stop_tokens(stop_tokens);
  const Device<uint32_t> d_seeds(seeds);
  const Device<uint32_t> d_workspace(c.batch * Workspace::words(targets, drafted, tiles));
  const Device<int32_t> accepted(c.batch), committed(c.batch), next(c.batch);
  const Device<int32_t> block_tokens(c.batch * targets), drawn(c.batch * targets);
  const Device<Flag> mismatch(c.batch), stopped(c.batch);
  std::vector<int32_t> h_accepted(c.batch), h_committed(c.batch), h_next(c.batch);
  std::vector<int32_t> h_block(c.batch * targets), h_drawn(c.batch * targets);
  std::vector<Flag> h_mismatch(c.batch), h_stopped(c.batch);
  const auto flags = [](const Flag* flags) {
    return const_cast<bool*>(reinterpret_cast<const bool*>(flags));
  };

  Sampling host{{rate.data(), top_k.data(), top_p.data(), min_p.data(), seeds.data()},
                {target.data(), targets, 0, c.bfloat16},
                {draft.data(), drafted, targets, c.draft_bfloat16},
                lengths.data(), Workspace(), c.batch, c.vocabulary, tiles, c.filtered};
  Sampling device{{d_rate.data, d_top_k.data, d_top_p.data, d_min_p.data, d_seeds.data},
                  {d_target.data, targets, 0, c.bfloat16},
                  {d_draft.data, drafted, targets, c.draft_bfloat16},
                  d_lengths.data,
                  Workspace(d_workspace.data, c.batch, targets, drafted, tiles),
                  c.batch, c.vocabulary, tiles, c.filtered};
  for (const bool block : {false, true}) {
    if (block && !c.draft) continue;
    verify_on_cpu({host, tokens.data(), stop_tokens.data(), positions.data(), h_accepted.data(),
                   h_committed.data(), flags(h_mismatch.data()), h_next.data(),
                   flags(h_stopped.data()), h_block.data(), c.gamma, stops, block}, nullptr);
    launched(verify_stochastic({device, d_tokens.data, d_stop_tokens.data, d_positions.data,
                                accepted.data, committed.data, flags(mismatch.data), next.data,
                                flags(stopped.data), block_tokens.data, c.gamma, stops, block},
                               nullptr));
    check(accepted.holds(h_accepted) && committed.holds(h_committed) && next.holds(h_next) &&
              mismatch.holds(h_mismatch) && stopped.holds(h_stopped) &&
              block_tokens.holds(h_block),
          block ? "verification by blocks" : "verification", c);
  }

  host.draft.positions = device.draft.positions = 0;
  host.lengths = device.lengths = nullptr;
  device.workspace = Workspace(d_workspace.data, c.batch, targets, 0, tiles);
  sample_on_cpu({host, positions.data(), h_drawn.data(), kBonus}, nullptr);
  launched(sample({device, d_positions.data, drawn.data, kBonus}, nullptr));
  check(drawn.holds(h_drawn), "drawing", c);
}

int main() {
  for (int vocabulary : {1, 37, 1024, 3000, 40000, 140000}) {
    for (int kind = 0; kind < 8; ++kind) {
      const bool bfloat16 = kind & 1, draft = kind & 2, filtered = kind & 4;
      if (vocabulary > 100000 && filtered) continue;
      const int batch = vocabulary > 100000 ? 3 : vocabulary > 10000 ? 8 : 16;
      run({batch, kind % 3 + (vocabulary == 37), vocabulary, bfloat16, draft, kind != 2, filtered});
    }
  }
  std::printf("%d wrong\n", failures);
  return failures > 0;
}
