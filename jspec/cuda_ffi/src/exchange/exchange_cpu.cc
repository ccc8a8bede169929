// The all-to-all and the all-reduce of exchange.h between virtual devices, each of which has a thread of its own.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

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

const char* all_reduce(const Reduction& x, Stream) {
  if (const char* wrong = refusal(x.group)) return wrong;
  std::vector<float> heard(x.group.ranks * x.count);
  const auto row = [&](int rank) { return heard.data() + rank * x.count; };
  const int64_t bytes = x.count * sizeof(float);
  std::memcpy(row(x.group.me), x.values, bytes);
  const auto pieces = [&](int) { return reinterpret_cast<const char*>(x.values); };
  const auto found = [&](int rank) { return reinterpret_cast<char*>(row(rank)); };
  if (const char* wrong = message(x.group, bytes, pieces, found)) return wrong;
  std::copy_n(row(0), x.count, x.sums);
  for (int rank = 1; rank < x.group.ranks; ++rank) {
    for (int64_t i = 0; i < x.count; ++i) x.sums[i] += row(rank)[i];
  }
  return nullptr;
}

}  // namespace jspec
