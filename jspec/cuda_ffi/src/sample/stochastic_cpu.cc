// Drawing and verifying by random numbers on a CPU, a row after the other.
#include <algorithm>
#include <vector>

#include "sample/sampling.h"

namespace jspec {
namespace {

// The largest key for which `holds`, which does for 0.
template <typename Holds>
uint32_t largest_key(Holds holds) {
  uint32_t found = 0;
  for (uint32_t bit = 1u << 31; bit; bit >>= 1) {
    if (holds(found | bit)) found |= bit;
  }
  return found;
}

// A position's distribution: the weights of the tokens, and how far those of a tile are shifted.
struct Position {
  std::vector<uint64_t> weights;
  std::vector<uint32_t> shifts;
  Scale scale;

  std::vector<uint64_t> masses() const {
    std::vector<uint64_t> sums(shifts.size());
    for (size_t i = 0; i < weights.size(); ++i) sums[i / kTile] += weights[i];
    for (size_t i = 0; i < sums.size(); ++i) sums[i] = shifted(sums[i], shifts[i]);
    return sums;
  }

  uint64_t total() const {
    uint64_t sum = 0;
    for (uint64_t mass : masses()) sum += mass;
    return sum;
  }

  uint64_t probability(size_t token) const {
    return token < weights.size() ? probability_of(weights[token], scale, shifts[token / kTile]) : 0;
  }

