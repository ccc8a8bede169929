// CUB's top-k as a handler of XLA's FFI. It is compiled for one case: CUB_SCORES is the type of the
// scores, CUB_N of which a row has, CUB_K the slots to select of it, and CUB_BATCHED or CUB_STABLE
// says which call.

// CCCL 3.6 has an assertion about GPUs that its calls cannot serve. nvcc 13.0 also evaluates it in a
// branch that is not taken, so that stable requests do not compile. Such a GPU is refused earlier.
#define CUB_DISABLE_TOPK_UNSUPPORTED_ARCH_ASSERT

#include <cub/device/device_batched_topk.cuh>
#include <cuda/iterator>
#include <cuda/stream_ref>
#include <cuda_bf16.h>

#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;
namespace execution = cuda::execution;

namespace {

using Scores = CUB_SCORES;
constexpr int n = CUB_N;
constexpr int k = CUB_K;

// Where the keys go, which nobody asks for, and where the values come from: a row's slots.
auto nowhere() { return cuda::make_discard_iterator(); }
auto counted() { return cuda::make_counting_iterator(int32_t{0}); }

// All rows at once, in any order: of equal scores any, or the first.
cudaError_t select(const Scores* scores, int32_t* slots, int rows, void* workspace, size_t& bytes,
                   cudaStream_t stream) {
#ifdef CUB_STABLE
  const auto asked = execution::require(execution::determinism::gpu_to_gpu,
                                        execution::tie_break::prefer_smaller_index,
                                        execution::output_ordering::unsorted);
#else
  const auto asked = execution::require(execution::determinism::not_guaranteed,
                                        execution::tie_break::unspecified,
                                        execution::output_ordering::unsorted);
#endif
  const cuda::std::execution::env env{cuda::stream_ref{stream}, asked};
  const auto row = [](auto* first, auto size) {
    return cuda::make_strided_iterator(cuda::make_counting_iterator(first), size);
  };
  return cub::DeviceBatchedTopK::MaxPairs(
      workspace, bytes, row(scores, cuda::std::integral_constant<int, n>{}),
      cuda::make_constant_iterator(nowhere()), cuda::make_constant_iterator(counted()),
      row(slots, cuda::std::integral_constant<int, k>{}), cuda::args::constant<n>{},
      cuda::args::constant<k>{}, rows, env);
}

// Results: slots [rows, k], workspace of as many bytes as `jspec_cub_workspace` says.
ffi::Error call(cudaStream_t stream, ffi::AnyBuffer scores, ffi::ResultBufferR2<ffi::S32> slots,
                ffi::ResultBufferR1<ffi::U8> workspace) {
  const int64_t rows = slots->dimensions()[0];
  if (scores.size_bytes() != rows * n * sizeof(Scores) || slots->dimensions()[1] != k) {
    return ffi::Error::InvalidArgument("it was compiled for another case");
  }
  size_t bytes = workspace->size_bytes();
  const cudaError_t error =
      select(static_cast<const Scores*>(scores.untyped_data()), slots->typed_data(),
             static_cast<int>(rows), workspace->untyped_data(), bytes, stream);
  return error == cudaSuccess ? ffi::Error::Success()
                              : ffi::Error::Internal(cudaGetErrorString(error));
}

}  // namespace

// Bytes that the call needs beside its results, or an error of CUDA's below 0.
extern "C" int64_t jspec_cub_workspace(int rows) {
  size_t bytes = 0;
  const cudaError_t error = select(nullptr, nullptr, rows, nullptr, bytes, nullptr);
  return error == cudaSuccess ? static_cast<int64_t>(bytes) : -static_cast<int64_t>(error);
}

XLA_FFI_DEFINE_HANDLER_SYMBOL(jspec_cub_select, call,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::PlatformStream<cudaStream_t>>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Ret<ffi::BufferR2<ffi::S32>>()
                                  .Ret<ffi::BufferR1<ffi::U8>>(),
                              {ffi::Traits::kCmdBufferCompatible});
