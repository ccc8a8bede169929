// A cluster of thread blocks takes a tile of columns, and each block of it a slice of the inputs.
// Weights and x go through a ring of stages in shared memory, by asynchronous copies. Weights are
// the first operand of mma, so that eight rows of x are the least that is multiplied. The slices
// are added up through distributed shared memory, in one order: a row's result is the same bits
// among any other rows.
#include <cuda_bf16.h>

#include "linear/linear.h"

namespace jspec {
namespace {

constexpr int kThreads = 256;
constexpr int kColumns = 128;          // of weights a tile, 16 of them a warp
constexpr int kDepth = 64;             // inputs a stage
constexpr int kPieces = kColumns / 8;  // of 16 bytes in a row of a tile
constexpr int kWeightBytes = kDepth * kColumns * 2;
constexpr int kRowBytes = kDepth * 2 + 16;  // of x in a stage, padded: rows begin in other banks

template <int groups>
constexpr int kStageBytes = kWeightBytes + groups * 8 * kRowBytes;

constexpr int kNormThreads = 512;

__device__ __forceinline__ uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// Copies 16 bytes, or fills with zeros.
__device__ __forceinline__ void copy_async(uint32_t to, const void* from, bool there) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(to), "l"(from),
               "r"(there ? 16 : 0)
               : "memory");
}

__device__ __forceinline__ void commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

template <int left>
__device__ __forceinline__ void wait_until_left() {
  asm volatile("cp.async.wait_group %0;" ::"n"(left) : "memory");
}

__device__ __forceinline__ float rounded(float x) {
  return __bfloat162float(__float2bfloat16_rn(x));
}

__device__ __forceinline__ float loaded(const uint16_t* from) {
  return __bfloat162float(__ushort_as_bfloat16(*from));
}

// What one thread copies of a stage's weights: pieces of rows that lie `kThreads / kPieces` apart.
struct Column {
  const uint16_t* from;  // of the first row of the slice
  int64_t width;         // of the kernel
  uint32_t to;           // within a stage
  int row;
  bool there;
};

__device__ __forceinline__ Column column_of(const Product& p, int tile, int first) {
  const int piece = threadIdx.x % kPieces, row = threadIdx.x / kPieces;
  const int every = p.gated ? kPieces / 2 : kPieces;
  const int within = (tile * every + piece % every) * 8;
  const int64_t width = p.gated ? 2 * int64_t(p.outputs) : p.outputs;
  const int column = within + (piece < every ? 0 : p.outputs);
  // Pieces change places within a row, so that eight rows of one column lie in other banks.
  const uint32_t to = row * kColumns * 2 + ((piece ^ (row & 7)) * 16);
  return {p.kernel + (first + row) * width + column, width, to, first + row, within < p.outputs};
}

__device__ __forceinline__ void load_weights(const Product& p, const Column& column, uint32_t stage,
                                             int index) {
  constexpr int apart = kThreads / kPieces;
  const uint16_t* from = column.from + index * kDepth * column.width;
#pragma unroll
  for (int i = 0; i < kDepth / apart; ++i) {
    const bool there = column.there && column.row + index * kDepth + i * apart < p.inputs;
    copy_async(stage + column.to + i * apart * kColumns * 2,
               there ? from + i * apart * column.width : p.kernel, there);
  }
}

// Rows of x for a stage. What lies in the place of rows that there are not is multiplied as well,
// into results that nobody reads.
__device__ __forceinline__ void load_rows(const Product& p, uint32_t stage, int input) {
  constexpr int pieces = kDepth / 8;
  for (int item = threadIdx.x; item < p.rows * pieces; item += kThreads) {
    const int row = item / pieces, piece = item % pieces, at = input + piece * 8;
    const bool there = at < p.inputs;
    copy_async(stage + kWeightBytes + row * kRowBytes + piece * 16,
               there ? p.x + int64_t(row) * p.inputs + at : p.x, there);
  }
}

__device__ __forceinline__ void load_matrices(uint32_t from, uint32_t (&to)[4]) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
               : "r"(from));
}

__device__ __forceinline__ void load_transposed(uint32_t from, uint32_t (&to)[4]) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
               : "r"(from));
}

// Multiplies a stage: each warp takes 16 of the columns. Two sums, of every other 16 inputs, so that
// fewer products wait for each other.
template <int groups>
__device__ __forceinline__ void multiply_stage(uint32_t stage, float (&sums)[2][groups][4]) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  constexpr int steps = kDepth / 16;
  uint32_t w[steps][4], x[groups][steps / 2][4];
#pragma unroll
  for (int step = 0; step < steps; ++step) {
    const int input = step * 16 + lane % 8 + lane / 16 * 8, piece = warp * 2 + lane / 8 % 2;
    load_transposed(stage + input * kColumns * 2 + ((piece ^ (input & 7)) * 16), w[step]);
  }
