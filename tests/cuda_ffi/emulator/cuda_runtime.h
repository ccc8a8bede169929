// CUDA C++ on a CPU, as much as the kernels that are tested so need: every thread of a block is a
// fiber, and all of them run on one thread of the CPU, each until it has to wait for others. The
// blocks of a cluster run together, clusters one after the other. A cluster whose threads all wait
// ends the program.
#pragma once

#include <ucontext.h>

#include <algorithm>
#include <array>
#include <cfenv>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <type_traits>
#include <vector>

#define __global__
#define __device__
#define __host__
#define __shared__
#define __forceinline__ inline
#define __noinline__
#define __grid_constant__
#define __launch_bounds__(...)
#define __align__(bytes)

struct dim3 {
  unsigned x, y, z;
  dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};
struct int2 { int x, y; };
struct alignas(8) uint2 { unsigned x, y; };
struct alignas(8) float2 { float x, y; };
struct alignas(16) int4 { int x, y, z, w; };
struct alignas(16) uint4 { unsigned x, y, z, w; };
struct alignas(16) float4 { float x, y, z, w; };

inline dim3 threadIdx, blockIdx, blockDim, gridDim;

template <typename A, typename B>
constexpr std::common_type_t<A, B> min(A a, B b) {
  using C = std::common_type_t<A, B>;
  return C(b) < C(a) ? C(b) : C(a);
}
template <typename A, typename B>
constexpr std::common_type_t<A, B> max(A a, B b) {
  using C = std::common_type_t<A, B>;
  return C(a) < C(b) ? C(b) : C(a);
}

namespace emulator {

constexpr int kSharedBytes = 232448, kStackBytes = 1 << 17;
constexpr int kMostThreads = 4096;  // of a cluster
inline char* shared_memory = nullptr;  // of kSharedBytes; the program defines it
inline int shared_bytes = 0;           // of this launch

// How much a block may have: of Hopper, or of the GPU that EMULATED_SHARED_BYTES says.
inline int shared_limit() {
  const char* named = std::getenv("EMULATED_SHARED_BYTES");
  return named ? std::atoi(named) : kSharedBytes;
}

struct Fiber {
  ucontext_t context;
  std::unique_ptr<char[]> stack{new char[kStackBytes]};  // without zeros, which take long to write
  std::function<bool()> ready;  // whether it may go on; none where it waits for nothing
  bool ended = false;
};

inline std::vector<std::unique_ptr<Fiber>> fibers;  // as many as any cluster has had
inline ucontext_t scheduler;
inline int current = 0;     // fiber of a cluster
inline int rank = 0;        // of its block
inline int64_t events = 0;  // whatever may let another thread go on

[[noreturn]] inline void fail(const char* what) {
  std::fprintf(stderr, "emulator: %s (block %u, thread %d)\n", what, blockIdx.x, current);
  std::fflush(stderr);
  std::abort();
}

template <typename Ready>
void wait_until(Ready ready) {
  if (ready()) return;
  Fiber& fiber = *fibers[current];
  fiber.ready = std::ref(ready);
  swapcontext(&fiber.context, &scheduler);
  fiber.ready = nullptr;
}

// A meeting of `count` threads, which may be held again and again.
struct Meeting {
  int arrived = 0;
  int64_t held = 0;

  int64_t arrive(int count) {
    const int64_t number = held;
    ++events;
    if (++arrived == count) arrived = 0, ++held;
    return number;
  }
  void meet(int count) {
    const int64_t number = arrive(count);
    wait_until([&] { return held > number; });
  }
};

// The values that `kThreads` threads bring to a meeting, of every other meeting.
template <int kThreads>
struct Exchange {
  Meeting meeting;
  std::array<std::array<char, 32>, kThreads> values[2];

