// What the programs of this folder share: arrays on the device, and an end where a launch fails.
#pragma once

#include <cuda_runtime.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "common/bfloat16_cpu.h"

// An array on the device, of exactly its size, so that a byte beyond it is an error.
template <typename T>
struct Device {
  T* data = nullptr;
  size_t size;

  explicit Device(const std::vector<T>& host) : Device(host.size()) {
    if (size) cudaMemcpy(data, host.data(), size * sizeof(T), cudaMemcpyHostToDevice);
  }
  explicit Device(size_t count) : size(count) {
    if (size) cudaMalloc(&data, size * sizeof(T));
    fill(0xA5);  // not what a kernel should write
  }
  ~Device() { cudaFree(data); }

  void fill(int byte) {
    if (size) cudaMemset(data, byte, size * sizeof(T));
  }

  // Whether it begins with what is wanted.
  bool holds(const std::vector<T>& want) const {
    std::vector<T> host(want.size());
    cudaMemcpy(host.data(), data, host.size() * sizeof(T), cudaMemcpyDeviceToHost);
    return host.empty() || !std::memcmp(host.data(), want.data(), host.size() * sizeof(T));
  }
};

// A bool that std::vector holds as a byte.
struct Flag {
  bool value;
};

// Waits for a kernel, and ends the program where it failed.
inline void launched(const char* error) {
  if (!error && cudaDeviceSynchronize() != cudaSuccess) error = "a kernel failed";
  if (!error) return;
  std::printf("%s\n", error);
  std::exit(1);
}

inline int random_below(int64_t below) {
  return (int64_t(std::rand()) << 16 ^ std::rand()) % below;
}

// Budgets and lengths of which some are 0, some whole, and some past the ends.
inline std::vector<int32_t> some_counts(int rows, int most) {
  std::vector<int32_t> counts(rows);
  for (int32_t& x : counts) x = random_below(3) ? random_below(most + 3) - 1 : most;
  return counts;
}

// Random numbers of bfloat16 in -2 .. 2.
inline std::vector<uint16_t> random_values(size_t count) {
  std::vector<uint16_t> values(count);
  for (uint16_t& x : values) x = jspec::narrow((random_below(2001) - 1000) / 500.0f);
  return values;
}

// Whether what lies on the device is near `want`, which may be infinite.
template <typename T>
bool near(const Device<T>& got, const std::vector<T>& want, float tolerance,
          float (*wide_of)(std::common_type_t<T>)) {
  std::vector<T> host(want.size());
  cudaMemcpy(host.data(), got.data, host.size() * sizeof(T), cudaMemcpyDeviceToHost);
  for (size_t i = 0; i < want.size(); ++i) {
    const float x = wide_of(host[i]), y = wide_of(want[i]);
    if (x != y && !(std::abs(x - y) <= tolerance)) return false;
  }
  return true;
}
