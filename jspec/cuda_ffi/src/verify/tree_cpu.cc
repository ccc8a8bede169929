// Verification of trees on a CPU: a row after the other.
#include <algorithm>
#include <cstdint>

#include "verify/tree.h"

namespace jspec {
namespace {

template <typename Token>
void verify_row(const TreeCall& tree, int64_t row) {
  const Greedy& greedy = tree.greedy;
  const int gamma = greedy.gamma, length = std::clamp(greedy.draft_lengths[row], 0, gamma);
  const Token* draft = static_cast<const Token*>(greedy.draft_tokens) + row * gamma;
  const Token* target = static_cast<const Token*>(greedy.target_tokens) + row * (gamma + 1);
  const Token* stops = static_cast<const Token*>(greedy.stop_tokens) + row * greedy.stops;
  Token* tokens = static_cast<Token*>(greedy.tokens) + row * (gamma + 1);
  int parent[kMostNodes] = {}, depth[kMostNodes] = {}, last = 0;
  bool accepted[kMostNodes] = {true};
  for (int node = 1; node <= gamma; ++node) {
    parent[node] = std::clamp(tree.parents[row * gamma + node - 1], 0, node - 1);
    depth[node] = depth[parent[node]] + 1;
    accepted[node] = node <= length && accepted[parent[node]] &&
                     draft[node - 1] == target[parent[node]];
    if (accepted[node] && depth[node] > depth[last]) last = node;
  }
  bool continues = false;
  for (int node = 1; node <= length; ++node) continues |= parent[node] == last;
  const int count = depth[last];
  int* path = tree.path + row * gamma;
  std::fill(path, path + gamma, 0);
  std::fill(tokens, tokens + gamma + 1, Token(-1));
  tokens[count] = target[last];
  for (int node = last; node; node = parent[node]) {
    path[depth[node] - 1] = node;
    tokens[depth[node] - 1] = draft[node - 1];
  }
  int committed = count + 1;
  bool stopped = false;
  for (int at = 0; at <= count && !stopped; ++at) {
    stopped = tokens[at] >= 0 && std::count(stops, stops + greedy.stops, tokens[at]);
    if (stopped) committed = at + 1;
  }
  const bool cut = committed <= count;
  greedy.accepted[row] = std::min(count, committed);
  greedy.committed[row] = committed;
  greedy.mismatch[row] = !cut && continues;
  static_cast<Token*>(greedy.next_token)[row] = cut ? Token(-1) : target[last];
  greedy.stopped[row] = stopped;
  std::fill(tokens + committed, tokens + gamma + 1, Token(-1));
  std::fill(path + greedy.accepted[row], path + gamma, 0);
}

}  // namespace

const char* verify_tree(const TreeCall& tree, Stream) {
  for (int64_t row = 0; row < tree.greedy.batch; ++row) {
    tree.greedy.wide ? verify_row<int64_t>(tree, row) : verify_row<int32_t>(tree, row);
  }
  return nullptr;
}

}  // namespace jspec
