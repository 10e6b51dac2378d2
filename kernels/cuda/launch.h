// SPDX-License-Identifier: Apache-2.0
// How kernels are launched: always on a named stream, with the grid's limits respected. For .cu files alone.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <cuda_runtime.h>
#include <type_traits>
#include <utility>

#include "kernels/cuda/launch_count.h"

namespace precondor::cuda {

constexpr unsigned kWarp = 32;
// Grids beyond this many blocks gain nothing; a block then has several of the work's blocks.
constexpr int64_t kMaxBlocks = 1 << 14;

constexpr int64_t Blocks(int64_t items, int64_t items_per_block) {
  return std::clamp<int64_t>((items + items_per_block - 1) / items_per_block, 1, kMaxBlocks);
}

// Launch with so many bytes of DynamicShared() for each block; beyond 48 KiB the kernel must have been allowed them.
template <typename... Params, typename... Args>
cudaError_t LaunchWithShared(cudaStream_t stream, dim3 grid, dim3 block, size_t shared_bytes, void (*kernel)(Params...),
                             Args&&... args) {
  ++launch_count;
  cudaLaunchConfig_t config = {};
  config.gridDim = grid;
  config.blockDim = block;
  config.dynamicSmemBytes = shared_bytes;
  config.stream = stream;
  return cudaLaunchKernelEx(&config, kernel, std::forward<Args>(args)...);
}

// The block's shared memory of the size that the launch says, at a multiple of 32 bytes.
#ifdef __CUDACC__
__device__ inline void* DynamicShared() {
  extern __shared__ __align__(32) double dynamic_shared[];
  return dynamic_shared;
}
#else
void* DynamicShared();  // CUDA on the host defines it
#endif

// The launch's own error; what the kernel does wrong shows at a later call on the stream.
template <typename... Params, typename... Args>
cudaError_t Launch(cudaStream_t stream, dim3 grid, dim3 block, void (*kernel)(Params...), Args&&... args) {
  return LaunchWithShared(stream, grid, block, 0, kernel, std::forward<Args>(args)...);
}

// The last job whose `first` is not beyond `unit`: jobs are in the order of theirs, and none is empty. All lanes of a
// warp take part, with the same arguments. Each look is at 32 jobs at once: a block waits for two loads among a
// thousand jobs, where halving would wait for ten, one after the other.
template <typename Job>
__device__ const Job& JobOf(const Job* jobs, int count, int64_t unit) {
  constexpr int kLanes = static_cast<int>(kWarp);
  const int lane = static_cast<int>(threadIdx.x % kWarp);
  int begin = 0;
  while (count > 1) {
    const int step = (count + kLanes - 1) / kLanes;
    const bool reached = lane * step < count && jobs[begin + lane * step].first <= unit;
    const int steps = __popc(__ballot_sync(0xffffffffu, reached)) - 1;
    begin += steps * step;
    count = std::min(step, count - steps * step);
  }
  return jobs[begin];
}

// Which of so many blocks of work a block of the grid does: neighbours, which seldom change their job.
// There are fewer than 2^31.
struct Share {
  unsigned begin, end;
};
__device__ inline Share ShareOf(int64_t blocks) {
  const unsigned all = static_cast<unsigned>(blocks), each = (all + gridDim.x - 1) / gridDim.x;
  const unsigned begin = blockIdx.x * each;
  return {begin, std::min(begin + each, all)};
}

// What a kernel takes that runs one job, which travels with the launch, or many in device memory.
//
// Of gives a job in device memory, which a kernel copies. InShared gives a large job in shared memory, where no store
// of results can change it; it stays until the block's next call, and all threads of the block take part. A block asks
// for its share's blocks in their order.
template <typename Job>
struct OneJob {
  Job job;
  __device__ const Job& Of(int64_t) const { return job; }
  __device__ const Job& InShared(Share, unsigned) const { return job; }
};
template <typename Job>
struct ManyJobs {
  const Job* jobs;
  int count;
  __device__ const Job& Of(int64_t block) const { return JobOf(jobs, count, block); }
  __device__ const Job& InShared(Share share, unsigned block) const {
    constexpr unsigned kWords = sizeof(Job) / sizeof(uint32_t);
    static_assert(sizeof(Job) % sizeof(uint32_t) == 0 && std::is_trivially_copyable_v<Job>);
    alignas(Job) __shared__ unsigned char bytes[sizeof(Job)];
    __shared__ unsigned next;  // the first block of the job after it
    void* const to = bytes;
    if (block == share.begin || block >= next) {
      const Job* const from = &Of(block);
      __syncthreads();  // no thread reads the job before any more
      for (unsigned at = threadIdx.x; at < kWords; at += blockDim.x) {
        memcpy(static_cast<uint32_t*>(to) + at, reinterpret_cast<const uint32_t*>(from) + at, sizeof(uint32_t));
      }
      if (threadIdx.x == 0) next = from - jobs + 1 < count ? static_cast<unsigned>(from[1].first) : share.end;
      __syncthreads();
    }
    return *static_cast<const Job*>(to);
  }
};

template <typename Jobs>
cudaError_t LaunchJobs(cudaStream_t stream, int64_t blocks, unsigned threads, void (*kernel)(Jobs, int64_t),
                       Jobs jobs) {
  return Launch(stream, dim3(static_cast<unsigned>(std::min(blocks, kMaxBlocks))), dim3(threads), kernel, jobs, blocks);
}

}  // namespace precondor::cuda
