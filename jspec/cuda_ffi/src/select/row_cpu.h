// The selection of a row on a CPU: the standard library's, among its keys.
#pragma once

#include <algorithm>
#include <vector>

#include "select/keys.h"

namespace jspec {

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

}  // namespace jspec
