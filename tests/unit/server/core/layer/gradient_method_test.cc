// SPDX-License-Identifier: Apache-2.0
// Methods that learn from gradients: their factors come back from snapshots and the journal's gradients, exactly, or
// without the gradients that the journal lacks. None is counted twice, and no replica gets an answer that another had
// otherwise.
#include <cstdint>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "kernels/base/log.h"
#include "kernels/methods/registry.h"
#include "tests/support/faulty_backend.h"
#include "tests/support/memory_journal.h"
#include "tests/unit/server/core/shard/shard_fixture.h"

namespace precondor {
namespace {

class GradientMethodTest : public ShardFixture, public ::testing::WithParamInterface<MethodConfig> {
 protected:
  static constexpr int64_t kRows = 3, kCols = 4;

  GradientMethodTest() {
    spec.method = GetParam();
    spec.layers = {{.name = "only", .d_out = kRows, .d_in = kCols, .has_bias = false}};
    spec.world_size = 1;
    options.make_method = MakeMethod;
    options.journal = &journal;
    options.snapshot_interval_steps = 4;
  }

  void Begin() {
    NewShard();
    ASSERT_TRUE(shard->Install(MakeInstall()).ok());
  }
  void NewShard() { shard = std::make_unique<Shard>(options, *backend, executor, clock, log_lines, counted); }
  void Crash() {
    NewShard();
    journal.Restore(*shard);
    ASSERT_TRUE(shard->replay().Finish().empty());
  }
  // Steps 0 to `last` by all ranks.
  void TrainThrough(uint64_t last) {
    for (uint64_t step = 0; step <= last; ++step) {
      for (uint32_t rank = 0; rank < static_cast<uint32_t>(spec.world_size); ++rank) SendGradient(step, rank);
    }
  }

  // The gradient of a step. Every rank has the same, whose average is itself.
  static std::vector<float> GradientOf(uint64_t step) {
    std::mt19937_64 random(step + 100);
    std::normal_distribution<float> normal;
    std::vector<float> values(kRows * kCols);
    for (float& value : values) value = normal(random);
    return values;
  }
  std::shared_ptr<Reply> SendGradient(uint64_t step, uint32_t rank = 0) {
    const ContributionHeader header = Header(ContributionKind::kGradient, step, rank);
    return Send(header, EncodeValues(spec.gradient_dtype, GradientOf(step), 1.0f));
  }

  // The method called directly with the gradients of these steps, in order: the last answer.
  std::vector<float> Direct(const std::vector<uint64_t>& steps) {
    const std::unique_ptr<Method> method = MakeMethod(spec.method).value();
    const std::unique_ptr<LayerState> state = method->MakeState(spec.layers[0], *backend).value();
    DeviceMatrix d = backend->Allocate(kRows, kCols).value(), u = backend->Allocate(kRows, kCols).value();
    std::vector<float> out(kRows * kCols);
    for (const uint64_t step : steps) {
      const std::vector<float> values = GradientOf(step);
      EXPECT_TRUE(backend->Upload(ConstMatrixView(values.data(), kRows, kCols), d.view()).ok());
      EXPECT_TRUE(state->Precondition(d.view(), u.view()).ok());
    }
    EXPECT_TRUE(backend->Download(u.view(), MatrixView(out.data(), kRows, kCols)).ok());
    return out;
  }
  static std::vector<uint64_t> Steps(uint64_t end) {
    std::vector<uint64_t> steps(end);
    for (uint64_t i = 0; i < end; ++i) steps[i] = i;
    return steps;
  }
  void ExpectAnswer(const Reply& reply, const std::vector<uint64_t>& steps) {
    EXPECT_EQ(reply.decision(), Decision::kPreconditioned);
    EXPECT_EQ(reply.version(), steps.size());
    EXPECT_EQ(reply.values(), Direct(steps));
  }

