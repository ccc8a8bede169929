// The FFI handler of packing.
#include "pack/kv_ffi.h"

namespace jspec {

ffi::Error pack_kv(Stream stream, ffi::RemainingArgs arguments, ffi::RemainingRets results,
                     int32_t threads, bool eager, bool recounts) {
  ffi::Error error = check_count(arguments, 2, results, 3);
  if (error.failure()) return error;
  const Cut cut{threads, eager, recounts};
  error = check_cut(cut);
  if (error.failure()) return error;
  const Buffers buffers(arguments, results);
  error = check_kv(buffers[0]);
  if (error.failure()) return error;
  const auto shape = buffers[0].dimensions();
  if (shape.size() != 3 || shape[0] < 1 || std::max(shape[0], shape[1]) >= INT32_MAX) {
    return invalid("kv ", buffers[0],
                   " must be [B, gamma, D] with B at least 1, and B and gamma below 2^31 - 1");
  }
  const auto S32 = ffi::DataType::S32;
  error = buffers.check(1, 1,
                        {{"accepted", S32, {shape[0]}},
                         {"packed", buffers[0].element_type(), {shape[0] * shape[1], shape[2]}},
                         {"offsets", S32, {shape[0]}},
                         {"total", S32, {}}});
  if (error.failure()) return error;
  return launched(pack(Pack{buffers.data<char>(0), buffers.data<int32_t>(1),
                            buffers.data<char>(2), buffers.data<int32_t>(3),
                            buffers.data<int32_t>(4), shape[0], static_cast<int32_t>(shape[1]),
                            row_bytes(buffers[0])},
                       cut, stream));
}

}  // namespace jspec

XLA_FFI_DEFINE_HANDLER_SYMBOL(jspec_pack, jspec::pack_kv, JSPEC_BIND_CUT(),
                              {jspec::ffi::Traits::kCmdBufferCompatible});
