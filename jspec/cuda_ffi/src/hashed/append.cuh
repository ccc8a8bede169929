// The kernel in front of a layer's selection: it norms and rotates queries and keys, writes keys and
// values into the cache, and makes the hash codes of both.
#pragma once

#include "common/dependent.cuh"
#include "hashed/attend.cuh"

namespace jspec {

constexpr int kEncoding = 256, kEncodingWarps = kEncoding / 32;
constexpr int kTogether = 2 * kEncodingWarps;  // vectors of a block: a warp encodes two at a time

// A block makes a word of the codes of some queries and keys of a head, vector `tile * kTogether` on.
// The vectors of a batch row are its queries, then its key.
template <int SIZE>
__global__ void __launch_bounds__(kEncoding)
    append_kernel(const __grid_constant__ Hash hash, const __grid_constant__ Layer layer,
                  int tiles) {
  extern __shared__ __align__(16) uint32_t shared[];
  float *w = reinterpret_cast<float*>(shared), *x = w + SIZE * 32;  // [SIZE, 32] and [kTogether, SIZE]
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, words = hash.words;
  const int tile = blockIdx.x % tiles, word = blockIdx.x / tiles % words;
  const int head = blockIdx.x / tiles / words, group = hash.group, n = hash.rows.n;
  constexpr int kPairs = SIZE / 64, kRows = SIZE / kEncodingWarps;
  const int vectors = hash.batch * (group + 1);
  // Everything is loaded before anything is stored: no load waits for another.
  float first[2][kPairs], second[2][kPairs], cosine[2][kPairs], sine[2][kPairs], row_w[kRows];
  int position[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int index = min(tile * kTogether + 2 * warp + i, vectors - 1);
    const int64_t batch = index / (group + 1), row = batch * hash.heads + head;
    const uint16_t* from = layer.joined + (row * (group + 2) + index % (group + 1)) * SIZE + lane;
    position[i] = __ldg(layer.positions + batch);
#pragma unroll
    for (int j = 0; j < kPairs; ++j) {
      first[i][j] = wide(__ldg(from + j * 32));
      second[i][j] = wide(__ldg(from + j * 32 + SIZE / 2));
      const int64_t angle = batch * (SIZE / 2) + j * 32 + lane;
      cosine[i][j] = __ldg(layer.cosine + angle);
      sine[i][j] = __ldg(layer.sine + angle);
    }
  }
  const float* own_w = layer.w + (int64_t(head) * SIZE * words + word) * 32 + lane;
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    row_w[i] = __ldg(own_w + int64_t(i * kEncodingWarps + warp) * words * 32);
  }
  // Where a vector's code goes, null for none.
  uint32_t* codes[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int index = tile * kTogether + 2 * warp + i;
    codes[i] = nullptr;
    float* to = x + (2 * warp + i) * SIZE;
    if (index >= vectors) {
      for (int c = lane; c < SIZE; c += 32) to[c] = 0;
      continue;
    }
    const int64_t batch = index / (group + 1), row = batch * hash.heads + head;
    const int which = index % (group + 1);
    const bool is_key = which == group;
    const float* scale = is_key ? layer.k_scale : layer.q_scale;
    if (scale != nullptr) {
      float squares = 0;
#pragma unroll
      for (int j = 0; j < kPairs; ++j) {
        squares += first[i][j] * first[i][j] + second[i][j] * second[i][j];
      }
#pragma unroll
      for (int step = 16; step > 0; step /= 2) {
        squares += __shfl_xor_sync(kAllLanes, squares, step);
      }
      const float eps = is_key ? layer.k_eps : layer.q_eps;
      const float root = 1 / __fsqrt_rn(squares / SIZE + eps);
      // Rounded where the model rounds: after the norm, and after its scale.
      const auto rounded = [](float y) { return wide(narrow(y)); };
#pragma unroll
      for (int j = 0; j < kPairs; ++j) {
        const int c = j * 32 + lane;
        first[i][j] = rounded(rounded(first[i][j] * root) * scale[c]);
        second[i][j] = rounded(rounded(second[i][j] * root) * scale[c + SIZE / 2]);
      }
    }
    const bool lives = position[i] >= 0 && position[i] < n;
    const int64_t place = (batch * n + position[i]) * hash.heads + head;
    uint16_t* turned = nullptr;
    if (is_key) {
      if (lives) turned = layer.keys + place * SIZE, codes[i] = layer.codes + place * words + word;
    } else {
      turned = layer.queries + (row * group + which) * SIZE;
      codes[i] = layer.q_codes + (row * group + which) * words + word;
    }
    const bool writes = word == 0 && turned != nullptr;
#pragma unroll
    for (int j = 0; j < kPairs; ++j) {
      const int c = j * 32 + lane;
      const uint16_t one = narrow(first[i][j] * cosine[i][j] - second[i][j] * sine[i][j]);
      const uint16_t two = narrow(second[i][j] * cosine[i][j] + first[i][j] * sine[i][j]);
      // Codes are of what the cache and the queries hold.
      to[c] = wide(one);
      to[c + SIZE / 2] = wide(two);
      if (writes) turned[c] = one, turned[c + SIZE / 2] = two;
    }
    if (writes && is_key) {
      const uint16_t* value = layer.joined + (row * (group + 2) + group + 1) * SIZE;
      for (int c = lane; c < SIZE; c += 32) layer.values[place * SIZE + c] = value[c];
    }
  }
#pragma unroll
  for (int i = 0; i < kRows; ++i) w[(i * kEncodingWarps + warp) * 32 + lane] = row_w[i];
  let_next_start();
  __syncthreads();
  const float *one = x + 2 * warp * SIZE, *two = one + SIZE;
  float sum = 0, other = 0;  // of a bit each
#pragma unroll 8
  for (int c = 0; c < SIZE; c += 4) {
    const float4 a = *reinterpret_cast<const float4*>(one + c);
    const float4 b = *reinterpret_cast<const float4*>(two + c);
    const float own[] = {w[c * 32 + lane], w[c * 32 + 32 + lane], w[c * 32 + 64 + lane],
                         w[c * 32 + 96 + lane]};
    sum = fmaf(a.w, own[3], fmaf(a.z, own[2], fmaf(a.y, own[1], fmaf(a.x, own[0], sum))));
    other = fmaf(b.w, own[3], fmaf(b.z, own[2], fmaf(b.y, own[1], fmaf(b.x, own[0], other))));
  }
  const uint32_t bits[] = {__ballot_sync(kAllLanes, sum > 0), __ballot_sync(kAllLanes, other > 0)};
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    if (lane == 0 && codes[i] != nullptr) *codes[i] = bits[i];
  }
}

}  // namespace jspec
