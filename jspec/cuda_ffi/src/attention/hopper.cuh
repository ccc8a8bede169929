// What Hopper's copies, barriers and matrix units are told: for attention of heads of 64 channels.
#pragma once

#include <cuda.h>
#include <cuda_runtime.h>

#include "attention/attention.h"

namespace jspec {
namespace {

constexpr int kWarpgroup = 128;
constexpr int kRowBytes = kChannels * 2;  // of a key
constexpr int kBlockBytes = kBlock * kRowBytes;
constexpr int kHalf = kBlock / 2, kHalfBytes = kBlockBytes / 2;

__device__ uint32_t address(const void* shared) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(shared));
}

__device__ void barrier_init(uint64_t* barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(address(barrier)), "r"(arrivals));
}

__device__ void barrier_arrive(uint64_t* barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(address(barrier)) : "memory");
}

// Arrives, and awaits a block's bytes besides.
__device__ void barrier_expect_block(uint64_t* barrier) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(address(barrier)),
               "n"(kBlockBytes)
               : "memory");
}

__device__ void barrier_wait(uint64_t* barrier, uint32_t phase) {
  asm volatile(
      "{\n.reg .pred done;\n"
      "again:\nmbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@done bra over;\nbra again;\nover:\n}" ::"r"(address(barrier)),
      "r"(phase)
      : "memory");
}

// Between two warpgroups.
__device__ void named_barrier_sync(int barrier) {
  asm volatile("barrier.sync %0, %1;" ::"r"(barrier), "n"(2 * kWarpgroup) : "memory");
}

__device__ void named_barrier_arrive(int barrier) {
  asm volatile("barrier.arrive %0, %1;" ::"r"(barrier), "n"(2 * kWarpgroup) : "memory");
}

// Starts the copy of a block of a head; what lies beyond the capacity is zero. It is read once, and
// leaves the L2 cache to the partial results.
__device__ void copy_block(char* to, const CUtensorMap& from, int row, int key, int head,
                           uint64_t* full) {
  barrier_expect_block(full);
  uint64_t evicted_first;
  asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(evicted_first));
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
      ".L2::cache_hint [%0], [%1, {%2, %3, %4, %5}], [%6], %7;" ::"r"(address(to)),
      "l"(&from), "r"(0), "r"(head), "r"(key), "r"(row), "r"(address(full)), "l"(evicted_first)
      : "memory");
}

// The tile of a half block in shared memory, as a product reads it.
__device__ uint64_t descriptor(const char* tile) {
  constexpr uint64_t kEightRows = 8 * kRowBytes / 16, kSwizzle128 = 1;
  return kSwizzle128 << 62 | kEightRows << 32 | kEightRows << 16 | (address(tile) & 0x3ffff) >> 4;
}

#define JSPEC_32(f, x)                                                                         \
  f(x[0]), f(x[1]), f(x[2]), f(x[3]), f(x[4]), f(x[5]), f(x[6]), f(x[7]), f(x[8]), f(x[9]),    \
      f(x[10]), f(x[11]), f(x[12]), f(x[13]), f(x[14]), f(x[15]), f(x[16]), f(x[17]), f(x[18]), \
      f(x[19]), f(x[20]), f(x[21]), f(x[22]), f(x[23]), f(x[24]), f(x[25]), f(x[26]), f(x[27]), \
      f(x[28]), f(x[29]), f(x[30]), f(x[31])
#define JSPEC_HELD(x) "+f"(x)

// sum (+)= a b for 64 rows, 64 columns and 16 between them.
template <bool kTransposed>
__device__ void multiply(float (&sum)[32], const uint32_t (&a)[4], uint64_t b, bool adds) {
  asm volatile(
      "{\n.reg .pred adds;\nsetp.ne.b32 adds, %37, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 "
      "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, "
      "%19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, "
      "{%32, %33, %34, %35}, %36, adds, 1, 1, %38;\n}"
      : JSPEC_32(JSPEC_HELD, sum)
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(int(adds)), "n"(int(kTransposed)));
}

__device__ void begin_product() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ void end_product() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

// Waits until all products but the last kPending are there; `sum` is of one of the others.
template <int kPending>
__device__ void await_product(float (&sum)[32]) {
  asm volatile("wgmma.wait_group.sync.aligned %32;" : JSPEC_32(JSPEC_HELD, sum) : "n"(kPending)
               : "memory");
}

__device__ void multiply_keys(float (&scores)[32], const uint32_t (&q)[4][4], const char* keys) {
  const uint64_t tile = descriptor(keys);
  begin_product();
#pragma unroll
  for (int i = 0; i < 4; ++i) multiply<false>(scores, q[i], tile + i * 32 / 16, i > 0);
  end_product();
}

__device__ void add_values(float (&sum)[32], const uint32_t (&p)[4][4], const char* values) {
  const uint64_t tile = descriptor(values);
  begin_product();
#pragma unroll
  for (int i = 0; i < 4; ++i) multiply<true>(sum, p[i], tile + i * 16 * kRowBytes / 16, true);
  end_product();
}

__device__ float exp2_fast(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

__device__ uint32_t packed(float low, float high) {
  uint32_t both;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
  return both;
}

}  // namespace
}  // namespace jspec
