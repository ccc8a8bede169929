// The FFI handler of attention over selected slots.
#include "common/ffi.h"
#include "gathered/gathered.h"

namespace jspec {

// The counts of lists are the last argument, if there are any. With all_slots, selected has no
// slots: a list is those of the cache in order. After output and log-sum-exp come two arrays of
// partial results, which the kernels pass on.
ffi::Error attend_selected(Stream stream, ffi::RemainingArgs arguments,
                           ffi::RemainingRets results, float scale, int32_t parts,
                           int32_t stages, int32_t warps, bool all_slots) {
  const bool counted = arguments.size() == 8;
  ffi::Error error = check_count(arguments, 7 + counted, results, 4);
  if (error.failure()) return error;
  const Buffers buffers(arguments, results);
  const auto q = buffers[0].dimensions(), k = buffers[1].dimensions();
  const auto selected = buffers[4].dimensions(), tail = buffers[5].dimensions();
  if (q.size() != 4 || k.size() != 4 || selected.size() < 2 || tail.size() != 2) {
    return invalid("q ", buffers[0], ", k ", buffers[1], ", selected ", buffers[4], " and tail ",
                   buffers[5], " must be [B, T, N, H], [B, S, K, H], [B, n] or [B, K, n], [B, m]");
  }
  const int64_t batch = q[0], tokens = q[1], heads = q[2], channels = q[3];
  const int64_t slots = k[1], kv_heads = k[2], group = kv_heads > 0 ? heads / kv_heads : 0;
  const int64_t rows = tokens * group, tail_count = tail[1];
  const int64_t count = all_slots ? slots : selected.back();
  const int64_t lists = selected.size() == 2 ? 1 : kv_heads;
  const bool fits = group * kv_heads == heads && rows >= 1 && batch >= 1 &&
                    batch <= kMaxBatch && slots >= 1 &&
                    (channels == 64 || channels == 128) && count + tail_count >= 1 &&
                    count + tail_count <= kMaxListed && parts >= 1 && parts <= kMaxParts &&
                    stages >= kMinStages && stages <= kMaxStages && warps >= 1 &&
                    warps <= kMaxWarps && (warps & (warps - 1)) == 0 && slots <= INT32_MAX &&
                    batch * kv_heads * rows * parts <= INT32_MAX && scale > 0;
  if (!fits) {
    return invalid("q ", buffers[0], ", k ", buffers[1], ", selected ", buffers[4], ", tail ",
                   buffers[5], ", scale ", scale, ", ", parts, " parts, ", stages,
                   " stages and ", warps, " warps must have 64 or 128 channels, up to ", kMaxListed,
                   " slots of a list and the tail, a positive scale, up to ", kMaxParts,
                   " parts, ", kMinStages, " to ", kMaxStages, " stages, up to ", kMaxWarps,
                   " warps, a power of 2, and up to ", kMaxBatch, " batch rows");
  }
  const auto BF16 = ffi::DataType::BF16, F32 = ffi::DataType::F32, S32 = ffi::DataType::S32;
  const std::vector<int64_t> cache = {slots, kv_heads, channels};
  std::vector<int64_t> of_lists;
  if (selected.size() > 2) of_lists.push_back(kv_heads);
  std::vector<Wanted> wanted = {{"q", BF16, {tokens, heads, channels}},
                                {"k", BF16, cache},
                                {"v", BF16, cache},
                                {"positions", S32, {tokens}},
                                {"selected", S32, of_lists},
                                {"tail", S32, {tail_count}},
                                {"context_len", S32, {}}};
  wanted[4].sizes.push_back(all_slots ? 0 : count);
  if (counted) wanted.push_back({"counts", S32, of_lists});
  wanted.insert(wanted.end(), {{"out", BF16, {tokens, heads, channels}},
                               {"lse", F32, {tokens, heads}},
                               {"partial_out", F32, {kv_heads, parts, rows, channels}},
                               {"partial_sums", F32, {kv_heads, parts, rows, 2}}});
  error = buffers.check(0, batch, wanted);
  if (error.failure()) return error;
  const size_t first = arguments.size();
  const auto values = [&](size_t i) { return buffers.data<uint16_t>(i); };
  const auto integers = [&](size_t i) { return buffers.data<int32_t>(i); };
  const auto narrowed = [](int64_t x) { return static_cast<int32_t>(x); };
  return launched(gathered_attention(
      Gathered{values(0), values(1), values(2), integers(3), all_slots ? nullptr : integers(4),
               integers(5), integers(6), counted ? integers(7) : nullptr, values(first),
               buffers.data<float>(first + 1), buffers.data<float>(first + 2),
               buffers.data<float>(first + 3), narrowed(batch), narrowed(slots),
               narrowed(kv_heads), narrowed(tokens), narrowed(group), narrowed(channels),
               narrowed(lists), narrowed(count), narrowed(tail_count), parts, stages, warps,
               scale},
      stream));
}

}  // namespace jspec

XLA_FFI_DEFINE_HANDLER_SYMBOL(
    jspec_gathered_attention, jspec::attend_selected,
    JSPEC_BIND()
        .Attr<float>("scale")
        .Attr<int32_t>("parts")
        .Attr<int32_t>("stages")
        .Attr<int32_t>("warps")
        .Attr<bool>("all_slots"),
    {jspec::ffi::Traits::kCmdBufferCompatible});
