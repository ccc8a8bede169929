// Selection on a CPU.
#include "select/row_cpu.h"

namespace jspec {

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

}  // namespace jspec
