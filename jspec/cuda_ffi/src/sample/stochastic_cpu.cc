// Drawing and verifying by random numbers on a CPU, a row after the other.
#include <algorithm>
#include <vector>

#include "sample/sampling.h"

namespace jspec {
namespace {

// A position's distribution, worked out: the weights of the tokens, and the scales of the tiles.
struct Distribution {
  std::vector<uint32_t> weights;
  std::vector<uint32_t> scales;

  uint32_t probability(int32_t token) const {
    if (token >= static_cast<int32_t>(weights.size())) return 0;
    return scaled(weights[token], scales[token / kTile]);
  }
};

// The largest key for which `holds`, which does for 0.
template <typename Holds>
uint32_t largest_key(Holds holds) {
  uint32_t found = 0;
  for (uint32_t bit = 1u << 31; bit; bit >>= 1) {
    if (holds(found | bit)) found |= bit;
  }
  return found;
}

class Position {
 public:
  Position(const Sampling& sampling, const Source& source, int64_t begin, int64_t row)
      : settings_(sampling.settings), row_(row), rate_(settings_.rate[row]), tiles_(sampling.tiles) {
    for (int32_t i = 0; i < sampling.vocabulary; ++i) {
      logits_.push_back(logit(source.logits, source.bfloat16, begin + i));
    }
    for (int32_t tile = 0; tile < tiles_; ++tile) {
      const auto first = logits_.begin() + tile * kTile;
      const auto last = logits_.begin() + std::min((tile + 1) * kTile, sampling.vocabulary);
      largest_ = std::max(largest_, *std::max_element(first, last));
      exponents_.push_back(exponent_of(std::max(*std::max_element(first, last), -FLT_MAX), rate_));
    }
  }

  Distribution distribution(bool filtered) const {
    Distribution out{std::vector<uint32_t>(logits_.size()), std::vector<uint32_t>(tiles_, kOne)};
    if (rate_ == 0) {
      const auto best = std::find(logits_.begin(), logits_.end(), largest_);
      if (best != logits_.end()) out.weights[best - logits_.begin()] = kWeight;
      return out;
    }
    for (size_t i = 0; i < logits_.size(); ++i) {
      out.weights[i] = weight_of(power_of(logits_[i], rate_), exponents_[i / kTile]);
    }
    if (filtered) filter(out);
    out.scales = scales(out.weights);
    return out;
  }

 private:
  void filter(Distribution& out) const {
    std::vector<uint32_t> keys;
    for (float x : logits_) keys.push_back(key_of(x));
    const auto keep = [&](uint32_t threshold) {
      for (size_t i = 0; i < keys.size(); ++i) {
        if (keys[i] < threshold) out.weights[i] = 0;
      }
    };
    if (const int32_t top_k = settings_.top_k[row_]; top_k > 0) {
      keep(largest_key([&](uint32_t key) {
        return std::count_if(keys.begin(), keys.end(), [&](uint32_t x) { return x >= key; }) >= top_k;
      }));
    }
    if (const uint32_t top_p = units(settings_.top_p[row_]); top_p < kOne) {
      out.scales = scales(out.weights);
      const auto mass = [&](uint32_t key) {
        uint64_t sum = 0;
        for (size_t i = 0; i < keys.size(); ++i) sum += keys[i] < key ? 0 : out.probability(i);
        return sum;
      };
      const uint64_t needed = mass(0) * std::max(top_p, 1u);
      keep(largest_key([&](uint32_t key) { return mass(key) * kOne >= needed; }));
    }
    const uint32_t min_p = units(settings_.min_p[row_]) / (kOne / kWeight);
    for (size_t i = 0; i < keys.size(); ++i) {
      if (weight_of(power_of(logits_[i] - largest_, rate_), 0) < min_p) out.weights[i] = 0;
    }
  }

  std::vector<uint32_t> scales(const std::vector<uint32_t>& weights) const {
    std::vector<uint64_t> sums(tiles_);
    for (size_t i = 0; i < weights.size(); ++i) sums[i / kTile] += weights[i];
    const float exponent = *std::max_element(exponents_.begin(), exponents_.end());
    uint64_t sum = 0;
    for (int32_t i = 0; i < tiles_; ++i) sum += mass_in_row(sums[i], exponents_[i], exponent);
    const Norm norm = norm_of(largest_, exponent, sum);
    std::vector<uint32_t> scales;
    for (float here : exponents_) scales.push_back(scale_of(norm, here));
    return scales;
  }

