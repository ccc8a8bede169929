// The arguments and results of greedy verification, read and checked for the handlers that do it.
#pragma once

#include "common/ffi.h"
#include "verify/verify.h"

namespace jspec {

// Arguments and results that `greedy_of` reads.
constexpr size_t kGreedyArguments = 4, kGreedyResults = 6;

// Fills `greedy` but for the target's tokens, from the first arguments and, from buffer `results`
// on, the first results.
inline ffi::Error draft_of(const Buffers& buffers, size_t results, Greedy* greedy) {
  const auto shape = buffers[0].dimensions();
  const auto stop_shape = buffers[3].dimensions();
  const ffi::DataType token = buffers[0].element_type();
  if (shape.size() < 2 || (token != ffi::DataType::S32 && token != ffi::DataType::S64)) {
    return invalid("draft_tokens ", buffers[0], " must be int32 or int64 [B, gamma]");
  }
  const int64_t gamma = shape.back();
  const int64_t stops = stop_shape.size() ? stop_shape.back() : -1;
  int64_t batch = 1;
  for (size_t i = 0; i + 1 < shape.size(); ++i) batch *= shape[i];
  if (stops < 0 || std::max(batch, std::max(gamma, stops)) >= INT32_MAX ||
      batch * std::max(gamma + 1, stops) > INT32_MAX) {
    return invalid("draft_tokens ", buffers[0], " and stop_tokens ", buffers[3],
                   " must be [B, gamma] and [B, M] with B * (gamma + 1) and B * M below 2^31");
  }

  const auto S32 = ffi::DataType::S32, PRED = ffi::DataType::PRED;
  ffi::Error error =
      buffers.check(2, batch, {{"draft_lengths", S32, {}}, {"stop_tokens", token, {stops}}});
  if (error.failure()) return error;
  error = buffers.check(results, batch,
                        {{"accepted", S32, {}},
                         {"committed", S32, {}},
                         {"mismatch", PRED, {}},
                         {"next_token", token, {}},
                         {"stopped", PRED, {}},
                         {"tokens", token, {gamma + 1}}});
  if (error.failure()) return error;
  *greedy = Greedy{buffers.data<void>(0),
                   nullptr,
                   buffers.data<int32_t>(2),
                   buffers.data<void>(3),
                   buffers.data<int32_t>(results),
                   buffers.data<int32_t>(results + 1),
                   buffers.data<bool>(results + 2),
                   buffers.data<void>(results + 3),
                   buffers.data<bool>(results + 4),
                   buffers.data<void>(results + 5),
                   batch,
                   static_cast<int32_t>(gamma),
                   static_cast<int32_t>(stops),
                   token == ffi::DataType::S64};
  return ffi::Error::Success();
}

// As `draft_of`, with the target's tokens.
inline ffi::Error greedy_of(const Buffers& buffers, size_t results, Greedy* greedy) {
  ffi::Error error = draft_of(buffers, results, greedy);
  if (error.failure()) return error;
  greedy->target_tokens = buffers.data<void>(1);
  const ffi::DataType token = buffers[0].element_type();
  return buffers.check(1, greedy->batch, {{"target_tokens", token, {greedy->gamma + 1}}});
}

}  // namespace jspec
