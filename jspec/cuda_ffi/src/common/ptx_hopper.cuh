// Instructions without a C++ function that Hopper alone has (sm_90a).
// tests/cuda_ffi/emulator has the same functions for CPUs.
#pragma once

#include <cuda.h>

#include "common/ptx.cuh"

namespace jspec {

constexpr int kWarpgroup = 128;

__device__ __forceinline__ void barrier_init(uint64_t* barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)),
               "r"(arrivals));
}

// After the initialisation of all barriers, before the threads of the block meet.
__device__ __forceinline__ void publish_barriers() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

__device__ __forceinline__ void barrier_arrive(uint64_t* barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(barrier))
               : "memory");
}

// Arrives at the barrier of a block of the cluster, this one or another, which orders no stores of
// this block for threads of another: that would take a fence of the whole GPU.
__device__ __forceinline__ void barrier_arrive_in(uint32_t address) {
  asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(address) : "memory");
}

// Arrives, and lets the barrier wait for so many bytes too.
__device__ __forceinline__ void barrier_expect(uint64_t* barrier, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(
                   shared_address(barrier)),
               "r"(bytes)
               : "memory");
}

template <int kBytes>
__device__ __forceinline__ void barrier_expect(uint64_t* barrier) {
  barrier_expect(barrier, kBytes);
}

__device__ __forceinline__ void barrier_wait(uint64_t* barrier, uint32_t phase) {
  asm volatile(
      "{\n.reg .pred done;\n"
      "again:\nmbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@done bra over;\nbra again;\nover:\n}" ::"r"(shared_address(barrier)),
      "r"(phase)
      : "memory");
}

// A barrier of the threads of a cluster, in two parts: what threads stored before they arrived, in
// shared memory of any of its blocks, is seen by those that have waited.
__device__ __forceinline__ void cluster_arrive() {
  asm volatile("barrier.cluster.arrive.release;" ::: "memory");
}

__device__ __forceinline__ void cluster_wait() {
  asm volatile("barrier.cluster.wait.acquire;" ::: "memory");
}

// Arrives there too, but orders no stores except the initialisation of barriers that was published.
__device__ __forceinline__ void cluster_arrive_relaxed() {
  asm volatile("barrier.cluster.arrive.relaxed;" ::: "memory");
}

// The address in block `block` of the cluster that `shared` is in this one.
__device__ __forceinline__ uint32_t address_in(int block, const void* shared) {
  uint32_t address;
  asm("mapa.shared::cluster.u32 %0, %1, %2;"
      : "=r"(address)
      : "r"(shared_address(shared)), "r"(block));
  return address;
}

__device__ __forceinline__ uint2 load_in(uint32_t address) {
  uint2 x;
  asm volatile("ld.shared::cluster.v2.u32 {%0, %1}, [%2];"
               : "=r"(x.x), "=r"(x.y)
               : "r"(address)
               : "memory");
  return x;
}

// Starts a store in another block of the cluster, whose barrier waits for its bytes; both addresses
// are in that block.
__device__ __forceinline__ void store_in(uint32_t address, float x, uint32_t barrier) {
  asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.f32 [%0], %1, [%2];" ::"r"(
                   address),
               "f"(x), "r"(barrier)
               : "memory");
}

__device__ __forceinline__ void store_in(uint32_t address, const float4& x, uint32_t barrier) {
  asm volatile(
      "st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1, %2, %3, %4}, "
      "[%5];" ::"r"(address),
      "f"(x.x), "f"(x.y), "f"(x.z), "f"(x.w), "r"(barrier)
      : "memory");
}

// A barrier of two warpgroups, by number.
__device__ __forceinline__ void named_barrier_sync(int barrier) {
  asm volatile("barrier.sync %0, %1;" ::"r"(barrier), "n"(2 * kWarpgroup) : "memory");
}

template <int kRegisters>
__device__ __forceinline__ void release_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

template <int kRegisters>
__device__ __forceinline__ void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

// Stores four matrices of 8 rows of 16 bytes, as load_matrices loads them: `row` is of this lane.
__device__ __forceinline__ void store_matrices(void* row, const uint32_t (&from)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(
                   shared_address(row)),
               "r"(from[0]), "r"(from[1]), "r"(from[2]), "r"(from[3])
               : "memory");
}

