// SPDX-License-Identifier: Apache-2.0
// The CUDA backend on a device that is missing, full or failing, on the host's imitation of one.
#include <algorithm>
#include <limits>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

#include "kernels/base/status_macros.h"
#include "kernels/cuda/cuda_backend.h"
#include "kernels/cuda/device.h"
#include "tests/support/cuda_host/memory.h"
#include "tests/support/cuda_host/stream.h"
#include "tests/support/packed_tiles.h"

namespace precondor {
namespace {

using testing::HasSubstr;

class CudaDeviceTest : public testing::Test {
 protected:
  ~CudaDeviceTest() override {
    cuda_host::Recover();
    cuda_host::SetDeviceCount(1);
    cuda_host::SetDeviceMemory(cuda_host::kDeviceBytes);
    EXPECT_EQ(cuda_host::LiveObjects(), 0);
  }
};

// A step of every kind of work: uploads, products, kernels with and without sums, a decomposition, downloads, short and
// on streams of their own.
absl::Status Work(Backend& backend) {
  constexpr int64_t kN = 5;
  std::vector<float> host(kN * kN, 0.0f);
  for (int64_t i = 0; i < kN; ++i) host[i * kN + i] = 2.0f;
  const MatrixView view(host.data(), kN, kN);
  PRECONDOR_ASSIGN_OR_RETURN(DeviceMatrix a, backend.Allocate(kN, kN));
  PRECONDOR_ASSIGN_OR_RETURN(DeviceMatrix b, backend.Allocate(kN, kN));
  PRECONDOR_ASSIGN_OR_RETURN(SymmetricMatrix m, backend.AllocateSymmetric(kN, SymmetricStorage::kF16));
  PRECONDOR_RETURN_IF_ERROR(backend.Upload(view, a.view()));
  PRECONDOR_RETURN_IF_ERROR(backend.Gemm(1.0, a.view(), Transpose::kNo, a.view(), Transpose::kYes, 0.0, b.view()));
  PRECONDOR_RETURN_IF_ERROR(backend.ScaleRows(std::vector<double>(kN, 0.5), b.view(), b.view()));
  PRECONDOR_RETURN_IF_ERROR(backend.SpdInverse(b.view(), a.view()));
  PRECONDOR_RETURN_IF_ERROR(SetTiles(backend, view, m));
  PRECONDOR_RETURN_IF_ERROR(backend.SymmetricUpdateMultiply(0.5, 0.25, {1.0}, a.view().RowRange(0, 1), m,
                                                            b.view().RowRange(0, 2), a.view().RowRange(0, 2)));
  PRECONDOR_RETURN_IF_ERROR(backend.TriangularSolve(From::kLeft, b.view(), Transpose::kNo, a.view()));
  PRECONDOR_RETURN_IF_ERROR(backend.Dot(a.view(), b.view()).status());
  std::vector<float> long_host(300000, 3.0f);  // two pinned buffers
  const MatrixView long_view(long_host.data(), 1, static_cast<int64_t>(long_host.size()));
  PRECONDOR_ASSIGN_OR_RETURN(DeviceMatrix c, backend.AllocateScratch(1, long_view.cols));
  PRECONDOR_RETURN_IF_ERROR(backend.UploadToIdle(long_view, c.view()));
  PRECONDOR_RETURN_IF_ERROR(backend.Axpby(2.0, c.view(), 0.0, c.view()));
  PRECONDOR_RETURN_IF_ERROR(backend.Download(c.view(), long_view));
  if (long_host.front() != 6.0f || long_host.back() != 6.0f) return absl::DataLossError("expected 6 throughout");
  return backend.Download(a.view(), view);
}

TEST_F(CudaDeviceTest, SaysWhyThereIsNoDevice) {
  cuda_host::SetDeviceCount(-1);
  absl::Status status = MakeCudaBackend({}).status();
  EXPECT_TRUE(absl::IsUnavailable(status));
  EXPECT_THAT(std::string(status.message()), HasSubstr("cudaErrorInsufficientDriver"));
  cuda_host::SetDeviceCount(0);
  EXPECT_THAT(std::string(MakeCudaBackend({}).status().message()), HasSubstr("cudaErrorNoDevice"));
  cuda_host::SetDeviceCount(2);
  status = MakeCudaBackend({.device = 2}).status();
  EXPECT_TRUE(absl::IsUnavailable(status));
  EXPECT_THAT(std::string(status.message()), HasSubstr("expected 0 ... 1, got 2"));
  cuda_host::SetComputeCapability(7);
  status = MakeCudaBackend({}).status();
  cuda_host::SetComputeCapability(9);
  EXPECT_TRUE(absl::IsUnavailable(status));
  EXPECT_THAT(std::string(status.message()), HasSubstr("expected compute capability 8.0 or later, got 7.x"));
}

// A server's --device, on threads whose current device is the first. The imitation refuses launches, events and handles
// of another device than the current one.
TEST_F(CudaDeviceTest, WorksOnAnotherDeviceThanItsThreads) {
  cuda_host::SetDeviceCount(2);
  const std::unique_ptr<Backend> backend = MakeCudaBackend({.device = 1}).value();
  ASSERT_EQ(cudaSetDevice(0), cudaSuccess);
  absl::Status status = Work(*backend), of_other;
  EXPECT_TRUE(status.ok()) << status;
  std::thread([&] { of_other = Work(*backend); }).join();
  EXPECT_TRUE(of_other.ok()) << of_other;
  ASSERT_EQ(cudaSetDevice(0), cudaSuccess);
}

TEST_F(CudaDeviceTest, KeepsToItsMemory) {
  EXPECT_TRUE(absl::IsInvalidArgument(MakeCudaBackend({.memory_limit_bytes = 0}).status()));
  const std::unique_ptr<Backend> backend = MakeCudaBackend({.memory_limit_bytes = 1000}).value();
  {
    const absl::StatusOr<DeviceMatrix> held = backend->Allocate(10, 20);
    ASSERT_TRUE(held.ok());
    const absl::Status refused = backend->Allocate(10, 6).status();
    EXPECT_TRUE(absl::IsResourceExhausted(refused));
    EXPECT_THAT(std::string(refused.message()), HasSubstr("at most 1000 bytes in use, got 800 and a request for 240"));
    EXPECT_TRUE(backend->Allocate(10, 5).ok());
  }
  EXPECT_EQ(backend->allocated_bytes(), 0);
  cuda_host::FailCall(0, cudaErrorMemoryAllocation);
  EXPECT_TRUE(absl::IsResourceExhausted(backend->Allocate(1, 1).status()));
  EXPECT_EQ(backend->allocated_bytes(), 0);
  EXPECT_TRUE(backend->Allocate(1, 1).ok());
}

TEST_F(CudaDeviceTest, KeepsSmallPiecesThatAreFree) {
  constexpr int64_t kMiB = (int64_t{1} << 20) / sizeof(float);
  const std::unique_ptr<Backend> backend = MakeCudaBackend({}).value();
  const auto take = [&](int64_t elements) {
    const int64_t calls = cuda_host::Calls();
    EXPECT_TRUE(backend->Allocate(1, elements).ok());
    return cuda_host::Calls() - calls;
  };
  const int64_t first = take(kMiB), large = take(kMiB + 1);
  EXPECT_LT(take(kMiB), first) << "the piece is there";
  EXPECT_EQ(take(kMiB + 1), large) << "it is too large to be kept";
  EXPECT_EQ(take(kMiB - 1), first) << "no piece has this size";
  backend->Trim();
  EXPECT_EQ(take(kMiB), first);
}

// Code that CUDA loads at the first launch of a kernel or a library's routine finds room when all else is in use.
TEST_F(CudaDeviceTest, KeepsAReserveBesideItsLimit) {
  constexpr int64_t kWork = int64_t{8} << 20;
  cuda_host::UnloadModules();
  cuda_host::SetDeviceMemory(int64_t{4} << 30);
  const std::unique_ptr<Backend> backend = MakeCudaBackend({}).value();
  const int64_t limit = backend->memory_limit_bytes();
  EXPECT_EQ(limit, cuda_host::FreeMemory(0) - cuda::Device::kReserveBytes) << "handles and workspaces exist already";
  EXPECT_EQ(MakeCudaBackend({.memory_limit_bytes = 1000}).value()->memory_limit_bytes(), 1000);
  const absl::StatusOr<DeviceMatrix> rest = backend->AllocateScratch(1, (limit - kWork) / 4);
  ASSERT_TRUE(rest.ok()) << rest.status();
  const absl::Status status = Work(*backend);
  EXPECT_TRUE(status.ok()) << status;
  EXPECT_TRUE(absl::IsResourceExhausted(backend->Allocate(1, kWork / 4 + 4).status()));
}

TEST_F(CudaDeviceTest, RefusesADeviceThatHasNoMoreThanTheReserve) {
  cuda_host::SetDeviceMemory(cuda::Device::kReserveBytes + (int64_t{100} << 20));
  const absl::Status refused = MakeCudaBackend({}).status();
  EXPECT_TRUE(absl::IsResourceExhausted(refused));
  EXPECT_THAT(std::string(refused.message()),
              HasSubstr("expected more than 1073741824 bytes of free memory, which stay in reserve, got "));
  cuda_host::SetDeviceMemory(0);
  EXPECT_TRUE(absl::IsResourceExhausted(MakeCudaBackend({}).status()));
}

// As when another process takes what is free, the reserve included.
TEST_F(CudaDeviceTest, GoesOnWhenMemoryIsThereAgain) {
  const std::unique_ptr<Backend> backend = MakeCudaBackend({}).value();
  cuda_host::UnloadModules();
  cuda_host::SetDeviceMemory(0);
  EXPECT_TRUE(absl::IsResourceExhausted(Work(*backend)));
  EXPECT_EQ(backend->allocated_bytes(), 0);
  EXPECT_TRUE(backend->fault().ok());
  cuda_host::SetDeviceMemory(cuda_host::kDeviceBytes);
  const absl::Status again = Work(*backend);
  EXPECT_TRUE(again.ok()) << again;
}

// Each call of the runtime in turn fails, in ways that the device survives and in one that ends its use.
TEST_F(CudaDeviceTest, EveryFailingCallIsAStatusAndLosesNothing) {
  int64_t calls = cuda_host::Calls();
  {
    const std::unique_ptr<Backend> backend = MakeCudaBackend({}).value();
    ASSERT_TRUE(Work(*backend).ok());
    calls = cuda_host::Calls() - calls;
  }
  ASSERT_GT(calls, 60);
  int64_t went_on = 0;
  for (const cudaError_t error : {cudaErrorInvalidConfiguration, cudaErrorMemoryAllocation, cudaErrorIllegalAddress}) {
    for (int64_t call = 0; call < calls; ++call) {
      cuda_host::FailCall(call, error);
      absl::StatusOr<std::unique_ptr<Backend>> backend = MakeCudaBackend({});
      if (!backend.ok()) {
        EXPECT_EQ(backend.status().code(), error == cudaErrorMemoryAllocation ? absl::StatusCode::kResourceExhausted
                                                                              : absl::StatusCode::kInternal)
            << backend.status();
      } else {
        const absl::Status status = Work(**backend);
        EXPECT_FALSE(status.ok()) << "call " << call << " of " << calls;
        EXPECT_EQ((*backend)->allocated_bytes(), 0);
        if (error == cudaErrorIllegalAddress) {
          // Whichever library has reported it, and in whatever words.
          EXPECT_THAT(std::string((*backend)->fault().message()), HasSubstr("cudaErrorIllegalAddress")) << status;
        } else {
          EXPECT_EQ(cudaPeekAtLastError(), cudaSuccess) << "the next launch would report it: " << status;
          // Unless the factors had changed already.
          const absl::Status again = Work(**backend);
          if (!again.ok()) {
            EXPECT_THAT(std::string(again.message()), HasSubstr("is lost since this fault")) << status;
          }
          went_on += again.ok() ? 1 : 0;
        }
        backend->reset();
      }
      cuda_host::Recover();
      ASSERT_EQ(cuda_host::LiveObjects(), 0) << "call " << call << " of " << calls;
    }
  }
  EXPECT_GT(went_on, calls);  // of twice as many
}

// An update that fails has left the factor alone, or the device is of no use any more: no update is applied twice.
TEST_F(CudaDeviceTest, AFailedUpdateIsNeverHalfDone) {
  constexpr int64_t kN = 70;
  int lost = 0;
  for (int64_t call = 0; call < 12; ++call) {
    const std::unique_ptr<Backend> backend = MakeCudaBackend({}).value();
    {
      SymmetricMatrix m = backend->AllocateSymmetric(kN, SymmetricStorage::kF32).value();
      DeviceMatrix rows = backend->Allocate(1, kN).value(), y = backend->Allocate(1, kN).value(),
                   x = backend->Allocate(kN, kN).value();
      ASSERT_TRUE(backend
                      ->SymmetricUpdateMultiply(1.0, 2.0, {}, ConstMatrixView(nullptr, 0, kN), m,
                                                ConstMatrixView(nullptr, 0, kN), MatrixView(nullptr, 0, kN))
                      .ok());
      cuda_host::FailCall(call, cudaErrorMemoryAllocation);
      const absl::Status status =
          backend->SymmetricUpdateMultiply(3.0, 0.0, {1.0}, rows.view(), m, rows.view(), y.view());
      const bool failed = !status.ok();
      cuda_host::Recover();
      const absl::Status expanded =
          backend->SymmetricExpand({1.0, 0.0, {}, ConstMatrixView(nullptr, 0, kN), m}, x.view());
      if (!expanded.ok()) {
        EXPECT_TRUE(failed);
        EXPECT_THAT(std::string(expanded.message()), HasSubstr("is lost since this fault"));
        ++lost;
      } else {
        EXPECT_EQ(backend->AbsoluteMaximum(x.view()).value(), failed ? 2.0 : 6.0) << "call " << call;
      }
    }
  }
  EXPECT_EQ(lost, 1);
}

TEST_F(CudaDeviceTest, ALostDeviceSaysSoAtOnce) {
  const std::unique_ptr<Backend> backend = MakeCudaBackend({}).value();
  EXPECT_TRUE(backend->fault().ok());
  cuda_host::FailCall(5, cudaErrorIllegalAddress);
  EXPECT_FALSE(Work(*backend).ok());
  cuda_host::Recover();  // the driver would go on failing; the backend does not ask it any more
  const int64_t calls = cuda_host::Calls();
  const absl::Status status = Work(*backend);
  EXPECT_TRUE(absl::IsInternal(status));
  EXPECT_THAT(std::string(status.message()), HasSubstr("CUDA device 0 is lost since this fault"));
  EXPECT_THAT(std::string(status.message()), HasSubstr("cudaErrorIllegalAddress"));
  EXPECT_EQ(backend->fault(), status);
  EXPECT_EQ(cuda_host::Calls(), calls);
}

// Rows and matrices longer than a pinned buffer come back as they were.
TEST_F(CudaDeviceTest, MovesWhatNoPinnedBufferHolds) {
  const std::unique_ptr<Backend> backend = MakeCudaBackend({}).value();
  for (const auto& [rows, cols] : {std::pair<int64_t, int64_t>(3, 1500000), {700, 3001}, {2000000, 1}}) {
    std::vector<float> host(rows * (cols + 1)), back(rows * cols);
    for (size_t i = 0; i < host.size(); ++i) host[i] = static_cast<float>(i % 65521);
    DeviceMatrix device = backend->Allocate(rows, cols).value();
    const ConstMatrixView view(host.data(), rows, cols, cols + 1);
    for (const bool idle : {false, true}) {
      ASSERT_TRUE((idle ? backend->UploadToIdle(view, device.view()) : backend->Upload(view, device.view())).ok());
      std::fill(back.begin(), back.end(), -1.0f);
      ASSERT_TRUE(backend->Download(device.view(), MatrixView(back.data(), rows, cols)).ok());
      for (int64_t i = 0; i < rows; ++i) {
        for (int64_t j = 0; j < cols; ++j) ASSERT_EQ(back[i * cols + j], host[i * (cols + 1) + j]);
      }
    }
  }
}

// More than all pinned buffers hold, so that an upload in the stream's order would have to wait for what is under way.
TEST_F(CudaDeviceTest, CopiesIntoIdleMemoryBesideWhatIsUnderWay) {
  const std::unique_ptr<cuda::Device> device = cuda::Device::Make(0, std::numeric_limits<int64_t>::max()).value();
  const int64_t elements = (cuda::Staging::kBuffers + 1) * cuda::Staging::kBufferBytes / 4;
  std::vector<float> host(elements, 1.0f), back(elements);
  const auto array = device->Array<float>(elements).value();
  const MatrixView memory(array.data(), 1, elements);
  std::vector<std::string> ran;
  const auto run = [&](std::string what) {
    return device->Run("work", [&](cudaStream_t stream) {
      cuda_host::Enqueue(stream,
                         [&, what, memory] { ran.push_back(what + (memory.data[elements - 1] == 1 ? "1" : "?")); });
      return cudaSuccess;
    });
  };
  ASSERT_TRUE(run("before").ok());
  ASSERT_TRUE(device->UploadToIdle(MatrixView(host.data(), 1, elements), memory).ok());
  EXPECT_TRUE(ran.empty());
  ASSERT_TRUE(run("after").ok());
  ASSERT_TRUE(device->Download(memory, MatrixView(back.data(), 1, elements)).ok());
  EXPECT_EQ(back, host);
  ASSERT_EQ(ran.size(), 2);
  EXPECT_EQ(ran[1], "after1");
}

}  // namespace
}  // namespace precondor
