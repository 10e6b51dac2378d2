// SPDX-License-Identifier: Apache-2.0
#include "server/core/coordinator/mode_policy.h"

#include "gtest/gtest.h"

namespace precondor {
namespace {

const std::vector<ModeInterval> kSecond = {{0, Mode::kSecondOrder}};
const std::vector<ModeInterval> kFirstFrom5 = {{0, Mode::kSecondOrder}, {5, Mode::kFirstOrder}};

TEST(ModePolicyTest, AnOperatorsChoiceHoldsFromTheFirstStepThatIsNotGranted) {
  ModePolicy policy({}, {});
  EXPECT_EQ(policy.WantedSchedule(kSecond, 5), kSecond);
  policy.Force(Mode::kFirstOrder);
  EXPECT_EQ(policy.decision().mode, Mode::kFirstOrder);
  EXPECT_EQ(policy.state().forced, Mode::kFirstOrder);
  EXPECT_EQ(policy.WantedSchedule(kSecond, 5), kFirstFrom5);
  EXPECT_EQ(policy.WantedSchedule(kFirstFrom5, 9), kFirstFrom5) << "carried out already";
}

TEST(ModePolicyTest, TakesInFinishedSteps) {
  ModePolicy policy({}, {});
  policy.Observe({.step = 4, .loss = 1});
  EXPECT_TRUE(policy.state().observed);
  EXPECT_EQ(policy.state().last_step, 4u);
  EXPECT_EQ(policy.decision().inputs.step, 4u);
}

}  // namespace
}  // namespace precondor
