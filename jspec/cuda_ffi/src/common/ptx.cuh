// Instructions without a C++ function, from compute capability 8.0 on.
// tests/cuda_ffi/emulator has the same functions for CPUs.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace jspec {

__device__ __forceinline__ uint32_t shared_address(const void* shared) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(shared));
}

__device__ __forceinline__ float exp2_fast(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// x / 2^count, 0 from 32 on.
__device__ __forceinline__ uint32_t shifted_right(uint32_t x, uint32_t count) {
  uint32_t result;
  asm("shr.u32 %0, %1, %2;" : "=r"(result) : "r"(x), "r"(count));
  return result;
}

// The low half of a word as the high half of a word of zeros. The compiler would make a
// multiplication of a shift.
__device__ __forceinline__ uint32_t low_half_to_high(uint32_t word) {
  uint32_t moved;
  asm("prmt.b32 %0, %1, 0, 0x1044;" : "=r"(moved) : "r"(word));
  return moved;
}

// The larger of two bfloat16 in each half; NaN only where both are.
__device__ __forceinline__ uint32_t max_of_halves(uint32_t a, uint32_t b) {
  asm("max.bf16x2 %0, %0, %1;" : "+r"(a) : "r"(b));
  return a;
}

// Loads 16 bytes of global memory at this point of the program, not where they are first used.
__device__ __forceinline__ uint4 load_now(const void* global) {
  uint4 words;
  asm volatile("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(words.x), "=r"(words.y), "=r"(words.z), "=r"(words.w)
               : "l"(global));
  return words;
}

// Adds to a counter in global memory after all that this thread, and those that it has met at a
// barrier, wrote before. Returns what the counter was.
__device__ __forceinline__ uint32_t add_release(uint32_t* counter, uint32_t more) {
  uint32_t before;
  asm volatile("atom.add.release.gpu.global.u32 %0, [%1], %2;"
               : "=r"(before)
               : "l"(counter), "r"(more)
               : "memory");
  return before;
}

// Loads after it see what other threads had written before the `add_release` that this thread saw.
__device__ __forceinline__ void acquire() {
#if __CUDACC_VER_MAJOR__ >= 13 && __CUDA_ARCH__ >= 900
  asm volatile("fence.acquire.gpu;" ::: "memory");
#else
  asm volatile("fence.acq_rel.gpu;" ::: "memory");
#endif
}

// The transpose of a matrix of 8 x 8 numbers of 16 bits, of which lane 4 i + j has those of row i in
// columns 2 j and 2 j + 1, before and after.
__device__ __forceinline__ uint32_t transposed(uint32_t pair) {
  uint32_t of_column;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(of_column) : "r"(pair));
  return of_column;
}

// Two numbers as bfloat16, `low` in the low half.
__device__ __forceinline__ uint32_t packed(float low, float high) {
  uint32_t both;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
  return both;
}

// As float16.
__device__ __forceinline__ uint32_t packed_float16(float low, float high) {
  uint32_t both;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
  return both;
}

// Starts the copy of 16 bytes to shared memory; zeros where not `there`.
__device__ __forceinline__ void copy_async(void* to, const void* from, bool there) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(to)),
               "l"(from), "r"(there ? 16 : 0)
               : "memory");
}

// Makes a group of the copies that this thread started since the last group.
__device__ __forceinline__ void commit_copies() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}

template <int kPending>
__device__ __forceinline__ void await_copy_groups() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

// Waits for all groups of this thread but the last `pending`, at most 6.
__device__ __forceinline__ void await_copies(int pending) {
  switch (pending) {
    case 0: return await_copy_groups<0>();
    case 1: return await_copy_groups<1>();
    case 2: return await_copy_groups<2>();
    case 3: return await_copy_groups<3>();
    case 4: return await_copy_groups<4>();
    case 5: return await_copy_groups<5>();
    default: return await_copy_groups<6>();
  }
}

// A barrier of kThreads threads, by a number from 1 to 15.
template <int kThreads>
__device__ __forceinline__ void barrier_of(int number) {
  asm volatile("barrier.sync %0, %1;" ::"r"(number), "n"(kThreads) : "memory");
}

// Loads four matrices of 8 x 8 bfloat16: lane 8 i + r passes the address of row r of matrix i.
template <bool kTransposed>
__device__ __forceinline__ void load_matrices(uint32_t (&to)[4], const void* row) {
  if (kTransposed) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                 : "r"(shared_address(row))
                 : "memory");
  } else {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                 : "r"(shared_address(row))
                 : "memory");
  }
}

// sum += a b of 16 rows, 16 inner and 8 columns. `sum` is four numbers of a thread.
__device__ __forceinline__ void multiply_add(float* sum, const uint32_t (&a)[4], uint32_t b0,
                                             uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%0, %1, %2, %3};"
      : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

}  // namespace jspec
