// Greedy verification with the bookkeeping of a step on a CPU: one row after the other.
#include <vector>

#include "common/bfloat16_cpu.h"
#include "verify/commit.h"
#include "verify/row.h"

namespace jspec {
namespace {

int32_t largest_logit(const Commit& commit, int64_t position) {
  const int64_t first = position * commit.vocabulary;
  Largest largest(0);
  for (int32_t token = 0; token < commit.vocabulary; ++token) {
    largest.take(commit.bfloat16
                     ? wide(static_cast<const uint16_t*>(commit.logits)[first + token])
                     : static_cast<const float*>(commit.logits)[first + token],
                 token);
  }
  return largest.token;
}

}  // namespace

const char* verify_and_commit(const Commit& commit, int, Stream) {
  std::vector<int32_t> target(commit.greedy.gamma + 1);
  for (int64_t row = 0; row < commit.greedy.batch; ++row) {
    for (size_t at = 0; at < target.size(); ++at) {
      target[at] = largest_logit(commit, row * target.size() + at);
    }
    const Greedy greedy = row_alone(commit.greedy, row, target.data());
    verify_row<int32_t>(greedy, 0);
    const Ended ended{*greedy.accepted, *greedy.committed, *greedy.stopped};
    commit_row(commit, row, target.data(), ended, commit.cached[row], commit.done[row], 0, 1);
  }
  return nullptr;
}

}  // namespace jspec
