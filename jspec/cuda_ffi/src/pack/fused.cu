// Verification fused with packing on a GPU.
#include "pack/move.cuh"

namespace jspec {
namespace {

// One block for the whole batch of at most 32: a warp a sequence, a scan by the first warp.
template <typename Token, int chunks>
__global__ void __launch_bounds__(1024) single_kernel(const Greedy greedy, const Pack pack,
                                                      int access) {
  __shared__ int offsets[32], counts[32];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  if (lane == 0) counts[warp] = 0;
  __syncwarp();
  if (warp < pack.batch) {
    verify_warp<Token, chunks>(greedy, warp, [&](int count, int, bool) { counts[warp] = count; });
  }
  __syncthreads();
  if (warp == 0) {
    int end = counts[lane];
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      const int before = __shfl_up_sync(kAllLanes, end, step);
      if (lane >= step) end += before;
    }
    offsets[lane] = end - counts[lane];
    if (lane < pack.batch) pack.offsets[lane] = offsets[lane];
    if (lane == 31) *pack.total = end;
  }
  __syncthreads();
  const char* from = pack.kv + warp * pack.gamma * pack.row_bytes;
  char* to = pack.packed + offsets[warp] * pack.row_bytes;
  copy(from, to, counts[warp] * pack.row_bytes, access, lane, 32);
}

}  // namespace

const char* verify_and_pack(const Greedy& greedy, const Pack& given, const Cut& cut,
                            Stream stream) {
  if (!cut.recounts) {
    if (const char* error = verify_ballot(greedy, 4, stream)) return error;
    Pack packing = given;
    packing.accepted = greedy.accepted;
    return pack(packing, cut, stream);
  }
  return for_greedy(greedy, [&](auto token, auto chunks) {
    return launch_move(Counting<decltype(token), chunks.value>{{given}, greedy}, given.kv,
                       given.packed, given.batch, given.gamma * given.row_bytes,
                       given.row_bytes, cut, stream);
  });
}

const char* verify_and_pack_single(const Greedy& greedy, const Pack& pack, Stream stream) {
  const int access = access_bytes(pack.kv, pack.packed, pack.row_bytes);
  return for_greedy(greedy, [&](auto token, auto chunks) {
    single_kernel<decltype(token), chunks.value><<<1, 1024, 0, stream>>>(greedy, pack, access);
    return launch_error();
  });
}

}  // namespace jspec
