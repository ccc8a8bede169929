// The FFI handler of packing a path.
#include "common/ffi.h"
#include "pack/path.h"

namespace jspec {

// Columns, the slots of sources and targets, and counts; the columns are updated in place.
ffi::Error pack_path_of(Stream stream, ffi::RemainingArgs arguments, ffi::RemainingRets results) {
  const size_t columns = results.size();
  ffi::Error error = check_count(arguments, columns + 3, results, columns);
  if (error.failure()) return error;
  const Buffers buffers(arguments, results);
  const auto first = buffers[0].dimensions(), moves = buffers[columns].dimensions();
  if (columns < 1 || first.size() < 2 || moves.size() != 2 || moves[1] >= INT32_MAX) {
    return invalid("column ", buffers[0], " and source_slots ", buffers[columns],
                   " must be [B, S, ...] and [B, n] with n below 2^31 - 1");
  }
  const auto S32 = ffi::DataType::S32;
  error = buffers.check(columns, 1,
                        {{"source_slots", S32, {first[0], moves[1]}},
                         {"target_slots", S32, {first[0], moves[1]}},
                         {"counts", S32, {first[0]}}});
  if (error.failure()) return error;
  Path path = {};
  path.moves = static_cast<int32_t>(moves[1]);
  path.source = buffers.data<int32_t>(columns);
  path.target = buffers.data<int32_t>(columns + 1);
  path.counts = buffers.data<int32_t>(columns + 2);
  path.batch = first[0], path.slots = first[1];
  for (size_t c = 0; c < columns; ++c) {
    const auto shape = buffers[c].dimensions();
    int64_t bytes = static_cast<int64_t>(ffi::ByteWidth(buffers[c].element_type()));
    for (size_t i = 2; i < shape.size(); ++i) bytes *= shape[i];
    if (shape.size() < 2 || shape[0] != first[0] || shape[1] != first[1] || bytes < 1 ||
        bytes > INT32_MAX) {
      return invalid("column ", buffers[c], " must be [B, S, ...] with B=", first[0],
                     ", S=", first[1], " and entries of 1 to 2^31 - 1 bytes");
    }
    char* entries = buffers.data<char>(c);
    if (entries != buffers.data<char>(columns + 3 + c)) {
      return invalid("column ", buffers[c], " must be aliased with its result");
    }
    path.column[path.columns++] = {entries, static_cast<int32_t>(bytes), 0};
    if (path.columns == kMostPathColumns || c + 1 == columns) {
      if (const char* wrong = pack_path(path, stream)) return launched(wrong);
      path.columns = 0;
    }
  }
  return ffi::Error::Success();
}

}  // namespace jspec

XLA_FFI_DEFINE_HANDLER_SYMBOL(jspec_pack_path, jspec::pack_path_of, JSPEC_BIND(),
                              {jspec::ffi::Traits::kCmdBufferCompatible});
