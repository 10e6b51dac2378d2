// SPDX-License-Identifier: Apache-2.0
// The host's imitation of a device refuses what a device refuses, and has a clock. Suites that run on it hold the rest.
#include "tests/support/cuda_host/cuda_host.h"

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace precondor::cuda_host {
namespace {

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
