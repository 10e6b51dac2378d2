// SPDX-License-Identifier: Apache-2.0
// How kernels are launched: always on a named stream, with the grid's limits respected. For .cu files alone.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cuda_runtime.h>
#include <utility>

#include "kernels/cuda/launch_count.h"

namespace precondor::cuda {

constexpr unsigned kWarp = 32;
// Grids beyond this many blocks gain nothing; kernels take what is left in strides of the grid.
constexpr int64_t kMaxBlocks = 1 << 16;

constexpr int64_t Blocks(int64_t items, int64_t items_per_block) {
  return std::clamp<int64_t>((items + items_per_block - 1) / items_per_block, 1, kMaxBlocks);
}

// The launch's own error; what the kernel does wrong shows at a later call on the stream.
template <typename... Params, typename... Args>
cudaError_t Launch(cudaStream_t stream, dim3 grid, dim3 block, void (*kernel)(Params...), Args&&... args) {
  ++launch_count;
  cudaLaunchConfig_t config = {};
  config.gridDim = grid;
  config.blockDim = block;
  config.stream = stream;
  return cudaLaunchKernelEx(&config, kernel, std::forward<Args>(args)...);
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
template <typename Job>
struct OneJob {
  Job job;
  __device__ const Job& Of(int64_t) const { return job; }
};
template <typename Job>
struct ManyJobs {
  const Job* jobs;
  int count;
  __device__ const Job& Of(int64_t block) const { return JobOf(jobs, count, block); }
};

template <typename Jobs>
cudaError_t LaunchJobs(cudaStream_t stream, int64_t blocks, unsigned threads, void (*kernel)(Jobs, int64_t),
                       Jobs jobs) {
  return Launch(stream, dim3(static_cast<unsigned>(std::min(blocks, kMaxBlocks))), dim3(threads), kernel, jobs, blocks);
}

}  // namespace precondor::cuda
