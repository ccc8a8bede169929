// Selection by hash codes, alone and inside a decoding layer: arguments, memory between the launches,
// and the functions behind the handlers. What each field means is said in jspec/ops/hash_select.py
// and jspec/ops/attention/hashed.py.
#pragma once

#include "common/host_device.h"
#include "common/launch.h"
#include "select/select.h"

namespace jspec {

struct Hash {
  const uint32_t* q_codes;  // [batch, tokens, heads * group, words]
  const uint32_t* k_codes;  // [batch, n, heads, words]
  int64_t batch;
  int32_t tokens, heads, group, words;
  Rows rows;  // batch * heads of them

  JSPEC_HOST_DEVICE int64_t queries() const { return int64_t(tokens) * group; }
  JSPEC_HOST_DEVICE int64_t highest() const { return queries() * 32 * words; }
};

// A decoding layer between its projections. Floats of 16 bits are bfloat16.
struct Layer {
  const uint16_t* joined;  // [batch, heads, group * size + size + size]
  const float *cosine, *sine;  // [batch, size / 2]
  const float *q_scale, *k_scale;  // [size], null for no norm
  float q_eps, k_eps, scale;
  const float* w;  // [heads, size, 32 * words]
  const int32_t *positions, *until;  // [batch]
  uint16_t *keys, *values;  // [batch, n, heads, size]
  uint32_t* codes;  // [batch, n, heads, words]: those of `Hash`
  uint16_t* queries;  // [batch, heads * group, size], turned
  uint32_t* q_codes;  // [batch, heads * group, words]: those of `Hash`
  uint16_t* out;  // [batch, heads * group, size]
  float* lse;  // [batch, heads * group]
  int32_t size, tail;
};

// How the work is cut for a GPU: slots of a row that a block scores, a power of 2, and blocks that
// share what follows of a row.
struct HashCut {
  int32_t chunk, parts;
};

constexpr int32_t kMostScore = 4095;
constexpr int32_t kLeastScored = 256, kMostScored = 32768, kMostParts = 1024;

// What lies where in the memory that the launches share. Offsets are in words of 4 bytes from the
// beginning of a row's part.
//
// A row has its scores, of 1 byte where these hold them and of 2 else; a record for each chunk: how
// many of its slots score at least d, for d in 0..bins - 1, as uint16; and, for attention, where its
// parts meet: counters of those that came, of those that are done and, in the first row, of all blocks
// that began; and what each part found.
struct HashPlan {
  int32_t bins, bytes, chunks, each;  // `each`: chunks of a part
  int64_t records, meeting, found, words;

  HashPlan(int64_t highest, int32_t n, const HashCut& cut, int64_t floats)
      : bins(static_cast<int32_t>((highest + 64) / 64 * 64)),
        bytes(highest < 256 ? 1 : 2),
        chunks(n > 0 ? (n - 1) / cut.chunk + 1 : 1),
        each((chunks + cut.parts - 1) / cut.parts),
        records((int64_t(n) * bytes + 15) / 16 * 4),
        meeting(records + int64_t(chunks) * bins / 2),
        found(meeting + 4),
        words((found + cut.parts * floats + 3) / 4 * 4) {}
};

// Floats that a part of a row leaves for the others: outputs, and two sums of each query head.
JSPEC_HOST_DEVICE inline int64_t floats_of(int32_t group, int32_t size) { return int64_t(group) * (size + 2); }

// Each returns what went wrong, or null.
const char* hash_select(const Hash& hash, const HashCut& cut, void* workspace, Stream stream);
const char* hash_attention(const Hash& hash, const Layer& layer, const HashCut& cut,
                           void* workspace, Stream stream);

// What comes before attention: the new token's columns, its queries and their codes, and the slots.
const char* hash_append_select(const Hash& hash, const Layer& layer, const HashCut& cut,
                               void* workspace, Stream stream);

}  // namespace jspec
