// Attention of up to 128 query rows a key-value head, of 64 channels: arguments, and the launch
// behind the handler. What the arrays mean is said in jspec/ops/attention; values are bfloat16.
#pragma once

#include "common/launch.h"

namespace jspec {

constexpr int kChannels = 64;   // of a head
constexpr int kMostRows = 128;  // query rows that share a key-value head
constexpr int kMostTokens = 32;
// A row's keys are dealt out in blocks, block i to part i % kParts, whatever its length.
constexpr int kBlock = 128, kParts = 16;

struct Attention {
  const uint16_t* q;         // [batch, tokens, kv_heads, group, kChannels]
  const uint16_t* k;         // [batch, slots, kv_heads, kChannels]
  const uint16_t* v;         // as k
  const int32_t* positions;  // [batch, tokens], -1 for padding
  const uint16_t* probe;     // [batch, kv_heads, kChannels], null for none
  uint16_t* out;             // as q
  float* lse;                // [batch, tokens, kv_heads, group]
  float* scores;             // [batch, kv_heads, slots] of the probe, null for none
  float* partial_out;        // [batch, kv_heads, kParts, tokens * group, kChannels]
  float* partial_sums;       // [batch, kv_heads, kParts, tokens * group, 2]
  int32_t batch;
  int32_t slots;
  int32_t kv_heads;
  int32_t tokens;
  int32_t group;
  float scale;
};

// Returns what went wrong, or null.
const char* attention(const Attention& attention, Stream stream);

}  // namespace jspec
