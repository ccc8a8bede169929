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

// Slots of rows that are there, [B, K, m], at buffer `at`.
ffi::Error read_slots(const Buffers& buffers, size_t at, const Fetch& fetch, There& there) {
  const auto slots = buffers[at].dimensions();
  if (slots.size() != 3) return invalid("slots ", buffers[at], " must be [B, K, m]");
  there.count = slots[2];
  there.slots = buffers.data<int32_t>(at);
  return buffers.check(at, 1, {{"slots", ffi::DataType::S32, {fetch.batch, fetch.heads, slots[2]}}});
}

// Rows that are there, of each column, from buffer `at` on, and their slots.
ffi::Error read_there(const Buffers& buffers, size_t at, const Fetch& fetch, There& there) {
  ffi::Error error = read_slots(buffers, at + fetch.columns, fetch, there);
  for (int c = 0; c < fetch.columns && !error.failure(); ++c) {
    const int64_t width = buffers[c].dimensions().back();
    const auto dtype = buffers[c].element_type();
    error = buffers.check(at + c, 1,
                          {{"rows", dtype, {fetch.batch, there.count, fetch.heads, width}}});
    there.rows[c] = buffers.data<char>(at + c);
  }
  return error;
}

}  // namespace

// Columns and slots, then rows that are near and their slots, and the same of rows fetched ahead.
ffi::Error fetch_rows_of(Stream stream, ffi::RemainingArgs arguments, ffi::RemainingRets results,
                         bool near, bool ahead) {
  const size_t columns = results.size(), plain = columns + 1;
  ffi::Error error = check_columns(columns);
  if (error.failure()) return error;
  error = check_count(arguments, plain * (1 + near + ahead), results, columns);
  if (error.failure()) return error;
  const Buffers buffers(arguments, results);
  Fetch fetch = {};
  error = read_fetch(buffers, columns, arguments.size(), fetch);
  if (!error.failure() && near) error = read_there(buffers, plain, fetch, fetch.near);
  if (!error.failure() && ahead) {
    error = read_there(buffers, plain * (1 + near), fetch, fetch.ahead);
  }
  if (error.failure()) return error;
  return launched(fetch_rows(fetch, stream));
}

// Columns, slots, and an array that is handed through; then the slots of rows that are near, if any.
ffi::Error fetch_ahead_of(Stream stream, ffi::RemainingArgs arguments, ffi::RemainingRets results,
                          bool near) {
  const size_t columns = results.size() - 1, given = columns + 2;
  ffi::Error error = check_columns(columns);
  if (error.failure()) return error;
  error = check_count(arguments, given + near, results, columns + 1);
  if (error.failure()) return error;
  const Buffers buffers(arguments, results);
  if (buffers.data<char>(columns + 1) != buffers.data<char>(buffers.size() - 1)) {
    return invalid("through ", buffers[columns + 1], " must be aliased with the last result");
  }
  Fetch fetch = {};
  error = read_fetch(buffers, columns, arguments.size(), fetch);
  if (!error.failure() && near) error = read_slots(buffers, given, fetch, fetch.near);
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

XLA_FFI_DEFINE_HANDLER_SYMBOL(jspec_fetch_rows, jspec::fetch_rows_of,
                              JSPEC_BIND().Attr<bool>("near").Attr<bool>("ahead"));
XLA_FFI_DEFINE_HANDLER_SYMBOL(jspec_fetch_ahead, jspec::fetch_ahead_of,
                              JSPEC_BIND().Attr<bool>("near"));
XLA_FFI_DEFINE_HANDLER_SYMBOL(jspec_store_rows, jspec::store_rows_of, JSPEC_BIND());
