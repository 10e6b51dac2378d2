// SPDX-License-Identifier: Apache-2.0
#include "client/cpp/src/outbox.h"

#include <cstdint>

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

#include "tests/unit/client/outbox_fixture.h"

namespace precondor {
namespace {

TEST_F(OutboxTest, SendsNothingWithoutAStream) {
  Submit("S0.1+10");
  EXPECT_EQ(WriteAll(), "");
  outbox_.StartStream(kCredit);
  EXPECT_EQ(WriteAll(), "S0.1[0+10]");
  EXPECT_EQ(outbox_.unacknowledged(), 1u);
}

TEST_F(OutboxTest, KeepsTheOrderAndCutsIntoChunks) {
  outbox_.StartStream(uint64_t{10} << 20);
  Submit("S3.0+10");
  ASSERT_TRUE(Add(Gradient(3, 0), 2 * wire::kChunkBytes + 5).ok());
  Submit("G3.1+0");
  EXPECT_EQ(WriteAll(), "S3.0[0+10] G3.0[0+1048576] G3.0[1048576+1048576] G3.0[2097152+5] G3.1[0+0]");
}

TEST_F(OutboxTest, StatisticsAreDoneWithTheAckAndGradientsWithTheResult) {
  outbox_.StartStream(kCredit);
  SubmitAndWrite("S0.0+10 G0.0+10");
  EXPECT_NE(outbox_.Acknowledge(Statistics(0, 0)), nullptr);
  EXPECT_EQ(outbox_.Acknowledge(Statistics(0, 0)), nullptr);
  EXPECT_EQ(outbox_.unacknowledged(), 1u);
  EXPECT_NE(outbox_.Acknowledge(Gradient(0, 0)), nullptr);
  EXPECT_EQ(outbox_.unacknowledged(), 0u);
  EXPECT_FALSE(outbox_.empty());
  EXPECT_NE(outbox_.Remove(Gradient(0, 0)), nullptr);
  EXPECT_EQ(outbox_.Remove(Gradient(0, 0)), nullptr);
  EXPECT_TRUE(outbox_.empty());
}

TEST_F(OutboxTest, BeforeTheFirstPullAnotherMemoryIsToldWhatWasFetched) {
  outbox_.StartStream(kCredit, 7);
  for (const auto& [step, layer] : {std::pair(0, 0), std::pair(10, 1)}) {
    ASSERT_TRUE(Add(Fetch(step, layer), 0).ok());
    WriteAll();
    outbox_.Finish(Fetch(step, layer), nullptr, 3);
  }
  EXPECT_EQ(NewStream(8), "R10.1v3") << "layer 0 has everything before it";
  EXPECT_EQ(outbox_.answered_through(), 9u);
}

// A PULL is what a gradient is: done with its result, kept and told of; a FETCH is not kept.
TEST_F(OutboxTest, APullIsKeptAndTheLastOneIsToldToAnotherMemory) {
  outbox_.StartStream(kCredit, 7);
  for (const uint64_t step : {10, 20}) {
    ASSERT_TRUE(Add(Fetch(step, 0), 0).ok());
    ASSERT_TRUE(Add(Pull(step, 0), 0).ok());
    EXPECT_EQ(WriteAll(), absl::StrCat("F", step, ".0[0+0] P", step, ".0[0+0]"));
    Finish(Fetch(step, 0));
    EXPECT_NE(outbox_.Acknowledge(Pull(step, 0)), nullptr);
    EXPECT_EQ(outbox_.unacknowledged(), 0u);
    Finish(Pull(step, 0));
  }
  EXPECT_TRUE(outbox_.empty());
  EXPECT_EQ(outbox_.answered_through(), 20u);
  SubmitAndWrite("F20.0+0");
  EXPECT_EQ(NewStream(8), "R20.0v200 | P20.0[0+0] F20.0[0+0]");
}

TEST_F(OutboxTest, VersionsFromBeforeFirstOrderAreNotClaimed) {
  outbox_.StartStream(kCredit, 7);
  SubmitAndWrite("G10.0+10");
  EXPECT_NE(outbox_.Acknowledge(Gradient(10, 0)), nullptr);
  Finish(Gradient(10, 0));
  outbox_.ForgetVersionsBefore(10);
  EXPECT_EQ(NewStream(8), "R10.0v100 | G10.0[0+10]");
  outbox_.ForgetVersionsBefore(11);
  EXPECT_EQ(NewStream(9), "R10.0v0 | G10.0[0+10]");
}

TEST_F(OutboxTest, RefusesTheSameKeyTwiceUntilItIsDone) {
  outbox_.StartStream(kCredit);
  Submit("S0.0+10");
  EXPECT_EQ(Add(Statistics(0, 0), 10).code(), absl::StatusCode::kAlreadyExists);
  EXPECT_TRUE(Add(Gradient(0, 0), 10).ok());
  WriteAll();
  Acknowledge("S0.0");
  EXPECT_TRUE(Add(Statistics(0, 0), 10).ok());
}

TEST_F(OutboxTest, StaysWithinTheCredit) {
  outbox_.StartStream(kCredit);
  Submit("G0.0+600 G0.1+600 G0.2+400");
  EXPECT_EQ(WriteAll(), "G0.0[0+600]");
  Acknowledge("G0.0");
  EXPECT_EQ(WriteAll(), "G0.1[0+600] G0.2[0+400]");
}

TEST_F(OutboxTest, APayloadLargerThanTheCreditGoesAlone) {
  outbox_.StartStream(kCredit);
  Submit("G0.0+10 G0.1+5000 G0.2+10");
  EXPECT_EQ(WriteAll(), "G0.0[0+10]");
  Acknowledge("G0.0");
  EXPECT_EQ(WriteAll(), "G0.1[0+5000]");
  Acknowledge("G0.1");
  EXPECT_EQ(WriteAll(), "G0.2[0+10]");
}

TEST_F(OutboxTest, ANewStreamRepeatsWhatWasNotAnsweredInItsOrder) {
  outbox_.StartStream(uint64_t{4} << 20, 1);
  Submit("S0.0+10 G0.0+20 S0.1+30");
  ASSERT_TRUE(Add(Gradient(0, 1), wire::kChunkBytes + 1).ok());
  for (int i = 0; i < 4; ++i) ASSERT_TRUE(outbox_.Next(kNow).has_value());  // the last is half sent
  Acknowledge("S0.0 G0.0");
  outbox_.StopStream();
  EXPECT_EQ(WriteAll(), "");
  Submit("S0.2+40");
  outbox_.StartStream(uint64_t{4} << 20, 1);
  EXPECT_EQ(WriteAll(), "G0.0[0+20] S0.1[0+30] G0.1[0+1048576] G0.1[1048576+1] S0.2[0+40]");
  EXPECT_EQ(outbox_.unacknowledged(), 4u);
}

TEST_F(OutboxTest, AnAnswerThatOvertakesTheLastChunkStopsTheRest) {
  outbox_.StartStream(uint64_t{8} << 20);
  ASSERT_TRUE(Add(Gradient(0, 0), 3 * wire::kChunkBytes).ok());
  Submit("G0.1+5");
  ASSERT_TRUE(outbox_.Next(kNow).has_value());
  ASSERT_NE(outbox_.Remove(Gradient(0, 0)), nullptr);
  EXPECT_EQ(WriteAll(), "G0.1[0+5]");
}

TEST_F(OutboxTest, RetriesAfterAPauseAndTellsWhen) {
  outbox_.StartStream(kCredit);
  SubmitAndWrite("S0.0+10");
  const absl::Time later = kNow + absl::Milliseconds(20);
  outbox_.RetryAfter(Statistics(0, 0), kNow, absl::Milliseconds(20));
  EXPECT_EQ(outbox_.NextEvent(kNow), later);
  EXPECT_EQ(WriteAll(), "");
  EXPECT_EQ(WriteAll(later), "S0.0[0+10]");
  EXPECT_EQ(outbox_.NextEvent(later), absl::InfiniteFuture());
}

TEST_F(OutboxTest, PausesGrowWithEachRefusalUntilTheNextStream) {
  outbox_.StartStream(kCredit);
  Submit("G0.0+900");
  absl::Time now = kNow;
  for (const int64_t pause_ms : {20, 40, 80, 160, 320, 640, 640}) {
    ASSERT_EQ(WriteAll(now), "G0.0[0+900]");
    outbox_.RetryAfter(Gradient(0, 0), now, absl::Milliseconds(20));
    now += absl::Milliseconds(pause_ms);
    EXPECT_EQ(outbox_.NextEvent(kNow), now) << pause_ms;
  }
  outbox_.StartStream(kCredit);
  ASSERT_EQ(WriteAll(now), "G0.0[0+900]");
  outbox_.RetryAfter(Gradient(0, 0), now, absl::Milliseconds(20));
  EXPECT_EQ(outbox_.NextEvent(now), now + absl::Milliseconds(20));
}

TEST_F(OutboxTest, ParkedItemsWaitForTheNextStreamAndUseNoCredit) {
  outbox_.StartStream(kCredit);
  Submit("G0.0+900 G0.1+900");
  EXPECT_EQ(WriteAll(), "G0.0[0+900]");
  outbox_.Park(Gradient(0, 0));
  EXPECT_EQ(WriteAll(), "G0.1[0+900]");
  outbox_.StartStream(kCredit);
  EXPECT_EQ(WriteAll(), "G0.0[0+900]");
}

TEST_F(OutboxTest, ExpiresWhatIsLate) {
  outbox_.StartStream(kCredit);
  ASSERT_TRUE(Add(Gradient(0, 0), 10, kNow + absl::Seconds(2)).ok());
  ASSERT_TRUE(Add(Gradient(0, 1), 10, kNow + absl::Seconds(1)).ok());
  EXPECT_EQ(outbox_.NextEvent(kNow), kNow + absl::Seconds(1));
  EXPECT_TRUE(outbox_.TakeExpired(kNow).empty());
  const auto expired = outbox_.TakeExpired(kNow + absl::Seconds(1));
  ASSERT_EQ(expired.size(), 1u);
  EXPECT_EQ(expired[0]->id, Gradient(0, 1));
  EXPECT_EQ(WriteAll(), "G0.0[0+10]");
}

TEST_F(OutboxTest, TellsOfAPayloadThatExpiresBetweenItsChunks) {
  outbox_.StartStream(4 * wire::kChunkBytes);
  ASSERT_TRUE(Add(Gradient(0, 0), wire::kChunkBytes + 1, kNow + absl::Seconds(1)).ok());
  EXPECT_FALSE(outbox_.sending());
  ASSERT_TRUE(outbox_.Next(kNow).has_value());
  EXPECT_TRUE(outbox_.sending());
  EXPECT_EQ(outbox_.TakeExpired(kNow + absl::Seconds(1)).size(), 1u);
  EXPECT_FALSE(outbox_.sending());
}

TEST_F(OutboxTest, TakeAllLeavesNothing) {
  outbox_.StartStream(kCredit);
  Submit("S0.0+10 G0.0+10");
  ASSERT_TRUE(outbox_.Next(kNow).has_value());
  EXPECT_EQ(outbox_.TakeAll().size(), 2u);
  EXPECT_TRUE(outbox_.empty());
  EXPECT_EQ(outbox_.unacknowledged(), 0u);
  EXPECT_EQ(WriteAll(), "");
}

TEST_F(OutboxTest, ANewEpochRepeatsAcknowledgedStatisticsOfStepsThatMayBeOpen) {
  outbox_.StartStream(kCredit, 1);
  SubmitAndWrite("S5.0+10 S5.1+11 G5.0+12 G5.1+13");
  Acknowledge("S5.0 S5.1");
  outbox_.Remove(Gradient(5, 0));  // its result: step 5 of layer 0 was sealed
  outbox_.Reopen();
  EXPECT_EQ(NewStream(1), "S5.1[0+11] G5.1[0+13]");
  // A refusal of a repetition tells nothing that the caller should hear.
  EXPECT_TRUE(outbox_.WasCounted(Statistics(5, 1), Refusal(ErrorReason::kConflict)));
}

TEST_F(OutboxTest, AStaleStepAnswersARepetitionThatWasCounted) {
  outbox_.StartStream(kCredit);
  Submit("S0.0+10 S0.1+10");
  ASSERT_TRUE(outbox_.Next(kNow).has_value());
  outbox_.StartStream(kCredit);
  WriteAll();
  const absl::Status stale = Refusal(ErrorReason::kStaleStep, absl::StatusCode::kAborted);
  EXPECT_TRUE(outbox_.WasCounted(Statistics(0, 0), stale));
  EXPECT_FALSE(outbox_.WasCounted(Statistics(0, 0), Refusal(ErrorReason::kNonFinite)));
  EXPECT_FALSE(outbox_.WasCounted(Statistics(0, 1), stale));
}

TEST_F(OutboxTest, StatisticsOfAStepThatIsOverAreRepeatedInALaterEpoch) {
  outbox_.StartStream(kCredit, 1);
  SubmitAndWrite("S5.0+10");
  Acknowledge("S5.0");
  outbox_.Reopen();
  EXPECT_EQ(NewStream(1), "S5.0[0+10]");
  // Refused as STALE_STEP.
  outbox_.Remove(Statistics(5, 0));
  // The job may go back to just this step, which this rank has not finished.
  outbox_.Reopen();
  EXPECT_EQ(NewStream(1), "S5.0[0+10]");
}

TEST_F(OutboxTest, StatisticsThatAreBeingRepeatedAreRepeatedInTheNextEpochToo) {
  outbox_.StartStream(kCredit, 1);
  SubmitAndWrite("S5.0+10");
  Acknowledge("S5.0");
  EXPECT_EQ(NewStream(2), "S5.0[0+10]") << "another memory";
  for (int epoch = 2; epoch < 5; ++epoch) {
    outbox_.Reopen();
    EXPECT_EQ(NewStream(2), "S5.0[0+10]") << epoch;
    Acknowledge("S5.0");
  }
}

TEST_F(OutboxTest, ALayerThatMovesTakesAlongWhatTheNextEpochRepeats) {
  outbox_.StartStream(kCredit, 1);
  SubmitAndWrite("S5.0+10");
  Acknowledge("S5.0");
  outbox_.StartStream(kCredit, 2);  // another memory, to which it is repeated
  outbox_.Reopen();
  outbox_.StopStream();
  Outbox to;
  to.Adopt(outbox_.TakeLayers({0}));
  for (int epoch = 2; epoch < 4; ++epoch) {
    to.StartStream(kCredit, 1);
    EXPECT_EQ(WriteAllOf(to), "S5.0[0+10]") << epoch;
    to.Acknowledge(Statistics(5, 0));
    to.Reopen();
  }
}

TEST_F(OutboxTest, AProcessThatTookItsRankOverSaysWhereItBegins) {
  outbox_.BeginAt(0, 5);
  Submit("G5.0+10");
  EXPECT_EQ(NewStream(1), "B5.0 | G5.0[0+10]");
  outbox_.Acknowledge({v1::FRAME_KIND_RESUME, 5, 0});
  EXPECT_EQ(NewStream(1), "G5.0[0+10]") << "that memory knows";
  EXPECT_EQ(NewStream(2), "B5.0 | G5.0[0+10]");
  // The acknowledgement is lost, and the answer says more.
  outbox_.Finish(Gradient(5, 0), Outbox::CopyToKeep(*outbox_.Find(Gradient(5, 0))), 3);
  EXPECT_EQ(NewStream(3), "R5.0v3 | G5.0[0+10]");
}

TEST_F(OutboxTest, AProcessThatTookItsRankOverSaysWhichFactorsItsCheckpointHad) {
  outbox_.BeginAt(0, 5, 7);
  Submit("G5.0+10");
  EXPECT_EQ(NewStream(1), "B5.0v7 | G5.0[0+10]");
  outbox_.StopStream();
  Outbox to;
  to.Adopt(outbox_.TakeLayers({0}));
  to.StartStream(kCredit, 1);
  EXPECT_EQ(WriteAllOf(to), "B5.0v7 | G5.0[0+10]");
  to.LowerBegun(0, 3);
  to.StartStream(kCredit, 3);
  EXPECT_EQ(WriteAllOf(to), "B5.0v4 | G5.0[0+10]") << "the user knows of three";
  to.ForgetVersionsBefore(6);
  to.StartStream(kCredit, 2);
  EXPECT_EQ(WriteAllOf(to), "B5.0 | G5.0[0+10]") << "first order needs none";
}

}  // namespace
}  // namespace precondor
