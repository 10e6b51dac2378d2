// SPDX-License-Identifier: Apache-2.0
// Copies between host and device on streams of their own, and memory that the pool hands out again, while the device
// works: on a device, and on tests/support/cuda_host.
#include <algorithm>
#include <cuda_runtime_api.h>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gtest/gtest.h"

#include "kernels/cuda/staging.h"
#include "tests/support/test_backend.h"

namespace precondor {
namespace {

constexpr int64_t kBufferElements = cuda::Staging::kBufferBytes / static_cast<int64_t>(sizeof(float));
constexpr int64_t kLongElements = cuda::Staging::kLongBytes / static_cast<int64_t>(sizeof(float));

ConstMatrixView Row(const std::vector<float>& x) {
  return ConstMatrixView(x.data(), 1, static_cast<int64_t>(x.size()));
}
MatrixView Row(std::vector<float>& x) { return MatrixView(x.data(), 1, static_cast<int64_t>(x.size())); }

// `count` floats that differ in every position and from those of any other `seed` below 100.
std::vector<float> Numbered(int64_t count, int seed) {
  std::vector<float> x(static_cast<size_t>(count));
  for (size_t i = 0; i < x.size(); ++i) x[i] = static_cast<float>(i % 100003) + static_cast<float>(seed) / 128;
  return x;
}

class DeviceCopiesTest : public testing::Test {
 protected:
  DeviceMatrix Make(int64_t rows, int64_t cols) {
    absl::StatusOr<DeviceMatrix> x = backend_->Allocate(rows, cols);
    EXPECT_TRUE(x.ok()) << x.status();
    return *std::move(x);
  }
  std::vector<float> ToHost(const DeviceMatrix& x) {
    std::vector<float> host(static_cast<size_t>(x.view().size()), -7.0f);
    const absl::Status status = backend_->Download(x.view(), MatrixView(host.data(), x.view().rows, x.view().cols));
    EXPECT_TRUE(status.ok()) << status;
    return host;
  }
  // Puts products on the stream whose result no test reads: of 1 GFLOP each, so that they are cuBLAS's own, which the
  // imitation computes fast too.
  void KeepBusy() {
    for (int i = 0; i < 2; ++i) {
      ASSERT_TRUE(
          backend_->Gemm(1e-3, busy_a_.view(), Transpose::kNo, busy_b_.view(), Transpose::kNo, 0, busy_c_.view()).ok());
    }
  }

