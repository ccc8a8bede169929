// The KV rows that packing moves, read and checked for their handlers.
#pragma once

#include "common/ffi.h"
#include "pack/kv.h"

namespace jspec {

// Bytes of one row of `kv [..., D]`; 0 for D = 0 and for dtypes of less than a byte.
inline int64_t row_bytes(const ffi::AnyBuffer& kv) {
  return kv.dimensions().back() * static_cast<int64_t>(ffi::ByteWidth(kv.element_type()));
}

// An error where D is not 0 but KV rows have no bytes.
inline ffi::Error check_kv(const ffi::AnyBuffer& kv) {
  if (kv.dimensions().size() < 3) return invalid("kv ", kv, " must be [B, gamma, D]");
  if (kv.dimensions().back() && !row_bytes(kv)) {
    return invalid("kv ", kv, " must have elements of whole bytes");
  }
  return ffi::Error::Success();
}

inline ffi::Error check_cut(const Cut& cut) {
  if (cut.threads % 32 == 0 && cut.threads >= 32 && cut.threads <= kMostThreads) {
    return ffi::Error::Success();
  }
  return invalid("threads=", cut.threads, " must be a multiple of 32 up to ", kMostThreads);
}

}  // namespace jspec

// Binds a handler that takes the fields of a Cut as attributes.
#define JSPEC_BIND_CUT() \
  JSPEC_BIND().Attr<int32_t>("threads").Attr<bool>("eager").Attr<bool>("recounts")
