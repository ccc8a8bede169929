// The FFI version this library was compiled against, asked before anything is registered.
#include "xla/ffi/api/c_api.h"

extern "C" int jspec_ffi_api_version() {
  return XLA_FFI_API_MAJOR * 1000 + XLA_FFI_API_MINOR;
}