#pragma unroll
  for (int group = 0; group < groups; ++group) {
    const uint32_t row = stage + kWeightBytes + (group * 8 + lane % 8) * kRowBytes;
#pragma unroll
    for (int pair = 0; pair < steps / 2; ++pair) {
      load_matrices(row + (pair * 4 + lane / 8) * 16, x[group][pair]);
    }
  }
#pragma unroll
  for (int step = 0; step < steps; ++step) {
#pragma unroll
    for (int group = 0; group < groups; ++group) {
      float(&c)[4] = sums[step % 2][group];
      const uint32_t* by = x[group][step / 2] + step % 2 * 2;
      asm volatile(
          "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, "
          "{%8,%9}, {%0,%1,%2,%3};"
          : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
          : "r"(w[step][0]), "r"(w[step][1]), "r"(w[step][2]), "r"(w[step][3]), "r"(by[0]),
            "r"(by[1]));
    }
  }
}

// Waits until all blocks of the cluster have come here, and sees what they wrote.
__device__ __forceinline__ void meet_cluster() {
  asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::
                   : "memory");
}

// The sum of every block's `*value`, in the order of the blocks.
__device__ __forceinline__ float over_cluster(const float* value, int splits) {
  const uint32_t own = shared_address(value);
  float found[kMostSplits];
#pragma unroll
  for (int rank = 0; rank < kMostSplits; ++rank) {
    uint32_t there;
    found[rank] = 0;
    if (rank < splits) {
      asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(own), "r"(rank));
      asm volatile("ld.shared::cluster.f32 %0, [%1];" : "=f"(found[rank]) : "r"(there));
    }
  }
  float sum = 0;
#pragma unroll
  for (int rank = 0; rank < kMostSplits; ++rank) sum += found[rank];
  return sum;
}

// One of the block's results, rounded wherever a model rounds.
__device__ __forceinline__ void finish(const Product& p, int row, int column, float value,
                                       float gate) {
  float y = rounded(value);
  if (p.bias) y = rounded(y + loaded(p.bias + column + (p.gated ? p.outputs : 0)));
  if (p.gated) {
    float g = rounded(gate);
    if (p.bias) g = rounded(g + loaded(p.bias + column));
    y = rounded(rounded(g / (1.0f + __expf(-g))) * y);
  }
  const int64_t at = int64_t(row) * p.outputs + column;
  if (p.add) y = rounded(loaded(p.add + at) + y);
  p.out[at] = __bfloat16_as_ushort(__float2bfloat16_rn(y));
}

template <int groups, int kStages>
__global__ void __launch_bounds__(kThreads) product_kernel(const Product p, int slice) {
#if __CUDA_ARCH__ >= 900
  extern __shared__ __align__(128) char ring[];
  constexpr int bytes = kStageBytes<groups>;
  const uint32_t base = shared_address(ring);
  const int rank = blockIdx.x, tile = blockIdx.y, first = rank * slice, stages = slice / kDepth;
  const int ahead = min(stages, kStages - 1);
  const Column column = column_of(p, tile, first);

  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
  for (int stage = 0; stage < ahead; ++stage) load_weights(p, column, base + stage * bytes, stage);
  // What the launch before this one gives is not read earlier.
  asm volatile("griddepcontrol.wait;" ::: "memory");
  for (int stage = 0; stage < ahead; ++stage) {
    load_rows(p, base + stage * bytes, first + stage * kDepth);
  }
  commit();

  float sums[2][groups][4] = {};
  int slot = 0;
  for (int stage = 0; stage < stages; ++stage) {
    if (stage == 0) {
      wait_until_left<0>();
    } else {
      wait_until_left<kStages - 2>();
    }
    __syncthreads();
    const int later = stage + kStages - 1;
    if (later < stages) {
      const uint32_t to = base + (slot == 0 ? kStages - 1 : slot - 1) * bytes;
      load_weights(p, column, to, later);
      load_rows(p, to, first + later * kDepth);
    }
    commit();
    multiply_stage<groups>(base + slot * bytes, sums);
    slot = slot == kStages - 1 ? 0 : slot + 1;
  }
  wait_until_left<0>();
  __syncthreads();

  auto* totals = reinterpret_cast<float*>(ring);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
#pragma unroll
  for (int group = 0; group < groups; ++group) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int row = group * 8 + lane % 4 * 2 + i % 2;
      totals[row * kColumns + warp * 16 + lane / 4 + i / 2 * 8] =
          sums[0][group][i] + sums[1][group][i];
    }
  }
  meet_cluster();
  const int every = p.gated ? kColumns / 2 : kColumns;
  const int own = (every + p.splits - 1) / p.splits;
  for (int item = threadIdx.x; item < p.rows * own; item += kThreads) {
    const int row = item / own, within = rank * own + item % own, at = tile * every + within;
    if (within >= every || at >= p.outputs) continue;
    const float* total = totals + row * kColumns + within;
    const float sum = over_cluster(total, p.splits);
    const float second = p.gated ? over_cluster(total + every, p.splits) : sum;
    finish(p, row, at, second, sum);
  }
  meet_cluster();  // no block ends while another reads its shared memory
