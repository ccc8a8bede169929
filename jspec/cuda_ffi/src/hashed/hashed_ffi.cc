// The FFI handlers of selection by hash codes, alone and inside a decoding layer.
#include "common/ffi.h"
#include "hashed/hashed.h"
#include "select/rows_ffi.h"

namespace jspec {

// Reads and checks codes of queries and keys: buffers `q` [..., T, N, W] and `k` [..., S, K, W].
ffi::Error codes_of(const Buffers& buffers, size_t q_at, size_t k_at, Hash* hash) {
  const auto q = buffers[q_at].dimensions(), k = buffers[k_at].dimensions();
  const auto wrong = [&] {
    return invalid("q_codes ", buffers[q_at], " and k_codes ", buffers[k_at],
                   " must be uint32 [..., T, N, W] and [..., S, K, W] with W of 1, 2, 4 or 8 and N "
                   "a multiple of K");
  };
  if (q.size() < 3 || k.size() < 3) return wrong();
  const int64_t words = k.back(), heads = k[k.size() - 2], n = k[k.size() - 3];
  const int64_t every = q[q.size() - 2], tokens = q[q.size() - 3];
  const bool fits = words == 1 || words == 2 || words == 4 || words == 8;
  if (heads < 1 || heads > INT32_MAX || every % heads || !fits) return wrong();
  int64_t batch = 1;
  for (size_t i = 0; i + 3 < k.size(); ++i) batch *= k[i];
  ffi::Error error = buffers.check(q_at, batch, {{"q_codes", Type::U32, {tokens, every, words}}});
  if (error.failure()) return error;
  error = buffers.check(k_at, batch, {{"k_codes", Type::U32, {n, heads, words}}});
  if (error.failure()) return error;
  const int64_t group = every / heads;
  if (tokens < 1 || group < 1 || tokens > kMostScore || group > kMostScore ||
      tokens * group * 32 * words > kMostScore) {
    return invalid("q_codes ", buffers[q_at], " and k_codes ", buffers[k_at],
                   " give scores that are not in 0..", kMostScore);
  }
  *hash = Hash{buffers.data<uint32_t>(q_at), buffers.data<uint32_t>(k_at), batch,
               static_cast<int32_t>(tokens), static_cast<int32_t>(heads),
               static_cast<int32_t>(group), static_cast<int32_t>(words), {}};
  return ffi::Error::Success();
}

ffi::Error check_hash_cut(const HashCut& cut) {
  if (is_power(cut.chunk) && cut.chunk >= kLeastScored && cut.chunk <= kMostScored &&
      cut.parts >= 1 && cut.parts <= kMostParts) {
    return ffi::Error::Success();
  }
  return invalid("chunk=", cut.chunk, " must be a power of 2 in ", kLeastScored, "..", kMostScored,
                 ", and parts=", cut.parts, " in 1..", kMostParts);
}

ffi::Error check_workspace(const Buffers& buffers, size_t at, const HashPlan& plan,
                           const HashCut& cut, int64_t rows) {
  if (rows * std::max(plan.chunks, cut.parts) > INT32_MAX) {
    return invalid(rows, " rows of ", plan.chunks, " chunks are more than 2^31 blocks");
  }
  return buffers.check(at, rows, {{"workspace", Type::U32, {plan.words}}});
}

// Arguments: q_codes, k_codes, counts, lengths. Results: slots, workspace.
ffi::Error hash_select_call(Stream stream, ffi::RemainingArgs arguments,
                            ffi::RemainingRets results, int32_t chunk, int32_t parts,
                            int32_t sinks, int32_t recent) {
  ffi::Error error = check_count(arguments, 4, results, 2);
  if (error.failure()) return error;
  const Buffers buffers(arguments, results);
  Hash hash;
  error = codes_of(buffers, 0, 1, &hash);
  if (error.failure()) return error;
  const auto k = buffers[1].dimensions();
  const int64_t rows = hash.batch * hash.heads;
  error = rows_of(buffers, 2, rows, k[k.size() - 3], sinks, recent, &hash.rows);
  if (error.failure()) return error;
  const HashCut cut{chunk, parts};
  error = check_hash_cut(cut);
  if (error.failure()) return error;
  error = check_workspace(buffers, 5, HashPlan(hash.highest(), hash.rows.n, cut, 0), cut, rows);
  if (error.failure() || rows == 0) return error;
  return launched(hash_select(hash, cut, buffers.data<void>(5), stream));
}

// Arguments: joined, cosine, sine, the scales of queries and keys (any array where there is no norm),
// w, positions, keys, values, codes, until, counts. Results: slots, the columns, turned queries, their
// codes, workspace; where it attends, out and lse too.
ffi::Error layer_call(bool attends, Stream stream, ffi::RemainingArgs arguments,
                      ffi::RemainingRets results, HashCut cut, int32_t sinks, int32_t recent,
                      int32_t tail, bool normed, float q_eps, float k_eps, float scale) {
  ffi::Error error = check_count(arguments, 12, results, attends ? 9 : 7);
  if (error.failure()) return error;
  const Buffers buffers(arguments, results);
  enum { kJoined, kCosine, kSine, kQScale, kKScale, kW, kPositions, kKeys, kValues, kCodes, kUntil,
         kCounts, kSlots, kNewKeys, kNewValues, kNewCodes, kQueries, kQCodes, kWorkspace, kOut,
         kLse };
  Hash hash;
  error = codes_of(buffers, kQCodes, kNewCodes, &hash);
  if (error.failure()) return error;
  const auto keys = buffers[kNewKeys].dimensions(), slots = buffers[kSlots].dimensions();
  const int64_t batch = hash.batch, heads = hash.heads, group = hash.group;
  const int64_t size = keys.size() ? keys.back() : 0;
  const auto codes = buffers[kNewCodes].dimensions();
  const int64_t n = codes[codes.size() - 3], most = slots.size() ? slots.back() : 0;
  if ((size != 64 && size != 128 && size != 256) || group > 8 || hash.tokens != 1) {
    return invalid("keys ", buffers[kNewKeys], " must have 64, 128 or 256 channels, and codes ",
                   buffers[kQCodes], " be of one token with 1 to 8 queries for each KV head");
  }
  if (most < 1 || most > INT32_MAX || n > INT32_MAX - kMostChunk || sinks < 0 || recent < 0 ||
      (attends && tail < 1)) {
    return invalid("slots ", buffers[kSlots], " of n=", n, ", sinks=", sinks, ", recent=", recent,
                   " and tail=", tail, " must be [..., k] with k and tail at least 1, and below "
                   "2^31 - 2^14");
  }
  const int64_t each = (group + 2) * size, queries = heads * group;
  const std::vector<Wanted> given = {
      {"joined", Type::BF16, {1, heads, each}},      {"cosine", Type::F32, {1, 1, size / 2}},
      {"sine", Type::F32, {1, 1, size / 2}},         {"q_scale", Type::F32, {}},
      {"k_scale", Type::F32, {}},                    {"w", Type::F32, {heads, size, 32 * hash.words}},
      {"positions", Type::S32, {1}},                 {"keys", Type::BF16, {n, heads, size}},
      {"values", Type::BF16, {n, heads, size}},      {"codes", Type::U32, {n, heads, hash.words}},
      {"until", Type::S32, {}},                      {"counts", Type::S32, {}},
      {"slots", Type::S32, {heads, most}},           {"keys", Type::BF16, {n, heads, size}},
      {"values", Type::BF16, {n, heads, size}},      {"codes", Type::U32, {n, heads, hash.words}},
      {"queries", Type::BF16, {1, queries, size}}};
  for (size_t i = 0; i < given.size(); ++i) {
    const bool scales = i == kQScale || i == kKScale;
    const int64_t rows = i == kW ? 1 : scales ? (normed ? size : batch * size / 2) : batch;
    error = buffers.check(i, rows, {given[i]});
    if (error.failure()) return error;
  }
  if (attends) {
    error = buffers.check(kOut, batch, {{"out", Type::BF16, {1, queries, size}},
                                        {"lse", Type::F32, {1, queries}}});
    if (error.failure()) return error;
  }
  for (size_t i : {kKeys, kValues, kCodes}) {
    if (buffers.data<void>(i) != buffers.data<void>(i + kNewKeys - kKeys) && batch * n > 0) {
      return invalid(given[i].name, " ", buffers[i], " must be aliased by a result");
    }
  }
  error = check_hash_cut(cut);
  if (error.failure()) return error;
  const int64_t rows = batch * heads;
  hash.rows = Rows{buffers.data<int32_t>(kCounts), buffers.data<int32_t>(kUntil),
                   buffers.data<int32_t>(kSlots), rows, static_cast<int32_t>(n),
                   static_cast<int32_t>(most), sinks, recent, hash.heads};
  const HashPlan plan(hash.highest(), hash.rows.n, cut, attends ? floats_of(group, size) : 0);
  error = check_workspace(buffers, kWorkspace, plan, cut, rows);
  if (error.failure() || rows == 0) return error;
  const Layer layer{buffers.data<uint16_t>(kJoined),
                    buffers.data<float>(kCosine),
                    buffers.data<float>(kSine),
                    normed ? buffers.data<float>(kQScale) : nullptr,
                    normed ? buffers.data<float>(kKScale) : nullptr,
                    q_eps,
                    k_eps,
                    scale,
                    buffers.data<float>(kW),
                    buffers.data<int32_t>(kPositions),
                    buffers.data<int32_t>(kUntil),
                    buffers.data<uint16_t>(kNewKeys),
                    buffers.data<uint16_t>(kNewValues),
                    buffers.data<uint32_t>(kNewCodes),
                    buffers.data<uint16_t>(kQueries),
                    buffers.data<uint32_t>(kQCodes),
                    attends ? buffers.data<uint16_t>(kOut) : nullptr,
                    attends ? buffers.data<float>(kLse) : nullptr,
                    static_cast<int32_t>(size),
                    tail};
  const auto run = attends ? hash_attention : hash_append_select;
  return launched(run(hash, layer, cut, buffers.data<void>(kWorkspace), stream));
}

ffi::Error hash_attention_call(Stream stream, ffi::RemainingArgs arguments,
                               ffi::RemainingRets results, int32_t chunk, int32_t parts,
                               int32_t sinks, int32_t recent, int32_t tail, bool normed,
                               float q_eps, float k_eps, float scale) {
  return layer_call(true, stream, arguments, results, {chunk, parts}, sinks, recent, tail, normed,
                    q_eps, k_eps, scale);
}

ffi::Error hash_append_select_call(Stream stream, ffi::RemainingArgs arguments,
                                   ffi::RemainingRets results, int32_t chunk, int32_t parts,
                                   int32_t sinks, int32_t recent, bool normed, float q_eps,
                                   float k_eps) {
  return layer_call(false, stream, arguments, results, {chunk, parts}, sinks, recent, 0, normed,
                    q_eps, k_eps, 0);
}

}  // namespace jspec