  template <typename T>
  std::array<T, kThreads> all(T value, int thread) {
    static_assert(sizeof(T) <= 32);
    auto& of = values[meeting.held % 2];
    std::memcpy(of[thread].data(), &value, sizeof(T));
    meeting.meet(kThreads);
    std::array<T, kThreads> result;
    for (int i = 0; i < kThreads; ++i) std::memcpy(&result[i], of[i].data(), sizeof(T));
    return result;
  }
};

// What the threads of a block share.
struct Block {
  std::vector<std::unique_ptr<Exchange<32>>> warps;
  std::vector<std::unique_ptr<Exchange<128>>> warpgroups;
  std::map<int, Meeting> named;
  std::map<int64_t, bool> any;  // of the values brought to a meeting of all threads, by its number
  std::deque<std::function<void()>> copies_in_flight;
  std::vector<char> memory;  // while another block of the cluster runs

  explicit Block(int threads) : memory(shared_bytes, char(0xff)) {
    for (int i = 0; i < threads; i += 32) warps.push_back(std::make_unique<Exchange<32>>());
    for (int i = 0; i < threads; i += 128) warpgroups.push_back(std::make_unique<Exchange<128>>());
  }
};

inline std::deque<Block> blocks;  // of the cluster
inline Meeting cluster;
inline std::vector<std::function<void()>> resets;  // of what ends with a cluster

template <typename T>
auto warp_values(T value) {
  return blocks[rank].warps[threadIdx.x / 32]->all(value, threadIdx.x % 32);
}

template <typename T>
auto warpgroup_values(T value) {
  return blocks[rank].warpgroups[threadIdx.x / 128]->all(value, threadIdx.x % 128);
}

// Makes `memory` that of another block of the cluster.
inline void switch_to(int other) {
  if (other == rank) return;
  std::memcpy(blocks[rank].memory.data(), shared_memory, shared_bytes);
  std::memcpy(shared_memory, blocks[other].memory.data(), shared_bytes);
  rank = other;
}

inline std::mutex one_at_a_time;
inline std::function<void()> body;

inline void run_fiber() {
  body();
  fibers[current]->ended = true;
  ++events;
  swapcontext(&fibers[current]->context, &scheduler);
}

// The blocks of a cluster, of which `first` is the first.
inline void run_cluster(dim3 first, int count, int threads) {
  static std::minstd_rand random;
  std::memset(shared_memory, 0xff, kSharedBytes);  // NaN
  blocks.clear(), cluster = {}, rank = 0;
  for (const auto& reset : resets) reset();
  for (int i = 0; i < count; ++i) blocks.emplace_back(threads);
  for (int i = 0; i < count * threads; ++i) {
    if (i == int(fibers.size())) fibers.push_back(std::make_unique<Fiber>());
    Fiber& fiber = *fibers[i];
    fiber.ended = false;
    getcontext(&fiber.context);
    fiber.context.uc_stack.ss_sp = fiber.stack.get();
    fiber.context.uc_stack.ss_size = kStackBytes;
    fiber.context.uc_link = nullptr;
    makecontext(&fiber.context, run_fiber, 0);
  }
  std::vector<bool> begun(count);
  bool stuck = true;
  for (int running = threads; running;) {
    const int64_t before = events;
    running = 0;
    // In another order each time, as a kernel may not rely on one.
    constexpr int kSteps[] = {1, 11, 13, 17, 19, 23};  // no factor of a number of threads
    for (int turn = 0, last = random() % count; turn < count; ++turn) {
      const int block = (turn + last) % count;
      if (!begun[block]) {  // the next one when all others wait, or before
        if (!stuck && random() % 64) {
          running += threads;
          continue;
        }
        begun[block] = true, stuck = false;
      }
      switch_to(block);
      blockIdx = dim3(first.x + rank, first.y, first.z);
      const unsigned step = kSteps[random() % 6], start = random() % threads;
      for (int i = 0; i < threads; ++i) {
        threadIdx = dim3((start + i * step) % threads);
        current = rank * threads + threadIdx.x;
        Fiber& fiber = *fibers[current];
        if (fiber.ended) continue;
        if (!fiber.ready || fiber.ready()) swapcontext(&scheduler, &fiber.context);
        running += !fiber.ended;
      }
    }
    const bool waits = events == before;
    bool copies = false;
    for (int i = 0; i < count; ++i) {
      auto& in_flight = blocks[i].copies_in_flight;
      if (in_flight.empty() || !(waits || random() % 64 == 0)) continue;
      switch_to(i);
      in_flight.front()();
      in_flight.pop_front();
      copies = true;
    }
    stuck = running && waits && !copies;
    const bool all_begun = std::find(begun.begin(), begun.end(), false) == begun.end();
    if (stuck && all_begun) fail("all threads wait for each other");
  }
  for (const Block& block : blocks) {
    if (!block.copies_in_flight.empty()) fail("the block ended before its copies");
  }
  for (int i = shared_bytes; i < kSharedBytes; ++i) {
    if (shared_memory[i] != char(0xff)) fail("a store past the launch's shared memory");
  }
}

}  // namespace emulator

