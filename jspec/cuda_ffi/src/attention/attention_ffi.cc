// The FFI handlers of attention of many query rows, with or without a query that only scores.
#include "attention/attention.h"
#include "common/ffi.h"

namespace jspec {

// After output and log-sum-exp come two arrays of partial results, which the kernels pass on. A
// probe is the last argument, and its scores are the last result.
ffi::Error attend(Stream stream, const ffi::RemainingArgs& arguments,
                  const ffi::RemainingRets& results, float scale, int32_t parts, int32_t together,
                  bool scored) {
  ffi::Error error = check_count(arguments, 4 + scored, results, 4 + scored);
  if (error.failure()) return error;
  const Buffers buffers(arguments, results);
  const auto q = buffers[0].dimensions(), k = buffers[1].dimensions();
  if (q.size() != 4 || k.size() != 4) {
    return invalid("q ", buffers[0], " and k ", buffers[1], " must be [B, T, N, H], [B, S, K, H]");
  }
  const int64_t batch = q[0], tokens = q[1], heads = q[2], slots = k[1], kv_heads = k[2];
  const int64_t channels = q[3], group = kv_heads > 0 ? heads / kv_heads : 0;
  const int64_t rows = tokens * group;
  int32_t together_log2 = 0;
  while (1 << together_log2 < together && together_log2 < kMaxTogetherLog2) ++together_log2;
  const bool fits = group * kv_heads == heads && rows >= 1 && tokens <= kMaxTokens &&
                    rows <= kMaxRows - scored && slots >= 1 && slots % 8 == 0 && batch >= 1 &&
                    (channels == 64 || channels == 128) && parts >= 1 && parts <= kMaxParts &&
                    together == 1 << together_log2 &&
                    batch * kv_heads * std::max(slots, parts * rows) <= INT32_MAX &&
                    slots <= INT32_MAX - 2 * kBlock && scale > 0;
  if (!fits) {
    return invalid("q ", buffers[0], ", k ", buffers[1], ", scale ", scale, ", ", parts,
                   " parts and ", together, " blocks together must have up to ", kMaxTokens,
                   " tokens, ", kMaxRows - scored,
                   " rows a head, 64 or 128 channels, slots in eights, a positive scale, up to ",
                   kMaxParts, " parts and together a power of 2 up to ", 1 << kMaxTogetherLog2);
  }
  const auto BF16 = ffi::DataType::BF16, F32 = ffi::DataType::F32;
  const auto F8 = ffi::DataType::F8E4M3FN;
  const bool narrow = buffers[1].element_type() == F8;
  const auto CACHE = narrow ? F8 : BF16;
  const std::vector<int64_t> cache = {slots, kv_heads, channels};
  error = buffers.check(0, batch,
                        {{"q", BF16, {tokens, heads, channels}},
                         {"k", CACHE, cache},
                         {"v", CACHE, cache},
                         {"positions", ffi::DataType::S32, {tokens}}});
  if (error.failure()) return error;
  const size_t first = arguments.size();
  if (scored) {
    error = buffers.check(4, batch, {{"probe", BF16, {kv_heads, channels}}});
    if (error.failure()) return error;
    error = buffers.check(first + 4, batch, {{"scores", F32, {kv_heads, slots}}});
    if (error.failure()) return error;
  }
  error = buffers.check(first, batch,
                        {{"out", BF16, {tokens, heads, channels}},
                         {"lse", F32, {tokens, heads}},
                         {"partial_out", F32, {kv_heads, parts, rows, channels}},
                         {"partial_sums", F32, {kv_heads, parts, rows, 2}}});
  if (error.failure()) return error;
  const auto values = [&](size_t i) { return buffers.data<uint16_t>(i); };
  const auto floats = [&](size_t i) { return buffers.data<float>(i); };
  return launched(attention(
      Attention{values(0), buffers.data<void>(1), buffers.data<void>(2),
                buffers.data<int32_t>(3),
                scored ? values(4) : nullptr, values(first), floats(first + 1),
                scored ? floats(first + 4) : nullptr, floats(first + 2), floats(first + 3),
                static_cast<int32_t>(batch), static_cast<int32_t>(slots),
                static_cast<int32_t>(kv_heads), static_cast<int32_t>(tokens),
                static_cast<int32_t>(group), static_cast<int32_t>(channels), parts,
                together_log2, scale, narrow},
      stream));
}

ffi::Error attend_alone(Stream stream, ffi::RemainingArgs arguments, ffi::RemainingRets results,
                        float scale, int32_t parts, int32_t together) {
  return attend(stream, arguments, results, scale, parts, together, false);
}

ffi::Error attend_and_score(Stream stream, ffi::RemainingArgs arguments,
                            ffi::RemainingRets results, float scale, int32_t parts,
                            int32_t together) {
  return attend(stream, arguments, results, scale, parts, together, true);
}

}  // namespace jspec

#define JSPEC_BIND_ATTENTION() \
  JSPEC_BIND().Attr<float>("scale").Attr<int32_t>("parts").Attr<int32_t>("together")

XLA_FFI_DEFINE_HANDLER_SYMBOL(jspec_attention, jspec::attend_alone, JSPEC_BIND_ATTENTION(),
                              {jspec::ffi::Traits::kCmdBufferCompatible});

XLA_FFI_DEFINE_HANDLER_SYMBOL(jspec_scored_attention, jspec::attend_and_score,
                              JSPEC_BIND_ATTENTION(),
                              {jspec::ffi::Traits::kCmdBufferCompatible});
