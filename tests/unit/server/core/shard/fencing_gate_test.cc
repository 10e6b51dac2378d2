// SPDX-License-Identifier: Apache-2.0
#include "server/core/shard/fencing_gate.h"

#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

#include "kernels/base/error_reason.h"
#include "tests/support/fake_clock.h"
#include "tests/support/status_matchers.h"
#include "tests/support/wait_until.h"

namespace precondor {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

class FencingGateTest : public ::testing::Test {
 protected:
  std::vector<uint64_t> remembered;
  absl::Status disk;
  FakeClock clock;
  FencingGate gate{clock, [this](uint64_t token) {
                     remembered.push_back(token);
                     return disk;
                   }};
};

TEST_F(FencingGateTest, RefusesWhoHasBeenReplaced) {
  EXPECT_TRUE(gate.Enter(5).ok());
  EXPECT_TRUE(gate.Enter(5).ok());
  EXPECT_TRUE(gate.Enter(9).ok());
  EXPECT_THAT(gate.Enter(8), StatusIs(absl::StatusCode::kFailedPrecondition, ErrorReason::kStaleLeader,
                                      AllOf(HasSubstr("expected at least 9"), HasSubstr("got 8"))));
  EXPECT_EQ(gate.Enter(0).status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(remembered, ElementsAre(5, 9)) << "once each";
}

// Such a token would keep every later coordinator out.
TEST_F(FencingGateTest, RefusesATokenFarAboveTheClockAndTheTokensBefore) {
  ASSERT_TRUE(gate.Enter(5).ok());
  constexpr uint64_t kYear = uint64_t{366} * 24 * 3600 * 1'000'000'000;
  for (const uint64_t token : {2 * kYear, ~uint64_t{0}}) {
    EXPECT_THAT(gate.Enter(token), StatusIs(absl::StatusCode::kInvalidArgument,
                                            AllOf(HasSubstr("expected at most "), HasSubstr(std::to_string(token)))));
  }
  EXPECT_TRUE(gate.Enter(6).ok());
  EXPECT_TRUE(gate.Enter(kYear + 6).ok());
  EXPECT_TRUE(gate.Enter(2 * kYear + 6).ok()) << "a clock that is behind";
  clock.SetWall(absl::Hours(24 * 366 * 50));
  EXPECT_TRUE(gate.Enter(51 * kYear).ok()) << "a clock in place of a count";
}

TEST_F(FencingGateTest, WhatAnEarlierProcessRememberedCounts) {
  gate.Restore(7);
  EXPECT_FALSE(gate.Enter(6).ok());
  EXPECT_TRUE(gate.Enter(7).ok());
  EXPECT_TRUE(remembered.empty());
}

TEST_F(FencingGateTest, NobodyGetsInWithATokenThatIsNotDurable) {
  ASSERT_TRUE(gate.Enter(5).ok());
  disk = absl::ResourceExhaustedError("no space left");
  EXPECT_THAT(gate.Enter(6), StatusIs(absl::StatusCode::kUnavailable, HasSubstr("no space left")));
  EXPECT_FALSE(gate.Enter(5).ok()) << "there is a later one";
  disk = absl::OkStatus();
  EXPECT_TRUE(gate.Enter(6).ok());
}

TEST_F(FencingGateTest, TheNextOneWaitsForCallsThatAreInside) {
  absl::StatusOr<FencingGate::Pass> old = gate.Enter(5);
  ASSERT_TRUE(old.ok());
  std::optional<FencingGate::Pass> inside(*std::move(old));
  bool left = false;
  std::thread successor([&] {
    EXPECT_TRUE(gate.Enter(6).ok());
    EXPECT_TRUE(left);
  });
  // From the moment that it has come no earlier one gets in.
  WaitUntil([&] { return !gate.Enter(5).ok(); });
  left = true;
  inside.reset();
  successor.join();
}

}  // namespace
}  // namespace precondor
