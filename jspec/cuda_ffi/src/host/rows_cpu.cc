// Rows of columns on a CPU, where the host's memory is the device's.
#include <algorithm>
#include <cstring>

#include "host/rows.h"

namespace jspec {

const char* fetch_rows(const Fetch& fetch, Stream) {
  const auto below = [](int32_t x, int32_t y) { return uint32_t(x) < uint32_t(y); };  // -1 is last
  for (int64_t b = 0; b < fetch.batch; ++b) {
    for (int64_t head = 0; head < fetch.heads; ++head) {
      const int64_t lane = b * fetch.heads + head;
      const int32_t* first = fetch.early_slots ? fetch.early_slots + lane * fetch.ahead : nullptr;
      const int32_t* last = first ? first + fetch.ahead : nullptr;
      for (int64_t i = 0; i < fetch.wanted; ++i) {
        const int32_t slot = fetch.wanted_slots[lane * fetch.wanted + i];
        const bool there = slot >= 0 && slot < fetch.slots;
        const int32_t* found = std::lower_bound(first, last, slot, below);
        const bool early = there && found != last && *found == slot;
        for (int c = 0; c < fetch.columns; ++c) {
          const int64_t bytes = fetch.bytes[c];
          char* to = fetch.rows[c] + ((b * fetch.wanted + i) * fetch.heads + head) * bytes;
          const char* from =
              early ? fetch.early[c] +
                          ((b * fetch.ahead + (found - first)) * fetch.heads + head) * bytes
                    : fetch.column[c] + ((b * fetch.slots + slot) * fetch.heads + head) * bytes;
          if (there) {
            std::memcpy(to, from, bytes);
          } else {
            std::memset(to, 0, bytes);
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
