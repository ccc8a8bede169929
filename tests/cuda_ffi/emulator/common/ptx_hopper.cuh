// The instructions of jspec/cuda_ffi/src/common/ptx_hopper.cuh on a CPU. Matmuls read their tile
// when they are awaited, which is the last moment at which hardware may.
#pragma once

#include "common/ptx.cuh"
#include "cuda.h"

namespace jspec {

constexpr int kWarpgroup = 128;

struct MemoryBarrier {
  int arrivals = 0, pending = 0, bytes = 0;
  uint32_t phase = 0;

  void change(int arrived, int more_bytes) {
    pending -= arrived, bytes += more_bytes;
    if (pending < 0) emulator::fail("too many arrivals at a barrier");
    if (pending == 0 && bytes == 0) pending = arrivals, phase ^= 1;
    ++emulator::events;
  }
};

inline std::map<const void*, MemoryBarrier> memory_barriers;

inline MemoryBarrier& memory_barrier(const void* barrier) {
  if (!memory_barriers.count(barrier)) emulator::fail("a barrier that was not initialised");
  return memory_barriers[barrier];
}

// Numbers of 8 bits, E4M3, as float16.
inline uint32_t float16_of(uint32_t pair) {
  return packed_float16(wide(uint8_t(pair)), wide(uint8_t(pair >> 8)));
}

// A matmul that was started: of this thread's two rows of the left factor.
struct StartedMatmul {
  float* sum;
  float a[2][16];
  uint64_t b;
  bool adds, transposed, float16;
};

inline std::vector<StartedMatmul> started[1024];

inline const bool registered = [] {
  emulator::resets.push_back([] {
    memory_barriers.clear();
    for (auto& of_thread : started) of_thread.clear();
  });
  return true;
}();

inline void barrier_init(uint64_t* barrier, int arrivals) {
  memory_barriers[barrier] = {arrivals, arrivals, 0, 0};
}
inline void publish_barriers() {}
inline void barrier_arrive(uint64_t* barrier) { memory_barrier(barrier).change(1, 0); }
template <int kBytes>
void barrier_expect(uint64_t* barrier) {
  memory_barrier(barrier).change(1, kBytes);
}
inline void barrier_wait(uint64_t* barrier, uint32_t phase) {
  emulator::wait_until([&] { return memory_barrier(barrier).phase != phase; });
}
inline void named_barrier_sync(int barrier) { emulator::named[barrier].meet(2 * kWarpgroup); }
template <int kRegisters>
void release_registers() {}
template <int kRegisters>
void take_registers() {}
inline void publish_stores() {}

// Where the byte `at` of a tile lies whose units are permuted: the bits of its 16-byte unit are
// changed by those of its row of 128 bytes.
inline uint32_t swizzled(uint32_t at) { return at ^ (at >> 7 & 7) << 4; }

inline char* shared_pointer(uint32_t address) { return emulator::shared_memory + address - 4096; }

inline void write_tile(uint32_t begin, const CUtensorMap& from, int x, int y, int z, int w,
                       uint64_t* full) {
  uint32_t at = 0;
  for (unsigned l = 0; l < from.box[3]; ++l) {
    for (unsigned k = 0; k < from.box[2]; ++k) {
      for (unsigned j = 0; j < from.box[1]; ++j) {
        for (unsigned i = 0; i < from.box[0]; ++i, at += from.element) {
          const uint64_t place[] = {uint64_t(x) + i, uint64_t(y) + j, uint64_t(z) + k,
                                    uint64_t(w) + l};
          uint16_t value = 0;
          uint64_t offset = 0;
          bool inside = true;
          for (int d = 0; d < 4; ++d) {
            inside &= place[d] < from.sizes[d];
            offset += place[d] * from.strides[d];
          }
          if (inside) std::memcpy(&value, from.data + offset, from.element);
          const uint32_t to = from.swizzled ? swizzled(begin + at) : begin + at;
          std::memcpy(shared_pointer(to), &value, from.element);
        }
      }
    }
  }
  memory_barrier(full).change(0, -int(at));
}

// The copy is made later; until then its target is NaN.
inline void copy_tile(char* to, const CUtensorMap& from, int x, int y, int z, int w,
                      uint64_t* full) {
  const uint32_t begin = shared_address(to);
  if (begin % 1024) emulator::fail("a tile that is not aligned");
  std::memset(to, 0xff, from.element * from.box[0] * from.box[1] * from.box[2] * from.box[3]);
  emulator::copies_in_flight.push_back([=, map = from] {
    write_tile(begin, map, x, y, z, w, full);
  });
}

template <bool kTransposed, bool kFloat16>
void multiply(float (&sum)[32], const uint32_t (&a)[4], uint64_t b, bool adds) {
  using Fragment = std::array<uint32_t, 4>;
  const auto fragments = emulator::warpgroup_values(Fragment{a[0], a[1], a[2], a[3]});
  StartedMatmul started_matmul{sum, {}, b, adds, kTransposed, kFloat16};
  const int first = threadIdx.x % kWarpgroup / 4 * 4;
  for (int quarter = 0; quarter < 4; ++quarter) {
    for (int i = 0; i < 4; ++i) {  // register i: row i % 2 of the thread, columns 8 (i / 2) + ...
      for (int j = 0; j < 2; ++j) {
        const uint16_t bits = fragments[first + quarter][i] >> 16 * j;
        started_matmul.a[i % 2][i / 2 * 8 + 2 * quarter + j] =
            kFloat16 ? wide_float16(bits) : wide(bits);
      }
    }
  }
  started[threadIdx.x].push_back(started_matmul);
}

inline void begin_matmul() {}
inline void end_matmul() {}

inline void await_matmul(float (&)[32]) {
  for (const StartedMatmul& x : started[threadIdx.x]) {
    const uint32_t begin = (x.b & 0x3fff) << 4, stride = (x.b >> 32 & 0x3fff) << 4;
    if (x.b >> 62 != 1) emulator::fail("a descriptor without the swizzle of 128 bytes");
    for (int column = 0; column < 64; ++column) {
      if (column / 2 % 4 != int(threadIdx.x % 4)) continue;
      float b[16];
      for (int inner = 0; inner < 16; ++inner) {
        // In memory there are groups of eight rows of 128 bytes, `stride` bytes apart.
        const int row = x.transposed ? inner : column, at = x.transposed ? column : inner;
        const uint32_t place = begin + row / 8 * stride + row % 8 * 128 + at * 2;
        uint16_t bits;
        std::memcpy(&bits, shared_pointer(swizzled(place)), 2);
        b[inner] = x.float16 ? wide_float16(bits) : wide(bits);
      }
      for (int row = 0; row < 2; ++row) {
        float& sum = x.sum[column / 8 * 4 + 2 * row + column % 2];
        if (!x.adds) sum = 0;
        for (int inner = 0; inner < 16; ++inner) sum += x.a[row][inner] * b[inner];
      }
    }
  }
  started[threadIdx.x].clear();
  __syncwarp();  // it waits for a whole warp's matmuls
}

}  // namespace jspec
