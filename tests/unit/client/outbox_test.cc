// SPDX-License-Identifier: Apache-2.0
#include "client/cpp/src/outbox.h"

#include <cstdint>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

#include "kernels/base/error_reason.h"

namespace precondor {
namespace {

using ::testing::StartsWith;

constexpr uint64_t kCredit = 1000;
const absl::Time kNow = absl::FromUnixSeconds(1000);

ContributionId Statistics(uint64_t step, uint32_t layer) { return {v1::FRAME_KIND_STATISTICS, step, layer}; }
ContributionId Gradient(uint64_t step, uint32_t layer) { return {v1::FRAME_KIND_GRADIENT, step, layer}; }
ContributionId Pull(uint64_t step, uint32_t layer) { return {v1::FRAME_KIND_PULL, step, layer}; }
ContributionId Fetch(uint64_t step, uint32_t layer) { return {v1::FRAME_KIND_FETCH, step, layer}; }

char Letter(v1::FrameKind kind) {
  switch (kind) {
    case v1::FRAME_KIND_GRADIENT:
      return 'G';
    case v1::FRAME_KIND_PULL:
      return 'P';
    case v1::FRAME_KIND_FETCH:
      return 'F';
    default:
      return 'S';
  }
}

absl::Status Refusal(ErrorReason reason, absl::StatusCode code = absl::StatusCode::kFailedPrecondition) {
  return ReasonedStatus(code, reason, "refused");
}

class OutboxTest : public ::testing::Test {
 protected:
  absl::Status Add(const ContributionId& id, uint64_t bytes, absl::Time deadline = absl::InfiniteFuture()) {
    return AddTo(outbox_, id, bytes, deadline);
  }
  static absl::Status AddTo(Outbox& outbox, const ContributionId& id, uint64_t bytes,
                            absl::Time deadline = absl::InfiniteFuture()) {
    auto item = std::make_shared<Contribution>();
    item->id = id;
    auto payload = std::make_shared<std::vector<uint8_t>>(bytes);
    item->payload = *payload;
    item->payload_owner = payload;
    item->deadline = deadline;
    return outbox.Add(std::move(item));
  }
  // Everything that may be written now, e.g. "R0.1v3 | S0.1[0+10] G0.1[0+20]": kind, step, layer, and factor version or
  // chunk. B: RESUME of a process that begins. | : nothing was written until the RESUMEs before it were acknowledged.
  std::string WriteAll(absl::Time now = kNow) { return WriteAllOf(outbox_, now); }
  static std::string WriteAllOf(Outbox& outbox, absl::Time now = kNow) {
    std::string text;
    std::vector<ContributionId> resumes;
    for (;;) {
      const auto frame = outbox.Next(now);
      if (!frame.has_value()) {
        Outbox acknowledged = outbox;
        for (const ContributionId& id : resumes) acknowledged.Acknowledge(id);
        if (!acknowledged.Next(now).has_value()) return text;
        for (const ContributionId& id : resumes) outbox.Acknowledge(id);
        resumes.clear();
        text += " |";
        continue;
      }
      const ContributionId& id = frame->item->id;
      if (!text.empty()) text += ' ';
      const std::string key = std::to_string(id.step) + '.' + std::to_string(id.layer);
      if (id.kind == v1::FRAME_KIND_RESUME) {
        resumes.push_back(id);
        text += frame->item->abstain ? 'B' + key : 'R' + key + 'v' + std::to_string(frame->item->factor_version);
      } else {
        text += Letter(id.kind) + key + '[' + std::to_string(frame->chunk.offset) + '+' +
                std::to_string(frame->chunk.size) + ']';
      }
    }
  }

  // Its result has come, made with factors of ten updates a step; the gradient is kept.
  void Finish(const ContributionId& id) { FinishIn(outbox_, id); }
  static void FinishIn(Outbox& outbox, const ContributionId& id) {
    const Outbox::Item item = outbox.Find(id);
    ASSERT_NE(item, nullptr);
    ASSERT_NE(outbox.Finish(id, Outbox::CopyToKeep(*item), 10 * id.step), nullptr);
  }