// Makes what this thread stored in shared memory visible to matmuls and bulk copies.
__device__ __forceinline__ void publish_stores() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// Starts the copy of a tile of a tensor at these coordinates, innermost first; what lies outside of
// the tensor is zero. The tile is evicted from the L2 cache before others.
__device__ __forceinline__ void copy_tile(char* to, const CUtensorMap& from, int x, int y, int z,
                                          int w, uint64_t* full) {
  uint64_t evicted_first;
  asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(evicted_first));
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
      ".L2::cache_hint [%0], [%1, {%2, %3, %4, %5}], [%6], %7;" ::"r"(shared_address(to)),
      "l"(&from), "r"(x), "r"(y), "r"(z), "r"(w), "r"(shared_address(full)), "l"(evicted_first)
      : "memory");
}

// The same of an array of two axes, with the default policy of the L2 cache.
__device__ __forceinline__ void copy_tile(char* to, const CUtensorMap& from, int x, int y,
                                          uint64_t* full) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
      " [%0], [%1, {%2, %3}], [%4];" ::"r"(shared_address(to)),
      "l"(&from), "r"(x), "r"(y), "r"(shared_address(full))
      : "memory");
}

// Prefetches a map into the cache of descriptors.
__device__ __forceinline__ void prefetch_map(const CUtensorMap& map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
}

// Two numbers of 8 bits, E4M3, as float16: both formats are exact.
__device__ __forceinline__ uint32_t float16_of(uint32_t pair) {
  uint32_t both;
  asm("{\n.reg .b16 low;\ncvt.u16.u32 low, %1;\ncvt.rn.f16x2.e4m3x2 %0, low;\n}"
      : "=r"(both)
      : "r"(pair));
  return both;
}

#define JSPEC_32(f, x)                                                                         \
  f(x[0]), f(x[1]), f(x[2]), f(x[3]), f(x[4]), f(x[5]), f(x[6]), f(x[7]), f(x[8]), f(x[9]),    \
      f(x[10]), f(x[11]), f(x[12]), f(x[13]), f(x[14]), f(x[15]), f(x[16]), f(x[17]), f(x[18]), \
      f(x[19]), f(x[20]), f(x[21]), f(x[22]), f(x[23]), f(x[24]), f(x[25]), f(x[26]), f(x[27]), \
      f(x[28]), f(x[29]), f(x[30]), f(x[31])
#define JSPEC_READ_WRITE(x) "+f"(x)

#define JSPEC_MULTIPLY(types)                                                                    \
  asm volatile(                                                                                  \
      "{\n.reg .pred adds;\nsetp.ne.b32 adds, %37, 0;\n"                                         \
      "wgmma.mma_async.sync.aligned.m64n64k16.f32." types " "                                    \
      "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, "   \
      "%19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, "                       \
      "{%32, %33, %34, %35}, %36, adds, 1, 1, %38;\n}"                                           \
      : JSPEC_32(JSPEC_READ_WRITE, sum)                                                          \
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(int(adds)), "n"(int(kTransposed)))

// Starts sum (+)= a b of 64 rows, 16 inner and 64 columns, both factors of 16 bits: float16 or
// bfloat16. `b` describes [columns, inner] in shared memory, or, if transposed, [inner, columns].
template <bool kTransposed, bool kFloat16>
__device__ __forceinline__ void multiply(float (&sum)[32], const uint32_t (&a)[4], uint64_t b,
                                         bool adds) {
  if constexpr (kFloat16) {
    JSPEC_MULTIPLY("f16.f16");
  } else {
    JSPEC_MULTIPLY("bf16.bf16");
  }
}

__device__ __forceinline__ void begin_matmul() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}

__device__ __forceinline__ void end_matmul() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

// Waits for all matmuls; `sum` is the result of one of them.
__device__ __forceinline__ void await_matmul(float (&sum)[32]) {
  asm volatile("wgmma.wait_group.sync.aligned 0;" : JSPEC_32(JSPEC_READ_WRITE, sum)::"memory");
}

#define JSPEC_16(f, x)                                                                         \
  f(x[0]), f(x[1]), f(x[2]), f(x[3]), f(x[4]), f(x[5]), f(x[6]), f(x[7]), f(x[8]), f(x[9]),    \
      f(x[10]), f(x[11]), f(x[12]), f(x[13]), f(x[14]), f(x[15])
