// SPDX-License-Identifier: Apache-2.0
#include "client/cpp/src/step_ledger.h"

#include "gtest/gtest.h"

#include "kernels/base/error_reason.h"

namespace precondor {
namespace {

using Verdict = StepLedger::Verdict;

WorkerDirective Lease(uint64_t through) {
  WorkerDirective directive;
  directive.lease_through_step = through;
  return directive;
}

TEST(StepLedgerTest, LeasesOnlyGrow) {
  StepLedger ledger(3, Lease(5));
  EXPECT_EQ(ledger.next_step(), 3u);
  ledger.Adopt(Lease(4));
  EXPECT_TRUE(ledger.MayStart(5));
  ledger.Adopt(Lease(6));
  EXPECT_TRUE(ledger.MayStart(6));
  EXPECT_FALSE(ledger.MayStart(7));
}

TEST(StepLedgerTest, ReportsAreOwedUntilTheyAreSettledInTheirOrder) {
  StepLedger ledger(0, Lease(2));
  EXPECT_EQ(ledger.QueueReport({.step = 0}), 1u);
  EXPECT_EQ(ledger.QueueReport({.step = 1}), 2u);
  EXPECT_EQ(ledger.next_step(), 2u);
  EXPECT_EQ(ledger.MarkAnswered(absl::UnavailableError("gone")), Verdict::kAskAgain);
  EXPECT_EQ(ledger.MarkAnswered(absl::DeadlineExceededError("slow")), Verdict::kAskAgain);
  EXPECT_EQ(ledger.MarkAnswered(ReasonedStatus(absl::StatusCode::kFailedPrecondition, ErrorReason::kStaleEpoch, "")),
            Verdict::kAskAgain);
  EXPECT_EQ(ledger.first_owed().report.step, 0u);
  EXPECT_EQ(ledger.answered(), 0u);
  EXPECT_EQ(ledger.MarkAnswered(Lease(2)), Verdict::kAnswered);
  EXPECT_EQ(ledger.answered(), 1u);
  EXPECT_EQ(ledger.first_owed().report.step, 1u);
  EXPECT_EQ(ledger.MarkAnswered(absl::InvalidArgumentError("no")), Verdict::kRefused);
  EXPECT_FALSE(ledger.owes());
}

TEST(StepLedgerTest, AsksAgainForTheStepAfterTheLastReport) {
  StepLedger ledger(0, Lease(0));
  ledger.QueueReport({.step = 0});
  EXPECT_EQ(ledger.MarkAnswered(Lease(0)), Verdict::kAskAgain);
  EXPECT_EQ(ledger.MarkAnswered(Lease(1)), Verdict::kAnswered);
  EXPECT_FALSE(ledger.owes());
}

TEST(StepLedgerTest, AJobThatWentBackSinceLeavesBehindWhoHasFinishedMore) {
  WorkerDirective directive;
  directive.rollback_epoch = 4;
  directive.resume_step = 10;
  EXPECT_TRUE(directive.LeavesBehind(3, 11));
  EXPECT_FALSE(directive.LeavesBehind(3, 10)) << "it begins where the job goes back to";
  EXPECT_FALSE(directive.LeavesBehind(4, 11)) << "it has been told";
}

TEST(StepLedgerTest, ModesHoldFromTheirFirstStepOn) {
  WorkerDirective directive;
  EXPECT_EQ(directive.ModeOf(0), Mode::kSecondOrder);
  directive.modes = {{0, Mode::kSecondOrder}, {4, Mode::kFirstOrder}};
  EXPECT_EQ(directive.ModeOf(3), Mode::kSecondOrder);
  EXPECT_EQ(directive.ModeOf(4), Mode::kFirstOrder);
  directive.modes.push_back({9, Mode::kSecondOrder});
  EXPECT_EQ(directive.LastFirstOrder(30), 4u);
  EXPECT_EQ(directive.LastFirstOrder(4), 4u);
  EXPECT_EQ(directive.LastFirstOrder(3), 0u) << "the shards need their factors until it is there";
  EXPECT_EQ(WorkerDirective().LastFirstOrder(30), 0u);
}

}  // namespace
}  // namespace precondor
