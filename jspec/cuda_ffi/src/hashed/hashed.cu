// The launches of selection by hash codes, alone and inside a layer.
#include "hashed/append.cuh"
#include "hashed/score.cuh"

namespace jspec {
namespace {

// Calls `run` with the type of a score and the words of a code.
template <typename Run>
const char* for_codes(const Hash& hash, const HashPlan& plan, Run run) {
  const auto with = [&](auto score) {
    switch (hash.words) {
      case 1: return run(score, std::integral_constant<int, 1>());
      case 2: return run(score, std::integral_constant<int, 2>());
      case 4: return run(score, std::integral_constant<int, 4>());
      default: return run(score, std::integral_constant<int, 8>());
    }
  };
  return plan.bytes == 1 ? with(uint8_t()) : with(uint16_t());
}

const char* scored(const Hash& hash, const HashPlan& plan, const HashCut& cut, uint32_t* memory,
                   bool early, Stream stream) {
  return for_codes(hash, plan, [&](auto score, auto words) {
    return launch_score<decltype(score), words.value>(hash, plan, cut, memory, early, stream);
  });
}

// How many blocks of a kernel the device holds at once.
template <typename Kernel>
int64_t blocks_at_once(Kernel kernel, int threads, int bytes) {
  int each;
  allow_shared_memory(kernel, bytes);
  cudaOccupancyMaxActiveBlocksPerMultiprocessor(&each, kernel, threads, bytes);
  return int64_t(multiprocessors()) * each;
}

template <typename Score, int SIZE>
const char* attended(const Hash& hash, const Layer& layer, const HashPlan& plan,
                     const HashCut& cut, uint32_t* memory, Stream stream) {
  const auto launch = [&](auto rows) {
    constexpr int ROWS = decltype(rows)::value;
    const int bytes = words_of_attending<SIZE, ROWS>(plan.bins) * 4;
    const auto kernel = attend_kernel<Score, SIZE, ROWS>;
    const int blocks = hash.rows.rows * cut.parts;
    const bool ordered = cut.parts > 1 && blocks > blocks_at_once(kernel, kPicking, bytes);
    return launch_behind(kernel, blocks, kPicking, bytes, true, stream, hash, layer, plan, cut,
                         ordered, memory);
  };
  if (hash.group == 1) return launch(std::integral_constant<int, 1>());
  if (hash.group == 2) return launch(std::integral_constant<int, 2>());
  if (hash.group <= 4) return launch(std::integral_constant<int, 4>());
  return launch(std::integral_constant<int, 8>());
}

template <int SIZE>
const char* layer_of(const Hash& hash, const Layer& layer, const HashPlan& plan,
                     const HashCut& cut, uint32_t* memory, Stream stream) {
  const int tiles = (hash.batch * (hash.group + 1) + kTogether - 1) / kTogether;
  const int bytes = (32 + kTogether) * SIZE * 4;
  if (const char* error =
          launch_behind(append_kernel<SIZE>, hash.heads * hash.words * tiles, kEncoding, bytes,
                        false, stream, hash, layer, tiles)) {
    return error;
  }
  if (const char* error = scored(hash, plan, cut, memory, true, stream)) return error;
  return plan.bytes == 1 ? attended<uint8_t, SIZE>(hash, layer, plan, cut, memory, stream)
                         : attended<uint16_t, SIZE>(hash, layer, plan, cut, memory, stream);
}

}  // namespace

const char* hash_select(const Hash& hash, const HashCut& cut, void* workspace, Stream stream) {
  const HashPlan plan(hash.highest(), hash.rows.n, cut, 0);
  uint32_t* memory = static_cast<uint32_t*>(workspace);
  if (const char* error = scored(hash, plan, cut, memory, false, stream)) return error;
  const int bytes = (words_of_finding(plan.bins) + 2 * kPickingWarps) * 4;
  const auto picked = [&](auto kernel) {
    return launch_behind(kernel, hash.rows.rows * cut.parts, kPicking, bytes, true, stream, hash,
                         plan, cut, memory);
  };
  return plan.bytes == 1 ? picked(pick_kernel<uint8_t>) : picked(pick_kernel<uint16_t>);
}

const char* hash_attention(const Hash& hash, const Layer& layer, const HashCut& cut,
                           void* workspace, Stream stream) {
  const HashPlan plan(hash.highest(), hash.rows.n, cut, floats_of(hash.group, layer.size));
  uint32_t* memory = static_cast<uint32_t*>(workspace);
  switch (layer.size) {
    case 64: return layer_of<64>(hash, layer, plan, cut, memory, stream);
    case 128: return layer_of<128>(hash, layer, plan, cut, memory, stream);
    default: return layer_of<256>(hash, layer, plan, cut, memory, stream);
  }
}

}  // namespace jspec
