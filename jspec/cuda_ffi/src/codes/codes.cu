// The launches of Hamming scores and of encoding.
#include "codes/encode.cuh"
#include "codes/scores.cuh"
#include "common/dependent.cuh"

namespace jspec {
namespace {

template <int words>
const char* scored(const KeyScores& scores, Stream stream) {
  const int64_t queries = int64_t(scores.tokens) * scores.group;
  const int heads = scores.heads < 32 / words ? scores.heads : 32 / words;  // four whole sectors
  const int groups = (scores.heads - 1) / heads + 1, slots = kScorers / heads * kTogether;
  const int chunks = (scores.n - 1) / slots + 1, planes = queries == 1 ? 0 : planes_of(queries);
  const int64_t blocks = scores.batch * groups * chunks;
  if (blocks > INT32_MAX) return "more than 2^31 blocks";
  const auto launch = [&](auto kernel) {
    return launch_behind(kernel, blocks, kScorers, (kBases + planes * heads * words) * 4, false,
                         stream, scores, heads, groups, chunks, planes);
  };
  if (scores.norms) {
    return queries == 1 ? launch(hamming_kernel<words, true, true>)
                        : launch(hamming_kernel<words, false, true>);
  }
  return queries == 1 ? launch(hamming_kernel<words, true, false>)
                      : launch(hamming_kernel<words, false, false>);
}

template <typename X, typename W>
const char* encoded(const Encoding& encoding, Stream stream) {
  const int64_t vectors = encoding.tokens * (encoding.group + (encoding.k != nullptr));
  const int64_t tiles = (vectors - 1) / kVectors + 1, blocks = tiles * encoding.heads * encoding.words;
  if (blocks > INT32_MAX) return "more than 2^31 blocks";
  const int bytes = (32 + kVectors) * encoding.size * 4;
  return launch_behind(encode_kernel<X, W>, blocks, kEncoders, bytes, false, stream, encoding,
                       static_cast<int>(tiles));
}

}  // namespace

const char* hamming_scores(const KeyScores& scores, Stream stream) {
  switch (scores.words) {
    case 1: return scored<1>(scores, stream);
    case 2: return scored<2>(scores, stream);
    case 4: return scored<4>(scores, stream);
    default: return scored<8>(scores, stream);
  }
}

const char* hash_encode(const Encoding& encoding, Stream stream) {
  const bool wide_w = encoding.w_type == Float::kFloat32;
  if (encoding.x_type == Float::kFloat32) {
    return wide_w ? encoded<float, float>(encoding, stream)
                  : encoded<float, uint16_t>(encoding, stream);
  }
  return wide_w ? encoded<uint16_t, float>(encoding, stream)
                : encoded<uint16_t, uint16_t>(encoding, stream);
}

}  // namespace jspec
