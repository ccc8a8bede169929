// The FFI handler of greedy verification with the bookkeeping of a step.
#include "verify/commit.h"
#include "verify/greedy_ffi.h"

namespace jspec {
namespace {

// Arguments: draft_tokens, logits, draft_lengths, stop_tokens, limits, known, cached, done. Results:
// the fields of `Verified`, the block, known, cached and done in the memory of the arguments, and
// the workspace: tops and firsts.
ffi::Error commit_call(Stream stream, ffi::RemainingArgs arguments, ffi::RemainingRets results,
                       int32_t warps, int32_t part) {
  constexpr size_t kArguments = 8, kBlock = kArguments + kGreedyResults;
  const auto S32 = ffi::DataType::S32, PRED = ffi::DataType::PRED;
  ffi::Error error = check_count(arguments, kArguments, results, kGreedyResults + 6);
  if (error.failure()) return error;
  if (warps < 1 || warps > 32 || part < 0) {
    return invalid("warps=", warps, " must be in 1..32 and part=", part, " at least 0");
  }
  const Buffers buffers(arguments, results);
  Greedy greedy;
  error = draft_of(buffers, kArguments, &greedy);
  if (error.failure()) return error;
  const ffi::AnyBuffer& logits = buffers[1];
  const auto dtype = logits.element_type();
  const int64_t vocabulary = logits.dimensions().size() ? logits.dimensions().back() : 0;
  const int64_t slots = buffers[5].dimensions().size() ? buffers[5].dimensions().back() : 0;
  if (greedy.wide || (dtype != ffi::DataType::F32 && dtype != ffi::DataType::BF16)) {
    return invalid("draft_tokens ", buffers[0], " must be int32 and logits ", logits,
                   " float32 or bfloat16");
  }
  if (vocabulary < 1 || vocabulary >= INT32_MAX || greedy.gamma >= kMaxPositions) {
    return invalid("logits ", logits, " must have V in 1..2^31-2 and at most ", kMaxPositions,
                   " positions");
  }
  const int64_t gamma = greedy.gamma, batch = greedy.batch;
  const int64_t parts = part ? (vocabulary + part - 1) / part : 0;
  error = buffers.check(1, batch, {{"logits", dtype, {gamma + 1, vocabulary}}});
  if (error.failure()) return error;
  error = buffers.check(4, batch,
                        {{"limits", S32, {}},
                         {"known", S32, {slots}},
                         {"cached", S32, {}},
                         {"done", PRED, {}}});
  if (error.failure()) return error;
  error = buffers.check(kBlock, batch,
                        {{"block", S32, {gamma + 3}},
                         {"known", S32, {slots}},
                         {"cached", S32, {}},
                         {"done", PRED, {}},
                         {"tops", ffi::DataType::F32, {gamma + 1, parts}},
                         {"firsts", S32, {gamma + 1, parts}}});
  if (error.failure()) return error;
  for (size_t i = 0; i < 3; ++i) {
    if (buffers.data<void>(5 + i) != buffers.data<void>(kBlock + 1 + i)) {
      return invalid("result ", buffers[kBlock + 1 + i], " must have the memory of its argument");
    }
  }
  if (batch == 0) return error;
  return launched(verify_and_commit(Commit{greedy,
                                           buffers.data<void>(1),
                                           buffers.data<int32_t>(4),
                                           buffers.data<int32_t>(kBlock + 1),
                                           buffers.data<int32_t>(kBlock + 2),
                                           buffers.data<bool>(kBlock + 3),
                                           buffers.data<int32_t>(kBlock),
                                           buffers.data<float>(kBlock + 4),
                                           buffers.data<int32_t>(kBlock + 5),
                                           slots,
                                           static_cast<int32_t>(vocabulary),
                                           part,
                                           static_cast<int32_t>(parts),
                                           dtype == ffi::DataType::BF16},
                                    warps, stream));
}

}  // namespace
}  // namespace jspec

XLA_FFI_DEFINE_HANDLER_SYMBOL(jspec_verify_and_commit, jspec::commit_call,
                              JSPEC_BIND().Attr<int32_t>("warps").Attr<int32_t>("part"),
                              {jspec::ffi::Traits::kCmdBufferCompatible});
