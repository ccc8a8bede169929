// Selection on a GPU. docs/selection.md says why it is exact.
#include "select/cluster.cuh"

namespace jspec {

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
                             kThreads, 0, false, stream, work, key);
    }
    if (plan.chunks == 1) {
      row_kernel<<<rows.rows, kThreads, 0, stream>>>(work, key);
      return launch_error();
    }
    count_kernel<<<rows.rows * plan.chunks, kThreads, 0, stream>>>(work, key);
    if (const char* error = launch_error()) return error;
    return place(work, key, stream);
  });
}

}  // namespace jspec
