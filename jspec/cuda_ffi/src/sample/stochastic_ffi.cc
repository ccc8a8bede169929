// The FFI handlers of drawing and verifying by random numbers.
#include "common/ffi.h"
#include "sample/sampling.h"

namespace jspec {

// Reads and checks the logits and settings of a call: logits [batch, positions, V], and from buffer
// `settings` on rate, top_k, top_p, min_p and seeds. The workspace is the last buffer.
inline ffi::Error sampling_of(const Buffers& buffers, size_t logits, size_t settings,
                              bool draft, bool filtered, Sampling* sampling) {
  using Type = ffi::DataType;
  const auto shape = buffers[logits].dimensions();
  const Type type = buffers[logits].element_type();
  if (shape.size() < 3 || (type != Type::F32 && type != Type::BF16)) {
    return invalid("logits ", buffers[logits], " must be float32 or bfloat16 [B, T, V]");
  }
  const int64_t vocabulary = shape.back(), positions = shape[shape.size() - 2];
  if (vocabulary < 1 || vocabulary > 1 << 24 || positions > 1 << 10) {
    return invalid("logits ", buffers[logits], " must have V in 1..2^24 and at most 2^10 positions");
  }
  int64_t batch = 1;
  for (size_t i = 0; i + 2 < shape.size(); ++i) batch *= shape[i];
  const int64_t tiles = (vocabulary + kTile - 1) / kTile;
  const int64_t drafted = draft ? positions - 1 : 0;
  const int64_t words = Workspace::words(positions, drafted, tiles);
  ffi::Error error = buffers.check(settings, batch,
                                   {{"rate", Type::F32, {}},
                                    {"top_k", Type::S32, {}},
                                    {"top_p", Type::F32, {}},
                                    {"min_p", Type::F32, {}},
                                    {"seeds", Type::U32, {2}}});
  if (error.failure()) return error;
  error = buffers.check(buffers.size() - 1, batch, {{"workspace", Type::U32, {words}}});
  if (error.failure()) return error;
  *sampling = Sampling{{buffers.data<float>(settings), buffers.data<int32_t>(settings + 1),
                        buffers.data<float>(settings + 2), buffers.data<float>(settings + 3),
                        buffers.data<uint32_t>(settings + 4)},
                       {buffers.data<void>(logits), static_cast<int32_t>(positions), 0,
                        type == Type::BF16},
                       {nullptr, static_cast<int32_t>(drafted), static_cast<int32_t>(positions),
                        false},
                       nullptr,
                       Workspace(buffers.data<void>(buffers.size() - 1), batch, positions, drafted,
                                 tiles),
                       batch,
                       static_cast<int32_t>(vocabulary),
                       static_cast<int32_t>(tiles),
                       filtered};
  return ffi::Error::Success();
}

// Arguments: draft_tokens, target_logits, draft_lengths, stop_tokens, five settings, positions and,
// where the draft has them, draft_logits. Results: the fields of `jspec.Verified`, workspace.
ffi::Error verify_stochastic_call(Stream stream, ffi::RemainingArgs arguments,
                                  ffi::RemainingRets results, bool block, bool filtered) {
  using Type = ffi::DataType;
  const size_t count = arguments.size() == 11 ? 11 : 10;
  ffi::Error error = check_count(arguments, count, results, 7);
  if (error.failure()) return error;
  const Buffers buffers(arguments, results);
  Stochastic out;
  Sampling& sampling = out.sampling;
  error = sampling_of(buffers, 1, 4, count == 11, filtered, &sampling);
  if (error.failure()) return error;
  const int64_t batch = sampling.batch, gamma = sampling.target.positions - 1;
  const auto stop_shape = buffers[3].dimensions();
  const int64_t stops = stop_shape.size() ? stop_shape.back() : -1;
  error = buffers.check(0, batch,
                        {{"draft_tokens", Type::S32, {gamma}}});
  if (error.failure()) return error;
  error = buffers.check(2, batch, {{"draft_lengths", Type::S32, {}},
                                   {"stop_tokens", Type::S32, {stops}}});
  if (error.failure()) return error;
  error = buffers.check(9, batch, {{"positions", Type::S32, {}}});
  if (error.failure()) return error;
  if (count == 11) {
    const Type type = buffers[10].element_type();
    if (type != Type::F32 && type != Type::BF16) {
      return invalid("draft_logits ", buffers[10], " must be float32 or bfloat16");
    }
    error = buffers.check(10, batch, {{"draft_logits", type, {gamma, sampling.vocabulary}}});
    if (error.failure()) return error;
    sampling.draft.logits = buffers.data<void>(10);
    sampling.draft.bfloat16 = type == Type::BF16;
  }
  error = buffers.check(count, batch,
                        {{"accepted", Type::S32, {}},
                         {"committed", Type::S32, {}},
                         {"mismatch", Type::PRED, {}},
                         {"next_token", Type::S32, {}},
                         {"stopped", Type::PRED, {}},
                         {"tokens", Type::S32, {gamma + 1}}});
  if (error.failure() || batch == 0) return error;
  sampling.lengths = buffers.data<int32_t>(2);
  out.draft_tokens = buffers.data<int32_t>(0);
  out.stop_tokens = buffers.data<int32_t>(3);
  out.positions = buffers.data<int32_t>(9);
  out.accepted = buffers.data<int32_t>(count);
  out.committed = buffers.data<int32_t>(count + 1);
  out.mismatch = buffers.data<bool>(count + 2);
  out.next_token = buffers.data<int32_t>(count + 3);
  out.stopped = buffers.data<bool>(count + 4);
  out.tokens = buffers.data<int32_t>(count + 5);
  out.gamma = static_cast<int32_t>(gamma);
  out.stops = static_cast<int32_t>(stops);
  out.block = block;
  return launched(verify_stochastic(out, stream));
}

// Arguments: logits, five settings, positions. Results: tokens, workspace.
ffi::Error sample_call(Stream stream, ffi::RemainingArgs arguments, ffi::RemainingRets results,
                       bool filtered, uint32_t role) {
  ffi::Error error = check_count(arguments, 7, results, 2);
  if (error.failure()) return error;
  const Buffers buffers(arguments, results);
  Draws out;
  error = sampling_of(buffers, 0, 1, false, filtered, &out.sampling);
  if (error.failure()) return error;
  const int64_t batch = out.sampling.batch, count = out.sampling.target.positions;
  error = buffers.check(6, batch, {{"positions", ffi::DataType::S32, {count}},
                                   {"tokens", ffi::DataType::S32, {count}}});
  if (error.failure() || batch * count == 0) return error;
  out.positions = buffers.data<int32_t>(6);
  out.tokens = buffers.data<int32_t>(7);
  out.role = role;
  return launched(sample(out, stream));
}

}  // namespace jspec

XLA_FFI_DEFINE_HANDLER_SYMBOL(jspec_verify_stochastic, jspec::verify_stochastic_call,
                              JSPEC_BIND().Attr<bool>("block").Attr<bool>("filtered"),
                              {jspec::ffi::Traits::kCmdBufferCompatible});

XLA_FFI_DEFINE_HANDLER_SYMBOL(jspec_sample, jspec::sample_call,
                              JSPEC_BIND().Attr<bool>("filtered").Attr<uint32_t>("role"),
                              {jspec::ffi::Traits::kCmdBufferCompatible});
