// SPDX-License-Identifier: Apache-2.0
#include "kernels/base/payload_digest.h"
#include "kernels/cuda/launch.h"
#include "kernels/cuda/payload_facts.h"

namespace precondor::cuda {
namespace {

constexpr unsigned kThreads = 256;
constexpr int kTogether = 8;  // number of elements that a thread loads before it waits for the first
constexpr int64_t kBlockElements = 4 * kTogether * kThreads;
constexpr uint32_t kExponent = 0x7f800000u;  // all exponent bits; all ones mean infinity or NaN

__device__ void Add(uint64_t value, uint64_t* sum) {
  static_assert(sizeof(unsigned long long) == sizeof(uint64_t));
  atomicAdd(reinterpret_cast<unsigned long long*>(sum), static_cast<unsigned long long>(value));
}

__global__ void __launch_bounds__(kThreads) SumPayloadsKernel(ManyJobs<PayloadJob> jobs, int64_t blocks) {
  __shared__ uint64_t digests[kThreads / kWarp], counts[kThreads / kWarp];
  const Share share = ShareOf(blocks);
  for (unsigned block = share.begin; block < share.end; ++block) {
    const PayloadJob job = jobs.Of(block);
    const ConstMatrixView x = job.x;
    const bool contiguous = x.stride == x.cols;
    const int64_t first = (block - job.first) * kBlockElements;
    const int64_t end = std::min(first + kBlockElements, x.rows * x.cols);
    uint64_t digest = 0, not_finite = 0;
    for (int64_t begin = first + threadIdx.x; begin < end; begin += kTogether * kThreads) {
      float values[kTogether];
#pragma unroll
      for (int u = 0; u < kTogether; ++u) {
        const int64_t at = begin + u * kThreads;
        values[u] = at < end ? x.data[contiguous ? at : at / x.cols * x.stride + at % x.cols] : 0.0f;
      }
#pragma unroll
      for (int u = 0; u < kTogether; ++u) {
        const int64_t at = begin + u * kThreads;
        if (at >= end) continue;
        uint32_t bits;
        memcpy(&bits, &values[u], sizeof(bits));
        digest += PayloadTerm(static_cast<uint64_t>(at), bits);
        not_finite += (bits & kExponent) == kExponent;
      }
    }
    for (unsigned offset = kWarp / 2; offset > 0; offset /= 2) {
      digest += __shfl_down_sync(0xffffffffu, digest, offset);
      not_finite += __shfl_down_sync(0xffffffffu, not_finite, offset);
    }
    if (threadIdx.x % kWarp == 0) {
      digests[threadIdx.x / kWarp] = digest;
      counts[threadIdx.x / kWarp] = not_finite;
    }
    __syncthreads();
    if (threadIdx.x == 0) {
      for (unsigned warp = 1; warp < kThreads / kWarp; ++warp) {
        digest += digests[warp];
        not_finite += counts[warp];
      }
      Add(digest, &job.sums->digest);
      if (not_finite > 0) Add(not_finite, &job.sums->not_finite);
    }
    __syncthreads();
  }
}

}  // namespace

int64_t PayloadBlocks(ConstMatrixView x) {
  return std::max<int64_t>((x.rows * x.cols + kBlockElements - 1) / kBlockElements, 1);
}

cudaError_t SumPayloads(cudaStream_t stream, const PayloadJob* jobs, int count, int64_t blocks) {
  return LaunchJobs(stream, blocks, kThreads, SumPayloadsKernel, ManyJobs<PayloadJob>{jobs, count});
}

}  // namespace precondor::cuda