// Collective functions: of whole warps, whatever the mask, which every caller sets to all lanes.
inline void __syncthreads() {
  emulator::blocks[emulator::rank].named[0].meet(blockDim.x);
}
inline bool __syncthreads_or(bool value) {
  emulator::Block& block = emulator::blocks[emulator::rank];
  emulator::Meeting& meeting = block.named[0];
  bool& any = block.any[meeting.held];
  any |= value;
  meeting.meet(blockDim.x);
  return any;
}
inline void __syncwarp() { emulator::warp_values(0); }
template <typename T>
T __shfl_sync(unsigned, T value, int lane) {
  return emulator::warp_values(value)[lane % 32];
}
template <typename T>
T __shfl_xor_sync(unsigned, T value, int lanes) {
  return emulator::warp_values(value)[threadIdx.x % 32 ^ lanes];
}
template <typename T>
T __shfl_up_sync(unsigned, T value, int lanes) {
  const int lane = threadIdx.x % 32;
  return emulator::warp_values(value)[lane < lanes ? lane : lane - lanes];
}
template <typename T>
T __shfl_down_sync(unsigned, T value, int lanes) {
  const int lane = threadIdx.x % 32;
  return emulator::warp_values(value)[lane + lanes < 32 ? lane + lanes : lane];
}
inline bool __any_sync(unsigned, bool value) {
  bool any = false;
  for (const bool x : emulator::warp_values(value)) any |= x;
  return any;
}
template <typename T>
T __reduce_max_sync(unsigned, T value) {
  for (const T x : emulator::warp_values(value)) value = max(value, x);
  return value;
}
inline unsigned __reduce_add_sync(unsigned, unsigned value) {
  unsigned sum = 0;
  for (const unsigned x : emulator::warp_values(value)) sum += x;
  return sum;
}
template <typename T>
T __reduce_min_sync(unsigned, T value) {
  for (const T x : emulator::warp_values(value)) value = min(value, x);
  return value;
}
inline unsigned __ballot_sync(unsigned, bool value) {
  unsigned bits = 0;
  int lane = 0;
  for (const bool x : emulator::warp_values(value)) bits |= unsigned(x) << lane++;
  return bits;
}

