// SPDX-License-Identifier: Apache-2.0
// An outbox repeats to a shard's new memory, and to another shard, what these may need.
#include <cstdint>
#include <memory>
#include <random>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

#include "tests/unit/client/outbox_fixture.h"

namespace precondor {
namespace {

// --- a shard that was lost and came back: another memory ---

TEST_F(OutboxTest, AShardThatCameBackGetsWhatOtherRanksMayNeedAgain) {
  outbox_.StartStream(kCredit, 1);
  SubmitAndWrite("S5.0+10 G5.0+11 G5.1+12");
  Acknowledge("S5.0 G5.0");
  Finish(Gradient(5, 0));
  SubmitAndWrite("G6.0+13");
  EXPECT_EQ(NewStream(1), "G5.1[0+12] G6.0[0+13]") << "the same memory: nothing that was answered";
  EXPECT_EQ(NewStream(2), "R5.0v50 | S5.0[0+10] G5.0[0+11] G5.1[0+12] G6.0[0+13]");
  // No call waits for their answers: an acknowledgement, or any refusal, ends them.
  EXPECT_TRUE(outbox_.WasCounted(Gradient(5, 0), Refusal(ErrorReason::kStaleStep, absl::StatusCode::kAborted)));
  EXPECT_EQ(outbox_.Find(Gradient(5, 0))->result, nullptr);
  Acknowledge("G5.0 S5.0");
  EXPECT_EQ(outbox_.Find(Gradient(5, 0)), nullptr);
  EXPECT_EQ(outbox_.unacknowledged(), 2u);
  // Lost once more before anything else is answered.
  EXPECT_EQ(NewStream(3), "R5.0v50 | S5.0[0+10] G5.0[0+11] G5.1[0+12] G6.0[0+13]");
}

TEST_F(OutboxTest, NothingGoesAheadOfAResumeThatIsRefused) {
  outbox_.StartStream(kCredit, 1);
  SubmitAndWrite("G5.0+11");
  Finish(Gradient(5, 0));
  Submit("G6.0+12");
  outbox_.StartStream(kCredit, 2);
  const auto resume = outbox_.Next(kNow);
  ASSERT_EQ(resume->item->id.kind, v1::FRAME_KIND_RESUME);
  EXPECT_FALSE(outbox_.Next(kNow).has_value());
  // The shard does not have the session yet, and gets it before the RESUME comes again.
  const absl::Duration pause = absl::Milliseconds(20);
  outbox_.RetryAfter(resume->item->id, kNow, pause);
  EXPECT_FALSE(outbox_.Next(kNow).has_value());
  EXPECT_EQ(WriteAll(kNow + pause), "R5.0v50 | G5.0[0+11] G6.0[0+12]");
}

TEST_F(OutboxTest, AnAnswerToALaterSubmissionEndsTheKeeping) {
  outbox_.StartStream(kCredit, 1);
  Submit("S5.0+10 G5.0+11 G6.0+12");  // before the answer of step 5 has come
  WriteAll();
  Acknowledge("S5.0");
  Finish(Gradient(5, 0));
  Finish(Gradient(6, 0));
  SubmitAndWrite("G7.0+13");
  EXPECT_EQ(NewStream(2), "R5.0v60 | S5.0[0+10] G5.0[0+11] G6.0[0+12] G7.0[0+13]");
  Finish(Gradient(7, 0));  // submitted after the answers of both
  Acknowledge("S5.0 G5.0 G6.0");
  outbox_.Acknowledge({v1::FRAME_KIND_RESUME, 5, 0});
  EXPECT_EQ(NewStream(3), "R7.0v70 | G7.0[0+13]");
}

TEST_F(OutboxTest, StatisticsOfALayerWhoseGradientAnotherRankSendsAreKeptForAFewSteps) {
  outbox_.StartStream(kCredit, 1);
  for (uint64_t step = 0; step < 6; ++step) {
    ASSERT_TRUE(Add(Statistics(step, 0), 10).ok());
    WriteAll();
    outbox_.Acknowledge(Statistics(step, 0));
  }
  EXPECT_EQ(NewStream(2), "S3.0[0+10] S4.0[0+10] S5.0[0+10]");
}

TEST_F(OutboxTest, AJobThatGoesBackLeavesWhatItKept) {
  outbox_.StartStream(kCredit, 1);
  for (uint64_t step : {5, 6}) {
    ASSERT_TRUE(Add(Statistics(step, 0), 10).ok());
    ASSERT_TRUE(Add(Gradient(step, 0), 11).ok());
  }
  WriteAll();
  for (uint64_t step : {5, 6}) {
    outbox_.Acknowledge(Statistics(step, 0));
    Finish(Gradient(step, 0));
  }
  Submit("S5.0+12");
  EXPECT_EQ(NewStream(2), "S5.0[0+12]");
}

TEST_F(OutboxTest, GradientsAreNotKeptForAShardThatRemembersNothing) {
  outbox_.StartStream(kCredit, 0);
  SubmitAndWrite("S5.0+10 G5.0+11");
  Acknowledge("S5.0");
  Finish(Gradient(5, 0));
  EXPECT_EQ(NewStream(2), "R6.0v50 | S5.0[0+10]");
}

TEST_F(OutboxTest, AMemoryThatMayBeAnotherIsToldWhatHasBeenAnswered) {
  outbox_.StartStream(kCredit, 0);
  SubmitAndWrite("G5.0+11 G5.1+11");
  Finish(Gradient(5, 0));
  outbox_.Remove(Gradient(5, 1));
  EXPECT_EQ(NewStream(0), "R6.1v0 R6.0v50") << "refused: it will not come again either";
  // Its fate is no concern of the caller's.
  const ContributionId resume{v1::FRAME_KIND_RESUME, 6, 0};
  EXPECT_TRUE(outbox_.WasCounted(resume, Refusal(ErrorReason::kMalformed)));
  EXPECT_NE(outbox_.Acknowledge(resume), nullptr);
  EXPECT_EQ(outbox_.answered_through(), 5u);
  // The job goes back: step 5 will be answered anew.
  Submit("S4.0+10");
  EXPECT_EQ(NewStream(0), "R6.1v0 | S4.0[0+10]");
}

TEST_F(OutboxTest, ANewMemoryHasTimeToSettle) {
  const absl::Status ahead = Refusal(ErrorReason::kStepTooFarAhead);
  const absl::Time end = kNow + absl::Seconds(9);
  EXPECT_EQ(outbox_.RecoveryOf(Gradient(5, 0), ahead, kNow), Recovery::kRefused);
  outbox_.RetryRefusalsUntil(end);
  EXPECT_EQ(outbox_.RecoveryOf(Gradient(5, 0), ahead, kNow), Recovery::kRetryLater);
  EXPECT_EQ(outbox_.RecoveryOf(Gradient(5, 0), ahead, end), Recovery::kRefused);
}

TEST_F(OutboxTest, ASessionThatTheShardDoesNotKnowMayComeAgain) {
  EXPECT_EQ(outbox_.RecoveryOf(Gradient(5, 0), Refusal(ErrorReason::kUnknownSession), kNow), Recovery::kRetryLater);
  EXPECT_EQ(outbox_.RecoveryOf(Gradient(5, 0), Refusal(ErrorReason::kNotOwner), kNow), Recovery::kFatal);
  EXPECT_EQ(outbox_.RecoveryOf(Gradient(5, 0), Refusal(ErrorReason::kStateLost), kNow), Recovery::kFatal);
  EXPECT_EQ(outbox_.RecoveryOf(Gradient(5, 0), Refusal(ErrorReason::kNotActive), kNow), Recovery::kRetryLater);
}

TEST_F(OutboxTest, ALostLayerHoldsUpNoOther) {
  outbox_.StartStream(kCredit, 1);
  for (const uint64_t step : {4, 5}) {
    ASSERT_TRUE(Add(Gradient(step, 0), 10).ok());
    ASSERT_TRUE(Add(Gradient(step, 1), 10).ok());
    WriteAll();
    if (step == 5) break;
    Finish(Gradient(step, 0));
    Finish(Gradient(step, 1));
  }
  // Other ranks have had the answer to step 5 of layer 0, and wait for that of layer 1.
  outbox_.StartStream(kCredit, 2);
  const absl::Status lost = Refusal(ErrorReason::kStateLost);
  std::vector<ContributionId> sent;
  while (const std::optional<Outbox::Frame> frame = outbox_.Next(kNow)) {
    const ContributionId id = sent.emplace_back(frame->item->id);
    if (id.layer == 1) {
      outbox_.Acknowledge(id);
    } else if (id == Gradient(5, 0)) {
      EXPECT_EQ(outbox_.RecoveryOf(id, lost, kNow), Recovery::kFatal);
    } else {
      ASSERT_EQ(outbox_.RecoveryOf(id, lost, kNow), Recovery::kRefused);
      ASSERT_TRUE(outbox_.WasCounted(id, lost));
      outbox_.Remove(id);
    }
  }
  ASSERT_EQ(sent.size(), 6u);  // a RESUME and the kept gradient of each layer, and the new ones
  EXPECT_EQ(sent.back(), Gradient(5, 1));
}

TEST_F(OutboxTest, InFirstOrderNoFactorsAreRemembered) {
  outbox_.StartStream(kCredit, 0);
  Contribution item;
  item.id = Gradient(5, 0);
  item.mode = Mode::kFirstOrder;
  ASSERT_TRUE(outbox_.Add(std::make_shared<Contribution>(item)).ok());
  WriteAll();
  Finish(Gradient(5, 0));
  EXPECT_EQ(NewStream(0), "R6.0v0");
}

TEST_F(OutboxTest, WhatIsKeptHasBytesOfItsOwn) {
  std::vector<uint8_t> memory = {1, 2, 3};
  Contribution item;
  item.id = Gradient(5, 0);
  item.payload = memory;
  item.borrowed = true;
  const Outbox::Item kept = Outbox::CopyToKeep(item);
  memory.assign(3, 0);
  EXPECT_EQ(std::vector<uint8_t>(kept->payload.begin(), kept->payload.end()), (std::vector<uint8_t>{1, 2, 3}));
  EXPECT_EQ(kept->deadline, absl::InfiniteFuture());
}

// Against a model: whatever the order of losses and answers, each contribution is sent until it is answered, streams
// carry the unanswered in their order, and the credit holds.
TEST_F(OutboxTest, LosesNothingUnderRandomFaults) {
  for (uint64_t seed = 0; seed < 50; ++seed) {
    SCOPED_TRACE(seed);
    std::mt19937_64 rng(seed);
    Outbox outbox;
    std::vector<ContributionId> sent;  // on this stream, whole, not acknowledged
    std::vector<ContributionId> waiting;
    uint64_t in_flight = 0;
    int answered = 0;
    uint32_t added = 0;
    outbox.StartStream(kCredit, 1);
    while (answered < 40) {
      const uint64_t what = rng() % 8;
      if (what < 2 && added < 40) {
        auto item = std::make_shared<Contribution>();
        item->id = added % 3 == 0 ? Statistics(0, added) : Gradient(0, added);
        auto payload = std::make_shared<std::vector<uint8_t>>(rng() % 400);
        item->payload = *payload;
        item->payload_owner = payload;
        ASSERT_TRUE(outbox.Add(item).ok());
        ++added;
      } else if (what < 5) {
        if (const auto frame = outbox.Next(kNow)) {
          ASSERT_TRUE(in_flight == 0 || in_flight + frame->chunk.size <= kCredit);
          in_flight += frame->chunk.size;
          sent.push_back(frame->item->id);
        }
      } else if (what == 5 && !sent.empty()) {
        const ContributionId id = sent[rng() % sent.size()];
        const auto item = outbox.Acknowledge(id);
        ASSERT_NE(item, nullptr);
        in_flight -= item->payload.size();
        std::erase(sent, id);
        if (id.kind == v1::FRAME_KIND_STATISTICS) {
          ++answered;
        } else {
          waiting.push_back(id);
        }
      } else if (what == 6 && !waiting.empty()) {
        ASSERT_NE(outbox.Remove(waiting.back()), nullptr);
        waiting.pop_back();
        ++answered;
      } else if (what == 7 && rng() % 4 == 0) {
        outbox.StartStream(kCredit, 1);
        sent.clear();
        waiting.clear();
        in_flight = 0;
      }
    }
    EXPECT_TRUE(outbox.empty());
    EXPECT_EQ(outbox.unacknowledged(), 0u);
  }
}

TEST(RecoveryTest, SortsRefusals) {
  EXPECT_EQ(RecoveryFor(Refusal(ErrorReason::kStaleEpoch)), Recovery::kRefreshEpoch);
  EXPECT_EQ(RecoveryFor(Refusal(ErrorReason::kNotActive, absl::StatusCode::kUnavailable)), Recovery::kRetryLater);
  EXPECT_EQ(RecoveryFor(Refusal(ErrorReason::kFutureEpoch, absl::StatusCode::kUnavailable)), Recovery::kRetryLater);
  EXPECT_EQ(RecoveryFor(Refusal(ErrorReason::kDraining, absl::StatusCode::kUnavailable)), Recovery::kRetryLater);
  EXPECT_EQ(RecoveryFor(absl::UnavailableError("gone")), Recovery::kRetryLater);
  EXPECT_EQ(RecoveryFor(Refusal(ErrorReason::kStaleIncarnation)), Recovery::kFatal);
  EXPECT_EQ(RecoveryFor(Refusal(ErrorReason::kUnknownSession, absl::StatusCode::kNotFound)), Recovery::kFatal);
  EXPECT_EQ(RecoveryFor(Refusal(ErrorReason::kSpecMismatch)), Recovery::kFatal);
  EXPECT_EQ(RecoveryFor(Refusal(ErrorReason::kNonFinite)), Recovery::kRefused);
  EXPECT_EQ(RecoveryFor(Refusal(ErrorReason::kConflict)), Recovery::kRefused);
  EXPECT_EQ(RecoveryFor(absl::InternalError("bug")), Recovery::kRefused);
}

// --- a shard whose address changes: its layers go to another link ---

TEST_F(OutboxTest, ALayerTakesAlongWhatIsOutstandingAndWhatOthersMayNeed) {
  Outbox from;
  from.StartStream(kCredit, 1);
  for (const uint32_t layer : {0u, 1u}) {
    ASSERT_TRUE(AddTo(from, Statistics(5, layer), 10).ok());
    ASSERT_TRUE(AddTo(from, Gradient(5, layer), 20).ok());
  }
  WriteAllOf(from);
  for (const uint32_t layer : {0u, 1u}) {
    ASSERT_NE(from.Acknowledge(Statistics(5, layer)), nullptr);
    FinishIn(from, Gradient(5, layer));
    ASSERT_TRUE(AddTo(from, Gradient(6, layer), 30).ok());
  }
  WriteAllOf(from);
  from.StopStream();

  Outbox to;
  to.StartStream(kCredit);
  ASSERT_TRUE(AddTo(to, Gradient(6, 2), 40).ok());
  to.Adopt(from.TakeLayers({1}));
  EXPECT_EQ(WriteAllOf(to), "R5.1v50 | G6.2[0+40] S5.1[0+10] G5.1[0+20] G6.1[0+30]");
  // Step 5 has been answered: no call waits for it, and a refusal means nothing.
  EXPECT_TRUE(to.WasCounted(Gradient(5, 1), Refusal(ErrorReason::kStaleStep)));
  ASSERT_NE(to.Acknowledge(Gradient(5, 1)), nullptr);
  EXPECT_EQ(to.Find(Gradient(5, 1)), nullptr);
  EXPECT_FALSE(to.WasCounted(Gradient(6, 1), Refusal(ErrorReason::kNonFinite)));
  // The other layer stays where it is.
  from.StartStream(kCredit, 1);
  EXPECT_EQ(WriteAllOf(from), "G6.0[0+30]");

  // Should the second shard be lost as well, the third gets the same.
  to.Acknowledge(Statistics(5, 1));
  to.StopStream();
  Outbox third;
  third.StartStream(kCredit, 1);
  third.Adopt(to.TakeLayers({1}));
  EXPECT_EQ(WriteAllOf(third), "R5.1v50 | S5.1[0+10] G5.1[0+20] G6.1[0+30]");
  // The answer to step 6 shows that every rank has that of step 5.
  FinishIn(third, Gradient(6, 1));
  third.StopStream();
  Outbox fourth;
  fourth.StartStream(kCredit);
  fourth.Adopt(third.TakeLayers({1}));
  EXPECT_EQ(WriteAllOf(fourth), "R6.1v60 | S5.1[0+10] G5.1[0+20] G6.1[0+30]")
      << "5 is under way, and its RESUME is acknowledged; 6 may be needed";
}

TEST_F(OutboxTest, WhatIsRefusedForItsValuesGoesAgainAsAnAbstentionAndIsKept) {
  const absl::Status refusal = Refusal(ErrorReason::kNonFinite, absl::StatusCode::kInvalidArgument);
  outbox_.StartStream(kCredit, 7);
  for (const ContributionId& id : {Statistics(0, 0), Gradient(0, 0)}) ASSERT_TRUE(Add(id, 10).ok());
  EXPECT_EQ(WriteAll(), "S0.0[0+10] G0.0[0+10]");
  for (const ContributionId& id : {Statistics(0, 0), Gradient(0, 0)}) {
    ASSERT_TRUE(outbox_.CountsAsAbstention(id, refusal));
    EXPECT_FALSE(outbox_.CountsAsAbstention(id, Refusal(ErrorReason::kConflict)));
    const Outbox::Item refused = outbox_.AbstainInstead(id);
    EXPECT_EQ(refused->payload.size(), 10u);
    const Outbox::Item abstention = outbox_.Find(id);
    EXPECT_TRUE(abstention->abstain);
    EXPECT_EQ(abstention->result, refused->result);
    EXPECT_FALSE(outbox_.CountsAsAbstention(id, refusal)) << "an abstention has no values";
  }
  EXPECT_EQ(outbox_.unacknowledged(), 2u);
  EXPECT_EQ(WriteAll(), "S0.0[0+0] G0.0[0+0]");
  Acknowledge("S0.0");
  Finish(Gradient(0, 0));
  EXPECT_TRUE(outbox_.empty());
  // The shard that counted them has lost its memory.
  EXPECT_EQ(NewStream(8), "R0.0v0 | S0.0[0+0] G0.0[0+0]");
  EXPECT_TRUE(outbox_.Find(Gradient(0, 0))->abstain);
}

TEST_F(OutboxTest, OnlyWhatWasSeenIsReplaced) {
  ASSERT_TRUE(Add(Gradient(0, 0), 10, kNow).ok());
  const Outbox::Item expired = outbox_.Find(Gradient(0, 0));
  const auto other = std::make_shared<Contribution>(*expired);
  EXPECT_TRUE(outbox_.Holds(expired));
  ASSERT_EQ(outbox_.TakeExpired(kNow).size(), 1u);
  Submit("G0.0+10");
  const Outbox::Item newer = outbox_.Find(Gradient(0, 0));
  EXPECT_FALSE(outbox_.Holds(expired));
  outbox_.Replace(expired, other);
  EXPECT_EQ(outbox_.Find(Gradient(0, 0)), newer);
  outbox_.Replace(newer, other);
  EXPECT_EQ(outbox_.Find(Gradient(0, 0)), other);
}

TEST_F(OutboxTest, ARefusalForItsValuesGivesTheCreditBack) {
  outbox_.StartStream(20);
  Submit("G0.0+15 G0.1+15");
  EXPECT_EQ(WriteAll(), "G0.0[0+15]");
  outbox_.AbstainInstead(Gradient(0, 0));
  EXPECT_EQ(WriteAll(), "G0.0[0+0] G0.1[0+15]");
}

}  // namespace
}  // namespace precondor
