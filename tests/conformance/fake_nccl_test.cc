// SPDX-License-Identifier: Apache-2.0
// How NcclCollective meets NCCL's errors; its results and time-outs are in the contract's suite.
#include "tests/conformance/fake_nccl.h"

#include <gmock/gmock.h>
#include <vector>

#include "kernels/cuda/nccl_collective.h"
#include "tests/conformance/collective_contract.h"

namespace precondor {
namespace {

using testing::HasSubstr;

TEST(FakeNcclTest, AbortsTheCommunicatorAndGivesNcclsErrorItsCode) {
  const struct {
    ncclResult_t error;
    absl::StatusCode code;
  } cases[] = {
      {ncclRemoteError, absl::StatusCode::kUnavailable},         {ncclSystemError, absl::StatusCode::kUnavailable},
      {ncclUnhandledCudaError, absl::StatusCode::kInternal},     {ncclInternalError, absl::StatusCode::kInternal},
      {ncclInvalidUsage, absl::StatusCode::kFailedPrecondition},
  };
  for (const auto& each : cases) {
    std::vector<std::unique_ptr<Collective>> ranks = JoinAll(1);
    ASSERT_NE(ranks[0], nullptr);
    EXPECT_EQ(FakeNcclCommunicators(), 1);
    FakeNcclFailWith(each.error);
    const absl::Status status = ranks[0]->Barrier(kAmple);
    FakeNcclFailWith(ncclSuccess);
    EXPECT_EQ(status.code(), each.code) << status;
    EXPECT_THAT(std::string(status.message()), HasSubstr("Barrier (operation 1): rank 0 of 1: NCCL: "));
    EXPECT_EQ(FakeNcclCommunicators(), 0) << "aborted at once, not at the end";
    EXPECT_EQ(ranks[0]->Barrier(kAmple), status);
  }
}

TEST(FakeNcclTest, NamesTheDevicesFault) {
  std::vector<std::unique_ptr<Collective>> ranks = JoinAll(1);
  ASSERT_NE(ranks[0], nullptr);
  FakeNcclFailWith(ncclUnhandledCudaError);
  FakeCudaFailStreams(cudaErrorIllegalAddress);
  const absl::Status status = ranks[0]->Barrier(kAmple);
  FakeNcclFailWith(ncclSuccess);
  FakeCudaFailStreams(cudaSuccess);
  EXPECT_EQ(status.code(), absl::StatusCode::kInternal) << status;
  EXPECT_THAT(std::string(status.message()), HasSubstr(": CUDA device 0: cudaErrorIllegalAddress"));
}

TEST(FakeNcclTest, LeavesNoCommunicatorBehind) {
  {
    const absl::StatusOr<std::string> id = NewNcclId();
    ASSERT_TRUE(id.ok());
    const absl::Status status = MakeNcclCollective(*id, 0, 2, {}, absl::Milliseconds(20)).status();
    EXPECT_EQ(status,
              absl::DeadlineExceededError("joining: rank 0 of 2 timed out; NCCL does not say which rank it waits for"));
    EXPECT_EQ(FakeNcclCommunicators(), 0);
  }
  OnEach(JoinAll(3), [](Collective& ranks) { EXPECT_EQ(ranks.Barrier(kAmple), absl::OkStatus()); });
  EXPECT_EQ(FakeNcclCommunicators(), 0);
}

TEST(FakeNcclTest, NamesADeviceThatIsNotThere) {
  EXPECT_EQ(MakeNcclCollective(*NewNcclId(), 0, 1, NcclOptions{.device = 4}, kAmple).status(),
            absl::UnavailableError("NCCL: expected a CUDA device from 0 to 3, got 4"));
}

}  // namespace
}  // namespace precondor
