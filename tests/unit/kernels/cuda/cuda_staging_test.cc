// SPDX-License-Identifier: Apache-2.0
// Pinned memory of copies, where streams run later than the calls.
#include <numeric>
#include <thread>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

#include "kernels/cuda/staging.h"
#include "tests/support/cuda_host/stream.h"

namespace precondor::cuda {
namespace {

constexpr int64_t kMiB = int64_t{1} << 20;

class StagingTest : public ::testing::Test {
 protected:
  StagingTest() {
    EXPECT_EQ(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), cudaSuccess);
    staging_ = Staging::Make(stream_).value();
  }
  ~StagingTest() override {
    staging_ = nullptr;
    EXPECT_EQ(cudaStreamDestroy(stream_), cudaSuccess);
  }
  static std::vector<float> Numbers(int64_t bytes, float first) {
    std::vector<float> numbers(static_cast<size_t>(bytes) / sizeof(float));
    std::iota(numbers.begin(), numbers.end(), first);
    return numbers;
  }
  cudaError_t Upload(const std::vector<float>& from, std::vector<float>& to) {
    to.resize(from.size());
    const auto bytes = static_cast<int64_t>(from.size() * sizeof(float));
    return staging_->Upload(from.data(), bytes, bytes, 1, to.data(), bytes);
  }

  cudaStream_t stream_ = nullptr;
  std::unique_ptr<Staging> staging_;
};

TEST_F(StagingTest, TheUploadsOfAStepWaitForNothing) {
  constexpr int kLayers = 144;
  std::vector<std::vector<float>> sent, device(kLayers);
  for (int i = 0; i < kLayers; ++i) sent.push_back(Numbers(64 << 10, static_cast<float>(i)));
  const int64_t before = cuda_host::Waits();
  for (int i = 0; i < kLayers; ++i) ASSERT_EQ(Upload(sent[i], device[i]), cudaSuccess);
  EXPECT_EQ(cuda_host::Waits() - before, 0);
  ASSERT_EQ(cudaStreamSynchronize(stream_), cudaSuccess);
  EXPECT_EQ(device, sent);
}

TEST_F(StagingTest, ATableNeedsNothingOfWhatMatricesHold) {
  const std::vector<float> matrix = Numbers(Staging::kMatrixBytes, 1), table = Numbers(4096, 7);
  std::vector<float> matrix_there, table_there(table.size());
  ASSERT_EQ(Upload(matrix, matrix_there), cudaSuccess);
  const int64_t before = cuda_host::Waits();
  ASSERT_EQ(staging_->UploadTable(table.data(), 4096, table_there.data()), cudaSuccess);
  EXPECT_EQ(cuda_host::Waits() - before, 0);
  EXPECT_NE(matrix_there, matrix) << "its copy has not run";
  // The next matrix does need it.
  std::vector<float> more;
  ASSERT_EQ(Upload(table, more), cudaSuccess);
  EXPECT_EQ(cuda_host::Waits() - before, 1);
  ASSERT_EQ(cudaStreamSynchronize(stream_), cudaSuccess);
  EXPECT_EQ(matrix_there, matrix);
  EXPECT_EQ(table_there, table);
  EXPECT_EQ(more, table);
}

// Sizes that do not divide the memory, more copies than have events, from several threads.
TEST_F(StagingTest, ItsMemoryIsUsedAgainAndAgain) {
  std::vector<std::thread> threads;
  for (int thread = 0; thread < 3; ++thread) {
    threads.emplace_back([this, thread] {
      for (int i = 0; i < 700; ++i) {
        const std::vector<float> sent = Numbers(i % 50 == 0 ? 3 * kMiB + 20 : 100 + 256 * i, static_cast<float>(i));
        std::vector<float> there;
        ASSERT_EQ(Upload(sent, there), cudaSuccess);
        ASSERT_EQ(cudaStreamSynchronize(stream_), cudaSuccess);
        ASSERT_EQ(there, sent) << thread << " " << i;
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  std::vector<std::vector<float>> there(3000);
  const std::vector<float> sent = Numbers(128, 1);
  for (std::vector<float>& to : there) ASSERT_EQ(Upload(sent, to), cudaSuccess);
  ASSERT_EQ(cudaStreamSynchronize(stream_), cudaSuccess);
  EXPECT_THAT(there, ::testing::Each(sent));
}

}  // namespace
}  // namespace precondor::cuda
