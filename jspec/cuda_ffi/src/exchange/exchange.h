// An all-to-all, one that is merged as it arrives, and an all-reduce within one process, in which
// each device stores what it has for its peers in their memory.
//
// A device has a workspace that its peers store into: for each of them room for two messages, which
// take turns. Eight bytes of a message travel as a line of two words, each of 4 bytes and the number
// of the message, so that a word says by itself that it has come: words of 8 bytes are stored and
// loaded whole. A device begins message e + 2 to a peer once it has all of the peer's message
// e + 1, which the peer began after it had read all of message e: the room is free by then.
#pragma once

#include <cmath>

#include "common/host_device.h"
#include "common/launch.h"

namespace jspec {

constexpr int kMostDevices = 8;
constexpr int64_t kLineBytes = 8;        // of a message
constexpr int64_t kMostBytes = 1 << 20;  // to one peer
constexpr int64_t kMostLines = kMostBytes / kLineBytes;

struct Group {
  int ranks;
  int me;            // this device's rank
  int first;         // the device of rank 0, which those of the other ranks follow
  int64_t patience;  // nanoseconds that a device waits for another
};

struct Exchange {
  const char* pieces;  // [ranks, bytes]: for each rank of the group
  char* found;         // [ranks, bytes]: of each rank
  int64_t bytes;       // a multiple of kLineBytes, at most kMostBytes
  Group group;
};

// Attention over the keys of all ranks, from that of each rank to its own keys. A device sends every
// peer the outputs and log-sum-exps of the peer's share of the heads, and merges what it gets.
struct Merging {
  const char* outs;   // [rows, ranks, heads, lines of 8 bytes]: of this rank's keys
  const float* lses;  // [rows, ranks, heads], natural log
  char* out;          // [rows, heads, lines of 8 bytes]: of all keys, for this rank's heads
  float* lse;         // [rows, heads]
  int64_t rows, heads;
  int64_t lines;  // of the output of a head; rows * heads * (lines + 1) is at most kMostLines
  bool narrow;    // outputs are bfloat16, and not float32
  Group group;
};

// Each device sends all of its values to every peer, and sums those of all ranks in their order, so
// that all devices have the same bits. The sum is rounded, and `added` is added to that.
struct Reduction {
  const float* values;  // [count]
  const char* added;    // [count] as the sums are, or null
  char* sums;           // [count]
  int64_t count;        // even, at most kMostBytes / 4
  bool narrow;          // sums are bfloat16, and not float32
  Group group;
};

struct Line {
  uint64_t low, high;  // 4 bytes of a message, and above them the number of the message
};

struct Workspace {
  uint32_t done;                    // blocks of the running kernel that have read the numbers
  uint32_t messages[kMostDevices];  // sent to each device, and so received from it
  uint32_t unused[7];
  Line lines[2][kMostDevices][kMostLines];  // by the message's number, and by its sender
};

// What keeps the first `count` devices from exchanging, or null. The first call makes workspaces.
const char* open_exchange(int count);

// The group of `device`: `ranks` devices that follow each other, from device 0 on. None has so many
// where the number of ranks is 0.
inline Group group_of(int32_t device, int64_t ranks, int64_t patience) {
  if (ranks < 2 || ranks > kMostDevices || device / ranks * ranks + ranks > kMostDevices) return {};
  const int me = static_cast<int>(device % ranks);
  return {static_cast<int>(ranks), me, device - me, patience};
}

// What went wrong, or null. `early`: as `linear_stream` takes it.
const char* exchange(const Exchange& exchange, Stream stream);
const char* merge(const Merging& merging, Stream stream);
const char* all_reduce(const Reduction& reduction, bool early, Stream stream);

// The log-sum-exp of all ranks, and the share of each in the merged output: 0 where it has no key.
// As `jspec.ops.attention.merge_attention`, in the order of the ranks.
JSPEC_HOST_DEVICE inline float shares_of(const float (&lses)[kMostDevices], int ranks,
                                         float (&shares)[kMostDevices]) {
  float highest = -INFINITY, total = 0;
#pragma unroll
  for (int rank = 0; rank < kMostDevices; ++rank) {
    // FlashAttention-2 has +inf where there is no key.
    if (rank < ranks && lses[rank] != INFINITY) highest = fmaxf(highest, lses[rank]);
  }
  const float finite = highest == -INFINITY ? 0 : highest;
#pragma unroll
  for (int rank = 0; rank < kMostDevices; ++rank) {
    const bool has_keys = rank < ranks && lses[rank] != INFINITY;
    shares[rank] = has_keys ? expf(lses[rank] - finite) : 0;
    total += shares[rank];
  }
#pragma unroll
  for (int rank = 0; rank < kMostDevices; ++rank) shares[rank] /= total > 0 ? total : 1;
  return finite + logf(total);
}

}  // namespace jspec
