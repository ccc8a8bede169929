// The FFI handler of attention over selected slots.
#include "common/ffi.h"
#include "gathered/gathered.h"

namespace jspec {

// How the work is cut for a GPU, and the scale of scores.
struct Cut {
  float scale;
  int32_t parts, stages, warps;
};

// Norms of queries and keys, of a token that is appended.
struct Norms {
  bool are_there;
  float q_eps, k_eps;
};

// The counts of lists are the last argument, if there are any. With all_slots, selected has no
// slots: a list is those of the cache in order. After output and log-sum-exp come two arrays of
// partial results, which the kernels pass on.
//
// With `norms` a token of each row is appended: in place of queries come its projections, after the
// other arguments cosine, sine and the scales of the norms, and after the other results the columns
// of the cache, in the memory of the arguments.
ffi::Error attend(Stream stream, ffi::RemainingArgs arguments, ffi::RemainingRets results,
                  const Cut& cut, bool all_slots, const Norms* norms) {
  const auto [scale, parts, stages, warps] = cut;
  const bool counted = !norms && arguments.size() == 8;
  ffi::Error error =
      check_count(arguments, norms ? 11 : 7 + counted, results, norms ? 6 : 4);
  if (error.failure()) return error;
  const Buffers buffers(arguments, results);
  const auto given = buffers[0].dimensions(), k = buffers[1].dimensions();
  const auto selected = buffers[4].dimensions(), tail = buffers[5].dimensions();
  if (given.size() != 4 || k.size() != 4 || selected.size() < 2 || tail.size() != 2) {
    return invalid(norms ? "projections " : "q ", buffers[0], ", k ", buffers[1], ", selected ",
                   buffers[4], " and tail ", buffers[5], " must be ",
                   norms ? "[B, 1, K, (G + 2) H]" : "[B, T, N, H]",
                   ", [B, S, K, H], [B, n] or [B, K, n], [B, m]");
  }
  // Of projections, a KV head has its queries, a key and a value.
  const int64_t channels = k[3], width = given[3];
  const int64_t heads = norms && channels > 0 ? given[2] * (width / channels - 2) : given[2];
  const int64_t batch = given[0], tokens = given[1];
  const int64_t slots = k[1], kv_heads = k[2], group = kv_heads > 0 ? heads / kv_heads : 0;
  const int64_t rows = tokens * group, tail_count = tail[1];
  const int64_t count = all_slots ? slots : selected.back();
  const int64_t lists = selected.size() == 2 ? 1 : kv_heads;
  const bool fits = group * kv_heads == heads && rows >= 1 && batch >= 1 &&
                    batch <= kMaxBatch && slots >= 1 &&
                    (channels == 64 || channels == 128) &&
                    (!norms || (tokens == 1 && rows <= kFewRows && given[2] == kv_heads &&
                                width == (group + 2) * channels)) &&
                    count + tail_count >= 1 &&
                    count + tail_count <= kMaxListed && parts >= 1 && parts <= kMaxParts &&
                    stages >= kMinStages && stages <= kMaxStages && warps >= 1 &&
                    warps <= kMaxWarps && (warps & (warps - 1)) == 0 && slots <= INT32_MAX &&
                    batch * kv_heads * rows * parts <= INT32_MAX && scale > 0;
  if (!fits) {
    return invalid(norms ? "projections " : "q ", buffers[0], ", k ", buffers[1], ", selected ",
                   buffers[4], ", tail ", buffers[5], ", scale ", scale, ", ", parts, " parts, ",
                   stages, " stages and ", warps, " warps must have 64 or 128 channels, up to ",
                   kMaxListed, " slots of a list and the tail, a positive scale, up to ", kMaxParts,
                   " parts, ", kMinStages, " to ", kMaxStages, " stages, up to ", kMaxWarps,
                   " warps, a power of 2, and up to ", kMaxBatch, " batch rows",
                   norms ? "; one token a row is appended, of up to 8 query heads a KV head" : "");
  }
  const auto BF16 = ffi::DataType::BF16, F32 = ffi::DataType::F32, S32 = ffi::DataType::S32;
  const std::vector<int64_t> cache = {slots, kv_heads, channels};
  std::vector<int64_t> of_lists;
  if (selected.size() > 2) of_lists.push_back(kv_heads);
  const Wanted queries = {"q", BF16, {tokens, heads, channels}};
  const Wanted projections = {"projections", BF16, {tokens, kv_heads, (group + 2) * channels}};
  std::vector<Wanted> wanted = {norms ? projections : queries,
                                {"k", BF16, cache},
                                {"v", BF16, cache},
                                {"positions", S32, {tokens}},
                                {"selected", S32, of_lists},
                                {"tail", S32, {tail_count}},
                                {"context_len", S32, {}}};
  wanted[4].sizes.push_back(all_slots ? 0 : count);
  if (counted) wanted.push_back({"counts", S32, of_lists});
  const size_t first = arguments.size();
  error = buffers.check(0, batch, wanted);
  if (error.failure()) return error;
  error = buffers.check(first, batch,
                        {{"out", BF16, {tokens, heads, channels}},
                         {"lse", F32, {tokens, heads}},
                         {"partial_out", F32, {kv_heads, parts, rows, channels}},
                         {"partial_sums", F32, {kv_heads, parts, rows, 2}}});
  if (error.failure()) return error;
  const auto values = [&](size_t i) { return buffers.data<uint16_t>(i); };
  const auto integers = [&](size_t i) { return buffers.data<int32_t>(i); };
  const auto narrowed = [](int64_t x) { return static_cast<int32_t>(x); };
  Gathered gathered{values(0), values(1), values(2), integers(3),
                    all_slots ? nullptr : integers(4), integers(5), integers(6),
                    counted ? integers(7) : nullptr, values(first),
                    buffers.data<float>(first + 1), buffers.data<float>(first + 2),
                    buffers.data<float>(first + 3), narrowed(batch), narrowed(slots),
                    narrowed(kv_heads), narrowed(tokens), narrowed(group), narrowed(channels),
                    narrowed(lists), narrowed(count), narrowed(tail_count), parts, stages, warps,
                    scale};
  if (norms) {
    error = buffers.check(7, batch, {{"cosine", F32, {1, 1, channels / 2}},
                                     {"sine", F32, {1, 1, channels / 2}}});
    if (error.failure()) return error;
    const int64_t scales = norms->are_there ? channels : 0;
    error = buffers.check(9, 1, {{"q_scale", BF16, {scales}}, {"k_scale", BF16, {scales}}});
    if (error.failure()) return error;
    error = buffers.check(first + 4, batch, {{"keys", BF16, cache}, {"values", BF16, cache}});
    if (error.failure()) return error;
    gathered.q = nullptr;
    gathered.appended = {values(0), buffers.data<float>(7), buffers.data<float>(8),
                         scales ? values(9) : nullptr, scales ? values(10) : nullptr,
                         values(first + 4), values(first + 5), norms->q_eps, norms->k_eps};
  }
  return launched(gathered_attention(gathered, stream));
}

ffi::Error attend_selected(Stream stream, ffi::RemainingArgs arguments,
                           ffi::RemainingRets results, float scale, int32_t parts,
                           int32_t stages, int32_t warps, bool all_slots) {
  return attend(stream, arguments, results, {scale, parts, stages, warps}, all_slots, nullptr);
}

ffi::Error append_and_attend(Stream stream, ffi::RemainingArgs arguments,
                             ffi::RemainingRets results, float scale, int32_t parts,
                             int32_t stages, int32_t warps, bool normed, float q_eps,
                             float k_eps) {
  const Norms norms{normed, q_eps, k_eps};
  return attend(stream, arguments, results, {scale, parts, stages, warps}, false, &norms);
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

XLA_FFI_DEFINE_HANDLER_SYMBOL(jspec_rotate_append_attend, jspec::append_and_attend,
                              JSPEC_BIND()
                                  .Attr<float>("scale")
                                  .Attr<int32_t>("parts")
                                  .Attr<int32_t>("stages")
                                  .Attr<int32_t>("warps")
                                  .Attr<bool>("normed")
                                  .Attr<float>("q_eps")
                                  .Attr<float>("k_eps"),
                              {jspec::ffi::Traits::kCmdBufferCompatible});
