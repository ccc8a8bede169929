// Selection on a GPU. docs/selection.md says why it is exact.
#include "select/take.cuh"

namespace jspec {

// A cluster takes a row, and each of its blocks `counted` slots, whose keys stay in registers.
template <typename Key>
__global__ void __launch_bounds__(kThreads, kBlocks)
    cluster_kernel(const __grid_constant__ Work work, Key key) {
  ClusterShared& shared = shared_memory<ClusterShared>();
  const Digits& digits = work.plan.digits;
  const int blocks = work.plan.chunks, block = blockIdx.x % blocks;
  const Row<Key> row(work, blockIdx.x / blocks);
  if (block == 0) row.write_forced();
  if (row.taken.need == 0) return;
  const Held<Key> held = row.tile(block * work.cut.counted, work.cut.counted);
  clear(shared.counters, kMostBins + kLaterBins);
  clear(shared.totals[0], 3 * 64);
  __syncthreads();
  uint32_t threshold = 0;  // the digits found, as the highest bits of a key
  int need = row.taken.need;
  Before before{0, 0};
  uint32_t* counters = shared.counters;
  for (int level = 0; level < digits.levels; ++level) {
    const int shift = digits.shift[level], bins = digits.bins[level];
    const int width = level > 0 ? digits.shift[level - 1] - shift : 0;
    const uint32_t mask = level > 0 ? (1u << width) - 1 : ~0u;
    held.items.each([&](int i) {
      const uint32_t own = key(held.raw[i]);
      if (level == 0 || own >> (shift + width) == threshold) {
        atomicAdd(counters + (own >> shift & mask), 1);
      }
    });
    const Place place = find_in_cluster(shared, counters, level, bins, blocks, block, need);
    threshold = level > 0 ? threshold << width | place.found.digit : place.found.digit;
    need = place.found.need;
    before = {before.over + place.over, place.at};
    counters += bins;
  }
  row.take(
      held.items, threshold, need, before, shared.sums,
      [&](int i) { return key(held.raw[i]); }, [&](int at) { return at; });
  sync_cluster();  // no block ends while another reads its histograms
}

const char* select(const Select& select, const Cut& cut, void* workspace, Stream stream) {
  const Rows& rows = select.rows;
  const Plan plan(keys_of(select), rows.n, cut);
  return for_scores(select, [&](auto key) {
    const int vector = 16 / sizeof(typename decltype(key)::Type);
    const bool aligned =
        rows.n % vector == 0 && reinterpret_cast<uint64_t>(select.scores) % 16 == 0;
    const Work work{select.scores, rows.n, aligned, rows,
                    plan,          cut,    static_cast<uint32_t*>(workspace)};
    if (plan.fits_registers && (plan.chunks == 1 || is_hopper_or_newer())) {
      return launch_clusters(cluster_kernel<decltype(key)>, plan.chunks, rows.rows * plan.chunks,
                             kThreads, sizeof(ClusterShared), false, stream, work, key);
    }
    if (plan.chunks == 1) {
      return launch_behind(row_kernel<decltype(key)>, rows.rows, kThreads, sizeof(ClusterShared),
                           false, stream, work, key);
    }
    const char* error = launch_behind(count_kernel<decltype(key)>, rows.rows * plan.chunks,
                                      kThreads, sizeof(Counting), false, stream, work, key);
    return error != nullptr ? error : place(work, key, stream);
  });
}

}  // namespace jspec
