// SPDX-License-Identifier: Apache-2.0
// Several devices in one process: that the host's imitation of them tells when two are mixed, and that backends mix
// none.
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

#include "kernels/base/status_macros.h"
#include "kernels/cuda/cuda_backend.h"
#include "tests/support/cuda_host/cuda_host.h"
#include "tests/support/packed_tiles.h"

namespace precondor {
namespace {

using testing::HasSubstr;

class CudaDevicesTest : public testing::Test {
 protected:
  CudaDevicesTest() { cuda_host::SetDeviceCount(3); }
  ~CudaDevicesTest() override {
    cuda_host::Recover();
    EXPECT_EQ(cuda_host::LiveObjects(), 0);
    cuda_host::SetDeviceCount(1);
    EXPECT_EQ(cudaSetDevice(0), cudaSuccess);
  }
};

void WriteOne(float* out) { *out = 1.0f; }

// A device's stream and a piece of its memory.
struct Place {
  explicit Place(int number) : device(number) {
    EXPECT_EQ(cudaSetDevice(device), cudaSuccess);
    EXPECT_EQ(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), cudaSuccess);
    EXPECT_EQ(cudaEventCreateWithFlags(&event, cudaEventDisableTiming), cudaSuccess);
    cudaMemPoolProps properties = {};
    properties.location.id = device;
    EXPECT_EQ(cudaMemPoolCreate(&pool, &properties), cudaSuccess);
    EXPECT_EQ(cudaMallocFromPoolAsync(reinterpret_cast<void**>(&memory), sizeof(float), pool, stream), cudaSuccess);
  }
  ~Place() {
    EXPECT_EQ(cudaFreeAsync(memory, stream), cudaSuccess);
    EXPECT_EQ(cudaStreamDestroy(stream), cudaSuccess);
    EXPECT_EQ(cudaEventDestroy(event), cudaSuccess);
    EXPECT_EQ(cudaMemPoolDestroy(pool), cudaSuccess);
  }
  cudaError_t Launch(float* out) const {
    cudaLaunchConfig_t config = {};
    config.gridDim = config.blockDim = dim3(1);
    config.stream = stream;
    return cudaLaunchKernelEx(&config, WriteOne, out);
  }
  float Read() const {
    float value = 0;
    EXPECT_EQ(cudaMemcpyAsync(&value, memory, sizeof(value), cudaMemcpyDeviceToHost, stream), cudaSuccess);
    EXPECT_EQ(cudaStreamSynchronize(stream), cudaSuccess);
    return value;
  }

  const int device;
  cudaStream_t stream = nullptr;
  cudaEvent_t event = nullptr;
  cudaMemPool_t pool = nullptr;
  float* memory = nullptr;
};

TEST_F(CudaDevicesTest, LaunchesAndEventsBelongToTheirStreamsDevice) {
  const Place one(1), two(2);
  EXPECT_EQ(one.Launch(one.memory), cudaErrorInvalidResourceHandle) << "device 2 is the current one";
  EXPECT_EQ(cudaEventRecord(one.event, two.stream), cudaErrorInvalidResourceHandle);
  EXPECT_EQ(two.Launch(two.memory), cudaSuccess);
  EXPECT_EQ(two.Read(), 1.0f);
  // With any device current, one may wait for another and copy on its stream.
  EXPECT_EQ(cudaEventRecord(two.event, two.stream), cudaSuccess);
  EXPECT_EQ(cudaStreamWaitEvent(one.stream, two.event, 0), cudaSuccess);
  ASSERT_EQ(cudaSetDevice(1), cudaSuccess);
  EXPECT_EQ(one.Launch(one.memory), cudaSuccess);
  EXPECT_EQ(one.Read(), 1.0f);
  EXPECT_EQ(two.Read(), 1.0f);
  int current = -1;
  EXPECT_EQ(cudaGetDevice(&current), cudaSuccess);
  EXPECT_EQ(current, 1);
  EXPECT_EQ(cudaSetDevice(3), cudaErrorInvalidDevice);
}

TEST_F(CudaDevicesTest, AKernelThatTouchesAnotherDevicesMemoryEndsTheProcess) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  EXPECT_DEATH(
      {
        const Place one(1);
        const Place two(2);
        if (two.Launch(one.memory) == cudaSuccess) cudaStreamSynchronize(two.stream);
      },
      "device 2 touches memory of device 1");
}

