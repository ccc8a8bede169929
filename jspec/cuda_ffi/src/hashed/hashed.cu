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

const char* picked(const Hash& hash, const HashPlan& plan, const HashCut& cut, uint32_t* memory,
                   Stream stream) {
  const int bytes = (words_of_finding(plan.bins) + 2 * kPickingWarps) * 4;
  const auto kernel = plan.bytes == 1 ? pick_kernel<uint8_t> : pick_kernel<uint16_t>;
  return launch_behind(kernel, hash.rows.rows * cut.parts, kPicking, bytes, true, stream, hash,
                       plan, cut, memory);
}

// Appends the new tokens, and scores the slots.
template <int SIZE>
const char* appended(const Hash& hash, const Layer& layer, const HashPlan& plan,
                     const HashCut& cut, uint32_t* memory, Stream stream) {
  const int tiles = (hash.batch * (hash.group + 1) + kTogether - 1) / kTogether;
  const int bytes = (32 + kTogether) * SIZE * 4;
  if (const char* error =
          launch_behind(append_kernel<SIZE>, hash.heads * hash.words * tiles, kEncoding, bytes,
                        false, stream, hash, layer, tiles)) {
    return error;
  }
  return scored(hash, plan, cut, memory, true, stream);
}

// Calls `run` with the channels of a head.
template <typename Run>
const char* for_size(const Layer& layer, Run run) {
  switch (layer.size) {
    case 64: return run(std::integral_constant<int, 64>());
    case 128: return run(std::integral_constant<int, 128>());
    default: return run(std::integral_constant<int, 256>());
  }
}

}  // namespace

const char* hash_select(const Hash& hash, const HashCut& cut, void* workspace, Stream stream) {
  const HashPlan plan(hash.highest(), hash.rows.n, cut, 0);
  uint32_t* memory = static_cast<uint32_t*>(workspace);
  if (const char* error = scored(hash, plan, cut, memory, false, stream)) return error;
  return picked(hash, plan, cut, memory, stream);
}

const char* hash_append_select(const Hash& hash, const Layer& layer, const HashCut& cut,
                               void* workspace, Stream stream) {
  const HashPlan plan(hash.highest(), hash.rows.n, cut, 0);
  uint32_t* memory = static_cast<uint32_t*>(workspace);
  return for_size(layer, [&](auto size) {
    const char* error = appended<size.value>(hash, layer, plan, cut, memory, stream);
    return error ? error : picked(hash, plan, cut, memory, stream);
  });
}

const char* hash_attention(const Hash& hash, const Layer& layer, const HashCut& cut,
                           void* workspace, Stream stream) {
  const HashPlan plan(hash.highest(), hash.rows.n, cut, floats_of(hash.group, layer.size));
  uint32_t* memory = static_cast<uint32_t*>(workspace);
  return for_size(layer, [&](auto size) {
    const char* error = appended<size.value>(hash, layer, plan, cut, memory, stream);
    if (error) return error;
    return plan.bytes == 1
               ? attended<uint8_t, size.value>(hash, layer, plan, cut, memory, stream)
               : attended<uint16_t, size.value>(hash, layer, plan, cut, memory, stream);
  });
}

}  // namespace jspec
