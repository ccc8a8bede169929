// The FFI handlers of fetching and storing rows of columns. None of them is marked as capturable:
// one that waits for a stream of its own cannot be part of a CUDA graph that XLA records.
#include "common/ffi.h"
#include "host/rows.h"

namespace jspec {
namespace {

int64_t bytes_of(const ffi::AnyBuffer& buffer, size_t from) {
  const auto shape = buffer.dimensions();
  int64_t bytes = static_cast<int64_t>(ffi::ByteWidth(buffer.element_type()));
  for (size_t i = from; i < shape.size(); ++i) bytes *= shape[i];
  return bytes;
}

// Columns, slots and the rows that begin at buffer `rows`, into `fetch`.
ffi::Error read_fetch(const Buffers& buffers, int columns, size_t rows, Fetch& fetch) {
  const auto first = buffers[0].dimensions(), slots = buffers[columns].dimensions();
  if (first.size() != 4 || slots.size() != 3) {
    return invalid("column ", buffers[0], " and slots ", buffers[columns],
                   " must be [B, S, K, H] and [B, K, n]");
  }
  fetch.columns = columns;
  fetch.batch = first[0], fetch.slots = first[1], fetch.heads = first[2], fetch.wanted = slots[2];
  for (int c = 0; c < columns; ++c) {
    const auto dtype = buffers[c].element_type();
    const int64_t width = buffers[c].dimensions().back();
    ffi::Error error =
        buffers.check(c, 1, {{"column", dtype, {first[0], first[1], first[2], width}}});
    if (error.failure()) return error;
    error = buffers.check(rows + c, 1, {{"rows", dtype, {first[0], slots[2], first[2], width}}});
    if (error.failure()) return error;
    fetch.column[c] = buffers.data<char>(c);
    fetch.rows[c] = buffers.data<char>(rows + c);
    fetch.bytes[c] = bytes_of(buffers[c], 3);
  }
  fetch.wanted_slots = buffers.data<int32_t>(columns);
  return buffers.check(columns, 1, {{"slots", ffi::DataType::S32, {first[0], first[2], slots[2]}}});
}

ffi::Error check_columns(size_t columns) {
  return columns >= 1 && columns <= kMostColumns
             ? ffi::Error::Success()
             : invalid("there are ", columns, " columns, and must be 1 or ", kMostColumns);
}

}  // namespace

// Columns and slots, then rows that were fetched ahead and their slots if there are any.
ffi::Error fetch_rows_of(Stream stream, ffi::RemainingArgs arguments, ffi::RemainingRets results) {
  const size_t columns = results.size();
  ffi::Error error = check_columns(columns);
  if (error.failure()) return error;
  const size_t plain = columns + 1, early = 2 * plain;
  error = check_count(arguments, arguments.size() < early ? plain : early, results, columns);
  if (error.failure()) return error;
  const Buffers buffers(arguments, results);
  Fetch fetch = {};
  error = read_fetch(buffers, columns, arguments.size(), fetch);
  if (error.failure()) return error;
  if (arguments.size() == early) {
    const auto S32 = ffi::DataType::S32;
    const auto slots = buffers[early - 1].dimensions();
    if (slots.size() != 3) return invalid("slots ", buffers[early - 1], " must be [B, K, m]");
    error = buffers.check(early - 1, 1, {{"slots", S32, {fetch.batch, fetch.heads, slots[2]}}});
    if (error.failure()) return error;
    fetch.ahead = slots[2];
    fetch.early_slots = buffers.data<int32_t>(early - 1);
    for (size_t c = 0; c < columns; ++c) {
      const int64_t width = buffers[c].dimensions().back();
      error = buffers.check(plain + c, 1,
                            {{"rows",
                              buffers[c].element_type(),
                              {fetch.batch, fetch.ahead, fetch.heads, width}}});
      if (error.failure()) return error;
      fetch.early[c] = buffers.data<char>(plain + c);
    }
  }
  return launched(fetch_rows(fetch, stream));
}

// Columns, slots, and an array that is handed through.
ffi::Error fetch_ahead_of(Stream stream, ffi::RemainingArgs arguments, ffi::RemainingRets results) {
  const size_t columns = results.size() - 1;
  ffi::Error error = check_columns(columns);
  if (error.failure()) return error;
  error = check_count(arguments, columns + 2, results, columns + 1);
  if (error.failure()) return error;
  const Buffers buffers(arguments, results);
  if (buffers.data<char>(columns + 1) != buffers.data<char>(buffers.size() - 1)) {
    return invalid("through ", buffers[columns + 1], " must be aliased with the last result");
  }
  Fetch fetch = {};
  error = read_fetch(buffers, columns, arguments.size(), fetch);
  if (error.failure()) return error;
  return launched(fetch_ahead(fetch, stream));
}

// Columns, their rows, and slots; the columns are updated in place.
ffi::Error store_rows_of(Stream stream, ffi::RemainingArgs arguments, ffi::RemainingRets results) {
  const size_t columns = results.size();
  ffi::Error error = check_columns(columns);
  if (error.failure()) return error;
  error = check_count(arguments, 2 * columns + 1, results, columns);
  if (error.failure()) return error;
  const Buffers buffers(arguments, results);
  const auto slots = buffers[2 * columns].dimensions();
  if (slots.size() != 2) return invalid("slots ", buffers[2 * columns], " must be [B, T]");
  Store store = {};
  store.columns = static_cast<int>(columns);
  store.batch = slots[0], store.tokens = slots[1];
  store.into = buffers.data<int32_t>(2 * columns);
  error = buffers.check(2 * columns, 1, {{"slots", ffi::DataType::S32, {slots[0], slots[1]}}});
  if (error.failure()) return error;
  for (size_t c = 0; c < columns; ++c) {
    const auto shape = buffers[c].dimensions();
    const auto dtype = buffers[c].element_type();
    if (shape.size() != 4 || shape[0] != slots[0]) {
      return invalid("column ", buffers[c], " must be [B, S, K, H] with B=", slots[0]);
    }
    store.slots = shape[1];
    error = buffers.check(columns + c, 1, {{"rows", dtype, {slots[0], slots[1], shape[2], shape[3]}}});
    if (error.failure()) return error;
    error = buffers.check(2 * columns + 1 + c, 1,
                          {{"column", dtype, {shape[0], buffers[0].dimensions()[1], shape[2], shape[3]}}});
    if (error.failure()) return error;
    store.column[c] = buffers.data<char>(c);
    if (store.column[c] != buffers.data<char>(2 * columns + 1 + c)) {
      return invalid("column ", buffers[c], " must be aliased with its result");
    }
    store.rows[c] = buffers.data<char>(columns + c);
    store.bytes[c] = bytes_of(buffers[c], 2);
  }
  return launched(store_rows(store, stream));
}

}  // namespace jspec

XLA_FFI_DEFINE_HANDLER_SYMBOL(jspec_fetch_rows, jspec::fetch_rows_of, JSPEC_BIND());
XLA_FFI_DEFINE_HANDLER_SYMBOL(jspec_fetch_ahead, jspec::fetch_ahead_of, JSPEC_BIND());
XLA_FFI_DEFINE_HANDLER_SYMBOL(jspec_store_rows, jspec::store_rows_of, JSPEC_BIND());
