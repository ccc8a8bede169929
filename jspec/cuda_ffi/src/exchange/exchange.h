// An all-to-all and an all-reduce within one process, in which each device stores what it has for
// its peers in their memory.
//
// A device has a workspace that its peers store into: for each of them room for two messages, which
// take turns. Eight bytes of a message travel as a line of two words, each of 4 bytes and the number
// of the message, so that a word says by itself that it has come: words of 8 bytes are stored and
// loaded whole. A device begins message e + 2 to a peer once it has all of the peer's message
// e + 1, which the peer began after it had read all of message e: the room is free by then.
#pragma once

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

// Each device sends all of its values to every peer, and sums those of all ranks in their order, so
// that all devices have the same bits.
struct Reduction {
  const float* values;  // [count]
  float* sums;          // [count]
  int64_t count;        // even, at most kMostBytes / 4
  Group group;
};

struct Line {
  uint64_t low, high;  // 4 bytes of a message, and above them the number of the message
};

struct Workspace {
  uint32_t done;                    // blocks of the running kernel that have ended
  uint32_t messages[kMostDevices];  // sent to each device, and so received from it
  uint32_t unused[7];
  Line lines[2][kMostDevices][kMostLines];  // by the message's number, and by its sender
};

// What keeps the first `count` devices from exchanging, or null. The first call makes workspaces.
const char* open_exchange(int count);

// What went wrong, or null.
const char* exchange(const Exchange& exchange, Stream stream);
const char* all_reduce(const Reduction& reduction, Stream stream);

}  // namespace jspec
