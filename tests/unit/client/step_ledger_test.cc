// SPDX-License-Identifier: Apache-2.0
#include "client/cpp/src/step_ledger.h"

#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

#include "kernels/base/error_reason.h"

namespace precondor {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;
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
  EXPECT_EQ(ledger.MarkAnswered(1, absl::UnavailableError("gone")), Verdict::kAskAgain);
  EXPECT_EQ(ledger.MarkAnswered(1, absl::DeadlineExceededError("slow")), Verdict::kAskAgain);
  EXPECT_EQ(ledger.MarkAnswered(1, ReasonedStatus(absl::StatusCode::kFailedPrecondition, ErrorReason::kStaleEpoch, "")),
            Verdict::kAskAgain);
  EXPECT_EQ(ledger.first_owed().report.step, 0u);
  EXPECT_EQ(ledger.answered(), 0u);
  EXPECT_EQ(ledger.MarkAnswered(1, Lease(2)), Verdict::kAnswered);
  EXPECT_EQ(ledger.answered(), 1u);
  EXPECT_EQ(ledger.first_owed().report.step, 1u);
  EXPECT_EQ(ledger.MarkAnswered(1, absl::InvalidArgumentError("no")), Verdict::kRefused);
  EXPECT_FALSE(ledger.owes());
}

TEST(StepLedgerTest, AsksAgainForTheStepAfterTheLastReport) {
  StepLedger ledger(0, Lease(0));
  ledger.QueueReport({.step = 0});
  EXPECT_EQ(ledger.MarkAnswered(1, Lease(0)), Verdict::kAskAgain);
  EXPECT_EQ(ledger.MarkAnswered(1, Lease(1)), Verdict::kAnswered);
  EXPECT_FALSE(ledger.owes());
}

WorkerDirective Takes(size_t report_limit, uint64_t lease = 99) {
  WorkerDirective directive = Lease(lease);
  directive.report_limit = report_limit;
  return directive;
}

std::vector<uint64_t> Steps(const std::vector<OwnReport>& reports) {
  std::vector<uint64_t> steps;
  steps.reserve(reports.size());
  for (const OwnReport& report : reports) steps.push_back(report.step);
  return steps;
}

TEST(StepLedgerTest, ACallHasAsManyReportsAsTheCoordinatorTakes) {
  StepLedger ledger(0, Takes(3));
  EXPECT_THAT(ledger.NextCall(), IsEmpty());
  for (uint64_t step = 0; step < 5; ++step) {
    EXPECT_EQ(ledger.IsDue(), step >= 3) << step;
    ledger.QueueReport({.step = step});
  }
  EXPECT_THAT(Steps(ledger.NextCall()), ElementsAre(0, 1, 2));
  EXPECT_EQ(ledger.MarkAnswered(3, absl::UnavailableError("gone")), Verdict::kAskAgain);
  EXPECT_THAT(Steps(ledger.NextCall()), ElementsAre(0, 1, 2));
  EXPECT_EQ(ledger.MarkAnswered(3, Takes(3)), Verdict::kAnswered);
  EXPECT_EQ(ledger.answered(), 3u);
  EXPECT_FALSE(ledger.IsDue());
  EXPECT_THAT(Steps(ledger.NextCall()), ElementsAre(3, 4));
  EXPECT_EQ(ledger.MarkAnswered(2, Takes(3, /*lease=*/4)), Verdict::kAnswered) << "leases only grow";
  EXPECT_FALSE(ledger.owes());
}

TEST(StepLedgerTest, ReportsAreDueBeforeTheLeaseEnds) {
  StepLedger ledger(0, Takes(64, /*lease=*/20));
  for (uint64_t step = 0; step < 5; ++step) {
    EXPECT_FALSE(ledger.IsDue()) << step;
    ledger.QueueReport({.step = step});
  }
  EXPECT_TRUE(ledger.IsDue());
}

TEST(StepLedgerTest, AfterARefusalEachReportOfTheCallIsSentByItself) {
  StepLedger ledger(0, Takes(64));
  for (uint64_t step = 0; step < 4; ++step) ledger.QueueReport({.step = step});
  EXPECT_EQ(ledger.MarkAnswered(3, absl::InvalidArgumentError("one of them")), Verdict::kAskAgain);
  const std::vector<absl::StatusOr<WorkerDirective>> answers = {Takes(64), absl::InvalidArgumentError("no"), Takes(64)};
  for (uint64_t step = 0; step < 3; ++step) {
    EXPECT_TRUE(ledger.IsDue());
    EXPECT_THAT(Steps(ledger.NextCall()), ElementsAre(step));
    EXPECT_EQ(ledger.MarkAnswered(1, answers[step]), step == 1 ? Verdict::kRefused : Verdict::kAnswered);
  }
  ledger.QueueReport({.step = 4});
  EXPECT_THAT(Steps(ledger.NextCall()), ElementsAre(3, 4));
}

TEST(StepLedgerTest, ACoordinatorOfAnOlderReleaseHasLeftEarlierStepsOut) {
  StepLedger ledger(0, Takes(64));
  for (uint64_t step = 0; step < 2; ++step) ledger.QueueReport({.step = step});
  EXPECT_EQ(ledger.MarkAnswered(2, Takes(1)), Verdict::kAskAgain);
  EXPECT_EQ(ledger.answered(), 0u);
  EXPECT_THAT(Steps(ledger.NextCall()), ElementsAre(0));
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
