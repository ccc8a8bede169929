// Accepted KV rows and the buffer that they are packed into: arguments, and what the handlers
// launch. What each field means is said in jspec/ops/pack.py and jspec/ops/fused.py.
#pragma once

#include "common/launch.h"
#include "verify/verify.h"

namespace jspec {

struct Pack {
  const char* kv;           // [batch, gamma, row_bytes]
  const int32_t* accepted;  // [batch], null where the kernel verifies
  char* packed;             // [batch * gamma, row_bytes]
  int32_t* offsets;         // [batch]
  int32_t* total;           // []
  int64_t batch;
  int32_t gamma;
  int64_t row_bytes;
};

// Most threads of a block that moves KV rows.
constexpr int kMostThreads = 256;

// How the moving of KV rows is cut for a GPU: blocks of so many threads. `eager`: a block
// loads its rows before it knows whether they were accepted. `recounts`: each block counts for
// itself what was accepted before its rows, in one launch; otherwise a launch before has counted.
struct Cut {
  int32_t threads;
  bool eager;
  bool recounts;
};

// Each returns what went wrong, or null.
const char* pack(const Pack& pack, const Cut& cut, Stream stream);
const char* verify_and_pack(const Greedy& greedy, const Pack& pack, const Cut& cut,
                            Stream stream);
const char* verify_and_pack_single(const Greedy& greedy, const Pack& pack, Stream stream);

}  // namespace jspec
