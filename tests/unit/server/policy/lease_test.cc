// SPDX-License-Identifier: Apache-2.0
#include "server/policy/lease.h"

#include <limits>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace precondor {
namespace {

using ::testing::ElementsAre;

constexpr uint64_t kMax = std::numeric_limits<uint64_t>::max();

TEST(LeaseTest, ModeOfAStepIsThatOfItsInterval) {
  const std::vector<ModeInterval> schedule = {
      {0, Mode::kSecondOrder}, {100, Mode::kFirstOrder}, {200, Mode::kSecondOrder}};
  EXPECT_EQ(ModeAt(schedule, 0), Mode::kSecondOrder);
  EXPECT_EQ(ModeAt(schedule, 99), Mode::kSecondOrder);
  EXPECT_EQ(ModeAt(schedule, 100), Mode::kFirstOrder);
  EXPECT_EQ(ModeAt(schedule, 199), Mode::kFirstOrder);
  EXPECT_EQ(ModeAt(schedule, kMax), Mode::kSecondOrder);
  EXPECT_EQ(ModeAt({}, 5), Mode::kSecondOrder);
}

TEST(LeaseTest, ModesBetweenCoverTheRangeAndNoMore) {
  const std::vector<ModeInterval> schedule = {
      {0, Mode::kSecondOrder}, {100, Mode::kFirstOrder}, {200, Mode::kSecondOrder}};
  EXPECT_THAT(ModesBetween(schedule, 10, 99), ElementsAre(ModeInterval{10, Mode::kSecondOrder}));
  EXPECT_THAT(ModesBetween(schedule, 10, 100),
              ElementsAre(ModeInterval{10, Mode::kSecondOrder}, ModeInterval{100, Mode::kFirstOrder}));
  EXPECT_THAT(ModesBetween(schedule, 150, 250),
              ElementsAre(ModeInterval{150, Mode::kFirstOrder}, ModeInterval{200, Mode::kSecondOrder}));
}

}  // namespace
}  // namespace precondor
