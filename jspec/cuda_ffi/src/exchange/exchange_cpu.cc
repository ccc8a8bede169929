// The all-to-all, the merge and the all-reduce of exchange.h between virtual devices, each of which
// has a thread of its own.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "common/bfloat16_cpu.h"
#include "exchange/exchange.h"

namespace jspec {
namespace {

std::unique_ptr<Workspace> workspaces[kMostDevices];  // by device
std::mutex opening;
// Whether a device was given up on. Its next message would be taken for the one that is missing.
std::atomic<bool> failed{false};

uint64_t word(const char* bytes, uint32_t message) {
  uint32_t bits;
  std::memcpy(&bits, bytes, sizeof bits);
  return uint64_t(message) << 32 | bits;
}

// Puts 4 bytes at `to` once `word` is of `message`; false where it does not come in time.
bool awaited(const uint64_t& word, uint32_t message, std::chrono::steady_clock::time_point until,
             char* to) {
  uint64_t value;
  while ((value = __atomic_load_n(&word, __ATOMIC_RELAXED)) >> 32 != message) {
    if (failed || std::chrono::steady_clock::now() > until) return false;
    std::this_thread::yield();
  }
  const uint32_t bits = static_cast<uint32_t>(value);
  std::memcpy(to, &bits, sizeof bits);
  return true;
}

const char* refusal(const Group& group) {
  if (failed) return "an exchange has failed before in this process";
  for (int rank = 0; rank < group.ranks; ++rank) {
    if (!workspaces[group.first + rank]) return "a device has no workspace";
  }
  return nullptr;
}

// Sends `bytes` of `pieces(rank)` to each peer, and puts what comes from each at `found(rank)`.
template <typename Pieces, typename Found>
const char* message(const Group& group, int64_t bytes, Pieces pieces, Found found) {
  Workspace& own = *workspaces[group.first + group.me];
  const int64_t lines = bytes / kLineBytes;
  for (int rank = 0; rank < group.ranks; ++rank) {
    if (rank == group.me) continue;
    const uint32_t message = own.messages[group.first + rank] + 1;
    Line* there = workspaces[group.first + rank]->lines[message % 2][group.first + group.me];
    const char* piece = pieces(rank);
    for (int64_t i = 0; i < lines; ++i, piece += kLineBytes) {
      __atomic_store_n(&there[i].low, word(piece, message), __ATOMIC_RELAXED);
      __atomic_store_n(&there[i].high, word(piece + 4, message), __ATOMIC_RELAXED);
    }
  }
  const auto until = std::chrono::steady_clock::now() + std::chrono::nanoseconds(group.patience);
  for (int rank = 0; rank < group.ranks; ++rank) {
    if (rank == group.me) continue;
    const uint32_t message = ++own.messages[group.first + rank];
    const Line* here = own.lines[message % 2][group.first + rank];
    char* piece = found(rank);
    for (int64_t i = 0; i < lines; ++i, piece += kLineBytes) {
      if (!awaited(here[i].low, message, until, piece) ||
          !awaited(here[i].high, message, until, piece + 4)) {
        failed = true;
        return "another device did not send in time";
      }
    }
  }
  return nullptr;
}

}  // namespace

const char* open_exchange(int count) {
  const std::lock_guard<std::mutex> lock(opening);
  for (int device = 0; device < count; ++device) {
    if (!workspaces[device]) workspaces[device] = std::make_unique<Workspace>();
  }
  return nullptr;
}

const char* exchange(const Exchange& x, Stream) {
  if (const char* wrong = refusal(x.group)) return wrong;
  std::memcpy(x.found + x.group.me * x.bytes, x.pieces + x.group.me * x.bytes, x.bytes);
  const auto pieces = [&](int rank) { return x.pieces + rank * x.bytes; };
  return message(x.group, x.bytes, pieces, [&](int rank) { return x.found + rank * x.bytes; });
}

const char* merge(const Merging& x, Stream) {
  if (const char* wrong = refusal(x.group)) return wrong;
  // A head is its output and its log-sum-exp, in a line of its own.
  const int64_t items = x.rows * x.heads, output = x.lines * kLineBytes;
  const int64_t record = output + kLineBytes, bytes = items * record;
  const int ranks = x.group.ranks;
  std::vector<char> sent(ranks * bytes), heard(ranks * bytes);
  for (int rank = 0; rank < ranks; ++rank) {
    for (int64_t item = 0; item < items; ++item) {
      const int64_t head = (item / x.heads * ranks + rank) * x.heads + item % x.heads;
      char* to = &sent[rank * bytes + item * record];
      std::memcpy(to, x.outs + head * output, output);
      std::memcpy(to + output, x.lses + head, sizeof(float));
    }
  }
  const int64_t own = x.group.me * bytes;
  std::copy_n(&sent[own], bytes, &heard[own]);
  const auto pieces = [&](int rank) { return &sent[rank * bytes]; };
  const auto found = [&](int rank) { return &heard[rank * bytes]; };
  if (const char* wrong = message(x.group, bytes, pieces, found)) return wrong;
  const int64_t width = x.narrow ? sizeof(uint16_t) : sizeof(float), size = output / width;
  for (int64_t item = 0; item < items; ++item) {
    float lses[kMostDevices], shares[kMostDevices];
    for (int rank = 0; rank < ranks; ++rank) {
      std::memcpy(&lses[rank], found(rank) + item * record + output, sizeof(float));
    }
    x.lse[item] = shares_of(lses, ranks, shares);
    for (int64_t i = 0; i < size; ++i) {
      float sum = 0;
      for (int rank = 0; rank < ranks; ++rank) {
        const char* from = found(rank) + item * record + i * width;
        float value;
        uint16_t bits;
        std::memcpy(&value, from, sizeof value);
        std::memcpy(&bits, from, sizeof bits);
        if (shares[rank] > 0) sum += (x.narrow ? wide(bits) : value) * shares[rank];
      }
      const uint16_t rounded = narrow(sum);
      char* to = x.out + item * output + i * width;
      x.narrow ? std::memcpy(to, &rounded, width) : std::memcpy(to, &sum, width);
    }
  }
  return nullptr;
}

const char* all_reduce(const Reduction& x, bool, Stream) {
  if (const char* wrong = refusal(x.group)) return wrong;
  std::vector<float> heard(x.group.ranks * x.count);
  const auto row = [&](int rank) { return heard.data() + rank * x.count; };
  const int64_t bytes = x.count * sizeof(float);
  std::memcpy(row(x.group.me), x.values, bytes);
  const auto pieces = [&](int) { return reinterpret_cast<const char*>(x.values); };
  const auto found = [&](int rank) { return reinterpret_cast<char*>(row(rank)); };
  if (const char* wrong = message(x.group, bytes, pieces, found)) return wrong;
  for (int64_t i = 0; i < x.count; ++i) {
    float sum = row(0)[i];
    for (int rank = 1; rank < x.group.ranks; ++rank) sum += row(rank)[i];
    if (x.narrow) {
      const auto added = reinterpret_cast<const uint16_t*>(x.added);
      const uint16_t rounded = narrow(sum);
      reinterpret_cast<uint16_t*>(x.sums)[i] =
          added ? narrow(wide(added[i]) + wide(rounded)) : rounded;
    } else {
      const auto added = reinterpret_cast<const float*>(x.added);
      reinterpret_cast<float*>(x.sums)[i] = added ? added[i] + sum : sum;
    }
  }
  return nullptr;
}

}  // namespace jspec