  Outbox outbox_;
};

TEST_F(OutboxTest, SendsNothingWithoutAStream) {
  ASSERT_TRUE(Add(Statistics(0, 1), 10).ok());
  EXPECT_EQ(WriteAll(), "");
  outbox_.StartStream(kCredit);
  EXPECT_EQ(WriteAll(), "S0.1[0+10]");
  EXPECT_EQ(outbox_.unacknowledged(), 1u);
}

TEST_F(OutboxTest, KeepsTheOrderAndCutsIntoChunks) {
  outbox_.StartStream(uint64_t{10} << 20);
  ASSERT_TRUE(Add(Statistics(3, 0), 10).ok());
  ASSERT_TRUE(Add(Gradient(3, 0), 2 * wire::kChunkBytes + 5).ok());
  ASSERT_TRUE(Add(Gradient(3, 1), 0).ok());
  EXPECT_EQ(WriteAll(), "S3.0[0+10] G3.0[0+1048576] G3.0[1048576+1048576] G3.0[2097152+5] G3.1[0+0]");
}

TEST_F(OutboxTest, StatisticsAreDoneWithTheAckAndGradientsWithTheResult) {
  outbox_.StartStream(kCredit);
  ASSERT_TRUE(Add(Statistics(0, 0), 10).ok());
  ASSERT_TRUE(Add(Gradient(0, 0), 10).ok());
  WriteAll();
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
  outbox_.StartStream(kCredit, 8);
  EXPECT_EQ(WriteAll(), "R10.1v3") << "layer 0 has everything before it";
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
  ASSERT_TRUE(Add(Fetch(20, 0), 0).ok());
  WriteAll();
  outbox_.StartStream(kCredit, 8);
  EXPECT_EQ(WriteAll(), "R20.0v200 | P20.0[0+0] F20.0[0+0]");
  outbox_.DropUnansweredBefore(20);
  outbox_.StartStream(kCredit, 9);
  EXPECT_THAT(WriteAll(), StartsWith("R20.0v200"));
  outbox_.DropUnansweredBefore(21);
  outbox_.StartStream(kCredit, 10);
  EXPECT_THAT(WriteAll(), StartsWith("R20.0v0"));
}

TEST_F(OutboxTest, RefusesTheSameKeyTwiceUntilItIsDone) {
  outbox_.StartStream(kCredit);
  ASSERT_TRUE(Add(Statistics(0, 0), 10).ok());
  EXPECT_EQ(Add(Statistics(0, 0), 10).code(), absl::StatusCode::kAlreadyExists);
  EXPECT_TRUE(Add(Gradient(0, 0), 10).ok());
  WriteAll();
  outbox_.Acknowledge(Statistics(0, 0));
  EXPECT_TRUE(Add(Statistics(0, 0), 10).ok());
}

TEST_F(OutboxTest, StaysWithinTheCredit) {
  outbox_.StartStream(kCredit);
  ASSERT_TRUE(Add(Gradient(0, 0), 600).ok());
  ASSERT_TRUE(Add(Gradient(0, 1), 600).ok());
  ASSERT_TRUE(Add(Gradient(0, 2), 400).ok());
  EXPECT_EQ(WriteAll(), "G0.0[0+600]");
  outbox_.Acknowledge(Gradient(0, 0));
  EXPECT_EQ(WriteAll(), "G0.1[0+600] G0.2[0+400]");
}

TEST_F(OutboxTest, APayloadLargerThanTheCreditGoesAlone) {
  outbox_.StartStream(kCredit);
  ASSERT_TRUE(Add(Gradient(0, 0), 10).ok());
  ASSERT_TRUE(Add(Gradient(0, 1), 5000).ok());
  ASSERT_TRUE(Add(Gradient(0, 2), 10).ok());
  EXPECT_EQ(WriteAll(), "G0.0[0+10]");
  outbox_.Acknowledge(Gradient(0, 0));
  EXPECT_EQ(WriteAll(), "G0.1[0+5000]");
  outbox_.Acknowledge(Gradient(0, 1));
  EXPECT_EQ(WriteAll(), "G0.2[0+10]");
}

TEST_F(OutboxTest, ANewStreamRepeatsWhatWasNotAnsweredInItsOrder) {
  outbox_.StartStream(uint64_t{4} << 20, 1);
  ASSERT_TRUE(Add(Statistics(0, 0), 10).ok());
  ASSERT_TRUE(Add(Gradient(0, 0), 20).ok());
  ASSERT_TRUE(Add(Statistics(0, 1), 30).ok());
  ASSERT_TRUE(Add(Gradient(0, 1), wire::kChunkBytes + 1).ok());
  for (int i = 0; i < 4; ++i) ASSERT_TRUE(outbox_.Next(kNow).has_value());  // the last is half sent
  outbox_.Acknowledge(Statistics(0, 0));
  outbox_.Acknowledge(Gradient(0, 0));
  outbox_.StopStream();
  EXPECT_EQ(WriteAll(), "");
  ASSERT_TRUE(Add(Statistics(0, 2), 40).ok());
  outbox_.StartStream(uint64_t{4} << 20, 1);
  EXPECT_EQ(WriteAll(), "G0.0[0+20] S0.1[0+30] G0.1[0+1048576] G0.1[1048576+1] S0.2[0+40]");
  EXPECT_EQ(outbox_.unacknowledged(), 4u);
}

TEST_F(OutboxTest, AnAnswerThatOvertakesTheLastChunkStopsTheRest) {
  outbox_.StartStream(uint64_t{8} << 20);
  ASSERT_TRUE(Add(Gradient(0, 0), 3 * wire::kChunkBytes).ok());
  ASSERT_TRUE(Add(Gradient(0, 1), 5).ok());
  ASSERT_TRUE(outbox_.Next(kNow).has_value());
  ASSERT_NE(outbox_.Remove(Gradient(0, 0)), nullptr);
  EXPECT_EQ(WriteAll(), "G0.1[0+5]");
}

TEST_F(OutboxTest, RetriesAfterAPauseAndTellsWhen) {
  outbox_.StartStream(kCredit);
  ASSERT_TRUE(Add(Statistics(0, 0), 10).ok());
  WriteAll();
  const absl::Time later = kNow + absl::Milliseconds(20);
  outbox_.RetryAfter(Statistics(0, 0), kNow, absl::Milliseconds(20));
  EXPECT_EQ(outbox_.NextEvent(kNow), later);
  EXPECT_EQ(WriteAll(), "");
  EXPECT_EQ(WriteAll(later), "S0.0[0+10]");
  EXPECT_EQ(outbox_.NextEvent(later), absl::InfiniteFuture());
}

TEST_F(OutboxTest, PausesGrowWithEachRefusalUntilTheNextStream) {
  outbox_.StartStream(kCredit);
  ASSERT_TRUE(Add(Gradient(0, 0), 900).ok());
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
  ASSERT_TRUE(Add(Gradient(0, 0), 900).ok());
  ASSERT_TRUE(Add(Gradient(0, 1), 900).ok());
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

TEST_F(OutboxTest, TakeAllLeavesNothing) {
  outbox_.StartStream(kCredit);
  ASSERT_TRUE(Add(Statistics(0, 0), 10).ok());
  ASSERT_TRUE(Add(Gradient(0, 0), 10).ok());
  ASSERT_TRUE(outbox_.Next(kNow).has_value());
  EXPECT_EQ(outbox_.TakeAll().size(), 2u);
  EXPECT_TRUE(outbox_.empty());
  EXPECT_EQ(outbox_.unacknowledged(), 0u);
  EXPECT_EQ(WriteAll(), "");
}

TEST_F(OutboxTest, ANewEpochRepeatsAcknowledgedStatisticsOfStepsThatMayBeOpen) {
  outbox_.StartStream(kCredit, 1);
  ASSERT_TRUE(Add(Statistics(5, 0), 10).ok());
  ASSERT_TRUE(Add(Statistics(5, 1), 11).ok());
  ASSERT_TRUE(Add(Gradient(5, 0), 12).ok());
  ASSERT_TRUE(Add(Gradient(5, 1), 13).ok());
  WriteAll();
  outbox_.Acknowledge(Statistics(5, 0));
  outbox_.Acknowledge(Statistics(5, 1));
  outbox_.Remove(Gradient(5, 0));  // its result: step 5 of layer 0 was sealed
  outbox_.Reopen();
  outbox_.StartStream(kCredit, 1);
  EXPECT_EQ(WriteAll(), "S5.1[0+11] G5.1[0+13]");
  // A refusal of a repetition tells nothing that the caller should hear.
  EXPECT_TRUE(outbox_.WasCounted(Statistics(5, 1), Refusal(ErrorReason::kConflict)));
}

TEST_F(OutboxTest, AStaleStepAnswersARepetitionThatWasCounted) {
  outbox_.StartStream(kCredit);
  ASSERT_TRUE(Add(Statistics(0, 0), 10).ok());
  ASSERT_TRUE(Add(Statistics(0, 1), 10).ok());
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
  ASSERT_TRUE(Add(Statistics(5, 0), 10).ok());
  WriteAll();
  outbox_.Acknowledge(Statistics(5, 0));
  outbox_.Reopen();
  outbox_.StartStream(kCredit, 1);
  EXPECT_EQ(WriteAll(), "S5.0[0+10]");
  // Refused as STALE_STEP.
  outbox_.Remove(Statistics(5, 0));
  // The job may go back to just this step, which this rank has not finished.
  outbox_.Reopen();
  outbox_.StartStream(kCredit, 1);
  EXPECT_EQ(WriteAll(), "S5.0[0+10]");
}

TEST_F(OutboxTest, StatisticsThatAreBeingRepeatedAreRepeatedInTheNextEpochToo) {
  outbox_.StartStream(kCredit, 1);
  ASSERT_TRUE(Add(Statistics(5, 0), 10).ok());
  WriteAll();
  outbox_.Acknowledge(Statistics(5, 0));
  outbox_.StartStream(kCredit, 2);  // another memory
  EXPECT_EQ(WriteAll(), "S5.0[0+10]");
  for (int epoch = 2; epoch < 5; ++epoch) {
    outbox_.Reopen();
    outbox_.StartStream(kCredit, 2);
    EXPECT_EQ(WriteAll(), "S5.0[0+10]") << epoch;
    outbox_.Acknowledge(Statistics(5, 0));
  }
}

TEST_F(OutboxTest, ALayerThatMovesTakesAlongWhatTheNextEpochRepeats) {
  outbox_.StartStream(kCredit, 1);
  ASSERT_TRUE(Add(Statistics(5, 0), 10).ok());
  WriteAll();
  outbox_.Acknowledge(Statistics(5, 0));
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
  ASSERT_TRUE(Add(Gradient(5, 0), 10).ok());
  outbox_.StartStream(kCredit, 1);
  EXPECT_EQ(WriteAll(), "B5.0 | G5.0[0+10]");
  outbox_.Acknowledge({v1::FRAME_KIND_RESUME, 5, 0});
  outbox_.StartStream(kCredit, 1);
  EXPECT_EQ(WriteAll(), "G5.0[0+10]") << "that memory knows";
  outbox_.StartStream(kCredit, 2);
  EXPECT_EQ(WriteAll(), "B5.0 | G5.0[0+10]");
  // The acknowledgement is lost, and the answer says more.
  outbox_.Finish(Gradient(5, 0), Outbox::CopyToKeep(*outbox_.Find(Gradient(5, 0))), 3);
  outbox_.StartStream(kCredit, 3);
  EXPECT_EQ(WriteAll(), "R5.0v3 | G5.0[0+10]");
}

// --- a shard that was lost and came back: another memory ---

TEST_F(OutboxTest, AShardThatCameBackGetsWhatOtherRanksMayNeedAgain) {
  outbox_.StartStream(kCredit, 1);
  ASSERT_TRUE(Add(Statistics(5, 0), 10).ok());
  ASSERT_TRUE(Add(Gradient(5, 0), 11).ok());
  ASSERT_TRUE(Add(Gradient(5, 1), 12).ok());
  WriteAll();
  outbox_.Acknowledge(Statistics(5, 0));
  outbox_.Acknowledge(Gradient(5, 0));
  Finish(Gradient(5, 0));
  ASSERT_TRUE(Add(Gradient(6, 0), 13).ok());
  WriteAll();
  outbox_.StartStream(kCredit, 1);  // the same memory: nothing that was answered
  EXPECT_EQ(WriteAll(), "G5.1[0+12] G6.0[0+13]");
  outbox_.StartStream(kCredit, 2);
  EXPECT_EQ(WriteAll(), "R5.0v50 | S5.0[0+10] G5.0[0+11] G5.1[0+12] G6.0[0+13]");
  // No call waits for their answers: an acknowledgement, or any refusal, ends them.
  EXPECT_TRUE(outbox_.WasCounted(Gradient(5, 0), Refusal(ErrorReason::kStaleStep, absl::StatusCode::kAborted)));
  EXPECT_EQ(outbox_.Find(Gradient(5, 0))->result, nullptr);
  outbox_.Acknowledge(Gradient(5, 0));
  outbox_.Acknowledge(Statistics(5, 0));
  EXPECT_EQ(outbox_.Find(Gradient(5, 0)), nullptr);
  EXPECT_EQ(outbox_.unacknowledged(), 2u);
  // Lost once more before anything else is answered.
  outbox_.StartStream(kCredit, 3);
  EXPECT_EQ(WriteAll(), "R5.0v50 | S5.0[0+10] G5.0[0+11] G5.1[0+12] G6.0[0+13]");
}

TEST_F(OutboxTest, NothingGoesAheadOfAResumeThatIsRefused) {
  outbox_.StartStream(kCredit, 1);
  ASSERT_TRUE(Add(Gradient(5, 0), 11).ok());
  WriteAll();
  Finish(Gradient(5, 0));
  ASSERT_TRUE(Add(Gradient(6, 0), 12).ok());
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
  ASSERT_TRUE(Add(Statistics(5, 0), 10).ok());
  ASSERT_TRUE(Add(Gradient(5, 0), 11).ok());
  ASSERT_TRUE(Add(Gradient(6, 0), 12).ok());  // before the answer of step 5 has come
  WriteAll();
  outbox_.Acknowledge(Statistics(5, 0));
  Finish(Gradient(5, 0));
  Finish(Gradient(6, 0));
  ASSERT_TRUE(Add(Gradient(7, 0), 13).ok());
  WriteAll();
  outbox_.StartStream(kCredit, 2);
  EXPECT_EQ(WriteAll(), "R5.0v60 | S5.0[0+10] G5.0[0+11] G6.0[0+12] G7.0[0+13]");
  Finish(Gradient(7, 0));  // submitted after the answers of both
  outbox_.Acknowledge(Statistics(5, 0));
  outbox_.Acknowledge(Gradient(5, 0));
  outbox_.Acknowledge(Gradient(6, 0));
  outbox_.Acknowledge({v1::FRAME_KIND_RESUME, 5, 0});
  outbox_.StartStream(kCredit, 3);
  EXPECT_EQ(WriteAll(), "R7.0v70 | G7.0[0+13]");
}

TEST_F(OutboxTest, StatisticsOfALayerWhoseGradientAnotherRankSendsAreKeptForAFewSteps) {
  outbox_.StartStream(kCredit, 1);
  for (uint64_t step = 0; step < 6; ++step) {
    ASSERT_TRUE(Add(Statistics(step, 0), 10).ok());
    WriteAll();
    outbox_.Acknowledge(Statistics(step, 0));
  }
  outbox_.StartStream(kCredit, 2);
  EXPECT_EQ(WriteAll(), "S3.0[0+10] S4.0[0+10] S5.0[0+10]");
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
  ASSERT_TRUE(Add(Statistics(5, 0), 12).ok());
  outbox_.StartStream(kCredit, 2);
  EXPECT_EQ(WriteAll(), "S5.0[0+12]");
}

TEST_F(OutboxTest, GradientsAreNotKeptForAShardThatRemembersNothing) {
  outbox_.StartStream(kCredit, 0);
  ASSERT_TRUE(Add(Statistics(5, 0), 10).ok());
  ASSERT_TRUE(Add(Gradient(5, 0), 11).ok());
  WriteAll();
  outbox_.Acknowledge(Statistics(5, 0));
  Finish(Gradient(5, 0));
  outbox_.StartStream(kCredit, 2);
  EXPECT_EQ(WriteAll(), "R6.0v50 | S5.0[0+10]");
}

TEST_F(OutboxTest, AMemoryThatMayBeAnotherIsToldWhatHasBeenAnswered) {
  outbox_.StartStream(kCredit, 0);
  ASSERT_TRUE(Add(Gradient(5, 0), 11).ok());
  ASSERT_TRUE(Add(Gradient(5, 1), 11).ok());
  WriteAll();
  Finish(Gradient(5, 0));
  outbox_.Remove(Gradient(5, 1));  // refused: it will not come again either
  outbox_.StartStream(kCredit, 0);
  EXPECT_EQ(WriteAll(), "R6.1v0 R6.0v50");
  // Whatever becomes of it is no concern of the caller's.
  const ContributionId resume{v1::FRAME_KIND_RESUME, 6, 0};
  EXPECT_TRUE(outbox_.WasCounted(resume, Refusal(ErrorReason::kMalformed)));
  EXPECT_NE(outbox_.Acknowledge(resume), nullptr);
  EXPECT_EQ(outbox_.answered_through(), 5u);
  // The job goes back: step 5 will be answered anew.
  ASSERT_TRUE(Add(Statistics(4, 0), 10).ok());
  outbox_.StartStream(kCredit, 0);
  EXPECT_EQ(WriteAll(), "R6.1v0 | S4.0[0+10]");
}

TEST_F(OutboxTest, ANewMemoryHasTimeToSettle) {
  const absl::Status ahead = Refusal(ErrorReason::kStepTooFarAhead);
  const absl::Time end = kNow + absl::Seconds(9);
  EXPECT_EQ(outbox_.RecoveryOf(ahead, kNow), Recovery::kRefused);
  outbox_.RetryRefusalsUntil(end);
  EXPECT_EQ(outbox_.RecoveryOf(ahead, kNow), Recovery::kRetryLater);
  EXPECT_EQ(outbox_.RecoveryOf(ahead, end), Recovery::kRefused);
}

TEST_F(OutboxTest, ASessionThatTheShardDoesNotKnowMayComeAgain) {
  EXPECT_EQ(outbox_.RecoveryOf(Refusal(ErrorReason::kUnknownSession), kNow), Recovery::kRetryLater);
  EXPECT_EQ(outbox_.RecoveryOf(Refusal(ErrorReason::kNotOwner), kNow), Recovery::kFatal);
  EXPECT_EQ(outbox_.RecoveryOf(Refusal(ErrorReason::kStateLost), kNow), Recovery::kFatal);
  EXPECT_EQ(outbox_.RecoveryOf(Refusal(ErrorReason::kNotActive), kNow), Recovery::kRetryLater);
}

TEST_F(OutboxTest, InFirstOrderNoFactorsAreRemembered) {
  outbox_.StartStream(kCredit, 0);
  Contribution item;
  item.id = Gradient(5, 0);
  item.mode = Mode::kFirstOrder;
  ASSERT_TRUE(outbox_.Add(std::make_shared<Contribution>(item)).ok());
  WriteAll();
  Finish(Gradient(5, 0));
  outbox_.StartStream(kCredit, 0);
  EXPECT_EQ(WriteAll(), "R6.0v0");
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
  outbox_.Acknowledge(Statistics(0, 0));
  Finish(Gradient(0, 0));
  EXPECT_TRUE(outbox_.empty());
  // The shard that counted them has lost its memory.
  outbox_.StartStream(kCredit, 8);
  EXPECT_EQ(WriteAll(), "R0.0v0 | S0.0[0+0] G0.0[0+0]");
  EXPECT_TRUE(outbox_.Find(Gradient(0, 0))->abstain);
}

TEST_F(OutboxTest, OnlyWhatWasSeenIsReplaced) {
  ASSERT_TRUE(Add(Gradient(0, 0), 10, kNow).ok());
  const Outbox::Item expired = outbox_.Find(Gradient(0, 0));
  const auto other = std::make_shared<Contribution>(*expired);
  EXPECT_TRUE(outbox_.Holds(expired));
  ASSERT_EQ(outbox_.TakeExpired(kNow).size(), 1u);
  ASSERT_TRUE(Add(Gradient(0, 0), 10).ok());
  const Outbox::Item newer = outbox_.Find(Gradient(0, 0));
  EXPECT_FALSE(outbox_.Holds(expired));
  outbox_.Replace(expired, other);
  EXPECT_EQ(outbox_.Find(Gradient(0, 0)), newer);
  outbox_.Replace(newer, other);
  EXPECT_EQ(outbox_.Find(Gradient(0, 0)), other);
}

TEST_F(OutboxTest, ARefusalForItsValuesGivesTheCreditBack) {
  outbox_.StartStream(20);
  ASSERT_TRUE(Add(Gradient(0, 0), 15).ok());
  ASSERT_TRUE(Add(Gradient(0, 1), 15).ok());
  EXPECT_EQ(WriteAll(), "G0.0[0+15]");
  outbox_.AbstainInstead(Gradient(0, 0));
  EXPECT_EQ(WriteAll(), "G0.0[0+0] G0.1[0+15]");
}

}  // namespace
}  // namespace precondor