#endif
}

// Norms a row a block.
__global__ void __launch_bounds__(kNormThreads) norm_kernel(const Norm n) {
#if __CUDA_ARCH__ >= 900
  __shared__ float sums[kNormThreads / 32];
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
  asm volatile("griddepcontrol.wait;" ::: "memory");
  const int64_t row = int64_t(blockIdx.x) * n.width;
  float sum = 0;
  for (int at = threadIdx.x * 8; at < n.width; at += kNormThreads * 8) {
    const uint4 piece = *reinterpret_cast<const uint4*>(n.x + row + at);
    const auto* values = reinterpret_cast<const uint16_t*>(&piece);
#pragma unroll
    for (int i = 0; i < 8; ++i) sum += loaded(values + i) * loaded(values + i);
  }
  for (int offset = 16; offset; offset /= 2) sum += __shfl_xor_sync(~0u, sum, offset);
  if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = sum;
  __syncthreads();
  sum = 0;
  for (float part : sums) sum += part;
  const float root = __frsqrt_rn(sum / n.width + n.eps);
  for (int at = threadIdx.x * 8; at < n.width; at += kNormThreads * 8) {
    uint4 piece = *reinterpret_cast<const uint4*>(n.x + row + at);
    const uint4 scale = *reinterpret_cast<const uint4*>(n.scale + at);
    auto* values = reinterpret_cast<uint16_t*>(&piece);
    const auto* by = reinterpret_cast<const uint16_t*>(&scale);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const float y = rounded(loaded(values + i) * root) * loaded(by + i);
      values[i] = __bfloat16_as_ushort(__float2bfloat16_rn(y));
    }
    *reinterpret_cast<uint4*>(n.out + row + at) = piece;
  }
#endif
}

// Launches a kernel that may begin before the one before it ends, if `chained`.
template <typename Argument, typename... More>
cudaError_t start(void (*kernel)(Argument, More...), cudaLaunchConfig_t config, int splits,
                  bool chained, Argument argument, More... more) {
  cudaLaunchAttribute attributes[2];
  attributes[0].id = cudaLaunchAttributeClusterDimension;
  attributes[0].val.clusterDim = {unsigned(splits), 1, 1};
  attributes[1].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[1].val.programmaticStreamSerializationAllowed = 1;
  config.attrs = attributes;
  config.numAttrs = chained ? 2 : 1;
  return cudaLaunchKernelEx(&config, kernel, argument, more...);
}

template <int groups, int kStages>
cudaError_t launch(const Product& p, bool chained, Stream stream) {
  const int step = p.splits * kDepth, slice = (p.inputs + step - 1) / step * kDepth;
  const int every = p.gated ? kColumns / 2 : kColumns;
  constexpr int bytes = kStages * kStageBytes<groups>;
  cudaError_t error = cudaFuncSetAttribute(product_kernel<groups, kStages>,
                                           cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
  if (error != cudaSuccess) return error;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(p.splits, (p.outputs + every - 1) / every);
  config.blockDim = dim3(kThreads);
  config.dynamicSmemBytes = bytes;
  config.stream = stream;
  return start(product_kernel<groups, kStages>, config, p.splits, chained, p, slice);
}

template <int groups>
cudaError_t launch_rows(const Product& p, bool chained, Stream stream) {
  return p.stages <= 4   ? launch<groups, 4>(p, chained, stream)
         : p.stages <= 6 ? launch<groups, 6>(p, chained, stream)
                         : launch<groups, 8>(p, chained, stream);
}

const char* text(cudaError_t error) {
  return error == cudaSuccess ? nullptr : cudaGetErrorString(error);
}

}  // namespace

const char* multiply(const Product& p, bool chained, Stream stream) {
  return text(p.rows <= 8    ? launch_rows<1>(p, chained, stream)
              : p.rows <= 16 ? launch_rows<2>(p, chained, stream)
              : p.rows <= 32 ? launch_rows<4>(p, chained, stream)
                             : launch_rows<8>(p, chained, stream));
}

const char* norm(const Norm& n, bool chained, Stream stream) {
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(n.rows);
  config.blockDim = dim3(kNormThreads);
  config.stream = stream;
  return text(start(norm_kernel, config, 1, chained, n));
}

}  // namespace jspec
