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

// An attribute of the device that launches go to.
inline int device_attribute(cudaDeviceAttr attribute) {
  int device, value;
  cudaGetDevice(&device);
  cudaDeviceGetAttribute(&value, attribute, device);
  return value;
}

inline int multiprocessors() { return device_attribute(cudaDevAttrMultiProcessorCount); }

// Whether the device has clusters, and launches that depend on each other.
inline bool is_hopper_or_newer() {
  return device_attribute(cudaDevAttrComputeCapabilityMajor) >= 9;
}

// Whether the device has the instructions that Hopper alone has (sm_90a).
inline bool is_hopper() { return device_attribute(cudaDevAttrComputeCapabilityMajor) == 9; }

// Launches `kernel` in clusters of so many blocks that differ in x. `early`: it may start before the
// kernel ahead of it, one of the same call, has ended, and calls wait_for_kernels_ahead() in every
// thread.
template <typename... Parameters>
const char* launch_clusters(void (*kernel)(Parameters...), int cluster, dim3 blocks, int threads,
                            int bytes, bool early, Stream stream, const Parameters&... arguments) {
  allow_shared_memory(kernel, bytes);
  early = early && is_hopper_or_newer();
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
