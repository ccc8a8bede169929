// The FFI handlers of verification fused with packing.
#include "verify/greedy_ffi.h"
#include "pack/kv_ffi.h"

namespace jspec {
namespace {

// Reads greedy verification and the KV rows behind its arguments; checks the results of packing.
ffi::Error read_pack(ffi::RemainingArgs arguments, ffi::RemainingRets results, Greedy* greedy,
                     Pack* pack) {
  ffi::Error error =
      check_count(arguments, kGreedyArguments + 1, results, kGreedyResults + 3);
  if (error.failure()) return error;
  const Buffers buffers(arguments, results);
  const size_t first = arguments.size(), packed = first + kGreedyResults;
  error = greedy_of(buffers, first, greedy);
  if (error.failure()) return error;
  const ffi::AnyBuffer& kv = buffers[kGreedyArguments];
  error = check_kv(kv);
  if (error.failure()) return error;
  const auto S32 = ffi::DataType::S32;
  const int64_t batch = greedy->batch, gamma = greedy->gamma, width = kv.dimensions().back();
  error = buffers.check(kGreedyArguments, 1,
                        {{"kv", kv.element_type(), {batch, gamma, width}}});
  if (error.failure()) return error;
  error = buffers.check(packed, 1,
                        {{"packed", kv.element_type(), {batch * gamma, width}},
                         {"offsets", S32, {batch}},
                         {"total", S32, {}}});
  if (error.failure()) return error;
  if (batch < 1) return invalid("kv ", kv, " must have B at least 1");
  *pack = Pack{buffers.data<char>(kGreedyArguments),
               nullptr,
               buffers.data<char>(packed),
               buffers.data<int32_t>(packed + 1),
               buffers.data<int32_t>(packed + 2),
               batch,
               greedy->gamma,
               row_bytes(kv)};
  return ffi::Error::Success();
}

ffi::Error pack_fused(Stream stream, ffi::RemainingArgs arguments, ffi::RemainingRets results,
                      int32_t threads, bool eager, bool recounts) {
  const Cut cut{threads, eager, recounts};
  ffi::Error error = check_cut(cut);
  if (error.failure()) return error;
  Greedy greedy;
  Pack pack;
  error = read_pack(arguments, results, &greedy, &pack);
  if (error.failure()) return error;
  return launched(verify_and_pack(greedy, pack, cut, stream));
}

ffi::Error pack_single(Stream stream, ffi::RemainingArgs arguments, ffi::RemainingRets results) {
  Greedy greedy;
  Pack pack;
  ffi::Error error = read_pack(arguments, results, &greedy, &pack);
  if (error.failure()) return error;
  if (greedy.batch > 32) return invalid("B=", greedy.batch, " must be at most 32: one block");
  return launched(verify_and_pack_single(greedy, pack, stream));
}

}  // namespace
}  // namespace jspec

XLA_FFI_DEFINE_HANDLER_SYMBOL(jspec_verify_and_pack, jspec::pack_fused, JSPEC_BIND_CUT(),
                              {jspec::ffi::Traits::kCmdBufferCompatible});

XLA_FFI_DEFINE_HANDLER_SYMBOL(jspec_verify_and_pack_single, jspec::pack_single, JSPEC_BIND(),
                              {jspec::ffi::Traits::kCmdBufferCompatible});
