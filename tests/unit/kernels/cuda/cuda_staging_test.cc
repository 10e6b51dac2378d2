// SPDX-License-Identifier: Apache-2.0
// Pinned buffers that copies in both directions share, where a copy of one stream runs later than those of another.
#include <numeric>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

#include "kernels/cuda/staging.h"
#include "tests/support/cuda_host/stream.h"

namespace precondor::cuda {
namespace {

// Calls of CUDA for a piece of an upload: it waits for a buffer, copies, and says when the buffer is idle.
constexpr int64_t kCallsOfAPiece = 3;

// While an upload is at its last piece, its first is on its way out of a buffer that is free for others to take.
TEST(StagingTest, ADownloadLeavesWhatAnUploadStillReads) {
  constexpr int64_t kPieceElements = Staging::kBufferBytes / sizeof(float);
  for (const int64_t width : {Staging::kLongBytes / 2, Staging::kLongBytes}) {
    cudaStream_t stream = nullptr;
    ASSERT_EQ(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), cudaSuccess);
    {
      const auto staging = Staging::Make(stream).value();
      std::vector<float> sent(Staging::kBuffers * kPieceElements), device(sent.size());
      std::iota(sent.begin(), sent.end(), 1.0f);
      const std::vector<float> other(static_cast<size_t>(width) / sizeof(float), -1.0f);
      std::vector<float> downloaded(other.size());
      cuda_host::RunBefore((Staging::kBuffers - 1) * kCallsOfAPiece, [&] {
        EXPECT_EQ(device, std::vector<float>(sent.size())) << "nothing has been copied so far";
        EXPECT_EQ(staging->Download(other.data(), width, width, 1, downloaded.data(), width), cudaSuccess);
      });
      const int64_t bytes = static_cast<int64_t>(sent.size() * sizeof(float));
      ASSERT_EQ(staging->UploadToIdle(sent.data(), bytes, bytes, 1, device.data(), bytes), cudaSuccess);
      ASSERT_EQ(cudaStreamSynchronize(stream), cudaSuccess);
      EXPECT_EQ(downloaded, other);
      EXPECT_EQ(device, sent) << width;
    }
    ASSERT_EQ(cudaStreamDestroy(stream), cudaSuccess);
  }
}

}  // namespace
}  // namespace precondor::cuda
