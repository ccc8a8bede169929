// Scoring and selection of hash codes on a GPU: the scores are counted as they are computed, so that
// one launch more takes the slots.
#include <algorithm>

#include "select/score.cuh"

namespace jspec {
namespace {

constexpr int kCounters = 10240;  // of a block: 40 KiB

Heads heads_of(const Hash& hash, int bins) {
  // Codes of 128 bytes that lie together are four whole sectors.
  int heads = std::min({hash.heads, 32 / hash.words, kCounters / bins});
  heads = std::max(heads, 1);
  return {heads, (hash.heads + heads - 1) / heads, kThreads / heads};
}

template <int words>
const char* score(const Work& work, const Hash& hash, Stream stream) {
  const Heads heads = heads_of(hash, work.plan.digits.bins[0]);
  const int64_t blocks = hash.batch * heads.groups * work.plan.chunks;
  const int bins = work.plan.digits.bins[0], planes = planes_of(hash.queries());
  // Counters, their totals, 32 bases and the planes.
  const size_t bytes = (heads.heads * bins + heads.totals(bins) + 32 + planes * heads.heads * words) *
                       sizeof(uint32_t);
  if (hash.queries() == 1) {
    score_kernel<words, true><<<blocks, kThreads, bytes, stream>>>(work, hash, heads, 0);
  } else {
    score_kernel<words, false><<<blocks, kThreads, bytes, stream>>>(work, hash, heads, planes);
  }
  return launch_error();
}

}  // namespace

const char* hash_select(const Hash& hash, const Cut& cut, void* workspace, Stream stream) {
  const Rows& rows = hash.rows;
  const Plan plan(hash.highest() + 1, rows.n, cut, true);
  uint32_t* memory = static_cast<uint32_t*>(workspace);
  const Work work{memory + plan.scores, plan.words * 2, true, rows, plan, cut, memory};
  const char* error = [&] {
    switch (hash.words) {
      case 1: return score<1>(work, hash, stream);
      case 2: return score<2>(work, hash, stream);
      case 4: return score<4>(work, hash, stream);
      default: return score<8>(work, hash, stream);
    }
  }();
  return error ? error : place(work, Uint16Key(), stream);
}

}  // namespace jspec