  const std::unique_ptr<Backend> backend_ = MakeTestBackend();
  const DeviceMatrix busy_a_ = Make(800, 800), busy_b_ = Make(800, 800);
  DeviceMatrix busy_c_ = Make(800, 800);
};

TEST_F(DeviceCopiesTest, ACopyLongerThanAllBuffersArrivesWhole) {
  for (const int64_t count : {kLongElements - 1, kLongElements, (cuda::Staging::kBuffers + 3) * kBufferElements + 5}) {
    const std::vector<float> sent = Numbered(count, 1);
    DeviceMatrix x = Make(1, count);
    KeepBusy();
    ASSERT_TRUE(backend_->Upload(Row(sent), x.view()).ok());
    EXPECT_TRUE(ToHost(x) == sent) << count << " elements";
    DeviceMatrix idle = Make(1, count);
    (void)ToHost(idle);  // nothing under way uses it
    KeepBusy();
    ASSERT_TRUE(backend_->UploadToIdle(Row(sent), idle.view()).ok());
    EXPECT_TRUE(ToHost(idle) == sent) << count << " elements beside other work";
  }
}

TEST_F(DeviceCopiesTest, WhatFollowsAnUploadSeesAllThatItBrought) {
  const int64_t count = 5 * kBufferElements + 3;
  DeviceMatrix x = Make(1, count), y = Make(1, count);
  (void)ToHost(x);
  for (int round = 0; round < 3; ++round) {
    std::vector<float> sent = Numbered(count, round);
    KeepBusy();
    // The host's memory may be reused on return; what reads the last round's x has ended, for y was downloaded.
    ASSERT_TRUE(backend_->UploadToIdle(Row(sent), x.view()).ok());
    std::vector<float> expected = sent;
    std::fill(sent.begin(), sent.end(), -1.0f);
    ASSERT_TRUE(backend_->Axpby(2, x.view(), 0, y.view()).ok());
    for (float& element : expected) element *= 2;
    EXPECT_TRUE(ToHost(y) == expected) << "round " << round;
  }
}

TEST_F(DeviceCopiesTest, ADownloadSeesAllThatWasLaunchedBeforeIt) {
  for (const int64_t count : {int64_t{17}, 3 * kBufferElements + 1}) {
    DeviceMatrix x = Make(1, count);
    const std::vector<float> ones(static_cast<size_t>(count), 1.0f);
    ASSERT_TRUE(backend_->Upload(Row(ones), x.view()).ok());
    for (int step = 1; step <= 5; ++step) {
      KeepBusy();
      ASSERT_TRUE(backend_->ScaleBy(2, x.view(), x.view()).ok());
      EXPECT_TRUE(ToHost(x) == std::vector<float>(static_cast<size_t>(count), static_cast<float>(1 << step)))
          << count << " elements, step " << step;
    }
  }
}

TEST_F(DeviceCopiesTest, ThreadsCopyInBothDirectionsAtOnce) {
  constexpr int kThreads = 4, kRounds = 6;
  std::vector<std::string> findings(kThreads);
  std::vector<std::thread> threads;
  threads.reserve(kThreads);
  for (int thread = 0; thread < kThreads; ++thread) {
    threads.emplace_back([&, thread] {
      for (int round = 0; round < kRounds && findings[thread].empty(); ++round) {
        // Between a part of a buffer and more than all threads' shares of the buffers.
        const int64_t count = 1000 + int64_t{(thread + round) % 4 * 2} * kBufferElements;
        const std::vector<float> sent = Numbered(count, thread * kRounds + round);
        std::vector<float> got(sent.size());
        absl::StatusOr<DeviceMatrix> x = backend_->Allocate(1, count);
        absl::Status status = x.status();
        if (status.ok()) status = backend_->Upload(Row(sent), x->view());
        if (status.ok()) status = backend_->ScaleBy(-1, x->view(), x->view());
        if (status.ok()) status = backend_->ScaleBy(.5, x->view(), x->view());
        if (status.ok()) status = backend_->Download(x->view(), Row(got));
        for (size_t i = 0; status.ok() && i < got.size(); ++i) {
          if (got[i] != -.5f * sent[i]) status = absl::DataLossError(absl::StrCat("element ", i, ": ", got[i]));
        }
        if (!status.ok()) findings[thread] = absl::StrCat("round ", round, ": ", status.ToString());
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(findings, std::vector<std::string>(kThreads));
}

TEST_F(DeviceCopiesTest, RowsThatLieApartAreCopiedWithoutWhatIsBetween) {
  constexpr int64_t kRows = 300, kCols = 1001, kPitch = 1024;
  const std::vector<float> wide = Numbered(kRows * kPitch, 3);
  DeviceMatrix x = Make(kRows, kPitch);
  ASSERT_TRUE(backend_->Upload(ConstMatrixView(wide.data(), kRows, kPitch), x.view()).ok());
  std::vector<float> narrow(kRows * kCols), back(kRows * kPitch, -1.0f);
  const ConstMatrixView part(x.view().data, kRows, kCols, kPitch);
  ASSERT_TRUE(backend_->Download(part, MatrixView(narrow.data(), kRows, kCols)).ok());
  ASSERT_TRUE(backend_->Download(part, MatrixView(back.data(), kRows, kCols, kPitch)).ok());
  int64_t wrong = 0;
  for (int64_t i = 0; i < kRows; ++i) {
    for (int64_t j = 0; j < kPitch; ++j) {
      const float expected = j < kCols ? wide[i * kPitch + j] : -1.0f;
      wrong += back[i * kPitch + j] != expected || (j < kCols && narrow[i * kCols + j] != expected);
    }
  }
  EXPECT_EQ(wrong, 0);
}

TEST_F(DeviceCopiesTest, MemoryIsHandedOutAgainOnlyAfterItsLastUse) {
  const int64_t before = backend_->allocated_bytes();
  constexpr int64_t kCount = 200000;
  for (int round = 0; round < 10; ++round) {
    const std::vector<float> sent = Numbered(kCount, round);
    DeviceMatrix copy = Make(1, kCount);
    KeepBusy();
    {
      DeviceMatrix source = Make(1, kCount);
      ASSERT_TRUE(backend_->Upload(Row(sent), source.view()).ok());
      ASSERT_TRUE(backend_->Copy(source.view(), copy.view()).ok());
    }  // freed while the copy may not have begun
    const DeviceMatrix next = Make(1, kCount);
    EXPECT_TRUE(ToHost(next) == std::vector<float>(kCount)) << "round " << round << ": not zeroed";
    EXPECT_TRUE(ToHost(copy) == sent) << "round " << round;
  }
  EXPECT_EQ(backend_->allocated_bytes(), before);
}

TEST_F(DeviceCopiesTest, ThePoolServesMoreThanTheDeviceHasOneAfterTheOther) {
  size_t free_bytes = 0, total_bytes = 0;
  ASSERT_EQ(cudaMemGetInfo(&free_bytes, &total_bytes), cudaSuccess);
  const int64_t before = backend_->allocated_bytes();
  const int64_t cols = 1 << 16, rows = static_cast<int64_t>(total_bytes / 64) / 4 / cols;
  const std::vector<float> sent = Numbered(cols, 1);
  // The ring has 64.
  for (int round = 0; round < 80; ++round) {
    absl::StatusOr<DeviceMatrix> x = backend_->AllocateScratch(rows, cols);
    ASSERT_TRUE(x.ok()) << "round " << round << ": " << x.status();
    float* const last = x->view().data + (rows - 1) * cols;
    ASSERT_TRUE(backend_->Upload(Row(sent), MatrixView(last, 1, cols)).ok());
    std::vector<float> got(sent.size());
    ASSERT_TRUE(backend_->Download(ConstMatrixView(last, 1, cols), Row(got)).ok());
    ASSERT_TRUE(got == sent) << "round " << round;
    if (round % 20 == 19) backend_->Trim();
  }
  EXPECT_EQ(backend_->allocated_bytes(), before);
}

}  // namespace
}  // namespace precondor
