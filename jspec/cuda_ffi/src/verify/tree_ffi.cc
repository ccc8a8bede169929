// The FFI handler of verifying trees.
#include "verify/greedy_ffi.h"
#include "verify/tree.h"

namespace jspec {

// The arguments of greedy verification, then the parents; its results, then the path.
ffi::Error verify_tree_of(Stream stream, ffi::RemainingArgs arguments, ffi::RemainingRets results) {
  ffi::Error error = check_count(arguments, kGreedyArguments + 1, results, kGreedyResults + 1);
  if (error.failure()) return error;
  const Buffers buffers(arguments, results);
  TreeCall tree = {};
  error = greedy_of(buffers, kGreedyArguments + 1, &tree.greedy);
  if (error.failure()) return error;
  const Greedy& greedy = tree.greedy;
  const size_t path = kGreedyArguments + 1 + kGreedyResults;
  const auto S32 = ffi::DataType::S32;
  error = buffers.check(kGreedyArguments, greedy.batch, {{"parents", S32, {greedy.gamma}}});
  if (error.failure()) return error;
  error = buffers.check(path, greedy.batch, {{"path", S32, {greedy.gamma}}});
  if (error.failure() || greedy.batch == 0) return error;
  if (greedy.gamma >= kMostNodes) {
    return invalid("gamma=", greedy.gamma, " must be below ", kMostNodes);
  }
  tree.parents = buffers.data<int32_t>(kGreedyArguments);
  tree.path = buffers.data<int32_t>(path);
  return launched(verify_tree(tree, stream));
}

}  // namespace jspec

XLA_FFI_DEFINE_HANDLER_SYMBOL(jspec_verify_tree, jspec::verify_tree_of, JSPEC_BIND(),
                              {jspec::ffi::Traits::kCmdBufferCompatible});
