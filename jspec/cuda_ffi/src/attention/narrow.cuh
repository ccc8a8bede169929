// A cache of 8 bits (E4M3): how its blocks arrive, and become float16 for the matmuls.
//
// Copies put a block into shared memory as it is. A warpgroup writes it as float16 where the matmuls
// read, in the layout that copies of 16 bits have; the warpgroups that compute are the same for both.
#pragma once

#include "attention/program.cuh"

namespace jspec {
namespace {

__device__ __forceinline__ uint32_t float16_from_bfloat16(uint32_t both) {
  return packed_float16(__uint_as_float(both << 16), __uint_as_float(both & 0xffff0000u));
}

template <int kChannels>
__device__ void init_barriers(Arriving<kChannels, true>& arriving) {
  for (int which = 0; which < 2; ++which) {
    for (int i = 0; i < arriving.kStages; ++i) {
      barrier_init(&arriving.full[which][i], 1);
      barrier_init(&arriving.free[which][i], 4);  // a lane of each warp that converts
    }
  }
}

// The warp that copies all keys and values of this program's items.
template <int kChannels>
__device__ void copy_all(const Work& a, const CUtensorMap& keys, const CUtensorMap& values,
                         Shared<kChannels, true>& shared) {
  auto& arriving = shared.arriving;
  Place<Arriving<kChannels, true>::kStages> place;
  each_block(a, [&](const Item& item, int key, int) {
#pragma unroll
    for (int which = 0; which < 2; ++which) {
      uint64_t* full = &arriving.full[which][place.slot];
      barrier_wait(&arriving.free[which][place.slot], place.phase ^ 1);
      if (threadIdx.x % 32 == 0) {
        barrier_expect<kBlock * kChannels>(full);
        copy_tile(arriving.blocks[which][place.slot], which ? values : keys, 0, item.head, key,
                  item.row, full);
      }
    }
    place = place.next();
  });
}

// Eight numbers of 8 bits as float16.
__device__ __forceinline__ uint4 widened(uint32_t low, uint32_t high) {
  return {float16_of(low), float16_of(low >> 16), float16_of(high), float16_of(high >> 16)};
}

// Converts a block, by a warpgroup; its rows from `count` on become zeros.
template <int kChannels>
__device__ __forceinline__ void convert_block(char* to, const char* from, int count) {
  constexpr int kUnits = kChannels / 16, kRowsAtOnce = kWarpgroup / kUnits;  // units of 16 bytes
  const int thread = threadIdx.x % kWarpgroup, unit = thread % kUnits;
  // Which of its two units a thread writes first: eight threads write to different banks.
  const bool second = unit >= 4;
  char* const chunk = to + unit / 4 * kChunkBytes;
#pragma unroll 4
  for (int row = thread / kUnits; row < kBlock; row += kRowsAtOnce) {
    uint4 x = *reinterpret_cast<const uint4*>(from + row * kChannels + unit * 16);
    if (row >= count) x = {};
    const int at = 2 * (unit % 4) + second, other = at ^ 1;
    const uint4 one = second ? widened(x.z, x.w) : widened(x.x, x.y);
    const uint4 two = second ? widened(x.x, x.y) : widened(x.z, x.w);
    *reinterpret_cast<uint4*>(chunk + row * kRowBytes + (at ^ row % 8) * 16) = one;
    *reinterpret_cast<uint4*>(chunk + row * kRowBytes + (other ^ row % 8) * 16) = two;
  }
}

// The warpgroup that converts all keys and values of this program's items.
template <int kChannels>
__device__ void convert_all(const Work& a, Shared<kChannels, true>& shared) {
  auto& arriving = shared.arriving;
  Place<Arriving<kChannels, true>::kStages> from;
  Place<Shared<kChannels, true>::kStages> to;
  each_block(a, [&](const Item&, int key, int end) {
#pragma unroll
    for (int which = 0; which < 2; ++which) {
      barrier_wait(&arriving.full[which][from.slot], from.phase);
      barrier_wait(&(which ? shared.values_free : shared.keys_free)[to.slot], to.phase ^ 1);
      // Slots past the length may hold anything, and 0 * NaN is NaN.
      convert_block<kChannels>((which ? shared.values : shared.keys)[to.slot],
                               arriving.blocks[which][from.slot], which ? end - key : kBlock);
      publish_stores();
      __syncwarp();
      if (threadIdx.x % 32 == 0) {
        barrier_arrive(&arriving.free[which][from.slot]);
        barrier_arrive(&(which ? shared.values_full : shared.keys_full)[to.slot]);
      }
    }
    from = from.next(), to = to.next();
  });
}

}  // namespace
}  // namespace jspec
