// The FFI handler of the one-sided all-to-all. It is not marked as capturable: XLA could run two
// calls of a CUDA graph at once, or in another order on another device.
#include "common/ffi.h"
#include "exchange/exchange.h"

namespace jspec {

// pieces [ranks, n]; groups are `ranks` devices that follow each other, from device 0 on.
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
  call.patience = patience;
  if (ranks < 2 || ranks > kMostDevices || call.bytes % kLineBytes ||
      call.bytes > kMostPieceBytes || device / ranks * ranks + ranks > kMostDevices) {
    return invalid("device ", device, " cannot exchange pieces ", buffers[0]);
  }
  call.ranks = static_cast<int>(ranks);
  call.me = static_cast<int>(device % ranks);
  call.first = device - call.me;
  return launched(exchange(call, stream));
}

}  // namespace jspec

extern "C" const char* jspec_open_exchange(int count) { return jspec::open_exchange(count); }

XLA_FFI_DEFINE_HANDLER_SYMBOL(jspec_exchange, jspec::exchange_of,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<jspec::StreamContext>()
                                  .Ctx<xla::ffi::DeviceOrdinal>()
                                  .RemainingArgs()
                                  .RemainingRets()
                                  .Attr<int64_t>("patience"));