// Functions of a thread alone.
inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __clz(unsigned x) { return x ? __builtin_clz(x) : 32; }
inline int __ffs(int x) { return __builtin_ffs(x); }
template <typename T>
T __ldg(const T* from) { return *from; }
template <typename T>
T __ldcg(const T* from) { return *from; }
inline void __threadfence() {}
inline float rsqrtf(float x) { return 1 / std::sqrt(x); }
inline float __fsqrt_rn(float x) { return std::sqrt(x); }
inline float __fdividef(float x, float y) { return x / y; }
inline float __fmul_rn(float x, float y) { return x * y; }
inline float __fsub_rn(float x, float y) { return x - y; }
inline int __float2int_rd(float x) { return static_cast<int>(std::floor(x)); }
template <typename T, typename Value>
T atomicAdd(T* to, Value value) {
  const T before = *to;
  *to += value;
  return before;
}
template <typename T, typename Value>
T atomicMax(T* to, Value value) {
  const T before = *to;
  *to = max(before, T(value));
  return before;
}
template <typename T>
T atomicCAS(T* to, T expected, T value) {
  const T before = *to;
  if (before == expected) *to = value;
  return before;
}
inline float __uint_as_float(unsigned bits) {
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}
inline unsigned __float_as_uint(float value) {
  unsigned bits;
  std::memcpy(&bits, &value, 4);
  return bits;
}
inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
inline float2 make_float2(float x, float y) { return {x, y}; }
inline int __float_as_int(float value) {
  int bits;
  std::memcpy(&bits, &value, 4);
  return bits;
}

inline float __int_as_float(int bits) { return __uint_as_float(bits); }

namespace emulator {

// What `operation` gives in a rounding mode of <cfenv>. Its operands are volatile, as compilers
// compute for the nearest mode, and where they like.
template <typename Operation>
float rounded(int mode, Operation operation) {
  std::fesetround(mode);
  const volatile float result = operation();
  std::fesetround(FE_TONEAREST);
  return result;
}

}  // namespace emulator

inline float __fmaf_ru(volatile float x, volatile float y, volatile float z) {
  return emulator::rounded(FE_UPWARD, [&] { return std::fma(x, y, z); });
}
inline float __fmaf_rz(volatile float x, volatile float y, volatile float z) {
  return emulator::rounded(FE_TOWARDZERO, [&] { return std::fma(x, y, z); });
}
inline float __fmul_rz(volatile float x, volatile float y) {
  return emulator::rounded(FE_TOWARDZERO, [&] { return x * y; });
}
inline float __fmul_rd(volatile float x, volatile float y) {
  return emulator::rounded(FE_DOWNWARD, [&] { return x * y; });
}

inline uint64_t __cvta_generic_to_shared(const void* pointer) {
  // Shared memory does not begin at 0, where programs could take an address for an offset.
  const int64_t at = static_cast<const char*>(pointer) - emulator::shared_memory;
  if (at < 0 || at >= emulator::shared_bytes) emulator::fail("not an address of shared memory");
  return 4096 + at;
}

// The host's part.
using cudaError_t = int;
using cudaStream_t = struct CUstream_st*;
enum { cudaSuccess = 0, cudaErrorPeerAccessAlreadyEnabled = 704 };
enum cudaDeviceAttr {
  cudaDevAttrMultiProcessorCount,
  cudaDevAttrComputeCapabilityMajor,
  cudaDevAttrMaxSharedMemoryPerBlockOptin
};
enum {
  cudaFuncAttributeMaxDynamicSharedMemorySize,
  cudaFuncAttributePreferredSharedMemoryCarveout
};
enum { cudaSharedmemCarveoutMaxShared = 100 };
enum {
  cudaLaunchAttributeProgrammaticStreamSerialization,
  cudaLaunchAttributeClusterDimension
};
enum cudaDriverEntryPointQueryResult { cudaDriverEntryPointSuccess };
enum { cudaEnableDefault };
#define CUDART_VERSION 13000

// Defines what kernels declare as `extern __shared__ char memory[]`, in their namespace.
#define EMULATOR_SHARED_MEMORY                                                    \
  alignas(4096) char memory[emulator::kSharedBytes];                              \
  const bool has_memory = (emulator::shared_memory = memory) != nullptr;

struct cudaLaunchAttribute {
  int id;
  struct {
    int programmaticStreamSerializationAllowed;
    dim3 clusterDim;
  } val;
};
struct cudaLaunchConfig_t {
  dim3 gridDim, blockDim;
  size_t dynamicSmemBytes;
  cudaStream_t stream;
  cudaLaunchAttribute* attrs;
  unsigned numAttrs;
};