XLA_FFI_DEFINE_HANDLER_SYMBOL(jspec_hash_select, jspec::hash_select_call,
                              JSPEC_BIND()
                                  .Attr<int32_t>("chunk")
                                  .Attr<int32_t>("parts")
                                  .Attr<int32_t>("sinks")
                                  .Attr<int32_t>("recent"),
                              {jspec::ffi::Traits::kCmdBufferCompatible});

XLA_FFI_DEFINE_HANDLER_SYMBOL(jspec_hash_attention, jspec::hash_attention_call,
                              JSPEC_BIND()
                                  .Attr<int32_t>("chunk")
                                  .Attr<int32_t>("parts")
                                  .Attr<int32_t>("sinks")
                                  .Attr<int32_t>("recent")
                                  .Attr<int32_t>("tail")
                                  .Attr<bool>("normed")
                                  .Attr<float>("q_eps")
                                  .Attr<float>("k_eps")
                                  .Attr<float>("scale"),
                              {jspec::ffi::Traits::kCmdBufferCompatible});

XLA_FFI_DEFINE_HANDLER_SYMBOL(jspec_hash_append_select, jspec::hash_append_select_call,
                              JSPEC_BIND()
                                  .Attr<int32_t>("chunk")
                                  .Attr<int32_t>("parts")
                                  .Attr<int32_t>("sinks")
                                  .Attr<int32_t>("recent")
                                  .Attr<bool>("normed")
                                  .Attr<float>("q_eps")
                                  .Attr<float>("k_eps"),
                              {jspec::ffi::Traits::kCmdBufferCompatible});
