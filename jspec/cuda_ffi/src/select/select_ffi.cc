// The FFI handlers of selection, of scores and of hash codes.
#include "common/ffi.h"
#include "select/plan.h"

namespace jspec {

using Type = ffi::DataType;

inline bool is_power(int32_t x) { return x > 0 && (x & (x - 1)) == 0; }

// Reads and checks what every selection has: counts and lengths from buffer `first` on, [batch,
// inner...], then the slots, and the workspace that `plan` asks for.
inline ffi::Error rows_of(const Buffers& buffers, size_t first, int64_t batch, int64_t n,
                          int32_t sinks, int32_t recent, Rows* rows) {
  const auto shape = buffers[first + 2].dimensions();
  const int64_t k = shape.size() ? shape.back() : 0;
  if (k < 1 || k > INT32_MAX || n > INT32_MAX - kMostChunk || sinks < 0 || recent < 0) {
    return invalid("slots ", buffers[first + 2], " of n=", n, ", sinks=", sinks, " and recent=",
                   recent, " must be [..., k] with k at least 1 and all below 2^31 - 2^14");
  }
  *rows = Rows{buffers.data<int32_t>(first), buffers.data<int32_t>(first + 1),
               buffers.data<int32_t>(first + 2), batch, static_cast<int32_t>(n),
               static_cast<int32_t>(k), sinks, recent};
  return buffers.check(first, batch, {{"counts", Type::S32, {}},
                                      {"lengths", Type::S32, {}},
                                      {"slots", Type::S32, {k}}});
}

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
  const Plan plan(keys_of(out), out.rows.n, cut, false);
  error = check_cut(cut, plan, rows);
  if (error.failure()) return error;
  error = buffers.check(4, rows, {{"workspace", Type::U32, {plan.words}}});
  if (error.failure() || rows == 0) return error;
  return launched(select(out, cut, buffers.data<void>(4), stream));
}

// Arguments: q_codes, k_codes, counts, lengths. Results: slots, workspace.
ffi::Error hash_select_call(Stream stream, ffi::RemainingArgs arguments,
                            ffi::RemainingRets results, int32_t counted, int32_t taken,
                            int32_t sinks, int32_t recent) {
  ffi::Error error = check_count(arguments, 4, results, 2);
  if (error.failure()) return error;
  const Buffers buffers(arguments, results);
  const auto q = buffers[0].dimensions(), k = buffers[1].dimensions();
  const auto wrong = [&] {
    return invalid("q_codes ", buffers[0], " and k_codes ", buffers[1],
                   " must be uint32 [..., T, N, W] and [..., S, K, W] with W of 1, 2, 4 or 8 and N "
                   "a multiple of K");
  };
  if (q.size() < 3 || k.size() < 3) return wrong();
  const int64_t words = k.back(), heads = k[k.size() - 2], n = k[k.size() - 3];
  const int64_t every = q[q.size() - 2], tokens = q[q.size() - 3];
  if (heads < 1 || heads > INT32_MAX || every % heads || (words != 1 && words != 2 && words != 4 && words != 8)) {
    return wrong();
  }
  int64_t batch = 1;
  for (size_t i = 0; i + 3 < k.size(); ++i) batch *= k[i];
  error = buffers.check(0, batch, {{"q_codes", Type::U32, {tokens, every, words}},
                                   {"k_codes", Type::U32, {n, heads, words}}});
  if (error.failure()) return error;
  Hash out{buffers.data<uint32_t>(0), buffers.data<uint32_t>(1), batch, 0, 0, 0, 0, {}};
  const int64_t group = every / heads;
  if (tokens < 1 || group < 1 || tokens > kMostBins || group > kMostBins ||
      tokens * group * 32 * words >= kMostBins) {
    return invalid("q_codes ", buffers[0], " and k_codes ", buffers[1], " give scores that are not "
                   "in 0..", kMostBins - 1);
  }
  out.tokens = tokens, out.heads = heads, out.group = group, out.words = words;
  const int64_t rows = batch * heads;
  error = rows_of(buffers, 2, rows, n, sinks, recent, &out.rows);
  if (error.failure()) return error;
  const Cut cut{counted, taken};
  if (counted < 1) return invalid("counted=", counted, " must be at least ", kLeastChunk);
  const Plan plan(out.highest() + 1, out.rows.n, cut, true);
  error = check_cut(cut, plan, rows);
  if (error.failure()) return error;
  error = buffers.check(5, rows, {{"workspace", Type::U32, {plan.words}}});
  if (error.failure() || rows == 0) return error;
  return launched(hash_select(out, cut, buffers.data<void>(5), stream));
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

XLA_FFI_DEFINE_HANDLER_SYMBOL(jspec_hash_select, jspec::hash_select_call,
                              JSPEC_BIND()
                                  .Attr<int32_t>("counted")
                                  .Attr<int32_t>("taken")
                                  .Attr<int32_t>("sinks")
                                  .Attr<int32_t>("recent"),
                              {jspec::ffi::Traits::kCmdBufferCompatible});
