// SPDX-License-Identifier: Apache-2.0
#include "kernels/base/payload_digest.h"
#include "kernels/cuda/launch.h"
#include "kernels/cuda/payload_facts.h"

namespace precondor::cuda {
namespace {

constexpr unsigned kThreads = 256;
constexpr int64_t kElementsOfPiece = 16 * kThreads;
constexpr int kTogether = 8;                 // number of elements that a thread loads before it waits for the first
constexpr uint32_t kExponent = 0x7f800000u;  // all exponent bits; all ones mean infinity or NaN

template <bool kContiguous>
__global__ void __launch_bounds__(kThreads) SumPayloadKernel(ConstMatrixView x, PayloadSums* sums) {
  __shared__ uint64_t digests[kThreads / kWarp], counts[kThreads / kWarp];
  const int64_t size = x.rows * x.cols;
  uint64_t digest = 0, not_finite = 0;
  const int64_t step = int64_t{gridDim.x} * kThreads;
  for (int64_t begin = int64_t{blockIdx.x} * kThreads + threadIdx.x; begin < size; begin += kTogether * step) {
    float values[kTogether];
#pragma unroll
    for (int u = 0; u < kTogether; ++u) {
      const int64_t at = begin + u * step;
      values[u] = at < size ? x.data[kContiguous ? at : at / x.cols * x.stride + at % x.cols] : 0.0f;
    }
#pragma unroll
    for (int u = 0; u < kTogether; ++u) {
      const int64_t at = begin + u * step;
      if (at >= size) continue;
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
  if (threadIdx.x != 0) return;
  for (unsigned warp = 1; warp < kThreads / kWarp; ++warp) {
    digest += digests[warp];
    not_finite += counts[warp];
  }
  sums[blockIdx.x] = {digest, not_finite};
}

}  // namespace

int64_t PayloadPieces(ConstMatrixView x) {
  return std::clamp<int64_t>((x.rows * x.cols + kElementsOfPiece - 1) / kElementsOfPiece, 1, kMaxPayloadPieces);
}

cudaError_t SumPayload(cudaStream_t stream, ConstMatrixView x, PayloadSums* sums) {
  return Launch(stream, dim3(static_cast<unsigned>(PayloadPieces(x))), dim3(kThreads),
                x.contiguous() ? SumPayloadKernel<true> : SumPayloadKernel<false>, x, sums);
}

}  // namespace precondor::cuda
