// Kernels of one call that follow each other: each starts before the one ahead of it has ended, and
// reads what no kernel of the call writes meanwhile (programmatic dependent launch, from compute
// capability 9.0 on).
#pragma once

#include "common/launch.h"
#include "common/warp.cuh"

namespace jspec {

// Lets the next kernel start as soon as there is room for its blocks.
__device__ __forceinline__ void let_next_start() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// Waits until the kernels ahead have ended, and sees what they wrote.
__device__ __forceinline__ void wait_for_kernels_ahead() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Lets `kernel` have so many bytes of shared memory.
template <typename Kernel>
void allow_shared_memory(Kernel kernel, int bytes) {
  if (bytes > 48 * 1024) {
    cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
  }
}

// Of the device that launches go to.
inline int multiprocessors() {
  int device, count;
  cudaGetDevice(&device);
  cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device);
  return count;
}

// Launches `kernel`, which calls wait_for_kernels_ahead() in every thread, in clusters of so many
// blocks that differ in x. `early`: it may start before the kernel ahead of it, one of the same
// call, has ended.
template <typename... Parameters>
const char* launch_clusters(void (*kernel)(Parameters...), int cluster, dim3 blocks, int threads,
                            int bytes, bool early, Stream stream, const Parameters&... arguments) {
  allow_shared_memory(kernel, bytes);
  if (early) {
    int device, major;
    cudaGetDevice(&device);
    cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
    early = major >= 9;
  }
  cudaLaunchConfig_t config{};
  config.gridDim = blocks;
  config.blockDim = dim3(threads);
  config.dynamicSmemBytes = bytes;
  config.stream = stream;
  cudaLaunchAttribute attributes[2]{};
  if (early) {
    cudaLaunchAttribute& attribute = attributes[config.numAttrs++];
    attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attribute.val.programmaticStreamSerializationAllowed = 1;
  }
  if (cluster > 1) {
    cudaLaunchAttribute& attribute = attributes[config.numAttrs++];
    attribute.id = cudaLaunchAttributeClusterDimension;
    attribute.val.clusterDim.x = cluster;
    attribute.val.clusterDim.y = attribute.val.clusterDim.z = 1;
  }
  config.attrs = attributes;
  cudaLaunchKernelEx(&config, kernel, arguments...);
  return launch_error();
}

// The same, without clusters.
template <typename... Parameters>
const char* launch_behind(void (*kernel)(Parameters...), dim3 blocks, int threads, int bytes,
                          bool early, Stream stream, const Parameters&... arguments) {
  return launch_clusters(kernel, 1, blocks, threads, bytes, early, stream, arguments...);
}

}  // namespace jspec
