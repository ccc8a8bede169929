// The FFI handler of selection among scores.
#include "select/plan.h"
#include "select/rows_ffi.h"

namespace jspec {

inline ffi::Error check_cut(const Cut& cut, const Plan& plan, int64_t rows) {
  if (!is_power(cut.counted) || !is_power(cut.taken) || cut.counted < kLeastChunk ||
      cut.taken < cut.counted ||
      cut.taken > kMostChunk) {
    return invalid("counted=", cut.counted, " and taken=", cut.taken, " must be powers of 2 in ",
                   kLeastChunk, "..", kMostChunk, ", taken at least counted");
  }
  if (rows * plan.chunks > INT32_MAX) {
    return invalid(rows, " rows of ", plan.chunks, " chunks are more than 2^31 blocks");
  }
  return ffi::Error::Success();
}

// Arguments: scores, counts, lengths. Results: slots, workspace.
ffi::Error select_call(Stream stream, ffi::RemainingArgs arguments, ffi::RemainingRets results,
                       int32_t counted, int32_t taken, int32_t sinks, int32_t recent,
                       int32_t highest) {
  ffi::Error error = check_count(arguments, 3, results, 2);
  if (error.failure()) return error;
  const Buffers buffers(arguments, results);
  const auto shape = buffers[0].dimensions();
  Select out{buffers.data<void>(0), Scores::kInt32, highest, {}};
  switch (buffers[0].element_type()) {
    case Type::S32: break;
    case Type::F32: out.type = Scores::kFloat32; break;
    case Type::BF16: out.type = Scores::kBfloat16; break;
    case Type::F16: out.type = Scores::kFloat16; break;
    default: return invalid("scores ", buffers[0], " must be int32, float32, bfloat16 or float16");
  }
  const bool bounded = highest != -1;
  if (shape.size() < 1 || highest < -1 || highest == INT32_MAX ||
      (bounded && out.type != Scores::kInt32)) {
    return invalid("scores ", buffers[0], " must be [..., n], and highest=", highest,
                   " in -1..2^31 - 2, -1 unless they are int32");
  }
  int64_t rows = 1;
  for (size_t i = 0; i + 1 < shape.size(); ++i) rows *= shape[i];
  error = rows_of(buffers, 1, rows, shape.back(), sinks, recent, &out.rows);
  if (error.failure()) return error;
  const Cut cut{counted, taken};
  if (counted < 1) return invalid("counted=", counted, " must be at least ", kLeastChunk);
  const Plan plan(keys_of(out), out.rows.n, cut);
  error = check_cut(cut, plan, rows);
  if (error.failure()) return error;
  error = buffers.check(4, rows, {{"workspace", Type::U32, {plan.words}}});
  if (error.failure() || rows == 0) return error;
  return launched(select(out, cut, buffers.data<void>(4), stream));
}

}  // namespace jspec

XLA_FFI_DEFINE_HANDLER_SYMBOL(jspec_select, jspec::select_call,
                              JSPEC_BIND()
                                  .Attr<int32_t>("counted")
                                  .Attr<int32_t>("taken")
                                  .Attr<int32_t>("sinks")
                                  .Attr<int32_t>("recent")
                                  .Attr<int32_t>("highest"),
                              {jspec::ffi::Traits::kCmdBufferCompatible});
