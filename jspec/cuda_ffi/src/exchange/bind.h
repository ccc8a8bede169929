// Binds a handler of messages: it takes its stream, the number of its device, its arguments and
// results, and its attributes.
#pragma once

#include "common/ffi.h"

#define JSPEC_BIND_MESSAGE()              \
  xla::ffi::Ffi::Bind()                   \
      .Ctx<jspec::StreamContext>()        \
      .Ctx<xla::ffi::DeviceOrdinal>()     \
      .RemainingArgs()                    \
      .RemainingRets()