// Everything that a backend does, from one thread for two devices in turn and from many at once.
absl::StatusOr<std::vector<float>> Work(Backend& backend, float seed) {
  constexpr int64_t kN = 6;
  std::vector<float> host(kN * kN, 0.0f);
  for (int64_t i = 0; i < kN * kN; ++i) host[i] = seed * static_cast<float>(i % 5) + (i % (kN + 1) == 0 ? 9.0f : 0.0f);
  const MatrixView view(host.data(), kN, kN);
  PRECONDOR_ASSIGN_OR_RETURN(DeviceMatrix a, backend.Allocate(kN, kN));
  PRECONDOR_ASSIGN_OR_RETURN(DeviceMatrix b, backend.Allocate(kN, kN));
  PRECONDOR_ASSIGN_OR_RETURN(SymmetricMatrix m, backend.AllocateSymmetric(kN, SymmetricStorage::kF16));
  PRECONDOR_RETURN_IF_ERROR(backend.Upload(view, a.view()));
  PRECONDOR_RETURN_IF_ERROR(backend.Gemm(1.0, a.view(), Transpose::kNo, a.view(), Transpose::kYes, 0.0, b.view()));
  PRECONDOR_RETURN_IF_ERROR(backend.SpdInverse(b.view(), a.view()));
  PRECONDOR_RETURN_IF_ERROR(SetTiles(backend, view, m));
  PRECONDOR_RETURN_IF_ERROR(backend.SymmetricUpdateMultiply(0.5, 0.25, {1.0}, a.view().RowRange(0, 1), m,
                                                            b.view().RowRange(0, 2), a.view().RowRange(0, 2)));
  std::vector<double> values(kN);
  PRECONDOR_RETURN_IF_ERROR(backend.Symmetrize(b.view()));
  PRECONDOR_RETURN_IF_ERROR(backend.SymmetricEigen(b.view(), absl::MakeSpan(values), a.view()));
  PRECONDOR_RETURN_IF_ERROR(backend.TriangularSolve(From::kLeft, b.view(), Transpose::kNo, a.view()));
  PRECONDOR_RETURN_IF_ERROR(backend.Dot(a.view(), b.view()).status());
  PRECONDOR_RETURN_IF_ERROR(backend.Download(a.view(), view));
  return host;
}

TEST_F(CudaDevicesTest, BackendsBesideEachOtherMixNothing) {
  std::vector<std::unique_ptr<Backend>> backends;
  for (int device = 0; device < 3; ++device) backends.push_back(MakeCudaBackend({.device = device}).value());
  const std::vector<float> expected = Work(*backends[0], 0.5f).value();
  for (int round = 0; round < 2; ++round) {
    for (const auto& backend : backends) {
      const absl::StatusOr<std::vector<float>> got = Work(*backend, 0.5f);
      ASSERT_TRUE(got.ok()) << got.status();
      EXPECT_EQ(*got, expected) << "any device gives the same bits";
    }
  }
  std::vector<absl::StatusOr<std::vector<float>>> results(9, absl::UnknownError(""));
  std::vector<std::thread> threads;
  for (size_t i = 0; i < results.size(); ++i) {
    threads.emplace_back([&, i] { results[i] = Work(*backends[i % 3], 0.5f); });
  }
  for (std::thread& thread : threads) thread.join();
  for (const auto& result : results) {
    ASSERT_TRUE(result.ok()) << result.status();
    EXPECT_EQ(*result, expected);
  }
  // Memory of one device may be freed on a thread whose current device is another one.
  DeviceMatrix held = backends[1]->Allocate(3, 3).value();
  ASSERT_TRUE(Work(*backends[2], 0.5f).ok());
  held = DeviceMatrix();
  EXPECT_EQ(backends[1]->allocated_bytes(), 0);
  backends[1]->Trim();
}

TEST_F(CudaDevicesTest, ADeviceThatIsLostTakesNoOtherWithIt) {
  std::vector<std::unique_ptr<Backend>> backends;
  for (int device = 0; device < 2; ++device) backends.push_back(MakeCudaBackend({.device = device}).value());
  const std::vector<float> expected = Work(*backends[0], 0.5f).value();
  cuda_host::FailCall(7, cudaErrorIllegalAddress);
  EXPECT_FALSE(Work(*backends[1], 0.5f).ok());
  const absl::Status lost = Work(*backends[1], 0.5f).status();
  EXPECT_THAT(std::string(lost.message()), HasSubstr("CUDA device 1 is lost since this fault"));
  const absl::StatusOr<std::vector<float>> other = Work(*backends[0], 0.5f);
  ASSERT_TRUE(other.ok()) << other.status();
  EXPECT_EQ(*other, expected);
}

}  // namespace
}  // namespace precondor
