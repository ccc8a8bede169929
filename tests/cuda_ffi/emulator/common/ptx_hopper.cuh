// The instructions of jspec/cuda_ffi/src/common/ptx_hopper.cuh on a CPU. Matmuls read their tile
// when they are awaited, which is the last moment at which hardware may.
#pragma once

#include "common/ptx.cuh"
#include "cuda.h"

namespace jspec {

constexpr int kWarpgroup = 128;

// Of blocks of a cluster, addresses differ by their high bits.
constexpr uint32_t kOneBlock = 1 << 20;

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

// By the rank of the block and the address.
inline std::map<std::pair<int, const void*>, MemoryBarrier> memory_barriers;

inline MemoryBarrier& memory_barrier(const void* barrier, int rank = emulator::rank) {
  const auto place = std::make_pair(rank, barrier);
  if (!memory_barriers.count(place)) emulator::fail("a barrier that was not initialised");
  return memory_barriers[place];
}

// Numbers of 8 bits, E4M3, as float16.
inline uint32_t float16_of(uint32_t pair) {
  return packed_float16(wide(uint8_t(pair)), wide(uint8_t(pair >> 8)));
}

// A matmul that was started: of this thread's two rows of the left factor.
struct StartedMatmul {
  float* sum;
  int columns;
  float a[2][16];
  uint64_t b;
  bool adds, transposed, float16;
};

inline std::vector<StartedMatmul> started[emulator::kMostThreads];

inline int64_t last_meeting[emulator::kMostThreads];  // of the cluster, that each thread came to

inline const bool registered = [] {
  emulator::resets.push_back([] {
    memory_barriers.clear();
    for (auto& of_thread : started) of_thread.clear();
  });
  return true;
}();

inline void barrier_init(uint64_t* barrier, int arrivals) {
  memory_barriers[{emulator::rank, barrier}] = {arrivals, arrivals, 0, 0};
}
inline void publish_barriers() {}
inline void barrier_arrive(uint64_t* barrier) { memory_barrier(barrier).change(1, 0); }
inline void barrier_arrive_in(uint32_t address) {
  const char* named = emulator::shared_memory + address % kOneBlock - 4096;
  memory_barrier(named, address / kOneBlock - 1).change(1, 0);
}
inline void barrier_expect(uint64_t* barrier, int bytes) {
  memory_barrier(barrier).change(1, bytes);
}
template <int kBytes>
void barrier_expect(uint64_t* barrier) {
  barrier_expect(barrier, kBytes);
}
inline void barrier_wait(uint64_t* barrier, uint32_t phase) {
  emulator::wait_until([&] { return memory_barrier(barrier).phase != phase; });
}
inline void named_barrier_sync(int barrier) { barrier_of<2 * kWarpgroup>(barrier); }
template <int kRegisters>
void release_registers() {}
template <int kRegisters>
void take_registers() {}
inline void store_matrices(void* row, const uint32_t (&from)[4]) {
  struct Stored { void* row; uint32_t from[4]; };
  const auto all = emulator::warp_values(Stored{row, {from[0], from[1], from[2], from[3]}});
  const int lane = threadIdx.x % 32, matrix = lane / 8;  // of the row that this lane stores
  for (int quarter = 0; quarter < 4; ++quarter) {
    const uint32_t pair = all[lane % 8 * 4 + quarter].from[matrix];
    std::memcpy(static_cast<char*>(row) + quarter * 4, &pair, 4);
  }
  __syncwarp();
}
inline void publish_stores() {}

inline void cluster_arrive_relaxed() {
  last_meeting[emulator::current] = emulator::cluster.arrive(emulator::blocks.size() * blockDim.x);
}
inline void cluster_arrive() { cluster_arrive_relaxed(); }
inline void cluster_wait() {
  const int64_t number = last_meeting[emulator::current];
  emulator::wait_until([=] { return emulator::cluster.held > number; });
}

inline uint32_t address_in(int block, const void* shared) {
  if (block < 0 || block >= int(emulator::blocks.size())) emulator::fail("no block of the cluster");
  return (block + 1) * kOneBlock + shared_address(shared);
}
template <typename T>
void store_in(uint32_t address, const T& x, uint32_t barrier) {
  const int block = address / kOneBlock - 1, at = address % kOneBlock - 4096;
  if (block == emulator::rank) emulator::fail("a store in another block that is in this one");
  if (at % alignof(T)) emulator::fail("a store that is not aligned");
  std::memcpy(emulator::blocks[block].memory.data() + at, &x, sizeof(T));
  const char* named = emulator::shared_memory + barrier % kOneBlock - 4096;
  memory_barrier(named, barrier / kOneBlock - 1).change(0, -int(sizeof(T)));
}

inline uint2 load_in(uint32_t address) {
  const int block = address / kOneBlock - 1, at = address % kOneBlock - 4096;
  if (at % alignof(uint2)) emulator::fail("a load that is not aligned");
  const bool is_own = block == emulator::rank;
  uint2 x;
  std::memcpy(&x, (is_own ? emulator::shared_memory : emulator::blocks[block].memory.data()) + at,
              sizeof(x));
  return x;
}

// Where the byte `at` of a tile lies whose units are permuted: the lowest bits of its 16-byte unit
// are changed by those of its row of 128 bytes.
inline uint32_t swizzled(uint32_t at, uint32_t bits = 3) {
  return at ^ (at >> 7 & ((1 << bits) - 1)) << 4;
}

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
          const uint32_t to = swizzled(begin + at, from.swizzle);
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
  emulator::blocks[emulator::rank].copies_in_flight.push_back([=, map = from] {
    write_tile(begin, map, x, y, z, w, full);
  });
}

inline void copy_tile(char* to, const CUtensorMap& from, int x, int y, uint64_t* full) {
  copy_tile(to, from, x, y, 0, 0, full);
}
inline void prefetch_map(const CUtensorMap&) {}

template <bool kTransposed, bool kFloat16, int kSums>
void multiply(float (&sum)[kSums], const uint32_t (&a)[4], uint64_t b, bool adds) {
  using Fragment = std::array<uint32_t, 4>;
  const auto fragments = emulator::warpgroup_values(Fragment{a[0], a[1], a[2], a[3]});
  StartedMatmul started_matmul{sum, 2 * kSums, {}, b, adds, kTransposed, kFloat16};
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
  started[emulator::current].push_back(started_matmul);
}

template <int kSums>
void add_matmul(float (&sum)[kSums], const uint32_t (&a)[4], uint64_t b) {
  multiply<false, false>(sum, a, b, true);
}

inline void begin_matmul() {}
inline void end_matmul() {}

template <int kSums>
void await_matmul(float (&)[kSums]) {
  for (const StartedMatmul& x : started[emulator::current]) {
    const uint32_t begin = (x.b & 0x3fff) << 4, stride = (x.b >> 32 & 0x3fff) << 4;
    if (x.b >> 62 != 1) emulator::fail("a descriptor without the swizzle of 128 bytes");
    for (int column = 0; column < x.columns; ++column) {
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
  started[emulator::current].clear();
  __syncwarp();  // it waits for a whole warp's matmuls
}

}  // namespace jspec
