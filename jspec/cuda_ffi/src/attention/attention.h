// Attention of up to 128 query rows per key-value head, of 64 or 128 channels: arguments and
// launch. The arrays are those of jspec/ops/attention; queries and outputs are bfloat16, keys
// and values are too, or have 8 bits (E4M3).
#pragma once

#include "attention/parts.h"
#include "common/launch.h"

namespace jspec {

constexpr int kMaxRows = 128;  // query rows that share a key-value head
constexpr int kMaxTokens = 32;
constexpr int kBlock = 128;  // keys; a head's are distributed by blocks
constexpr int kMaxTogetherLog2 = 7;

struct Attention {
  const uint16_t* q;         // [batch, tokens, kv_heads, group, channels]
  const void* k;             // [batch, slots, kv_heads, channels]
  const void* v;             // as k
  const int32_t* positions;  // [batch, tokens], -1 for padding
  const uint16_t* probe;     // [batch, kv_heads, channels], null for none
  uint16_t* out;             // as q
  float* lse;                // [batch, tokens, kv_heads, group]
  float* scores;             // [batch, kv_heads, slots] of the probe, null for none
  float* partial_out;        // [batch, kv_heads, parts, tokens * group, channels]
  float* partial_sums;       // [batch, kv_heads, parts, tokens * group, 2]
  int32_t batch;
  int32_t slots;
  int32_t kv_heads;
  int32_t tokens;
  int32_t group;
  int32_t channels;  // of a head: 64 or 128
  int32_t parts;     // into which the keys of a head are split
  int32_t together_log2;  // block i is in part (i >> together_log2) % parts, whatever their number
  float scale;
  bool narrow;  // whether keys and values have 8 bits
};

// Returns the error's message, or null.
const char* attention(const Attention& attention, Stream stream);

}  // namespace jspec
