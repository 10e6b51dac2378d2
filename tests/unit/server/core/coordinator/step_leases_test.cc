// SPDX-License-Identifier: Apache-2.0
#include "server/core/coordinator/step_leases.h"

#include "gtest/gtest.h"

namespace precondor {
namespace {

constexpr uint64_t kLease = 10;

StepLeases MakeLeases() { return StepLeases(StepLeases::First(SessionSpec(), kLease), kLease, kLease); }

std::vector<ModeInterval> FirstOrderFrom(uint64_t step) { return {{0, Mode::kSecondOrder}, {step, Mode::kFirstOrder}}; }

TEST(StepLeasesTest, GrantsNothingBeyondWhatIsDurable) {
  StepLeases leases = MakeLeases();
  EXPECT_EQ(leases.durable().durable_through, 50u) << "five leases, so that few reports wait for a write";
  leases.ExtendBeyond(3);
  EXPECT_EQ(leases.granted_through(), 13u);
  leases.ExtendBeyond(1);
  EXPECT_EQ(leases.granted_through(), 13u) << "a grant is not taken back";
  leases.ExtendBeyond(100);
  EXPECT_EQ(leases.granted_through(), 50u);
  const auto longer = leases.BeginWrite(leases.durable().schedule, {});
  ASSERT_TRUE(longer.has_value());
  EXPECT_EQ(leases.granted_through(), 50u);
  EXPECT_FALSE(leases.BeginWrite(leases.durable().schedule, {}).has_value()) << "one is being written";
  leases.Adopt(*longer);
  EXPECT_EQ(leases.granted_through(), 110u);
  EXPECT_FALSE(leases.BeginWrite(leases.durable().schedule, {}).has_value()) << "nothing to write";
}

TEST(StepLeasesTest, NoLeaseGrowsIntoAChangeOfModeUntilItIsWritten) {
  StepLeases leases = MakeLeases();
  const auto change = leases.BeginWrite(FirstOrderFrom(11), {});
  ASSERT_TRUE(change.has_value());
  leases.ExtendBeyond(5);
  EXPECT_EQ(leases.granted_through(), 10u);
  leases.NoteInDoubt();
  leases.ExtendBeyond(6);
  EXPECT_EQ(leases.granted_through(), 10u) << "it may be found written after a crash";
  const auto again = leases.BeginWrite(leases.durable().schedule, {});
  ASSERT_TRUE(again.has_value()) << "what is in doubt is written again";
  leases.Adopt(*again);
  EXPECT_EQ(leases.granted_through(), 16u);
}

TEST(StepLeasesTest, AnOperatorsChoiceIsWrittenWhereItChangesNoMode) {
  StepLeases leases = MakeLeases();
  FallbackState forced;
  forced.forced = Mode::kSecondOrder;
  const auto written = leases.BeginWrite(leases.durable().schedule, forced);
  ASSERT_TRUE(written.has_value());
  leases.Adopt(*written);
  EXPECT_FALSE(leases.BeginWrite(leases.durable().schedule, forced).has_value());
}

TEST(StepLeasesTest, AHoldKeepsAStepFromBeingGranted) {
  StepLeases leases = MakeLeases();
  leases.HoldBefore(leases.first_open_step());
  leases.ExtendBeyond(5);
  EXPECT_EQ(leases.granted_through(), 10u);
  leases.EndHold();
  EXPECT_EQ(leases.granted_through(), 15u);
}

}  // namespace
}  // namespace precondor
