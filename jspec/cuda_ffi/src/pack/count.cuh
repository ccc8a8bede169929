// Accepted counts alone, for the blocks that move KV rows and need to know where theirs go.
#pragma once

#include "verify/ballot.cuh"

namespace jspec {

// Calls found(row, accepted) with one lane for each of the rows [begin, end), which `workers` warps
// share: this one is `worker`. A count is the first rejected position, or one more than the
// first that holds a stop token. Of long rows, a warp has the tokens of `together` on their way.
template <typename Token, int chunks, int together, typename Found>
__device__ void count_rows(const Greedy& greedy, int begin, int end, int worker, int workers,
                           Found found) {
  const int lane = threadIdx.x % 32;
  const int gamma = greedy.gamma;
  const Token* targets = static_cast<const Token*>(greedy.target_tokens);
  const Token* drafts = static_cast<const Token*>(greedy.draft_tokens);
  const Token* stops = static_cast<const Token*>(greedy.stop_tokens);

  if constexpr (chunks == 1) {
    // A short row takes as many lanes as it needs, a power of two, and a warp takes several.
    const int shift = gamma > 1 ? 32 - __clz(gamma - 1) : 0;
    const int at = lane & ((1 << shift) - 1), begins = lane - at, group = 32 >> shift;
    const unsigned mask = (shift == 5 ? 0u : 1u << (1 << shift)) - 1;
    for (int first = begin + worker * group; first < end; first += workers * group) {
      const int row = first + (lane >> shift);
      const bool reads = row < end && at < gamma;
      const Token wanted = reads ? targets[int64_t(row) * (gamma + 1) + at] : Token(-1);
      const Token drafted = reads ? drafts[int64_t(row) * gamma + at] : Token(-1);
      const int64_t stop_row = int64_t(row) * greedy.stops;
      const Token first_stop = reads && greedy.stops ? stops[stop_row] : Token(-1);
      const int length = row < end ? min(greedy.draft_lengths[row], gamma) : 0;
      bool stop = wanted == first_stop && first_stop >= 0;
#pragma unroll 1
      for (int i = 1; i < greedy.stops; ++i) {
        const Token one = reads ? stops[stop_row + i] : Token(-1);
        stop |= wanted == one && one >= 0;
      }
      const bool rejects = at >= length || drafted != wanted;
      const unsigned rejected = __ballot_sync(kAllLanes, rejects) >> begins & mask;
      const unsigned either = __ballot_sync(kAllLanes, rejects || stop) >> begins & mask;
      // At the first of either, it is accepted if it is not rejected.
      const int last = either ? __ffs(either) - 1 : gamma;
      const int count = either && !(rejected >> last & 1) ? last + 1 : last;
      if (at == 0 && row < end) found(row, count);
    }
  } else {
    constexpr int wide = chunks == 2 ? 2 : 4;
    for (int first = begin + worker; first < end; first += workers * together) {
      int count[together], length[together];
      Token first_stop[together];
#pragma unroll
      for (int r = 0; r < together; ++r) {
        const int row = first + r * workers;
        length[r] = row < end ? greedy.draft_lengths[row] : 0;
        first_stop[r] = row < end && greedy.stops ? stops[int64_t(row) * greedy.stops] : Token(-1);
        count[r] = gamma;
      }
      for (int start = 0; start < gamma; start += wide * 32) {
        Token wanted[together][wide], drafted[together][wide];
#pragma unroll
        for (int r = 0; r < together; ++r) {
          const int row = first + r * workers;
#pragma unroll
          for (int c = 0; c < wide; ++c) {
            const int at = start + c * 32 + lane;
            const bool reads = row < end && at < gamma;
            wanted[r][c] = reads ? targets[int64_t(row) * (gamma + 1) + at] : Token(-1);
            drafted[r][c] = reads ? drafts[int64_t(row) * gamma + at] : Token(-1);
          }
        }
#pragma unroll
        for (int r = 0; r < together; ++r) {
          const int row = min(first + r * workers, end - 1);
          const auto end_at = [&](Token one) {
#pragma unroll
            for (int c = 0; c < wide; ++c) {
              const int at = start + c * 32 + lane;
              if (wanted[r][c] == one && one >= 0) count[r] = min(count[r], at + 1);
            }
          };
          end_at(first_stop[r]);
#pragma unroll 1
          for (int i = 1; i < greedy.stops; ++i) end_at(stops[int64_t(row) * greedy.stops + i]);
#pragma unroll
          for (int c = 0; c < wide; ++c) {
            const int at = start + c * 32 + lane;
            if (at >= length[r] || drafted[r][c] != wanted[r][c]) count[r] = min(count[r], at);
          }
        }
      }
#pragma unroll
      for (int r = 0; r < together; ++r) {
        const int row = first + r * workers;
        const int least = __reduce_min_sync(kAllLanes, count[r]);
        if (lane == 0 && row < end) found(row, least);
      }
    }
  }
}

}  // namespace jspec
