// The FFI handlers of greedy verification and of the acceptance scan.
#include "verify/greedy_ffi.h"

namespace jspec {

inline ffi::Error check_warps(int32_t warps) {
  if (warps >= 1 && warps <= 32) return ffi::Error::Success();
  return invalid("warps=", warps, " must be in 1..32");
}

inline ffi::Error verify(Stream stream, ffi::RemainingArgs arguments, ffi::RemainingRets results,
                         int32_t warps) {
  ffi::Error error = check_count(arguments, kGreedyArguments, results, kGreedyResults);
  if (error.success()) error = check_warps(warps);
  if (error.failure()) return error;
  Greedy greedy;
  error = greedy_of(Buffers(arguments, results), kGreedyArguments, &greedy);
  if (error.failure() || greedy.batch == 0) return error;
  return launched(verify_ballot(greedy, warps, stream));
}

template <const char* (*launch)(const Scan&, int, Stream)>
ffi::Error scan(Stream stream, ffi::RemainingArgs arguments, ffi::RemainingRets results,
                int32_t warps) {
  const auto S32 = ffi::DataType::S32;
  ffi::Error error = check_count(arguments, 2, results, 3);
  if (error.success()) error = check_warps(warps);
  if (error.failure()) return error;
  const Buffers buffers(arguments, results);
  const auto shape = buffers[0].dimensions();
  if (shape.size() < 2) return invalid("draft_tokens ", buffers[0], " must be int32 [B, gamma]");
  const int64_t gamma = shape.back();
  int64_t batch = 1;
  for (size_t i = 0; i + 1 < shape.size(); ++i) batch *= shape[i];
  if (gamma >= INT32_MAX || batch * (gamma + 1) > INT32_MAX) {
    return invalid("draft_tokens ", buffers[0], " must have B * (gamma + 1) below 2^31");
  }
  error = buffers.check(0, batch,
                        {{"draft_tokens", S32, {gamma}},
                         {"target_tokens", S32, {gamma + 1}},
                         {"accepted", S32, {}},
                         {"mismatch", ffi::DataType::PRED, {}},
                         {"next_token", S32, {}}});
  if (error.failure() || batch == 0) return error;
  return launched(launch(Scan{buffers.data<int32_t>(0), buffers.data<int32_t>(1),
                              buffers.data<int32_t>(2), buffers.data<bool>(3),
                              buffers.data<int32_t>(4), batch, static_cast<int32_t>(gamma)},
                         warps, stream));
}

}  // namespace jspec

XLA_FFI_DEFINE_HANDLER_SYMBOL(jspec_verify_greedy, jspec::verify,
                              JSPEC_BIND().Attr<int32_t>("warps"),
                              {jspec::ffi::Traits::kCmdBufferCompatible});

XLA_FFI_DEFINE_HANDLER_SYMBOL(jspec_acceptance_scan, jspec::scan<jspec::scan_ballot>,
                              JSPEC_BIND().Attr<int32_t>("warps"),
                              {jspec::ffi::Traits::kCmdBufferCompatible});

XLA_FFI_DEFINE_HANDLER_SYMBOL(jspec_acceptance_scan_naive, jspec::scan<jspec::scan_naive>,
                              JSPEC_BIND().Attr<int32_t>("warps"),
                              {jspec::ffi::Traits::kCmdBufferCompatible});
