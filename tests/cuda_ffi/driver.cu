// Launches every kernel on small random cases and compares with the serial scan on the host: a
// program of its own, so that compute-sanitizer has nothing else to look at.
// tests/cuda_ffi/test_driver.py compiles and runs it.
#include "device.cuh"
#include "pack/kv.h"
#include "verify/row.h"

using namespace jspec;

// Outputs of verification, on the host or the device.
template <typename Token, template <typename> class Array>
struct Outputs {
  Array<int32_t> accepted, committed;
  Array<Flag> mismatch, stopped;
  Array<Token> next, tokens;

  Outputs(int batch, int gamma)
      : accepted(batch), committed(batch), mismatch(batch), stopped(batch), next(batch),
        tokens(batch * (gamma + 1)) {}
};

template <typename T>
using Host = std::vector<T>;

int failures = 0;

void expect(bool right, const char* what, int batch, int gamma, int bytes) {
  if (right) return;
  ++failures;
  std::printf("wrong: %s, B=%d gamma=%d row_bytes=%d\n", what, batch, gamma, bytes);
}

template <typename Token>
void run(int batch, int gamma, int stops, int row_bytes) {
  const auto random = [](int below) { return std::rand() % below; };
  std::vector<Token> target(batch * (gamma + 1)), draft(batch * gamma), stop(batch * stops);
  std::vector<int32_t> lengths(batch);
  for (Token& token : target) token = random(50);
  for (int b = 0; b < batch; ++b) {
    lengths[b] = random(4) ? gamma : random(gamma + 3) - 1;
    for (int i = 0; i < gamma; ++i) {
      draft[b * gamma + i] = random(gamma + 2) ? target[b * (gamma + 1) + i] : Token(-1);
    }
  }
  for (Token& token : stop) token = random(3) ? -1 : random(200);
  std::vector<char> kv(batch * gamma * row_bytes);
  for (char& byte : kv) byte = random(256);

  Device<Token> d_target(target), d_draft(draft), d_stop(stop);
  Device<int32_t> d_lengths(lengths);
  Device<char> d_kv(kv);
  Outputs<Token, Host> want(batch, gamma);
  Outputs<Token, Device> got(batch, gamma);
  const auto flags = [](Flag* flags) { return reinterpret_cast<bool*>(flags); };
  const Greedy host{draft.data(), target.data(), lengths.data(), stop.data(),
                    want.accepted.data(), want.committed.data(), flags(want.mismatch.data()),
                    want.next.data(), flags(want.stopped.data()), want.tokens.data(), batch,
                    gamma, stops, sizeof(Token) == 8};
  const Greedy device{d_draft.data, d_target.data, d_lengths.data, d_stop.data,
                      got.accepted.data, got.committed.data, flags(got.mismatch.data),
                      got.next.data, flags(got.stopped.data), got.tokens.data, batch, gamma,
                      stops, sizeof(Token) == 8};
  for (int row = 0; row < batch; ++row) verify_row<Token>(host, row);

  const auto verified = [&](const char* what) {
    expect(got.accepted.holds(want.accepted) && got.committed.holds(want.committed) &&
               got.mismatch.holds(want.mismatch) && got.stopped.holds(want.stopped) &&
               got.next.holds(want.next) && got.tokens.holds(want.tokens),
           what, batch, gamma, row_bytes);
    for (Device<int32_t>* x : {&got.accepted, &got.committed}) {
      x->fill(0x55);
    }
    got.tokens.fill(0x55);
  };
  launched(verify_ballot(device, 4, nullptr));
  verified("ballot");
  launched(verify_naive(device, 1, nullptr));
  verified("naive");

  std::vector<int32_t> offsets;
  std::vector<char> packed;
  for (int b = 0; b < batch; ++b) {
    offsets.push_back(row_bytes ? packed.size() / row_bytes : 0);
    const char* from = kv.data() + b * gamma * row_bytes;
    packed.insert(packed.end(), from, from + want.accepted[b] * row_bytes);
  }
  Device<int32_t> d_accepted(want.accepted), d_offsets(batch), d_total(1);
  Device<char> d_packed(kv.size());
  const Pack packing{d_kv.data, d_accepted.data, d_packed.data, d_offsets.data, d_total.data,
                     batch, gamma, row_bytes};
  const auto is_packed = [&](const char* what) {
    expect(d_packed.holds(packed) && d_offsets.holds(offsets), what, batch, gamma, row_bytes);
    d_packed.fill(0x55);
  };
  for (const bool eager : {false, true}) {
    for (const int threads : {32, 128, 256}) {
      launched(pack(packing, Cut{threads, eager, false}, nullptr));
      is_packed("pack");
      for (const bool recounts : {false, true}) {
        launched(verify_and_pack(device, packing, Cut{threads, eager, recounts}, nullptr));
        is_packed(recounts ? "fused, one launch" : "fused, two");
        verified("fused");
      }
    }
  }
  if (batch <= 32) {
    launched(verify_and_pack_single(device, packing, nullptr));
    is_packed("single");
    verified("single");
  }
}

int main() {
  const int cases[][4] = {{1, 1, 0, 16},   {4, 8, 2, 256},  {32, 8, 1, 4096}, {33, 31, 1, 48},
                          {19, 32, 3, 14}, {7, 64, 40, 33}, {32, 128, 1, 64}, {5, 200, 2, 8},
                          {70, 5, 1, 16},  {3, 0, 1, 16},   {200, 16, 1, 32},
                          {9, 64, 1, 266}, {40, 40, 1, 640}};
  for (const auto& c : cases) {
    run<int32_t>(c[0], c[1], c[2], c[3]);
    run<int64_t>(c[0], c[1], c[2], c[3]);
  }
  if (const cudaError_t error = cudaDeviceSynchronize()) {
    std::printf("%s\n", cudaGetErrorString(error));
    return 1;
  }
  std::printf("%d wrong\n", failures);
  return failures != 0;
}
