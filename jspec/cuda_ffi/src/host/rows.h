// Rows of columns that may lie in the host's memory: arguments, and the launches behind the
// handlers. What each field means is said in jspec/ops/host_rows.py.
#pragma once

#include "common/launch.h"

namespace jspec {

constexpr int kMostColumns = 2;

// Rows on the device.
struct There {
  const char* rows[kMostColumns];  // [batch, count, heads] of `bytes`; null where none is read
  const int32_t* slots;            // [batch, heads, count], ascending, -1 behind; null for none
  int64_t count;
};

struct Fetch {
  int columns;                       // 1 or 2
  const char* column[kMostColumns];  // [batch, slots, heads] of `bytes`
  char* rows[kMostColumns];          // [batch, wanted, heads] of `bytes`
  int64_t bytes[kMostColumns];
  const int32_t* wanted_slots;  // [batch, heads, wanted]
  There near, ahead;            // what is near is taken from there, or is 0 if it has no rows
  int64_t batch;
  int64_t slots;
  int64_t heads;
  int64_t wanted;
};

struct Store {
  int columns;
  char* column[kMostColumns];      // [batch, slots] of `bytes`
  const char* rows[kMostColumns];  // [batch, tokens] of `bytes`
  int64_t bytes[kMostColumns];
  const int32_t* into;  // [batch, tokens]
  int64_t batch;
  int64_t slots;
  int64_t tokens;
};

// Each returns what went wrong, or null.
//
// `fetch_ahead` launches on a stream of its own, behind what the given one has been handed so far.
// `fetch_rows` with rows `ahead` has its stream wait for all that was fetched ahead.
const char* fetch_rows(const Fetch& fetch, Stream stream);
const char* fetch_ahead(const Fetch& fetch, Stream stream);
const char* store_rows(const Store& store, Stream stream);

}  // namespace jspec
