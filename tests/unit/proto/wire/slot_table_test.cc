// SPDX-License-Identifier: Apache-2.0
#include "proto/wire/slot_table.h"

#include "gtest/gtest.h"

#include "kernels/base/error_reason.h"

namespace precondor::wire {
namespace {

constexpr uint64_t kBytes = 4096;

class SlotTableTest : public ::testing::Test {
 protected:
  Slot Take(uint64_t offset, uint64_t bytes) {
    const absl::StatusOr<Slot> slot = table_.Take(offset, bytes);
    EXPECT_TRUE(slot.ok()) << slot.status();
    return slot.value_or(Slot{});
  }
  bool Refused(uint64_t offset, uint64_t bytes) {
    return GetErrorReason(table_.Take(offset, bytes).status()) == ErrorReason::kMalformed;
  }

  SlotTable table_{kBytes};
};

TEST_F(SlotTableTest, RangesInUseAreInsideTheRegionAndApart) {
  EXPECT_TRUE(Refused(4, 4)) << "not aligned";
  EXPECT_TRUE(Refused(0, 0)) << "empty";
  EXPECT_TRUE(Refused(0, kBytes + 1)) << "too large";
  EXPECT_TRUE(Refused(kBytes, 1)) << "behind the end";
  EXPECT_TRUE(Refused(kBytes - 256, 257)) << "over the end";
  EXPECT_TRUE(Refused(~uint64_t{255}, 512)) << "around";
  Take(512, 512);
  EXPECT_TRUE(Refused(512, 1)) << "equal to a range in use";
  EXPECT_TRUE(Refused(768, 1)) << "in a range in use";
  EXPECT_TRUE(Refused(256, 257)) << "into a range in use";
  EXPECT_TRUE(Refused(0, kBytes)) << "around a range in use";
  Take(256, 256);
  Take(1024, 1);
  Take(kBytes - 256, 256);
  EXPECT_EQ(table_.in_use(), 4u);
}

TEST_F(SlotTableTest, AnEarlierUseDoesNotEndALaterOne) {
  const Slot first = Take(256, 8);
  EXPECT_TRUE(table_.Holds(first));
  EXPECT_TRUE(table_.GiveBack(first));
  EXPECT_FALSE(table_.Holds(first));
  EXPECT_FALSE(table_.GiveBack(first)) << "once only";
  const Slot second = Take(256, 8);
  EXPECT_NE(second.generation, first.generation);
  EXPECT_FALSE(table_.GiveBack(first)) << "a stale generation";
  EXPECT_FALSE(table_.Holds(first));
  EXPECT_TRUE(table_.Holds(second));
  EXPECT_FALSE(table_.GiveBack(Slot{})) << "no use at all";
}

TEST_F(SlotTableTest, CloseEndsAllUses) {
  const Slot first = Take(0, 8);
  const Slot second = Take(256, 8);
  table_.Close();
  EXPECT_EQ(table_.in_use(), 0u);
  EXPECT_FALSE(table_.Holds(first));
  EXPECT_FALSE(table_.GiveBack(second));
  EXPECT_EQ(table_.Take(512, 8).status().code(), absl::StatusCode::kFailedPrecondition);
}

TEST(RegionCodecTest, RefusesAnotherMemory) {
  const v1::Ring ring = EncodeRegion("device", 8, "handle");
  EXPECT_EQ(ring.kind(), v1::RING_KIND_CUDA);
  EXPECT_EQ(ring.handle(), "handle");
  EXPECT_TRUE(CheckRegion(ring, "device").ok());
  EXPECT_EQ(GetErrorReason(CheckRegion(ring, "another")), ErrorReason::kMalformed);
  EXPECT_FALSE(CheckRegion(EncodeRegion("device", 0), "device").ok());
  v1::Ring of_no_kind = ring;
  of_no_kind.clear_kind();
  EXPECT_FALSE(CheckRegion(of_no_kind, "device").ok());
}

}  // namespace
}  // namespace precondor::wire
