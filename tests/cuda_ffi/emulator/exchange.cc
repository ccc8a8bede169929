// The CUDA kernels of one-sided messages, for a CPU. Devices call them from threads of their own.
// The last one of a group to come runs all blocks of all devices together, as if of one cluster.
#include <condition_variable>
#include <utility>

#include "cuda_runtime.h"

namespace emulator {

struct Launch {
  dim3 blocks;
  std::function<void()> kernel;
};

inline std::map<int, std::vector<Launch>> groups;  // of devices that have come, by the first one
inline std::map<int, int64_t> runs;                // of each group
inline std::mutex coming;
inline std::condition_variable ran;

inline void run_together(const std::vector<Launch>& devices, int threads) {
  const std::lock_guard<std::mutex> lock(one_at_a_time);
  const dim3 blocks = devices[0].blocks;
  const int each = blocks.x * blocks.y;
  gridDim = blocks, blockDim = dim3(threads), shared_bytes = 0;
  body = [&] {
    const int block = rank % each;
    blockIdx = dim3(block % blocks.x, block / blocks.x);
    devices[rank / each].kernel();
  };
  run_cluster(dim3(0, 0), each * int(devices.size()), threads);
}

}  // namespace emulator

// Of kernels that take a call of a group and the peers' workspaces, more special than any other.
template <typename Call, typename Peers>
cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t* config, void (*kernel)(Call, Peers),
                               const Call& call, const Peers& peers) {
  using namespace emulator;
  std::unique_lock<std::mutex> lock(coming);
  const int group = call.group.first;
  const int64_t run = runs[group];
  groups[group].push_back({config->gridDim, [=] { kernel(call, peers); }});
  if (int(groups[group].size()) < call.group.ranks) {
    ran.wait(lock, [&] { return runs[group] > run; });
    return cudaSuccess;
  }
  const auto devices = std::exchange(groups[group], {});
  run_together(devices, config->blockDim.x);
  ++runs[group];
  ran.notify_all();
  return cudaSuccess;
}

#include "exchange/exchange.cu"

namespace jspec {
namespace {
EMULATOR_SHARED_MEMORY
}
}  // namespace jspec
