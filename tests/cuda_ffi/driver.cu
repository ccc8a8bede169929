// Launches every kernel on small random cases and compares with the serial scan on the host: a
// program of its own, so that compute-sanitizer has nothing else to look at.
// tests/cuda_ffi/test_driver.py compiles and runs it.
#include "device.cuh"
#include "pack/kv.h"
#include "verify/commit.h"
#include "verify/row.h"
#include "verify/scan.h"

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

template <typename T>
T* data_of(std::vector<T>& x) {
  return x.data();
}

template <typename T>
T* data_of(Device<T>& x) {
  return x.data;
}

// Verification with commits, the logits of a row read as a whole and in parts.
void run_commit(int batch, int gamma, int stops, int vocabulary) {
  const int slots = gamma + 6, positions = gamma + 1;
  std::vector<float> logits(batch * positions * vocabulary);
  std::vector<int32_t> draft(batch * gamma), lengths(batch, gamma), stop(batch * stops);
  for (float& logit : logits) logit = random_below(40) ? random_below(9) : INFINITY;
  logits[0] = NAN;
  for (int32_t& token : draft) token = random_below(3);
  for (int32_t& token : stop) token = random_below(2 * vocabulary) - vocabulary;
  std::vector<int32_t> limits(batch), known(batch * slots, -1), cached(batch);
  std::vector<Flag> done(batch);
  for (int b = 0; b < batch; ++b) {
    cached[b] = random_below(slots);
    limits[b] = cached[b] + 1 + random_below(gamma + 3);
    done[b].value = b % 5 == 3;
  }
  Device<float> d_logits(logits);
  Device<int32_t> d_draft(draft), d_lengths(lengths), d_stop(stop), d_limits(limits);
  const auto flags = [](Flag* flags) { return reinterpret_cast<bool*>(flags); };
  const auto commit_of = [&](auto& out, auto* draft, auto* lengths, auto* stop, auto* logits,
                             auto* limits, auto* known, auto* cached, bool* done, auto* block,
                             float* tops, int32_t* firsts, int part) {
    const Greedy greedy{draft, nullptr, lengths, stop, data_of(out.accepted), data_of(out.committed),
                        flags(data_of(out.mismatch)), data_of(out.next), flags(data_of(out.stopped)),
                        data_of(out.tokens), batch, gamma, stops, false};
    return Commit{greedy, logits, limits, known, cached, done, block, tops, firsts, slots,
                  vocabulary, part, part ? (vocabulary + part - 1) / part : 0, false};
  };
  Outputs<int32_t, Host> want(batch, gamma);
  std::vector<int32_t> want_known = known, want_cached = cached, block(batch * (gamma + 3));
  std::vector<Flag> want_done = done;
  const Commit host = commit_of(want, draft.data(), lengths.data(), stop.data(), logits.data(),
                                limits.data(), want_known.data(), want_cached.data(),
                                flags(want_done.data()), block.data(), nullptr, nullptr, 0);
  for (int row = 0; row < batch; ++row) {
    std::vector<int32_t> target;
    for (int at = row * positions; at < (row + 1) * positions; ++at) {
      Largest largest(0);
      for (int v = 0; v < vocabulary; ++v) largest.take(logits[at * vocabulary + v], v);
      target.push_back(largest.token);
    }
    const Greedy greedy = row_alone(host.greedy, row, target.data());
    verify_row<int32_t>(greedy, 0);
    const Ended ended{*greedy.accepted, *greedy.committed, *greedy.stopped};
    commit_row(host, row, target.data(), ended, cached[row], done[row].value, 0, 1);
  }
  for (const int part : {0, 32, 256}) {
    Outputs<int32_t, Device> got(batch, gamma);
    Device<int32_t> d_known(known), d_cached(cached), d_block(block.size());
    Device<Flag> d_done(done);
    const int parts = part ? batch * positions * ((vocabulary + part - 1) / part) : 0;
    Device<float> tops(parts);
    Device<int32_t> firsts(parts);
    launched(verify_and_commit(
        commit_of(got, d_draft.data, d_lengths.data, d_stop.data, d_logits.data, d_limits.data,
                  d_known.data, d_cached.data, flags(d_done.data), d_block.data, tops.data,
                  firsts.data, part),
        4, nullptr));
    expect(got.accepted.holds(want.accepted) && got.stopped.holds(want.stopped) &&
               got.next.holds(want.next) && got.tokens.holds(want.tokens),
           "verification of logits", batch, gamma, part);
    expect(d_known.holds(want_known) && d_cached.holds(want_cached) && d_done.holds(want_done) &&
               d_block.holds(block),
           "commit", batch, gamma, part);
  }
}

// The acceptance scan by ballots and by a thread a row.
void run_scan(int batch, int gamma) {
  std::vector<int32_t> target(batch * (gamma + 1)), draft(batch * gamma);
  for (int32_t& token : target) token = random_below(50);
  for (int i = 0; i < batch * gamma; ++i) {
    draft[i] = random_below(gamma + 2) ? target[i + i / gamma] : -1;
  }
  std::vector<int32_t> accepted(batch), next(batch);
  std::vector<Flag> mismatch(batch);
  const auto flags = [](Flag* flags) { return reinterpret_cast<bool*>(flags); };
  for (int row = 0; row < batch; ++row) {
    scan_row(Scan{draft.data(), target.data(), accepted.data(), flags(mismatch.data()),
                  next.data(), batch, gamma},
             row);
  }
  Device<int32_t> d_draft(draft), d_target(target), d_accepted(batch), d_next(batch);
  Device<Flag> d_mismatch(batch);
  for (const auto scan : {scan_ballot, scan_naive}) {
    d_accepted.fill(0x55);
    d_next.fill(0x55);
    launched(scan(Scan{d_draft.data, d_target.data, d_accepted.data, flags(d_mismatch.data),
                       d_next.data, batch, gamma},
                  4, nullptr));
    expect(d_accepted.holds(accepted) && d_mismatch.holds(mismatch) && d_next.holds(next),
           scan == scan_naive ? "naive scan" : "ballot scan", batch, gamma, 0);
  }
}

int main() {
  for (const int gamma : {0, 1, 8, 32, 33, 128, 129, 500}) run_scan(37, gamma);
  for (const int vocabulary : {5, 41, 260, 1000}) {
    run_commit(1, 5, 1, vocabulary);
    run_commit(9, 33, 2, vocabulary);
    run_commit(33, 0, 0, vocabulary);
    run_commit(3, 200, 3, vocabulary);
  }
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
