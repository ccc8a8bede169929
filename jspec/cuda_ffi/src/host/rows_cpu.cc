// Rows of columns on a CPU, where the host's memory is the device's.
#include <algorithm>
#include <cstring>

#include "host/rows.h"

namespace jspec {

namespace {

// The place of `slot` among those of a row that are there, -1 if it is not one of them.
int64_t place_of(const There& there, int64_t group, int32_t slot) {
  if (!there.slots) return -1;
  const auto below = [](int32_t x, int32_t y) { return uint32_t(x) < uint32_t(y); };  // -1 is last
  const int32_t* first = there.slots + group * there.count;
  const int32_t* found = std::lower_bound(first, first + there.count, slot, below);
  return found < first + there.count && *found == slot ? found - first : -1;
}

}  // namespace

const char* fetch_rows(const Fetch& fetch, Stream) {
  for (int64_t b = 0; b < fetch.batch; ++b) {
    for (int64_t head = 0; head < fetch.heads; ++head) {
      const int64_t group = b * fetch.heads + head;
      for (int64_t i = 0; i < fetch.wanted; ++i) {
        const int32_t slot = fetch.wanted_slots[group * fetch.wanted + i];
        const bool exists = slot >= 0 && slot < fetch.slots;
        const int64_t near = exists ? place_of(fetch.near, group, slot) : -1;
        const int64_t ahead = exists && near < 0 ? place_of(fetch.ahead, group, slot) : -1;
        for (int c = 0; c < fetch.columns; ++c) {
          const int64_t bytes = fetch.bytes[c];
          const auto row = [&](const char* rows, int64_t count, int64_t at) {
            return rows + ((b * count + at) * fetch.heads + head) * bytes;
          };
          char* to = fetch.rows[c] + ((b * fetch.wanted + i) * fetch.heads + head) * bytes;
          if (!exists || (near >= 0 && !fetch.near.rows[c])) {
            std::memset(to, 0, bytes);
          } else if (near >= 0) {
            std::memcpy(to, row(fetch.near.rows[c], fetch.near.count, near), bytes);
          } else if (ahead >= 0) {
            std::memcpy(to, row(fetch.ahead.rows[c], fetch.ahead.count, ahead), bytes);
          } else {
            std::memcpy(to, row(fetch.column[c], fetch.slots, slot), bytes);
          }
        }
      }
    }
  }
  return nullptr;
}

const char* fetch_ahead(const Fetch& fetch, Stream stream) { return fetch_rows(fetch, stream); }

const char* store_rows(const Store& store, Stream) {
  for (int64_t b = 0; b < store.batch; ++b) {
    for (int64_t i = 0; i < store.tokens; ++i) {
      const int32_t slot = store.into[b * store.tokens + i];
      if (slot < 0 || slot >= store.slots) continue;
      for (int c = 0; c < store.columns; ++c) {
        const int64_t bytes = store.bytes[c];
        std::memcpy(store.column[c] + (b * store.slots + slot) * bytes,
                    store.rows[c] + (b * store.tokens + i) * bytes, bytes);
      }
    }
  }
  return nullptr;
}

}  // namespace jspec
