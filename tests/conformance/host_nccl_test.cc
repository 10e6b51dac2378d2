// SPDX-License-Identifier: Apache-2.0
// What HostNcclCollective does beside the contract: it says what it moves, and takes and gives back the device's
// memory.
#include <gmock/gmock.h>
#include <vector>

#include "kernels/cuda/host_nccl_collective.h"
#include "tests/conformance/collective_contract.h"
#include "tests/conformance/fake_nccl.h"

namespace precondor {
namespace {

using testing::HasSubstr;

TEST(HostNcclTest, MovesTheHostsMemory) {
  for (const auto& ranks : JoinAll(2)) {
    EXPECT_EQ(ranks->name(), "nccl");
    EXPECT_EQ(ranks->backend_name(), "cpu");
  }
}

TEST(HostNcclTest, RefusesAStream) {
  CUstream_st* const some = reinterpret_cast<CUstream_st*>(8);
  EXPECT_TRUE(absl::IsInvalidArgument(
      MakeHostNcclCollective(*NewNcclId(), 0, 1, NcclOptions{.stream = some}, kAmple).status()));
}

TEST(HostNcclTest, WantOfDeviceMemoryEndsTheCommunicatorAndNamesTheBytes) {
  const int64_t before = FakeCudaAllocations();
  {
    std::vector<std::unique_ptr<Collective>> ranks = JoinAll(1);
    std::vector<float> numbers(100, 1.0f);
    ASSERT_TRUE(ranks[0]->AllReduce(DType::kF32, numbers.data(), numbers.data(), 100, kAmple).ok());
    numbers.resize(1000);
    FakeCudaFailAllocations(true);
    const absl::Status status = ranks[0]->AllReduce(DType::kF32, numbers.data(), numbers.data(), 1000, kAmple);
    FakeCudaFailAllocations(false);
    EXPECT_TRUE(absl::IsResourceExhausted(status)) << status;
    EXPECT_THAT(std::string(status.message()), HasSubstr("AllReduce of 1000 f32: 8192 bytes on the device"));
    EXPECT_EQ(FakeNcclCommunicators(), 0);
    EXPECT_EQ(ranks[0]->Barrier(kAmple), status);
  }
  EXPECT_EQ(FakeCudaAllocations(), before);
}

}  // namespace
}  // namespace precondor
