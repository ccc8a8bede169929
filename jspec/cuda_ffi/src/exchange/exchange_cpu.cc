// The all-to-all of exchange.h between virtual devices, each of which has a thread of its own.
#include <atomic>
#include <chrono>
#include <cstring>
#include <memory>
#include <mutex>
#include <thread>

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

}  // namespace

const char* open_exchange(int count) {
  const std::lock_guard<std::mutex> lock(opening);
  for (int device = 0; device < count; ++device) {
    if (!workspaces[device]) workspaces[device] = std::make_unique<Workspace>();
  }
  return nullptr;
}

const char* exchange(const Exchange& x, Stream) {
  if (failed) return "an exchange has failed before in this process";
  for (int rank = 0; rank < x.ranks; ++rank) {
    if (!workspaces[x.first + rank]) return "a device has no workspace";
  }
  Workspace& own = *workspaces[x.first + x.me];
  const int64_t lines = x.bytes / kLineBytes;
  std::memcpy(x.found + x.me * x.bytes, x.pieces + x.me * x.bytes, x.bytes);
  for (int rank = 0; rank < x.ranks; ++rank) {
    if (rank == x.me) continue;
    const uint32_t message = own.messages[x.first + rank] + 1;
    Line* there = workspaces[x.first + rank]->lines[message % 2][x.first + x.me];
    const char* piece = x.pieces + rank * x.bytes;
    for (int64_t i = 0; i < lines; ++i, piece += kLineBytes) {
      __atomic_store_n(&there[i].low, word(piece, message), __ATOMIC_RELAXED);
      __atomic_store_n(&there[i].high, word(piece + 4, message), __ATOMIC_RELAXED);
    }
  }
  const auto until = std::chrono::steady_clock::now() + std::chrono::nanoseconds(x.patience);
  for (int rank = 0; rank < x.ranks; ++rank) {
    if (rank == x.me) continue;
    const uint32_t message = ++own.messages[x.first + rank];
    const Line* here = own.lines[message % 2][x.first + rank];
    char* piece = x.found + rank * x.bytes;
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

}  // namespace jspec
