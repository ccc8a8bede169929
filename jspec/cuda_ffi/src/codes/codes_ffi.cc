// The FFI handlers of Hamming scores and of encoding.
#include "codes/codes.h"
#include "common/ffi.h"

namespace jspec {

using Type = ffi::DataType;

// Arguments: q_codes, k_codes, lengths, norms (any array where there are none). Result: scores.
ffi::Error hamming_scores_call(Stream stream, ffi::RemainingArgs arguments,
                               ffi::RemainingRets results, bool scaled) {
  ffi::Error error = check_count(arguments, 4, results, 1);
  if (error.failure()) return error;
  const Buffers buffers(arguments, results);
  const auto q = buffers[0].dimensions(), k = buffers[1].dimensions();
  const auto wrong = [&] {
    return invalid("q_codes ", buffers[0], " and k_codes ", buffers[1],
                   " must be uint32 [..., T, N, W] and [..., S, K, W] with W of 1, 2, 4 or 8, N a "
                   "multiple of K and scores in 1..", kMostShared);
  };
  if (q.size() < 3 || k.size() < 3) return wrong();
  const int64_t words = k.back(), heads = k[k.size() - 2], n = k[k.size() - 3];
  const int64_t every = q[q.size() - 2], tokens = q[q.size() - 3];
  const bool fits = words == 1 || words == 2 || words == 4 || words == 8;
  if (!fits || heads < 1 || heads > INT32_MAX || n > INT32_MAX || every % heads) return wrong();
  const int64_t group = every / heads;
  if (tokens < 1 || group < 1 || tokens > kMostShared || group > kMostShared ||
      tokens * group * 32 * words > kMostShared) {
    return wrong();
  }
  int64_t batch = 1;
  for (size_t i = 0; i + 3 < k.size(); ++i) batch *= k[i];
  error = buffers.check(0, batch, {{"q_codes", Type::U32, {tokens, every, words}},
                                   {"k_codes", Type::U32, {n, heads, words}},
                                   {"lengths", Type::S32, {}}});
  if (error.failure()) return error;
  if (scaled) error = buffers.check(3, batch, {{"norms", Type::F32, {n, heads}}});
  if (error.failure()) return error;
  error = buffers.check(4, batch, {{"scores", scaled ? Type::F32 : Type::S32, {heads, n}}});
  if (error.failure() || batch * n == 0) return error;
  return launched(hamming_scores(
      KeyScores{buffers.data<uint32_t>(0), buffers.data<uint32_t>(1), buffers.data<int32_t>(2),
             scaled ? buffers.data<float>(3) : nullptr, buffers.data<void>(4), batch,
             static_cast<int32_t>(tokens), static_cast<int32_t>(heads),
             static_cast<int32_t>(group), static_cast<int32_t>(words), static_cast<int32_t>(n)},
      stream));
}

// Reads the type of a buffer of floats; whether it is one.
bool float_of(const ffi::AnyBuffer& buffer, Float* type) {
  *type = buffer.element_type() == Type::F32 ? Float::kFloat32 : Float::kBfloat16;
  return buffer.element_type() == Type::F32 || buffer.element_type() == Type::BF16;
}

// Arguments: q, k (any array where there are no keys), w. Results: q_codes, k_codes.
ffi::Error hash_encode_call(Stream stream, ffi::RemainingArgs arguments,
                            ffi::RemainingRets results, bool with_keys) {
  ffi::Error error = check_count(arguments, 3, results, 2);
  if (error.failure()) return error;
  const Buffers buffers(arguments, results);
  const auto q = buffers[0].dimensions(), w = buffers[2].dimensions();
  Encoding encoding{};
  const bool fits = q.size() >= 2 && w.size() == 3 && float_of(buffers[0], &encoding.x_type) &&
                    float_of(buffers[2], &encoding.w_type) && w[0] >= 1 && w[0] <= INT32_MAX &&
                    q[q.size() - 2] % w[0] == 0 && q[q.size() - 2] <= INT32_MAX && w[2] % 32 == 0 &&
                    w[2] >= 32 && w[2] <= 256 && w[1] >= 4 && w[1] % 4 == 0 &&
                    w[1] <= kMostChannels;
  if (!fits) {
    return invalid("q ", buffers[0], " and w ", buffers[2],
                   " must be bfloat16 or float32 [..., N, H] and [K, H, R] with N a multiple of K, H "
                   "one of 4 up to ", kMostChannels, " and R of 32 up to 256");
  }
  const int64_t heads = w[0], size = w[1], words = w[2] / 32, every = q[q.size() - 2];
  const Type x = buffers[0].element_type();
  int64_t tokens = 1;
  for (size_t i = 0; i + 2 < q.size(); ++i) tokens *= q[i];
  error = buffers.check(0, tokens, {{"q", x, {every, size}}});
  if (error.failure()) return error;
  if (with_keys) error = buffers.check(1, tokens, {{"k", x, {heads, size}}});
  if (error.failure()) return error;
  error = buffers.check(3, tokens, {{"q_codes", Type::U32, {every, words}},
                                    {"k_codes", Type::U32, {with_keys ? heads : 0, words}}});
  if (error.failure() || tokens * (every + with_keys) == 0) return error;
  encoding.q = buffers.data<void>(0);
  encoding.k = with_keys ? buffers.data<void>(1) : nullptr;
  encoding.w = buffers.data<void>(2);
  encoding.q_codes = buffers.data<uint32_t>(3);
  encoding.k_codes = buffers.data<uint32_t>(4);
  encoding.tokens = tokens;
  encoding.heads = static_cast<int32_t>(heads);
  encoding.group = static_cast<int32_t>(every / heads);
  encoding.size = static_cast<int32_t>(size);
  encoding.words = static_cast<int32_t>(words);
  return launched(hash_encode(encoding, stream));
}

}  // namespace jspec

XLA_FFI_DEFINE_HANDLER_SYMBOL(jspec_hamming_scores, jspec::hamming_scores_call,
                              JSPEC_BIND().Attr<bool>("scaled"),
                              {jspec::ffi::Traits::kCmdBufferCompatible});

XLA_FFI_DEFINE_HANDLER_SYMBOL(jspec_hash_encode, jspec::hash_encode_call,
                              JSPEC_BIND().Attr<bool>("with_keys"),
                              {jspec::ffi::Traits::kCmdBufferCompatible});
