// SPDX-License-Identifier: Apache-2.0
// Launches kernels, always on a given stream and within the limits of a grid, and reduces over the threads of a block,
// and over blocks that finish in any order, with the same bits in every run. Include it in .cu files only.
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
// Largest grid. More blocks gain nothing; each block then runs several of the work's blocks.
constexpr int64_t kMaxBlocks = 1 << 14;

constexpr int64_t Blocks(int64_t items, int64_t items_per_block) {
  return std::clamp<int64_t>((items + items_per_block - 1) / items_per_block, 1, kMaxBlocks);
}

// Launches with `shared_bytes` bytes of DynamicShared() for each block. Above 48 KiB, the caller must have raised the
// kernel's limit first (cudaFuncSetAttribute).
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

// Returns the block's shared memory, of the size given at the launch, aligned to 32 bytes.
#ifdef __CUDACC__
__device__ inline void* DynamicShared() {
  extern __shared__ __align__(32) double dynamic_shared[];
  return dynamic_shared;
}
#else
void* DynamicShared();  // the host's imitation of CUDA defines it
#endif

// Returns the launch's own error. A later call on the stream returns an error of the kernel.
template <typename... Params, typename... Args>
cudaError_t Launch(cudaStream_t stream, dim3 grid, dim3 block, void (*kernel)(Params...), Args&&... args) {
  return LaunchWithShared(stream, grid, block, 0, kernel, std::forward<Args>(args)...);
}

// Returns the last job whose `first` is at most `unit`. Jobs are in the order of `first`, and none is empty. All lanes
// of a warp must call it with the same arguments. It looks at 32 jobs at once: among a thousand jobs a block waits for
// two loads, where a binary search waits for ten, one after another.
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

// The range of blocks of work that a block of the grid runs. They are neighbours, because neighbours seldom belong to
// different jobs. There are fewer than 2^31 blocks of work.
struct Share {
  unsigned begin, end;
};
__device__ inline Share ShareOf(int64_t blocks) {
  const unsigned all = static_cast<unsigned>(blocks), each = (all + gridDim.x - 1) / gridDim.x;
  const unsigned begin = blockIdx.x * each;
  return {begin, std::min(begin + each, all)};
}

// The argument of a kernel that can run one job, which travels with the launch (OneJob), or many jobs in device memory
// (ManyJobs).
//
// Of returns a block's job, possibly in device memory; a kernel copies it. InShared returns a large job in shared
// memory, where no store of results can change it. The reference is valid until the next call. All threads of the block
// must call it, with the blocks of their share in order.
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
    __shared__ unsigned next;  // first block of the following job
    void* const to = bytes;
    if (block == share.begin || block >= next) {
      const Job* const from = &Of(block);
      __syncthreads();  // waits until no thread reads the previous job
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

// Combines the values of all threads of a block in a fixed order and returns the result in thread 0; the return value
// of other threads is unspecified. All kThreads threads of the block must call it.
template <unsigned kThreads, typename Combine>
__device__ double CombineBlock(double value, Combine combine) {
  __shared__ double of_warp[kThreads / kWarp];
  for (unsigned offset = kWarp / 2; offset > 0; offset /= 2) {
    value = combine(value, __shfl_down_sync(0xffffffffu, value, offset));
  }
  __syncthreads();  // waits for threads that still read of_warp in an earlier call
  if (threadIdx.x % kWarp == 0) of_warp[threadIdx.x / kWarp] = value;
  __syncthreads();
  if (threadIdx.x == 0) {
    for (unsigned warp = 1; warp < kThreads / kWarp; ++warp) value = combine(value, of_warp[warp]);
  }
  return value;
}

struct Add {
  __device__ double operator()(double a, double b) const { return a + b; }
};

// Returns true in the last of `blocks` blocks that call it. That block sees everything that thread 0 of each other
// block wrote before its call; the call does not wait for the stores of other threads. All threads of each block must
// call it. Two calls share `last`, so a barrier must lie between them (CombineBlock has one). Precondition: *arrived is
// 0 before the first call.
__device__ inline bool IsLastBlockByFirstThread(unsigned* arrived, unsigned blocks) {
  __shared__ bool last;
  if (threadIdx.x == 0) {
    __threadfence();
    last = atomicAdd(arrived, 1u) == blocks - 1;
    __threadfence();
  }
  __syncthreads();
  return last;
}

}  // namespace precondor::cuda