  // Gives all mass to one token.
  void make_certain(size_t token) {
    std::fill(weights.begin(), weights.end(), 0);
    std::fill(shifts.begin(), shifts.end(), 0);
    weights[token] = kOne;
    scale = scale_of(0, kOne);
  }
};

// Drops the tokens that top-k, top-p or min-p do not keep.
void filter(const Settings& settings, int64_t row, const std::vector<float>& logits,
            Position& position) {
  std::vector<uint32_t> keys;
  for (float x : logits) keys.push_back(key_of(x));
  const uint32_t top = *std::max_element(keys.begin(), keys.end());
  const auto keep = [&](uint32_t threshold) {
    for (size_t i = 0; i < keys.size(); ++i) {
      if (keys[i] < threshold) position.weights[i] = 0;
    }
  };
  if (const int32_t top_k = settings.top_k[row]; top_k > 0) {
    keep(largest_key([&](uint32_t key) {
      return std::count_if(keys.begin(), keys.end(), [&](uint32_t x) { return x >= key; }) >= top_k;
    }));
  }
  if (const float top_p = settings.top_p[row]; top_p < 1) {
    position.scale = scale_of(position.scale.exponent, position.total());
    std::vector<uint64_t> probabilities;
    for (size_t i = 0; i < keys.size(); ++i) probabilities.push_back(position.probability(i));
    const auto mass = [&](uint32_t key) {
      uint64_t sum = 0;
      for (size_t i = 0; i < keys.size(); ++i) sum += keys[i] < key ? 0 : probabilities[i];
      return sum;
    };
    const uint64_t needed = needed_of(mass(0), top_p);
    keep(largest_key([&](uint32_t key) { return mass(key) >= needed; }));
  }
  if (const float min_p = settings.min_p[row]; min_p > 0) {
    const float rate = settings.rate[row];
    keep(largest_key([&](uint32_t key) { return min_p_drops(key, top, min_p, rate); }) + 1);
  }
}

Position position_of(const Sampling& sampling, const Source& source, int64_t row, int32_t at) {
  const int64_t begin = (row * source.positions + at) * int64_t(sampling.vocabulary);
  const float rate = sampling.settings.rate[row];
  std::vector<float> logits;
  for (int32_t i = 0; i < sampling.vocabulary; ++i) {
    logits.push_back(logit(source.logits, source.bfloat16, begin + i));
  }
  Position out{std::vector<uint64_t>(logits.size()), std::vector<uint32_t>(sampling.tiles), {}};
  const size_t best = std::max_element(logits.begin(), logits.end()) - logits.begin();
  if (rate == 0 || logits[best] == -INFINITY) {
    out.make_certain(best);
    return out;
  }
  out.scale.exponent = exponent_of(logits[best], rate);
  for (int32_t tile = 0; tile < sampling.tiles; ++tile) {
    const int32_t first = tile * kTile, end = std::min(first + kTile, sampling.vocabulary);
    const float top = *std::max_element(logits.begin() + first, logits.begin() + end);
    const int32_t exponent = exponent_of(std::max(top, -FLT_MAX), rate);
    out.shifts[tile] = mass_shift(out.scale.exponent, exponent, guard_bits(sampling.tiles));
    for (int32_t i = first; i < end; ++i) out.weights[i] = weight_of(logits[i], rate, exponent);
  }
  if (sampling.filtered) filter(sampling.settings, row, logits, out);
  out.scale = scale_of(out.scale.exponent, out.total());
  return out;
}

int32_t draw(const Position& from, uint64_t number) {
  uint64_t rest = high64(number, from.total());
  const std::vector<uint64_t> masses = from.masses();
  for (size_t tile = 0; tile < masses.size(); ++tile) {
    if (rest >= masses[tile]) {
      rest -= masses[tile];
      continue;
    }
    uint64_t reached = 0;
    for (size_t token = tile * kTile;; ++token) {
      reached += from.weights[token];
      if (shifted(reached, from.shifts[tile]) > rest) return static_cast<int32_t>(token);
    }
  }
  return 0;
}

// max(chance * p - q, 0); the chance is 1 under the token rule.
Position residual(const Position& p, const Position& q, uint64_t chance) {
  Position out{p.weights, std::vector<uint32_t>(p.shifts.size()), {}};
  for (size_t i = 0; i < p.weights.size(); ++i) {
    const uint64_t probability = times(chance, p.probability(i));
    out.weights[i] = probability - std::min(probability, q.probability(i));
  }
  return out;
}

// Writes all results of a row, which `following` ends.
void commit(const Stochastic& stochastic, int64_t row, int32_t length, int32_t accepted,
            int32_t following) {
  const int32_t* draft = stochastic.draft_tokens + row * stochastic.gamma;
  const int32_t* stops = stochastic.stop_tokens + row * stochastic.stops;
  int32_t* tokens = stochastic.tokens + row * (stochastic.gamma + 1);
  int32_t committed = 0;
  bool stopped = false;
  while (!stopped && committed <= accepted) {
    const int32_t token = committed < accepted ? draft[committed] : following;
    for (int32_t i = 0; i < stochastic.stops; ++i) stopped |= token >= 0 && token == stops[i];
    tokens[committed++] = token;
  }
  for (int32_t i = committed; i <= stochastic.gamma; ++i) tokens[i] = -1;
  const bool cut = committed <= accepted;
  stochastic.accepted[row] = cut ? committed : accepted;
  stochastic.committed[row] = committed;
  stochastic.mismatch[row] = !cut && accepted < length;
  stochastic.next_token[row] = cut ? -1 : following;
  stochastic.stopped[row] = stopped;
}

// As `verify_row`, by the block rule, with draft logits.
void verify_block(const Stochastic& stochastic, int64_t row) {
  const Sampling& sampling = stochastic.sampling;
  const int32_t* draft = stochastic.draft_tokens + row * stochastic.gamma;
  const int32_t length = std::clamp(sampling.lengths[row], 0, stochastic.gamma);
  const uint32_t* seed = sampling.settings.seeds + 2 * row;
  const int32_t first = stochastic.positions[row];
  std::vector<Position> p, q;
  std::vector<uint64_t> chances{kOne};
  for (int32_t i = 0; i <= length; ++i) {
    p.push_back(position_of(sampling, sampling.target, row, i));
    if (i == length) break;
    q.push_back(position_of(sampling, sampling.draft, row, i));
    const size_t token = std::max(draft[i], 0);
    chances.push_back(chance_of(chances[i], p[i].probability(token), q[i].probability(token)));
  }
  const auto accept = [&](int32_t i) { return number_of(seed, first + i - 1, kAccept); };
  if (length == 0 || takes_block(accept(length), chances[length])) {
    const uint64_t number = number_of(seed, first + length, kBonus);
    return commit(stochastic, row, length, length, draw(p[length], number));
  }
  for (int32_t at = length - 1;; --at) {
    const Position rest = residual(p[at], q[at], chances[at]);
    const uint64_t mass = rest.total();
    if (at > 0 && !ends_block(accept(at), chances[at], mass)) continue;
    const uint64_t number = number_of(seed, first + at, kResidual);
    return commit(stochastic, row, length, at, draw(mass ? rest : p[at], number));
  }
}

void verify_row(const Stochastic& stochastic, int64_t row) {
  const Sampling& sampling = stochastic.sampling;
  const int32_t gamma = stochastic.gamma;
  const int32_t* draft = stochastic.draft_tokens + row * gamma;
  const int32_t length = std::min(sampling.lengths[row], gamma);
  const uint32_t* seed = sampling.settings.seeds + 2 * row;
  const int32_t first = stochastic.positions[row];
  for (int32_t at = 0;; ++at) {
    const Position p = position_of(sampling, sampling.target, row, at);
    if (at >= length) {
      return commit(stochastic, row, length, at, draw(p, number_of(seed, first + at, kBonus)));
    }
    const int32_t token = std::max(draft[at], 0);
    const bool one_hot = sampling.draft.positions == 0;
    Position q;
    if (!one_hot) q = position_of(sampling, sampling.draft, row, at);
    const uint64_t q_token = one_hot ? kOne : q.probability(token);
    if (accepts(number_of(seed, first + at, kAccept), q_token, p.probability(token))) continue;
    Position rest = p;
    if (!one_hot) {
      rest = residual(p, q, kOne);
    } else if (draft[at] >= 0 && draft[at] < sampling.vocabulary) {
      rest.weights[draft[at]] = 0;
    }
    // p and q that differ by rounding alone can leave nothing: then the target's token serves.
    const uint64_t number = number_of(seed, first + at, kResidual);
    return commit(stochastic, row, length, at, draw(rest.total() ? rest : p, number));
  }
}

}  // namespace

const char* verify_stochastic(const Stochastic& stochastic, Stream) {
  const bool block = stochastic.block && stochastic.sampling.draft.positions > 0;
  for (int64_t row = 0; row < stochastic.sampling.batch; ++row) {
    block ? verify_block(stochastic, row) : verify_row(stochastic, row);
  }
  return nullptr;
}

const char* sample(const Draws& draws, Stream) {
  const Sampling& sampling = draws.sampling;
  const int32_t count = sampling.target.positions;
  for (int64_t i = 0; i < sampling.batch * count; ++i) {
    const int64_t row = i / count;
    const uint32_t* seed = sampling.settings.seeds + 2 * row;
    const Position p = position_of(sampling, sampling.target, row, i % count);
    draws.tokens[i] = draw(p, number_of(seed, draws.positions[i], draws.role));
  }
  return nullptr;
}

}  // namespace jspec