  const Settings& settings_;
  int64_t row_;
  float rate_;
  int32_t tiles_;
  float largest_ = -FLT_MAX;
  std::vector<float> logits_;
  std::vector<float> exponents_;
};

Distribution distribution(const Sampling& sampling, const Source& source, int64_t row,
                          int32_t position) {
  const int64_t begin = (row * source.positions + position) * int64_t(sampling.vocabulary);
  return Position(sampling, source, begin, row).distribution(sampling.filtered);
}

std::vector<uint64_t> masses(const Distribution& from) {
  std::vector<uint64_t> sums(from.scales.size());
  for (size_t i = 0; i < from.weights.size(); ++i) sums[i / kTile] += from.weights[i];
  for (size_t i = 0; i < sums.size(); ++i) sums[i] = scaled(sums[i], from.scales[i]);
  return sums;
}

uint32_t total(const Distribution& from) {
  uint64_t sum = 0;
  for (uint64_t mass : masses(from)) sum += mass;
  return static_cast<uint32_t>(sum);
}

int32_t draw(const Distribution& from, uint32_t number) {
  uint64_t left = target_of(number, total(from));
  const std::vector<uint64_t> mass = masses(from);
  for (size_t tile = 0; tile < mass.size(); ++tile) {
    if (left >= mass[tile]) {
      left -= mass[tile];
      continue;
    }
    uint64_t reached = 0;
    for (size_t token = tile * kTile;; ++token) {
      reached += from.weights[token];
      if (scaled(reached, from.scales[tile]) > left) return static_cast<int32_t>(token);
    }
  }
  return 0;
}

Distribution residual(const Distribution& p, const Distribution& q) {
  Distribution out{p.weights, std::vector<uint32_t>(p.scales.size(), kWeight)};
  for (size_t i = 0; i < p.weights.size(); ++i) {
    out.weights[i] = p.probability(i) - std::min(p.probability(i), q.probability(i));
  }
  return out;
}

// Writes all results of a row, which `following` ends.
void commit(const Stochastic& stochastic, int64_t row, int32_t length,
                         int32_t accepted, int32_t following) {
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

void verify_row(const Stochastic& stochastic, int64_t row) {
  const Sampling& sampling = stochastic.sampling;
  const int32_t gamma = stochastic.gamma;
  const int32_t* draft = stochastic.draft_tokens + row * gamma;
  const int32_t length = std::min(sampling.lengths[row], gamma);
  const uint32_t seed = sampling.settings.seeds[row];
  const int32_t first = stochastic.positions[row];
  const auto target = [&](int32_t at) {
    return distribution(sampling, sampling.target, row, at);
  };
  for (int32_t at = 0;; ++at) {
    Distribution p = target(at);
    if (at >= length) {
      return commit(stochastic, row, length, at, draw(p, number_of(seed, first + at, kBonus)));
    }
    const int32_t token = std::max(draft[at], 0);
    const bool one_hot = sampling.draft.positions == 0;
    Distribution q;
    if (!one_hot) q = distribution(sampling, sampling.draft, row, at);
    const uint32_t q_token = one_hot ? kOne : q.probability(token);
    if (stands(number_of(seed, first + at, kAccept), q_token, p.probability(token))) continue;
    Distribution rest = p;
    if (!one_hot) {
      rest = residual(p, q);
    } else if (draft[at] >= 0 && draft[at] < sampling.vocabulary) {
      rest.weights[draft[at]] = 0;
    }
    // What differs by rounding alone can leave nothing: the target then serves.
    const uint32_t number = number_of(seed, first + at, kResidual);
    return commit(stochastic, row, length, at, draw(total(rest) ? rest : p, number));
  }
}

}  // namespace

const char* verify_stochastic(const Stochastic& stochastic, Stream) {
  for (int64_t row = 0; row < stochastic.sampling.batch; ++row) verify_row(stochastic, row);
  return nullptr;
}

const char* sample(const Draws& draws, Stream) {
  const Sampling& sampling = draws.sampling;
  const int32_t count = sampling.target.positions;
  for (int64_t i = 0; i < sampling.batch * count; ++i) {
    const int64_t row = i / count;
    const uint32_t seed = sampling.settings.seeds[row];
    const Distribution p = distribution(sampling, sampling.target, row, i % count);
    draws.tokens[i] = draw(p, number_of(seed, draws.positions[i], draws.role));
  }
  return nullptr;
}

}  // namespace jspec