  MemoryJournal journal;
  LossObserver counted;
  std::vector<std::string> lines;  // warnings of the log
  LineLogger log_lines{LogFormat::kText, Severity::kWarning, clock,
                       [this](absl::string_view line) { lines.emplace_back(line); }};
};

TEST_P(GradientMethodTest, PreconditionsFromTheFirstGradientOnAndCountsThem) {
  Begin();
  for (uint64_t step = 0; step < 6; ++step) {
    ExpectAnswer(*SendGradient(step), Steps(step + 1));
    const std::shared_ptr<Reply> again = SendGradient(step);
    EXPECT_TRUE(again->duplicate());
    ExpectAnswer(*again, Steps(step + 1));
    EXPECT_EQ(StatsOf(0).factor_version, step + 1);
  }
  EXPECT_TRUE(Statistics(6, 0, 1)->accepted()) << "taken note of, and nothing else";
  ExpectAnswer(*SendGradient(6), Steps(7));
}

TEST_P(GradientMethodTest, AGradientThatTheSnapshotHasIsAnsweredAgainAndNotCounted) {
  Begin();
  // Step 4's work gives the snapshot of steps 0 ... 3; its answer is lost with the shard.
  TrainThrough(4);
  ASSERT_EQ(journal.snapshots(), 1);
  Crash();
  EXPECT_EQ(StatsOf(0).factor_version, 4u);
  ASSERT_TRUE(Resume(4, 0, 4).ok());
  EXPECT_EQ(counted.lost, 0);
  ExpectAnswer(*SendGradient(3), Steps(4));
  EXPECT_EQ(StatsOf(0).factor_version, 4u);
  // Planned before the crash with the factors that step 4 makes: exactly those.
  ExpectAnswer(*SendGradient(4), Steps(5));
  ExpectAnswer(*SendGradient(5), Steps(6));
}

TEST_P(GradientMethodTest, GoesOnFromTheSnapshotWithoutTheGradientsSince) {
  Begin();
  TrainThrough(7);
  Crash();
  // The answer of step 7 never came; that of 6 did, and its gradient is sent again too.
  ASSERT_TRUE(Resume(7, 0, 7).ok());
  EXPECT_EQ(counted.lost, 3);
  std::vector<uint64_t> kept = {0, 1, 2, 3, 6};
  ExpectAnswer(*SendGradient(6), kept);
  for (uint64_t step = 7; step < 12; ++step) {
    kept.push_back(step);
    ExpectAnswer(*SendGradient(step), kept);
  }
  // And from the next snapshot after that, whose steps have numbers by their outcome here.
  Crash();
  ASSERT_TRUE(Resume(12, 0, StatsOf(0).factor_version + 4).ok());
  kept = {0, 1, 2, 3, 6, 7, 12};
  ExpectAnswer(*SendGradient(12), kept);
}

TEST_P(GradientMethodTest, EverySnapshotsStepIsExactForOneRank) {
  options.snapshot_interval_steps = 1;
  Begin();
  for (uint64_t step = 0; step < 9; ++step) {
    SendGradient(step);
    Crash();
    // Unanswered, as far as the rank knows; it keeps the one before as well.
    ASSERT_TRUE(Resume(step, 0, step).ok());
    if (step > 0) ExpectAnswer(*SendGradient(step - 1), Steps(step));
    ExpectAnswer(*SendGradient(step), Steps(step + 1));
  }
}

TEST_P(GradientMethodTest, ReplicasNeverGetTwoAnswersToOneStep) {
  spec.world_size = 2;
  Begin();
  TrainThrough(6);
  // Rank 0 has the answer of step 6, rank 1 has not.
  Crash();
  EXPECT_EQ(Resume(6, 0, 7, 7).value(), 3u);
  const std::shared_ptr<Reply> waiting = SendGradient(7, 0);
  EXPECT_EQ(GetErrorReason(Resume(5, 1, 6, 6).status()), ErrorReason::kStateLost);
  EXPECT_EQ(GetErrorReason(waiting->result->status()), ErrorReason::kStateLost);
  EXPECT_EQ(SendGradient(6, 1)->reason(), ErrorReason::kStateLost);
  EXPECT_EQ(SendGradient(7, 0)->reason(), ErrorReason::kStateLost);
  // Both go back to step 5; the factors are those of the snapshot.
  ++epoch;
  SessionInstall install = MakeInstall(epoch);
  for (uint32_t rank : {0u, 1u}) {
    incarnations[rank] = 2;
    install.members[rank] = {.rank = rank, .incarnation = 2, .first_step = 5};
  }
  ASSERT_TRUE(shard->Install(install).ok());
  EXPECT_FALSE(SendGradient(5, 0)->answered());
  const std::shared_ptr<Reply> answered = SendGradient(5, 1);
  ExpectAnswer(*answered, {0, 1, 2, 3, 5});
}

TEST_P(GradientMethodTest, ARankThatNeverHadAnAnswerAsksForALostOne) {
  spec.world_size = 2;
  Begin();
  for (uint32_t rank : {0u, 1u}) SendGradient(0, rank);
  journal.LoseNext(1);
  NewShard();
  ASSERT_TRUE(shard->Install(MakeInstall()).ok());
  EXPECT_EQ(Resume(0, 0, 1, 1).value(), 1u);
  EXPECT_EQ(SendGradient(0, 1)->reason(), ErrorReason::kStateLost);
  EXPECT_EQ(SendGradient(1, 0)->reason(), ErrorReason::kStateLost);
}

TEST_P(GradientMethodTest, ReplicasThatHaveEqualAnswersGoOnWithOlderFactors) {
  spec.world_size = 2;
  Begin();
  TrainThrough(6);
  Crash();
  for (uint32_t rank : {0u, 1u}) {
    EXPECT_EQ(Resume(6, rank, 7, 7).value(), 3u);
    EXPECT_EQ(SendGradient(6, rank)->reason(), ErrorReason::kStaleStep) << "its answer is from before the loss";
  }
  EXPECT_EQ(counted.lost, 3) << "once, and not for each rank";
  std::vector<uint64_t> kept = {0, 1, 2, 3};
  for (uint64_t step = 7; step < 10; ++step) {
    kept.push_back(step);
    const std::shared_ptr<Reply> first = SendGradient(step, 0), second = SendGradient(step, 1);
    ExpectAnswer(*first, kept);
    ExpectAnswer(*second, kept);
  }
  EXPECT_EQ(shard->in_flight(), 0);
}

TEST_P(GradientMethodTest, ARepeatedResumeTellsTheLossAgain) {
  spec.world_size = 2;
  Begin();
  TrainThrough(6);
  Crash();
  for (uint32_t rank : {0u, 1u}) EXPECT_EQ(Resume(6, rank, 7, 7).value(), 3u);
  EXPECT_EQ(Resume(6, 0, 7, 7).value(), 3u) << "its acknowledgement may not have come";
  for (uint32_t rank : {0u, 1u}) SendGradient(7, rank);
  EXPECT_EQ(Resume(6, 0, 7, 7).value(), 3u);
  ExpectAnswer(*SendGradient(7, 0), {0, 1, 2, 3, 7});
}

// --- with a journal of gradients ------------------------------------------------------------------------------------

TEST_P(GradientMethodTest, TheJournalsGradientsMakeEveryStepExact) {
  journal.set_keeps_gradients(true);
  Begin();
  for (uint64_t step = 0; step < 11; ++step) {
    SendGradient(step);
    Crash();
    EXPECT_EQ(StatsOf(0).factor_version, step + 1);
    EXPECT_EQ(Resume(step, 0, step, step).value(), 0u);
    ExpectAnswer(*SendGradient(step), Steps(step + 1));
  }
}

TEST_P(GradientMethodTest, ARankGetsTheAnswerOfATornStepWithoutTheOthersGradients) {
  spec.world_size = 2;
  journal.set_keeps_gradients(true);
  for (const DType dtype : {DType::kF32, DType::kBF16, DType::kF16}) {
    spec.gradient_dtype = dtype;
    Begin();
    std::shared_ptr<Reply> had;
    for (uint64_t step = 0; step <= 6; ++step) {
      SendGradient(step, 0);
      had = SendGradient(step, 1);
    }
    Crash();
    EXPECT_EQ(Resume(5, 1, 6, 6).value(), 0u);
    const std::shared_ptr<Reply> again = SendGradient(6, 1);
    EXPECT_TRUE(again->duplicate());
    EXPECT_EQ(*again->answer().bytes, *had->answer().bytes);
    EXPECT_EQ(again->version(), 7u);
    // Rank 0 keeps the step's gradient for others and sends it again; the next step is answered to both.
    EXPECT_EQ(Resume(6, 0, 7, 7).value(), 0u);
    EXPECT_TRUE(SendGradient(6, 0)->duplicate());
    SendGradient(7, 0);
    const std::shared_ptr<Reply> next = SendGradient(7, 1);
    EXPECT_EQ(next->version(), 8u);
    EXPECT_EQ(shard->in_flight(), 0);
    ASSERT_TRUE(shard->Remove(kSession).ok());
    journal.Clear();
  }
}

TEST_P(GradientMethodTest, AGradientThatTheMethodRefusedIsNotTakenInByAReplayEither) {
  journal.set_keeps_gradients(true);
  Begin();
  SendGradient(0);
  const GradientRecord record = journal.gradients().at(0);
  const auto add = [&](uint64_t step, uint64_t version) {
    GradientRecord more = record;
    more.at.step = step;
    more.factor_version = version;
    more.average.bytes = EncodeValues(spec.gradient_dtype, GradientOf(step), 1.0f);
    journal.AppendGradient(more);
  };
  add(1, 1);  // refused, as the next record's version shows
  add(2, 1);
  add(3, 2);  // refused, as its plan shows
  journal.Append(PlanRecord{.at = {.session_id = record.at.session_id, .step = 3},
                            .plan = {.decision = Decision::kSkip, .factor_version = 2, .reason = "refused"}});
  Crash();
  EXPECT_EQ(StatsOf(0).factor_version, 2u);
  EXPECT_EQ(Resume(4, 0, 2, 4).value(), 0u);
  ExpectAnswer(*SendGradient(4), {0, 2, 4});
}

TEST_P(GradientMethodTest, GradientsBehindAGapAreNotTakenIn) {
  journal.set_keeps_gradients(true);
  Begin();
  for (uint64_t step = 0; step < 2; ++step) SendGradient(step);
  journal.set_keeps_gradients(false);
  SendGradient(2);
  journal.set_keeps_gradients(true);
  SendGradient(3);
  Crash();
  EXPECT_EQ(StatsOf(0).factor_version, 2u);
  EXPECT_EQ(Resume(4, 0, 4, 4).value(), 2u);
  ExpectAnswer(*SendGradient(4), {0, 1, 4});
}

TEST_P(GradientMethodTest, GradientsOfAnotherHistoryThanThePlansAreNotTakenIn) {
  journal.set_keeps_gradients(true);
  Begin();
  for (uint64_t step = 0; step < 3; ++step) SendGradient(step);
  // A release without a journal of gradients goes on from fresh factors.
  for (uint64_t step = 3; step < 5; ++step) {
    journal.Append(
        PlanRecord{.at = {.session_id = kSession, .step = step},
                   .plan = {.decision = Decision::kPreconditioned, .factor_version = step - 2, .reason = ""}});
  }
  Crash();
  EXPECT_EQ(StatsOf(0).factor_version, 0u);
  EXPECT_EQ(Resume(5, 0, 2, 5).value(), 2u);
  ExpectAnswer(*SendGradient(5), {5});
}

// --- a drain --------------------------------------------------------------------------------------------------------

TEST_P(GradientMethodTest, AFinalSnapshotIsExactWithoutAJournalOfGradients) {
  spec.world_size = 2;
  Begin();
  TrainThrough(6);
  EXPECT_TRUE(shard->upkeep().WriteFinalSnapshots(absl::InfiniteFuture()).empty());
  Crash();
  EXPECT_EQ(StatsOf(0).factor_version, 7u);
  // Rank 1 lacks the answer of step 6; both keep its gradient.
  EXPECT_EQ(Resume(6, 0, 7, 7).value(), 0u);
  EXPECT_EQ(Resume(5, 1, 6, 6).value(), 0u);
  SendGradient(6, 0);
  ExpectAnswer(*SendGradient(6, 1), Steps(7));
  SendGradient(7, 0);
  ExpectAnswer(*SendGradient(7, 1), Steps(8));
}

TEST_P(GradientMethodTest, AFinalSnapshotHasLayersWithoutAStepSinceARollback) {
  spec.layers.push_back(spec.layers[0]);
  spec.layers[1].name = "idle";
  Begin();
  TrainThrough(2);
  Replace({}, 0, /*rollback_step=*/1);
  SendGradient(1);
  EXPECT_TRUE(shard->upkeep().WriteFinalSnapshots(absl::InfiniteFuture()).empty());
  EXPECT_EQ(journal.snapshots(), 1);
  Crash();
  EXPECT_EQ(StatsOf(0).factor_version, 4u);
}

TEST_P(GradientMethodTest, StepsBeforeTheLastOneOfAFinalSnapshotAreNotAnsweredAgain) {
  spec.world_size = 2;
  Begin();
  TrainThrough(6);
  EXPECT_TRUE(shard->upkeep().WriteFinalSnapshots(absl::InfiniteFuture()).empty());
  Crash();
  // Both lack the answer of step 6, and repeat the gradient of step 5 too.
  for (uint32_t rank : {0u, 1u}) EXPECT_EQ(Resume(5, rank, 6, 6).value(), 0u);
  for (uint32_t rank : {0u, 1u}) EXPECT_EQ(SendGradient(5, rank)->reason(), ErrorReason::kStaleStep);
  SendGradient(6, 0);
  ExpectAnswer(*SendGradient(6, 1), Steps(7));
  SendGradient(7, 0);
  ExpectAnswer(*SendGradient(7, 1), Steps(8));
}

TEST_P(GradientMethodTest, AnAnswerThatNobodyHasHadIsMadeAgain) {
  spec.world_size = 2;
  Begin();
  TrainThrough(4);
  Crash();
  // Step 3 is the oldest that each of them keeps.
  for (uint32_t rank : {0u, 1u}) ASSERT_TRUE(Resume(3, rank, 4).ok());
  for (uint64_t step : {3, 4}) {
    const std::shared_ptr<Reply> first = SendGradient(step, 0), second = SendGradient(step, 1);
    ExpectAnswer(*first, Steps(step + 1));
    ExpectAnswer(*second, Steps(step + 1));
  }
}

TEST_P(GradientMethodTest, StepsWithoutAnAnswerTeachNothing) {
  Begin();
  ExpectAnswer(*SendGradient(0), {0});
  EXPECT_EQ(Abstain(ContributionKind::kGradient, 1, 0)->decision(), Decision::kSkip);
  EXPECT_EQ(StatsOf(0).factor_version, 1u);
  ContributionHeader first_order = Header(ContributionKind::kGradient, 2, 0);
  first_order.mode = Mode::kFirstOrder;
  const std::shared_ptr<Reply> plain = Send(first_order, EncodeValues(spec.gradient_dtype, GradientOf(2), 1.0f));
  EXPECT_EQ(plain->decision(), Decision::kIdentity);
  EXPECT_EQ(plain->values(), GradientOf(2));
  ExpectAnswer(*SendGradient(3), {0, 3});
}

TEST_P(GradientMethodTest, AGradientOfHugeNormIsRefusedAndSkippedAndForgotten) {
  Begin();
  ExpectAnswer(*SendGradient(0), {0});
  std::vector<float> huge = GradientOf(1);
  for (float& value : huge) value *= 3e19f;
  const ContributionHeader header = Header(ContributionKind::kGradient, 1, 0);
  EXPECT_EQ(Send(header, EncodeValues(spec.gradient_dtype, huge))->reason(), ErrorReason::kOverNorm);
  EXPECT_EQ(Send(header, EncodeValues(spec.gradient_dtype, huge))->decision(), Decision::kSkip);
  EXPECT_EQ(StatsOf(0).rejected, 1u);
  EXPECT_EQ(StatsOf(0).skipped, 1u);
  EXPECT_THAT(lines, testing::ElementsAre(testing::HasSubstr("step skipped")));
  ExpectAnswer(*SendGradient(2), {0, 2});
  ExpectAnswer(*SendGradient(3), {0, 2, 3});
}

// The gradient itself in place of a whole update would be a jump of the weights.
TEST_P(GradientMethodTest, AnUpdateThatCannotBeMadeIsSkipped) {
  const std::unique_ptr<Backend> cpu = std::move(backend);
  auto failing = std::make_unique<FaultyBackend>(*cpu);
  FaultyBackend& faults = *failing;
  backend = std::move(failing);
  Begin();
  ExpectAnswer(*SendGradient(0), {0});
  faults.FailAt(2);
  const std::shared_ptr<Reply> failed = SendGradient(1);
  ASSERT_TRUE(faults.failed());
  faults.NeverFail();
  EXPECT_EQ(failed->decision(), Decision::kSkip);
  EXPECT_EQ(failed->answer().cause, AnswerCause::kFailed);
  EXPECT_THAT(lines, testing::ElementsAre(testing::HasSubstr("step skipped")));
  ExpectAnswer(*SendGradient(2), {0, 2});
  shard.reset();  // before `cpu`
}

INSTANTIATE_TEST_SUITE_P(All, GradientMethodTest,
                         testing::Values(MethodConfig{"kron", {}}, MethodConfig{"soap", {}}, MethodConfig{"muon", {}},
                                         MethodConfig{"muon", {{"input_factor", true}, {"refresh_interval", 3.0}}}));

}  // namespace
}  // namespace precondor