#define JSPEC_64(f, x)                                                                           \
  JSPEC_32(f, x), f(x[32]), f(x[33]), f(x[34]), f(x[35]), f(x[36]), f(x[37]), f(x[38]), f(x[39]), \
      f(x[40]), f(x[41]), f(x[42]), f(x[43]), f(x[44]), f(x[45]), f(x[46]), f(x[47]), f(x[48]),   \
      f(x[49]), f(x[50]), f(x[51]), f(x[52]), f(x[53]), f(x[54]), f(x[55]), f(x[56]), f(x[57]),   \
      f(x[58]), f(x[59]), f(x[60]), f(x[61]), f(x[62]), f(x[63])

#define JSPEC_96(f, x)                                                                           \
  JSPEC_64(f, x), f(x[64]), f(x[65]), f(x[66]), f(x[67]), f(x[68]), f(x[69]), f(x[70]), f(x[71]), \
      f(x[72]), f(x[73]), f(x[74]), f(x[75]), f(x[76]), f(x[77]), f(x[78]), f(x[79]), f(x[80]),   \
      f(x[81]), f(x[82]), f(x[83]), f(x[84]), f(x[85]), f(x[86]), f(x[87]), f(x[88]), f(x[89]),   \
      f(x[90]), f(x[91]), f(x[92]), f(x[93]), f(x[94]), f(x[95])

// Starts sum += a b of 64 rows, 16 inner and 32, 64, 128 or 192 columns of bfloat16. `b` describes
// [columns, inner] in shared memory.
__device__ __forceinline__ void add_matmul(float (&sum)[16], const uint32_t (&a)[4], uint64_t b) {
  asm volatile(
      "{\n.reg .pred adds;\nsetp.eq.b32 adds, 0, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n32k16.f32.bf16.bf16 "
      "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15}, "
      "{%16, %17, %18, %19}, %20, adds, 1, 1, 0;\n}"
      : JSPEC_16(JSPEC_READ_WRITE, sum)
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}

__device__ __forceinline__ void add_matmul(float (&sum)[32], const uint32_t (&a)[4], uint64_t b) {
  multiply<false, false>(sum, a, b, true);
}

__device__ __forceinline__ void add_matmul(float (&sum)[64], const uint32_t (&a)[4], uint64_t b) {
  asm volatile(
      "{\n.reg .pred adds;\nsetp.eq.b32 adds, 0, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 "
      "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, "
      "%19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, "
      "%36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, "
      "%53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}, "
      "{%64, %65, %66, %67}, %68, adds, 1, 1, 0;\n}"
      : JSPEC_64(JSPEC_READ_WRITE, sum)
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}

__device__ __forceinline__ void add_matmul(float (&sum)[96], const uint32_t (&a)[4], uint64_t b) {
  asm volatile(
      "{\n.reg .pred adds;\nsetp.eq.b32 adds, 0, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n192k16.f32.bf16.bf16 "
      "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, "
      "%18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, "
      "%34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, "
      "%50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, %64, %65, "
      "%66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, %80, %81, "
      "%82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95}, "
      "{%96, %97, %98, %99}, %100, adds, 1, 1, 0;\n}"
      : JSPEC_96(JSPEC_READ_WRITE, sum)
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}

__device__ __forceinline__ void await_matmul(float (&sum)[16]) {
  asm volatile("wgmma.wait_group.sync.aligned 0;" : JSPEC_16(JSPEC_READ_WRITE, sum)::"memory");
}

__device__ __forceinline__ void await_matmul(float (&sum)[64]) {
  asm volatile("wgmma.wait_group.sync.aligned 0;" : JSPEC_64(JSPEC_READ_WRITE, sum)::"memory");
}

__device__ __forceinline__ void await_matmul(float (&sum)[96]) {
  asm volatile("wgmma.wait_group.sync.aligned 0;" : JSPEC_96(JSPEC_READ_WRITE, sum)::"memory");
}

#undef JSPEC_96
#undef JSPEC_64
#undef JSPEC_16
#undef JSPEC_MULTIPLY
#undef JSPEC_READ_WRITE
#undef JSPEC_32

}  // namespace jspec
