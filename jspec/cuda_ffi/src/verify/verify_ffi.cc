// The FFI handlers of greedy verification.
#include "verify/greedy_ffi.h"

namespace jspec {

template <const char* (*launch)(const Greedy&, int, Stream)>
ffi::Error verify(Stream stream, ffi::RemainingArgs arguments, ffi::RemainingRets results,
                  int32_t warps) {
  ffi::Error error = check_count(arguments, kGreedyArguments, results, kGreedyResults);
  if (error.failure()) return error;
  if (warps < 1 || warps > 32) return invalid("warps=", warps, " must be in 1..32");
  Greedy greedy;
  error = greedy_of(Buffers(arguments, results), kGreedyArguments, &greedy);
  if (error.failure() || greedy.batch == 0) return error;
  return launched(launch(greedy, warps, stream));
}

}  // namespace jspec

XLA_FFI_DEFINE_HANDLER_SYMBOL(jspec_verify_greedy, jspec::verify<jspec::verify_ballot>,
                              JSPEC_BIND().Attr<int32_t>("warps"),
                              {jspec::ffi::Traits::kCmdBufferCompatible});

XLA_FFI_DEFINE_HANDLER_SYMBOL(jspec_verify_greedy_naive, jspec::verify<jspec::verify_naive>,
                              JSPEC_BIND().Attr<int32_t>("warps"),
                              {jspec::ffi::Traits::kCmdBufferCompatible});
