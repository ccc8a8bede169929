// What a handler file (*_ffi.cc) needs. Handlers are compiled into both libraries: they check
// shapes and dtypes, and call functions that a *.cu or a *_cpu.cc file defines.
#pragma once

#include <algorithm>
#include <optional>
#include <sstream>
#include <string>
#include <vector>

#include "common/launch.h"
#include "xla/ffi/api/ffi.h"

namespace jspec {

namespace ffi = xla::ffi;

// The context that gives a handler its stream; on a CPU there is none, and it gets null.
struct HostStream {};

#ifdef JSPEC_CUDA
using StreamContext = ffi::PlatformStream<Stream>;
#else
using StreamContext = HostStream;
#endif

inline std::ostream& operator<<(std::ostream& out, const ffi::AnyBuffer& buffer) {
  out << buffer.element_type() << "[";
  const char* separator = "";
  for (int64_t size : buffer.dimensions()) {
    out << separator << size;
    separator = ", ";
  }
  return out << "]";
}

// An InvalidArgument whose message is its arguments one behind the other.
template <typename... Parts>
ffi::Error invalid(const Parts&... parts) {
  std::ostringstream message;
  (message << ... << parts);
  return ffi::Error::InvalidArgument(message.str());
}

// What a launch reported: null for success.
inline ffi::Error launched(const char* error) {
  return error ? ffi::Error::Internal(std::string("kernel launch failed: ") + error)
               : ffi::Error::Success();
}

// An error where a call does not have so many arguments and results.
inline ffi::Error check_count(const ffi::RemainingArgs& arguments, size_t arguments_wanted,
                              const ffi::RemainingRets& results, size_t results_wanted) {
  if (arguments.size() == arguments_wanted && results.size() == results_wanted) {
    return ffi::Error::Success();
  }
  return invalid("got ", arguments.size(), " arguments and ", results.size(), " results, not ",
                 arguments_wanted, " and ", results_wanted);
}

// What one buffer of a call must be: its dtype, and its last sizes behind a batch's.
struct Wanted {
  const char* name;
  ffi::DataType dtype;
  std::vector<int64_t> sizes;
};

// The buffers of a call, arguments first, then results.
class Buffers {
 public:
  Buffers(ffi::RemainingArgs arguments, ffi::RemainingRets results) {
    for (size_t i = 0; i < arguments.size(); ++i) {
      buffers_.push_back(*arguments.get<ffi::AnyBuffer>(i));
    }
    for (size_t i = 0; i < results.size(); ++i) {
      buffers_.push_back(**results.get<ffi::AnyBuffer>(i));
    }
  }

  size_t size() const { return buffers_.size(); }
  const ffi::AnyBuffer& operator[](size_t i) const { return buffers_[i]; }

  template <typename T>
  T* data(size_t i) const {
    return static_cast<T*>(buffers_[i].untyped_data());
  }

  // Whether the buffers from `first` on are what is wanted: [..., sizes...], the leading sizes
  // multiplying to `batch`.
  ffi::Error check(size_t first, int64_t batch, const std::vector<Wanted>& wanted) const {
    for (const Wanted& want : wanted) {
      const ffi::AnyBuffer& buffer = buffers_[first++];
      const auto shape = buffer.dimensions();
      const int64_t leading = static_cast<int64_t>(shape.size() - want.sizes.size());
      int64_t product = 1;
      for (int64_t i = 0; i < leading; ++i) product *= shape[i];
      if (leading < 0 || product != batch || buffer.element_type() != want.dtype ||
          !std::equal(want.sizes.begin(), want.sizes.end(), shape.begin() + leading)) {
        std::ostringstream sizes;
        for (int64_t size : want.sizes) sizes << ", " << size;
        return invalid(want.name, " ", buffer, " must be ", want.dtype, "[", batch, sizes.str(),
                       "]");
      }
    }
    return ffi::Error::Success();
  }

 private:
  std::vector<ffi::AnyBuffer> buffers_;
};

}  // namespace jspec

// Binds a handler that takes its stream, its arguments, its results and its attributes.
#define JSPEC_BIND() \
  jspec::ffi::Ffi::Bind().Ctx<jspec::StreamContext>().RemainingArgs().RemainingRets()

template <>
struct xla::ffi::CtxDecoding<jspec::HostStream> {
  using Type = jspec::Stream;
  // jaxlib renamed the type of the context: any will do.
  template <typename Context>
  static std::optional<Type> Decode(const XLA_FFI_Api*, Context*, DiagnosticEngine&) {
    return nullptr;
  }
};
