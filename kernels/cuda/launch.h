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
// Grids beyond this many blocks gain nothing; kernels take what is left in strides of the grid.
constexpr int64_t kMaxBlocks = 1 << 16;

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

// The block's shared memory of the size that the launch says, aligned for f64.
#ifdef __CUDACC__
__device__ inline void* DynamicShared() {
  extern __shared__ double dynamic_shared[];
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

// The last job whose `first` is not beyond `unit`: jobs are in the order of theirs, and none is empty.
template <typename Job>
__device__ const Job& JobOf(const Job* jobs, int count, int64_t unit) {
  int low = 0, high = count;
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    (jobs[middle].first <= unit ? low : high) = middle;
  }
  return jobs[low];
}

// What a kernel takes that runs one job, which travels with the launch, or many in device memory.
//
// Of gives a job in device memory, which a kernel copies. InShared gives a large job in shared memory, where no store
// of results can change it; it stays until the block's next call, and all threads of the block take part.
template <typename Job>
struct OneJob {
  Job job;
  __device__ const Job& Of(int64_t) const { return job; }
  __device__ const Job& InShared(int64_t) const { return job; }
};
template <typename Job>
struct ManyJobs {
  const Job* jobs;
  int count;
  __device__ const Job& Of(int64_t block) const { return JobOf(jobs, count, block); }
  __device__ const Job& InShared(int64_t block) const {
    constexpr unsigned kWords = sizeof(Job) / sizeof(uint32_t);
    static_assert(sizeof(Job) % sizeof(uint32_t) == 0 && std::is_trivially_copyable_v<Job>);
    alignas(Job) __shared__ unsigned char bytes[sizeof(Job)];
    const void* const from = &Of(block);
    void* const to = bytes;
    __syncthreads();  // no thread reads the job before any more
    for (unsigned at = threadIdx.x; at < kWords; at += blockDim.x) {
      memcpy(static_cast<uint32_t*>(to) + at, static_cast<const uint32_t*>(from) + at, sizeof(uint32_t));
    }
    __syncthreads();
    return *static_cast<const Job*>(to);
  }
};

template <typename Jobs>
cudaError_t LaunchJobs(cudaStream_t stream, int64_t blocks, unsigned threads, void (*kernel)(Jobs, int64_t),
                       Jobs jobs) {
  return Launch(stream, dim3(static_cast<unsigned>(std::min(blocks, kMaxBlocks))), dim3(threads), kernel, jobs, blocks);
}

}  // namespace precondor::cuda
