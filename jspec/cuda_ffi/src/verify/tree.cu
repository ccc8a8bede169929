// Verification of trees on a GPU: a warp a row, a lane a node, and one ballot for what matches.
#include "common/dependent.cuh"
#include "verify/tree.h"

namespace jspec {
namespace {

constexpr int kTreeWarps = 4;  // of a block

template <typename Token>
__global__ void __launch_bounds__(32 * kTreeWarps) tree_kernel(const TreeCall tree) {
  const int64_t row = int64_t(blockIdx.x) * kTreeWarps + threadIdx.x / 32;
  if (row >= tree.greedy.batch) return;
  const Greedy& greedy = tree.greedy;
  const int lane = threadIdx.x % 32, gamma = greedy.gamma;
  const Token* draft = static_cast<const Token*>(greedy.draft_tokens) + row * gamma;
  const Token* targets = static_cast<const Token*>(greedy.target_tokens) + row * (gamma + 1);
  const Token* stops = static_cast<const Token*>(greedy.stop_tokens) + row * greedy.stops;
  const bool is_draft = lane > 0 && lane <= gamma;
  const Token target = lane <= gamma ? targets[lane] : Token(-1);
  const Token drafted = is_draft ? draft[lane - 1] : Token(-1);
  const int parent = is_draft ? min(max(tree.parents[row * gamma + lane - 1], 0), lane - 1) : 0;
  const bool is_node = is_draft && lane <= greedy.draft_lengths[row];

  const Token after_parent = __shfl_sync(kAllLanes, target, parent);
  const bool matches = lane == 0 || (is_node && drafted == after_parent);
  const unsigned matching = __ballot_sync(kAllLanes, matches);
  unsigned ancestors = 1u << lane;
  int ancestor = parent;
#pragma unroll
  for (int round = 0; round < 5; ++round) {  // each doubles how far a node sees
    ancestors |= __shfl_sync(kAllLanes, ancestors, ancestor);
    ancestor = __shfl_sync(kAllLanes, ancestor, ancestor);
  }
  // The deepest node whose ancestors all match ends the path, the first of equals.
  const int depth = __popc(ancestors) - 1;
  const bool is_accepted = !(ancestors & ~matching);
  const int best = __reduce_max_sync(kAllLanes, is_accepted ? depth * 32 + 31 - lane : -1);
  const int count = best / 32, last = 31 - best % 32;
  const bool continues = __ballot_sync(kAllLanes, is_node && parent == last) != 0;

  // From here a lane has a position of the block: its node is one of the bits of the path.
  unsigned nodes = __shfl_sync(kAllLanes, ancestors, last) & ~1u;
  for (int i = 0; i < lane; ++i) nodes &= nodes - 1;
  const int node = lane < count ? __ffs(nodes) - 1 : 0;
  const Token of_node = __shfl_sync(kAllLanes, drafted, node);
  const Token following = __shfl_sync(kAllLanes, target, last);
  const Token token = lane < count ? of_node : lane == count ? following : Token(-1);
  bool stop = false;
  for (int i = 0; i < greedy.stops; ++i) stop |= token == stops[i] && token >= 0;
  const unsigned stopping = __ballot_sync(kAllLanes, stop);
  const int committed = stopping ? __ffs(stopping) : count + 1;
  const int accepted = min(count, committed);
  if (lane <= gamma) {
    Token* tokens = static_cast<Token*>(greedy.tokens) + row * (gamma + 1);
    tokens[lane] = lane < committed ? token : Token(-1);
  }
  if (lane < gamma) tree.path[row * gamma + lane] = lane < accepted ? node : 0;
  if (lane == 0) {
    const bool cut = committed <= count;
    greedy.accepted[row] = accepted;
    greedy.committed[row] = committed;
    greedy.mismatch[row] = !cut && continues;
    static_cast<Token*>(greedy.next_token)[row] = cut ? Token(-1) : following;
    greedy.stopped[row] = stopping != 0;
  }
}

}  // namespace

const char* verify_tree(const TreeCall& tree, Stream stream) {
  const int blocks = static_cast<int>((tree.greedy.batch + kTreeWarps - 1) / kTreeWarps);
  const auto kernel = tree.greedy.wide ? tree_kernel<int64_t> : tree_kernel<int32_t>;
  return launch_behind(kernel, blocks, 32 * kTreeWarps, 0, false, stream, tree);
}

}  // namespace jspec
