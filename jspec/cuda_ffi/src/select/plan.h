// What lies where in the memory that the kernels of a selection share. docs/selection.md shows it.
#pragma once

#include "select/keys.h"

namespace jspec {

// Slots whose keys fit the registers of a block, and blocks of a cluster that share a row.
constexpr int32_t kRegisterSlots = 1 << 14, kMaxClusterBlocks = 8;

// Offsets are in words of 4 bytes from the beginning of a row's part of the workspace.
//
// A chunk of `counted` slots has a record: how many of its slots have a first digit of at least d, for
// d in 0..bins - 1, and once more for every 64th d, 64 places. A count is a uint16. Keys of several
// digits have a list, of the slots whose first digit is at least the one that the row needs, and their
// keys behind them.
struct Plan {
  Digits digits;
  int32_t chunks;
  int64_t found;   // the first digit, how many of its slots are needed, and the list's length
  int64_t records;
  int64_t list;
  int64_t listed;  // most slots of the list
  int64_t words;   // a row
  bool fits_registers;  // of a block, or of the blocks of a cluster: they need nothing of this

  Plan(int64_t keys, int32_t n, const Cut& cut) : digits(digits_of(keys)) {
    chunks = n > 0 ? (n - 1) / cut.counted + 1 : 1;
    fits_registers = chunks <= kMaxClusterBlocks && cut.counted <= kRegisterSlots;
    found = 0;
    records = found + 4;
    list = records + (chunks == 1 ? 0 : chunks * record_words());
    listed = digits.levels > 1 && !(fits_registers && chunks == 1) ? (int64_t(n) + 3) / 4 * 4 : 0;
    words = list + 2 * listed;
  }

  JSPEC_HOST_DEVICE int64_t record_words() const { return (digits.bins[0] + 64) / 2; }
};

}  // namespace jspec