inline cudaError_t cudaGetLastError() { return cudaSuccess; }
inline const char* cudaGetErrorString(cudaError_t) { return "an error"; }
inline cudaError_t cudaDeviceSynchronize() { return cudaSuccess; }
template <typename T>
cudaError_t cudaMalloc(T** data, size_t bytes) {
  *data = static_cast<T*>(std::malloc(bytes));
  return cudaSuccess;
}
inline void cudaFree(void* data) { std::free(data); }
inline cudaError_t cudaMemset(void* data, int byte, size_t bytes) {
  std::memset(data, byte, bytes);
  return cudaSuccess;
}
inline cudaError_t cudaMemsetAsync(void* data, int byte, size_t bytes, cudaStream_t) {
  return cudaMemset(data, byte, bytes);
}
enum { cudaMemcpyHostToDevice, cudaMemcpyDeviceToHost };
inline void cudaMemcpy(void* to, const void* from, size_t bytes, int) {
  std::memcpy(to, from, bytes);
}
inline cudaError_t cudaGetDevice(int* device) { return *device = 0; }
inline cudaError_t cudaSetDevice(int) { return cudaSuccess; }
inline cudaError_t cudaDeviceEnablePeerAccess(int, unsigned) { return cudaSuccess; }
struct cudaFuncAttributes {
  int numRegs = 64;
};
template <typename Kernel>
cudaError_t cudaFuncGetAttributes(cudaFuncAttributes*, Kernel) { return cudaSuccess; }
template <typename Kernel>
cudaError_t cudaFuncSetAttribute(Kernel, int, int) { return cudaSuccess; }

template <typename Kernel>
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, Kernel, int, size_t) {
  return *blocks = 1, cudaSuccess;
}

inline cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int) {
  // Few multiprocessors, so that a persistent program has several items.
  if (attribute == cudaDevAttrMultiProcessorCount) *value = 3;
  if (attribute == cudaDevAttrMaxSharedMemoryPerBlockOptin) *value = emulator::shared_limit();
  if (attribute == cudaDevAttrComputeCapabilityMajor) {
    const char* named = std::getenv("EMULATED_COMPUTE_CAPABILITY");
    *value = named ? std::atoi(named) : 9;
  }
  return cudaSuccess;
}

template <typename... Parameters>
cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t* config, void (*kernel)(Parameters...),
                               const Parameters&... arguments) {
  const std::lock_guard<std::mutex> lock(emulator::one_at_a_time);
  if (int(config->dynamicSmemBytes) > emulator::shared_limit()) {
    emulator::fail("too much shared memory");
  }
  std::fenv_t environment;  // of XLA's threads, which take subnormal numbers for 0
  std::fegetenv(&environment);
  std::fesetenv(FE_DFL_ENV);
  emulator::shared_bytes = static_cast<int>(config->dynamicSmemBytes);
  emulator::body = [&] { kernel(arguments...); };
  gridDim = config->gridDim, blockDim = config->blockDim;
  unsigned cluster = 1;
  for (unsigned i = 0; i < config->numAttrs; ++i) {
    const cudaLaunchAttribute& attribute = config->attrs[i];
    if (attribute.id == cudaLaunchAttributeClusterDimension) cluster = attribute.val.clusterDim.x;
  }
  if (gridDim.x % cluster) emulator::fail("a cluster that is not whole");
  for (unsigned z = 0; z < gridDim.z; ++z) {
    for (unsigned y = 0; y < gridDim.y; ++y) {
      for (unsigned x = 0; x < gridDim.x; x += cluster) {
        emulator::run_cluster(dim3(x, y, z), cluster, blockDim.x);
      }
    }
  }
  std::fesetenv(&environment);
  return cudaSuccess;
}
