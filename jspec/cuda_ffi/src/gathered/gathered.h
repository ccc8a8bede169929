// Attention over selected slots of a cache: arguments and launch. The arrays are those of
// jspec/ops/attention/gathered.py; queries, keys, values and outputs are bfloat16.
#pragma once

#include "attention/parts.h"
#include "common/launch.h"

namespace jspec {

constexpr int kMaxListed = 131072;  // slots of a list, with those of the tail
constexpr int kMinStages = 2, kMaxStages = 8;
constexpr int kMaxWarps = 16, kMaxBatch = 65535;
constexpr int kFewRows = 8;  // query rows of a head, up to which a block has a part of its list

// A new token of each batch row, which is appended to the cache before it attends, in the slot of
// the tail at its position. `joined` is null if tokens are in the cache and queries are rotated.
struct Appended {
  const uint16_t* joined;  // [batch, kv_heads, group + 2, channels]: the fused QKV projection
  const float* cosine;     // [batch, channels / 2]
  const float* sine;       // as cosine
  const uint16_t* q_scale;  // [channels] of the norm of queries, null for none
  const uint16_t* k_scale;  // the same of keys
  uint16_t* keys;          // those of the cache, to be written
  uint16_t* values;        // as keys
  float q_eps;
  float k_eps;
};

struct Gathered {
  const uint16_t* q;           // [batch, tokens, kv_heads, group, channels], null if appended
  const uint16_t* k;           // [batch, slots, kv_heads, channels]
  const uint16_t* v;           // as k
  const int32_t* positions;    // [batch, tokens], -1 for padding
  const int32_t* selected;     // [batch, lists, selected_count], -1 for none; null: 0, 1, ...
  const int32_t* tail;         // [batch, tail_count], -1 for none
  const int32_t* context_len;  // [batch], the position of the first slot of the tail
  const int32_t* counts;       // [batch, lists], or null: all of a list
  uint16_t* out;               // as q
  float* lse;                  // [batch, tokens, kv_heads, group]
  float* partial_out;          // [batch, kv_heads, parts, tokens * group, channels]
  float* partial_sums;         // [batch, kv_heads, parts, tokens * group, 2]
  int32_t batch;
  int32_t slots;
  int32_t kv_heads;
  int32_t tokens;
  int32_t group;
  int32_t channels;  // of a head: 64 or 128
  int32_t lists;     // per row: 1, or kv_heads
  int32_t selected_count;
  int32_t tail_count;
  int32_t parts;   // into which a list is split, with the tail
  int32_t stages;  // tiles in shared memory, fewer where there is no room for so many
  int32_t warps;   // of a block, a power of 2, fewer where there is no room for so many; 4 or 8
                   // for heads of more than 8 query rows
  float scale;
  Appended appended{};  // one token a row, of heads of up to kFewRows query rows
};

// Returns the error's message, or null.
const char* gathered_attention(const Gathered& gathered, Stream stream);

}  // namespace jspec
