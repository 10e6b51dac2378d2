// SPDX-License-Identifier: Apache-2.0
// The host's imitation of a device, where tests of kernels lean on it: barriers, shuffles, streams that run later.
#include "tests/support/cuda_host/cuda_host.h"

#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace precondor::cuda_host {
namespace {

void Reverse(const int* in, int* out) {
  __shared__ int block[96];
  block[threadIdx.x] = in[blockIdx.x * blockDim.x + threadIdx.x];
  __syncthreads();
  out[blockIdx.x * blockDim.x + threadIdx.x] = block[blockDim.x - 1 - threadIdx.x];
}

void SumOfWarp(const int* in, int* out) {
  int sum = in[threadIdx.x];
  for (int offset = 16; offset > 0; offset /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, offset);
  out[threadIdx.x] = sum;
}

void BarrierOfTheFirstHalf() {
  if (threadIdx.x < 32) __syncthreads();
}

class CudaHostTest : public testing::Test {
 protected:
  CudaHostTest() { EXPECT_EQ(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), cudaSuccess); }
  ~CudaHostTest() override { EXPECT_EQ(cudaStreamDestroy(stream_), cudaSuccess); }
  cudaLaunchConfig_t Config(unsigned blocks, unsigned threads) const {
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3(blocks);
    config.blockDim = dim3(threads);
    config.stream = stream_;
    return config;
  }
  cudaStream_t stream_ = nullptr;
};

TEST_F(CudaHostTest, ThreadsOfABlockMeetAtBarriers) {
  std::vector<int> in(3 * 96), out(in.size());
  for (size_t i = 0; i < in.size(); ++i) in[i] = static_cast<int>(i);
  const cudaLaunchConfig_t config = Config(3, 96);
  ASSERT_EQ(cudaLaunchKernelEx(&config, Reverse, in.data(), out.data()), cudaSuccess);
  ASSERT_EQ(cudaStreamSynchronize(stream_), cudaSuccess);
  for (int i = 0; i < 3 * 96; ++i) EXPECT_EQ(out[i], i / 96 * 96 + 95 - i % 96);
}

TEST_F(CudaHostTest, LanesOfAWarpSeeEachOther) {
  std::vector<int> in(64), out(64);
  for (int i = 0; i < 64; ++i) in[i] = i;
  const cudaLaunchConfig_t config = Config(1, 64);
  ASSERT_EQ(cudaLaunchKernelEx(&config, SumOfWarp, in.data(), out.data()), cudaSuccess);
  ASSERT_EQ(cudaStreamSynchronize(stream_), cudaSuccess);
  for (int i = 0; i < 64; ++i) EXPECT_EQ(out[i], i < 32 ? 31 * 16 : 31 * 16 + 32 * 32);
}

TEST_F(CudaHostTest, WorkRunsWhenSomebodyWaits) {
  int in = 1, out = 0;
  cudaEvent_t event;
  ASSERT_EQ(cudaEventCreateWithFlags(&event, cudaEventDisableTiming), cudaSuccess);
  ASSERT_EQ(cudaMemcpy2DAsync(&out, 4, &in, 4, 4, 1, cudaMemcpyHostToHost, stream_), cudaSuccess);
  ASSERT_EQ(cudaEventRecord(event, stream_), cudaSuccess);
  in = 2;
  ASSERT_EQ(cudaMemsetAsync(&in, 0, 4, stream_), cudaSuccess);
  EXPECT_EQ(out, 0);
  ASSERT_EQ(cudaEventSynchronize(event), cudaSuccess);
  EXPECT_EQ(out, 2);  // as the copy found it
  EXPECT_EQ(in, 2);   // behind the event
  ASSERT_EQ(cudaStreamSynchronize(stream_), cudaSuccess);
  EXPECT_EQ(in, 0);
  EXPECT_EQ(cudaEventDestroy(event), cudaSuccess);
}

TEST_F(CudaHostTest, ABarrierThatNotAllReachEndsTheProgram) {
  const cudaLaunchConfig_t config = Config(1, 64);
  EXPECT_DEATH(
      {
        (void)cudaLaunchKernelEx(&config, BarrierOfTheFirstHalf);
        (void)cudaStreamSynchronize(stream_);
      },
      "cuda_host_test.cc:.*not all threads of the block come here");
}

TEST_F(CudaHostTest, RefusesGridsThatADeviceRefuses) {
  const cudaLaunchConfig_t wide = Config(1, 1025), empty = Config(0, 32);
  EXPECT_EQ(cudaLaunchKernelEx(&wide, BarrierOfTheFirstHalf), cudaErrorInvalidConfiguration);
  EXPECT_EQ(cudaLaunchKernelEx(&empty, BarrierOfTheFirstHalf), cudaErrorInvalidConfiguration);
}

TEST_F(CudaHostTest, EventsTellTheTimeBetweenThem) {
  cudaEvent_t first = nullptr, second = nullptr, untimed = nullptr;
  ASSERT_EQ(cudaEventCreateWithFlags(&first, cudaEventDefault), cudaSuccess);
  ASSERT_EQ(cudaEventCreateWithFlags(&second, cudaEventDefault), cudaSuccess);
  ASSERT_EQ(cudaEventCreateWithFlags(&untimed, cudaEventDisableTiming), cudaSuccess);
  float milliseconds = -1;
  EXPECT_EQ(cudaEventElapsedTime(&milliseconds, first, second), cudaErrorInvalidResourceHandle) << "never recorded";
  for (const cudaEvent_t event : {first, untimed, second}) ASSERT_EQ(cudaEventRecord(event, stream_), cudaSuccess);
  EXPECT_EQ(cudaEventElapsedTime(&milliseconds, first, second), cudaErrorNotReady);
  ASSERT_EQ(cudaEventSynchronize(second), cudaSuccess);
  EXPECT_EQ(cudaEventElapsedTime(&milliseconds, first, untimed), cudaErrorInvalidResourceHandle);
  ASSERT_EQ(cudaEventElapsedTime(&milliseconds, first, second), cudaSuccess);
  EXPECT_GE(milliseconds, 0);
  float back = 0;
  ASSERT_EQ(cudaEventElapsedTime(&back, second, first), cudaSuccess);
  EXPECT_EQ(back, -milliseconds);
  for (const cudaEvent_t event : {first, second, untimed}) EXPECT_EQ(cudaEventDestroy(event), cudaSuccess);
}

}  // namespace
}  // namespace precondor::cuda_host
