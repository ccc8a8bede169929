// The FFI handlers of the one-sided all-to-all, merge and all-reduce. XLA may capture them in CUDA graphs:
// a launch depends on its arguments alone, and message numbers are counted on the device. A graph
// orders calls that depend on each other by the data, so no two run at once, and the order is that
// of every other device.
#include "exchange/bind.h"
#include "exchange/exchange.h"

namespace jspec {

// pieces [ranks, n]
ffi::Error exchange_of(Stream stream, int32_t device, ffi::RemainingArgs arguments,
                       ffi::RemainingRets results, int64_t patience) {
  ffi::Error error = check_count(arguments, 1, results, 1);
  if (error.failure()) return error;
  const Buffers buffers(arguments, results);
  const auto shape = buffers[0].dimensions();
  if (shape.size() != 2) return invalid("pieces ", buffers[0], " must be [ranks, n]");
  const int64_t ranks = shape[0];
  error = buffers.check(1, ranks, {{"found", buffers[0].element_type(), {shape[1]}}});
  if (error.failure()) return error;
  Exchange call = {};
  call.pieces = buffers.data<char>(0), call.found = buffers.data<char>(1);
  call.bytes = shape[1] * static_cast<int64_t>(ffi::ByteWidth(buffers[0].element_type()));
  call.group = group_of(device, ranks, patience);
  if (!call.group.ranks || call.bytes % kLineBytes || call.bytes > kMostBytes) {
    return invalid("device ", device, " cannot exchange pieces ", buffers[0]);
  }
  return launched(exchange(call, stream));
}

// outs [rows, heads, size] of bfloat16 or float32, lses float32 [rows, heads]
ffi::Error merge_of(Stream stream, int32_t device, ffi::RemainingArgs arguments,
                    ffi::RemainingRets results, int64_t ranks, int64_t patience) {
  ffi::Error error = check_count(arguments, 2, results, 2);
  if (error.failure()) return error;
  const Buffers buffers(arguments, results);
  const auto shape = buffers[0].dimensions();
  const ffi::DataType dtype = buffers[0].element_type();
  const Group group = group_of(device, ranks, patience);
  if (shape.size() != 3 || (dtype != ffi::BF16 && dtype != ffi::F32) || !group.ranks ||
      shape[1] % ranks) {
    return invalid("device ", device, " of ", ranks, " ranks cannot merge outs ", buffers[0]);
  }
  const int64_t rows = shape[0], heads = shape[1] / ranks, size = shape[2];
  error = buffers.check(1, rows, {{"lses", ffi::F32, {shape[1]}},
                                  {"out", dtype, {heads, size}},
                                  {"lse", ffi::F32, {heads}}});
  if (error.failure()) return error;
  const int64_t bytes = size * static_cast<int64_t>(ffi::ByteWidth(dtype));
  const int64_t lines = bytes / kLineBytes;
  if (bytes % kLineBytes || rows * heads * (lines + 1) > kMostLines) {
    return invalid("device ", device, " of ", ranks, " ranks cannot merge outs ", buffers[0]);
  }
  const Merging call{buffers.data<char>(0), buffers.data<float>(1), buffers.data<char>(2),
                     buffers.data<float>(3), rows, heads, lines, dtype == ffi::BF16, group};
  return launched(merge(call, stream));
}

// values float32 [n], and what is added [n], or nothing; sums [n] of bfloat16 or float32
ffi::Error all_reduce_of(Stream stream, int32_t device, ffi::RemainingArgs arguments,
                         ffi::RemainingRets results, int64_t ranks, int64_t patience) {
  const bool adds = arguments.size() == 2;
  ffi::Error error = check_count(arguments, adds ? 2 : 1, results, 1);
  if (error.failure()) return error;
  const Buffers buffers(arguments, results);
  const auto shape = buffers[0].dimensions();
  const int64_t count = shape.size() ? shape[0] : 0;
  const size_t last = buffers.size() - 1;
  const ffi::DataType dtype =
      buffers[last].element_type() == ffi::BF16 ? ffi::BF16 : ffi::F32;
  std::vector<Wanted> wanted = {{"values", ffi::F32, {count}}, {"sums", dtype, {count}}};
  if (adds) wanted.insert(wanted.begin() + 1, {"added", dtype, {count}});
  error = buffers.check(0, 1, wanted);
  if (error.failure()) return error;
  const Group group = group_of(device, ranks, patience);
  const int64_t bytes = count * int64_t{sizeof(float)};
  if (!group.ranks || bytes % kLineBytes || bytes > kMostBytes) {
    return invalid("device ", device, " of ", ranks, " ranks cannot reduce ", buffers[0]);
  }
  const Reduction call{buffers.data<float>(0), adds ? buffers.data<char>(1) : nullptr,
                       buffers.data<char>(last), count, dtype == ffi::BF16, group};
  return launched(all_reduce(call, false, stream));
}

}  // namespace jspec

extern "C" const char* jspec_open_exchange(int count) { return jspec::open_exchange(count); }

XLA_FFI_DEFINE_HANDLER_SYMBOL(jspec_exchange, jspec::exchange_of,
                              JSPEC_BIND_MESSAGE().Attr<int64_t>("patience"),
                              {jspec::ffi::Traits::kCmdBufferCompatible});

XLA_FFI_DEFINE_HANDLER_SYMBOL(
    jspec_all_to_all_merge, jspec::merge_of,
    JSPEC_BIND_MESSAGE().Attr<int64_t>("ranks").Attr<int64_t>("patience"),
    {jspec::ffi::Traits::kCmdBufferCompatible});

XLA_FFI_DEFINE_HANDLER_SYMBOL(
    jspec_all_reduce, jspec::all_reduce_of,
    JSPEC_BIND_MESSAGE().Attr<int64_t>("ranks").Attr<int64_t>("patience"),
    {jspec::ffi::Traits::kCmdBufferCompatible});
