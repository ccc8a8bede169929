// Selection on a CPU: the keys of a row, and the standard library's selection among them.
#include <algorithm>
#include <vector>

#include "select/keys.h"

namespace jspec {
namespace {

// Writes the slots of `row`, whose keys `key(slot)` are.
template <typename Key>
void select_row(const Rows& rows, int64_t row, Key key) {
  const Taken taken = taken_of(rows, row);
  int32_t* slots = rows.slots + row * rows.k;
  int32_t* const end = slots + rows.k;
  for (int32_t slot = 0; slot < taken.first; ++slot) *slots++ = slot;
  if (taken.need > 0) {
    // The highest key first, and of equal keys the first slot.
    std::vector<uint64_t> order;
    order.reserve(taken.high - taken.low);
    for (int32_t slot = taken.low; slot < taken.high; ++slot) {
      order.push_back(uint64_t(~key(slot)) << 32 | uint32_t(slot));
    }
    std::nth_element(order.begin(), order.begin() + (taken.need - 1), order.end());
    for (int32_t i = 0; i < taken.need; ++i) slots[i] = static_cast<int32_t>(order[i]);
    std::sort(slots, slots + taken.need);
    slots += taken.need;
  }
  for (int32_t i = 0; i < taken.last; ++i) *slots++ = taken.high + i;
  std::fill(slots, end, -1);
}

}  // namespace

const char* select(const Select& select, const Cut&, void*, Stream) {
  for_scores(select, [&](auto key) {
    using Type = typename decltype(key)::Type;
    for (int64_t row = 0; row < select.rows.rows; ++row) {
      const Type* scores = static_cast<const Type*>(select.scores) + row * select.rows.n;
      select_row(select.rows, row, [&](int32_t slot) { return key(scores[slot]); });
    }
  });
  return nullptr;
}

const char* hash_select(const Hash& hash, const Cut&, void*, Stream) {
  const int64_t query = int64_t(hash.heads) * hash.group * hash.words;  // words of a token
  std::vector<uint32_t> keys(hash.rows.n);
  for (int64_t row = 0; row < hash.rows.rows; ++row) {
    const int64_t batch = row / hash.heads, head = row % hash.heads;
    const uint32_t* q =
        hash.q_codes + batch * hash.tokens * query + head * hash.group * hash.words;
    const uint32_t* k = hash.k_codes + (batch * hash.rows.n * hash.heads + head) * hash.words;
    for (int32_t slot = 0; slot < hash.rows.n; ++slot, k += hash.heads * hash.words) {
      int64_t distance = 0;
      for (int32_t token = 0; token < hash.tokens; ++token) {
        for (int32_t i = 0; i < hash.group * hash.words; ++i) {
          distance += __builtin_popcount(q[token * query + i] ^ k[i % hash.words]);
        }
      }
      keys[slot] = static_cast<uint32_t>(hash.highest() - distance);
    }
    select_row(hash.rows, row, [&](int32_t slot) { return keys[slot]; });
  }
  return nullptr;
}

}  // namespace jspec
