// What lies where in the memory that the kernels of a selection share. docs/selection.md shows it.
#pragma once

#include "select/keys.h"

namespace jspec {

// Offsets are in words of 4 bytes from the beginning of a row's part of the workspace.
//
// Level i keeps a record for each chunk of `counted` slots: of the slots whose higher digits are
// those found before, how many have a digit of at least d, for d in 0..bins - 1, and once more for
// every 64th d, 64 places. A count is a uint16. With several levels each chunk also has a list of the
// slots that may still be taken, as uint16 distances from its first slot.
struct Plan {
  Digits digits;
  int32_t chunks;
  int64_t scores;  // of hash codes: uint16 [n rounded up to 8]
  int64_t found;   // of each level: the digit, and how many of its slots are still needed
  int64_t records[kMostLevels];
  int64_t lists;
  int64_t words;  // a row

  Plan(int64_t keys, int32_t n, const Cut& cut, bool scored) : digits(digits_of(keys)) {
    chunks = n > 0 ? (n - 1) / cut.counted + 1 : 1;
    scores = 0;
    found = scored ? (int64_t(n) + 7) / 8 * 4 : 0;
    words = found + 8;
    for (int i = 0; i < digits.levels; ++i) {
      records[i] = words;
      words += chunks * record_words(i);
    }
    lists = words;
    if (digits.levels > 1) words += int64_t(chunks) * cut.counted / 2;
    words = (words + 3) / 4 * 4;
  }

  JSPEC_HOST_DEVICE int64_t record_words(int level) const { return (digits.bins[level] + 64) / 2; }
};

}  // namespace jspec
