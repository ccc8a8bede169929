// Selects on the device and on the host and compares: a program of its own, so that
// compute-sanitizer has nothing else to look at. tests/cuda_ffi/test_driver.py compiles and runs it.
#define select select_on_cpu
#include "select/select_cpu.cc"
#undef select

#include "device.cuh"
#include "select/plan.h"

namespace jspec {
const char* select(const Select& select, const Cut& cut, void* workspace, Stream stream);
}  // namespace jspec

using namespace jspec;

int failures = 0, calls = 0;

void expect(bool right, const char* what, const Rows& rows, int kind, const Cut& cut) {
  ++calls;
  if (right) return;
  ++failures;
  std::printf("wrong: %s kind=%d rows=%d n=%d k=%d sinks=%d recent=%d counted=%d taken=%d\n", what,
              kind, int(rows.rows), rows.n, rows.k, rows.sinks, rows.recent, cut.counted, cut.taken);
}

// A row of scores as their bits. Kinds: 0 all values, 1 few, 2 one, 3 rising, 4 falling.
uint32_t bits_of_score(Scores type, int kind, int slot, int n, int highest) {
  const int few = kind == 1 ? random_below(3) : kind == 2 ? 1 : kind == 3 ? slot : n - slot;
  const bool any = kind == 0;
  if (type == Scores::kInt32) {
    if (highest < 0) return any ? std::rand() * 2u ^ std::rand() : few;
    return (any ? random_below(highest + 2) : few % (highest + 2)) - 1;
  }
  const float odd[] = {NAN, -NAN, INFINITY, -INFINITY, -0.0f, 0.0f, 1e-40f, -1e-40f};
  float x = any ? float(std::rand()) / RAND_MAX - float(std::rand()) / RAND_MAX : few;
  if (any && !random_below(5)) x = odd[random_below(8)];
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  // The upper half of a float32 will do for both kinds of 16 bits.
  return type == Scores::kFloat32 ? bits : bits >> 16;
}

void try_select(Scores type, int highest, int rows, int n, int k, int sinks, int recent, Cut cut) {
  const int size = type == Scores::kInt32 || type == Scores::kFloat32 ? 4 : 2;
  std::vector<char> scores(int64_t(rows) * n * size);
  for (int row = 0; row < rows; ++row) {
    for (int slot = 0; slot < n; ++slot) {
      const uint32_t bits = bits_of_score(type, row % 5, slot, n, highest);
      std::memcpy(scores.data() + (int64_t(row) * n + slot) * size, &bits, size);
    }
  }
  const std::vector<int32_t> counts = some_counts(rows, k), lengths = some_counts(rows, n);
  std::vector<int32_t> want(int64_t(rows) * k);
  const Device<char> d_scores(scores);
  const Device<int32_t> d_counts(counts), d_lengths(lengths), d_slots(want.size());
  Select host{scores.data(), type, highest, {counts.data(), lengths.data(), want.data(), rows, n, k,
                                             sinks, recent}};
  Select device = host;
  device.scores = d_scores.data;
  device.rows.counts = d_counts.data;
  device.rows.lengths = d_lengths.data;
  device.rows.slots = d_slots.data;
  const Plan plan(keys_of(host), n, cut);
  const Device<uint32_t> workspace(plan.words * rows);
  select_on_cpu(host, cut, nullptr, nullptr);
  launched(select(device, cut, workspace.data, nullptr));
  expect(d_slots.holds(want), "select", host.rows, int(type) * 10 + (highest >= 0), cut);
}

int main() {
  const Scores types[] = {Scores::kFloat32, Scores::kInt32, Scores::kBfloat16, Scores::kFloat16};
  const int shapes[][5] = {{3, 1, 1, 0, 1},        {7, 90, 16, 1, 2},      {10, 1000, 1200, 4, 9},
                           {10, 1024, 64, 0, 0},   {5, 4097, 300, 16, 64}, {10, 20003, 700, 4, 16},
                           {10, 40000, 2048, 0, 3},
                           {5, 70001, 30000, 1, 1}};
  for (const auto& s : shapes) {
    for (const int chunk : {256, 1024, 4096, 16384, 32768}) {
      for (const Scores type : types) {
        try_select(type, -1, s[0], s[1], s[2], s[3], s[4], {chunk, chunk});
        try_select(type, -1, s[0], s[1], s[2], s[3], s[4], {std::min(chunk, 512), chunk});
      }
      for (const int highest : {0, 1, 128, 512, 4094, 4095, 5000, 70000}) {
        try_select(Scores::kInt32, highest, s[0], s[1], s[2], s[3], s[4], {chunk, chunk});
      }
      try_select(Scores::kInt32, 128, s[0], s[1], s[2], s[3], s[4], {256, chunk});
    }
  }
  std::printf("%d of %d wrong\n", failures, calls);
  return failures != 0;
}
