// SPDX-License-Identifier: Apache-2.0
// A session's layers on a shard become others; and how long a shard may answer unheard.
#include <deque>

#include "kernels/methods/registry.h"
#include "server/core/reservation.h"
#include "tests/support/memory_journal.h"
#include "tests/unit/server/core/shard/shard_fixture.h"

namespace precondor {
namespace {

using ::testing::HasSubstr;

class ShardLayersTest : public ShardFixture {
 protected:
  SessionInstall Of(std::vector<uint32_t> layers, uint64_t at_epoch) const {
    SessionInstall install = MakeInstall(at_epoch);
    install.layers = std::move(layers);
    return install;
  }
  int64_t BytesOf(const std::vector<uint32_t>& layers) const {
    const absl::StatusOr<MethodSet> methods = MethodSet::Make(spec, options.make_method);
    PRECONDOR_CHECK(methods.ok());
    return ComputeReservation(spec, *methods, layers, options.window_steps, executor.parallelism()).total();
  }
  std::shared_ptr<Reply> SendTo(uint32_t layer, ContributionKind kind, uint64_t step, uint32_t rank, float value) {
    const ContributionHeader header = Header(kind, step, rank, layer);
    return Send(header, Filled(header, value));
  }
  // A step of one layer by both ranks; the last reply to a gradient.
  std::shared_ptr<Reply> Step(uint32_t layer, uint64_t step) {
    std::shared_ptr<Reply> last;
    for (const ContributionKind kind : {ContributionKind::kStatistics, ContributionKind::kGradient}) {
      for (uint32_t rank = 0; rank < 2; ++rank) last = SendTo(layer, kind, step, rank, 1);
    }
    return last;
  }
};

TEST_F(ShardLayersTest, LayersThatComeBeginAnewAndThoseThatStayGoOn) {
  MakeShard();
  ASSERT_TRUE(shard->Install(Of({0}, 1)).ok());
  EXPECT_EQ(shard->memory()->reserved().total(), BytesOf({0}));
  Step(0, 0);
  Step(0, 1);
  ASSERT_EQ(StatsOf(0).factor_version, 2u);
  EXPECT_EQ(SendTo(1, ContributionKind::kGradient, 2, 0, 1)->reason(), ErrorReason::kNotOwner);

  // Rank 0 has sent its part of step 2 when the epoch ends.
  const auto kept = SendTo(0, ContributionKind::kStatistics, 2, 0, 1);
  ASSERT_TRUE(kept->accepted());
  ASSERT_TRUE(shard->Install(Of({0, 1}, 2)).ok());
  epoch = 2;
  EXPECT_EQ(shard->memory()->reserved().total(), BytesOf({0, 1}));
  ASSERT_EQ(shard->GetLayerStats("job")->size(), 2u);
  EXPECT_TRUE(SendTo(0, ContributionKind::kStatistics, 2, 0, 1)->duplicate()) << "its slot is still there";
  EXPECT_EQ(StatsOf(0).factor_version, 2u);
  EXPECT_EQ(StatsOf(1).factor_version, 0u);
  // The step that the others had begun without this shard.
  ASSERT_EQ(Step(1, 2)->decision(), Decision::kPreconditioned);
  EXPECT_EQ(StatsOf(1).factor_version, 1u);
}

TEST_F(ShardLayersTest, WithoutStatisticsTheAnswerIsTheAverage) {
  spec.inv_freq = 100;
  spec.warmup_steps = 0;
  options.make_method = MakeMethod;
  spec.method.name = "mkor";
  MakeShard();
  ASSERT_TRUE(shard->Install(Of({0}, 1)).ok());
  ASSERT_TRUE(shard->Install(Of({0, 1}, 2)).ok());
  epoch = 2;
  SendTo(1, ContributionKind::kGradient, 7, 0, 1);
  const auto reply = SendTo(1, ContributionKind::kGradient, 7, 1, 3);
  ASSERT_TRUE(reply->result.has_value() && reply->result->ok());
  EXPECT_EQ(reply->decision(), Decision::kIdentity);
  EXPECT_EQ(reply->values(), std::vector<float>(6, 2.0f));
  EXPECT_THAT((*reply->result)->reason, HasSubstr("no factors yet"));
}

TEST_F(ShardLayersTest, LayersThatGoFreeTheirMemoryAndTheirWaiters) {
  MakeShard();
  ASSERT_TRUE(shard->Install(Of({0, 1}, 1)).ok());
  SendTo(1, ContributionKind::kStatistics, 0, 0, 1);
  const auto waiting = SendTo(1, ContributionKind::kGradient, 0, 0, 1);
  ASSERT_TRUE(waiting->accepted());
  ASSERT_TRUE(shard->Install(Of({0}, 2)).ok());
  ASSERT_TRUE(waiting->result.has_value());
  EXPECT_EQ(GetErrorReason(waiting->result->status()), ErrorReason::kStaleEpoch);
  EXPECT_EQ(shard->memory()->reserved().total(), BytesOf({0}));
  EXPECT_EQ(shard->GetLayerStats("job")->size(), 1u);
  epoch = 2;
  EXPECT_EQ(SendTo(1, ContributionKind::kGradient, 0, 0, 1)->reason(), ErrorReason::kNotOwner);
  ASSERT_TRUE(*shard->Remove(kSession));
  EXPECT_EQ(shard->memory()->reserved().total(), 0);
}

TEST_F(ShardLayersTest, WithoutRoomNothingChanges) {
  options.capacity_bytes = BytesOf({0, 1}) - 1;
  MakeShard();
  ASSERT_TRUE(shard->Install(Of({0}, 1)).ok());
  const absl::Status status = shard->Install(Of({0, 1}, 2)).status();
  EXPECT_EQ(GetErrorReason(status), ErrorReason::kCapacity) << status;
  EXPECT_THAT(std::string(status.message()), HasSubstr(std::to_string(BytesOf({0, 1}) - BytesOf({0}))));
  EXPECT_EQ(shard->memory()->reserved().total(), BytesOf({0}));
  EXPECT_EQ(Step(0, 0)->decision(), Decision::kPreconditioned) << "the epoch goes on";
}

TEST_F(ShardLayersTest, ScratchIsEachLayersOwnWhereAllAreAtWorkAtOnce) {
  spec.layers[1].d_out = 30;
  spec.gradient_dtype = DType::kBF16;
  const MethodSet methods = MethodSet::Make(spec, options.make_method).value();
  const auto of = [&](std::vector<uint32_t> layers, int parallelism) {
    return std::vector<int64_t>{ComputeReservation(spec, methods, layers, options.window_steps, parallelism).scratch,
                                ComputeFirstOrderReservation(spec, layers, options.window_steps, parallelism).scratch};
  };
  const std::vector<int64_t> narrow = of({0}, 1), wide = of({1}, 1);
  for (const size_t i : {0, 1}) {
    EXPECT_GT(wide[i], narrow[i]);
    EXPECT_EQ(of({0, 1}, 1)[i], wide[i]);
    EXPECT_EQ(of({0, 1}, 2)[i], narrow[i] + wide[i]);
    EXPECT_EQ(of({0, 1}, 512)[i], narrow[i] + wide[i]);
  }
}

TEST_F(ShardLayersTest, WithoutFactorsThoseThatComeHaveNoneEither) {
  MakeShard();
  SessionInstall install = Of({0}, 1);
  install.factors_released = true;
  ASSERT_TRUE(shard->Install(install).ok());
  ASSERT_TRUE(shard->Install(Of({0, 1}, 2)).ok());
  const int64_t released =
      ComputeFirstOrderReservation(spec, {0, 1}, options.window_steps, executor.parallelism()).total();
  EXPECT_EQ(shard->memory()->reserved().total(), released);
  ASSERT_TRUE(shard->HoldFactors({.session_id = kSession, .version = 1, .hold = true}).ok());
  EXPECT_EQ(shard->memory()->reserved().total(), BytesOf({0, 1}));
  epoch = 2;
  EXPECT_EQ(Step(1, 0)->decision(), Decision::kPreconditioned);
}

TEST_F(ShardLayersTest, TheNewLayersComeBackFromTheJournal) {
  const auto journal = std::make_shared<MemoryJournal>();
  options.journal = journal.get();
  MakeShard();
  ASSERT_TRUE(shard->Install(Of({0}, 1)).ok());
  Step(0, 0);
  ASSERT_TRUE(shard->Install(Of({0, 1}, 2)).ok());
  epoch = 2;
  Step(0, 1);
  Step(1, 1);
  Step(1, 2);
  shard = nullptr;
  journal->Restore(MakeShard());
  shard->replay().Finish();
  ASSERT_EQ(shard->GetLayerStats("job")->size(), 2u);
  // Two updates each so far, one more now.
  EXPECT_EQ((*Step(0, 2)->result)->factor_version, 3u);
  EXPECT_EQ((*Step(1, 3)->result)->factor_version, 3u);
  EXPECT_EQ(shard->memory()->reserved().total(), BytesOf({0, 1}));
}

TEST_F(ShardLayersTest, TheNewLayersImagesFitThoseOfTheOthers) {
  MemoryJournal journal;
  options.journal = &journal;
  MakeShard();
  ASSERT_TRUE(shard->Install(Of({0}, 1)).ok());
  SessionInstall back = Of({0}, 2);
  back.rollback_epoch = 2;
  back.rollback_step = 0;
  ASSERT_TRUE(shard->Install(back).ok());
  SessionInstall more = Of({0, 1}, 3);
  more.rollback_epoch = 2;
  ASSERT_TRUE(shard->Install(more).ok());
  epoch = 3;
  Step(0, 0);
  Step(1, 0);
  const std::vector<UpdateRecord> updates = journal.Of<UpdateRecord>();
  ASSERT_EQ(updates.size(), 2u);
  for (const UpdateRecord& update : updates) EXPECT_EQ(update.at.rollback_epoch, 2u) << "layer " << update.at.layer;
}

class ShardLeaseTest : public ShardLayersTest {
 protected:
  ShardLeaseTest() { spec.on_shard_loss = ShardLossPolicy::kDegrade; }
  // A probe with what the shard said in the one before.
  void Probe() {
    const auto description = shard->Probe({.from = said, .duration = absl::Seconds(5)});
    ASSERT_TRUE(description.ok());
    said = description->shard_time;
  }
  absl::Time said = absl::InfinitePast();
};

TEST_F(ShardLeaseTest, AShardThatHasNotBeenHeardOfAnswersNothing) {
  Start();
  Probe();
  for (int second = 0; second < 20; ++second) {
    clock.Advance(absl::Seconds(1));
    Probe();
    ASSERT_EQ(Step(0, second)->decision(), Decision::kPreconditioned) << second;
  }
  clock.Advance(absl::Seconds(5));
  const auto refused = SendTo(0, ContributionKind::kStatistics, 20, 0, 1);
  EXPECT_EQ(refused->ack->status().code(), absl::StatusCode::kUnavailable);
  EXPECT_EQ(refused->reason(), ErrorReason::kNotActive);
  EXPECT_THAT(std::string(refused->ack->status().message()), HasSubstr("coordinator has not been heard of"));
  // Retained answers are no exception.
  EXPECT_EQ(SendTo(0, ContributionKind::kGradient, 19, 0, 1)->reason(), ErrorReason::kNotActive);
  // The coordinator is back, and knows that the shard is.
  Probe();
  EXPECT_EQ(SendTo(0, ContributionKind::kGradient, 19, 0, 1)->reason(), ErrorReason::kNotActive)
      << "it grants from an answer that is too old";
  Probe();
  EXPECT_TRUE(SendTo(0, ContributionKind::kGradient, 19, 0, 1)->duplicate());
}

// Whatever a stopped process finds in its sockets when it goes on.
TEST_F(ShardLeaseTest, AProbeThatIsReadLateGrantsNothing) {
  Start();
  Probe();
  clock.Advance(absl::Seconds(1));
  Probe();
  clock.Advance(absl::Minutes(1));
  for (int i = 0; i < 3; ++i) ASSERT_TRUE(shard->Probe({.from = said, .duration = absl::Seconds(5)}).ok());
  EXPECT_EQ(SendTo(0, ContributionKind::kStatistics, 0, 0, 1)->reason(), ErrorReason::kNotActive);
}

// Work that waits until it is told to go on, as in a process that was stopped.
class StoppedExecutor final : public Executor {
 public:
  uint64_t NewStrand() override { return ++strands_; }
  void Post(uint64_t, std::function<void()> task) override { tasks_.push_back(std::move(task)); }
  int parallelism() const override { return 1; }
  void Drain() override {
    while (!tasks_.empty()) {
      const std::function<void()> task = std::move(tasks_.front());
      tasks_.pop_front();
      task();
    }
  }

 private:
  uint64_t strands_ = 0;
  std::deque<std::function<void()>> tasks_;
};

TEST_F(ShardLeaseTest, AnswersThatWereComputedMeanwhileAreHeldBack) {
  StoppedExecutor stopped;
  shard = std::make_unique<Shard>(options, *backend, stopped, clock, logger, observer);
  ASSERT_TRUE(shard->Install(MakeInstall()).ok());
  Probe();
  const std::shared_ptr<Reply> waiting = Step(0, 0);
  ASSERT_TRUE(waiting->accepted());
  clock.Advance(absl::Minutes(1));
  stopped.Drain();
  ASSERT_TRUE(waiting->result.has_value());
  EXPECT_EQ(waiting->result->status().code(), absl::StatusCode::kUnavailable);
  EXPECT_EQ(GetErrorReason(waiting->result->status()), ErrorReason::kNotActive);
  // It has kept the answer, for when the coordinator says that the layers are still here.
  Probe();
  clock.Advance(absl::Seconds(1));
  Probe();
  const auto again = SendTo(0, ContributionKind::kGradient, 0, 1, 1);
  EXPECT_TRUE(again->duplicate());
  EXPECT_EQ(again->decision(), Decision::kPreconditioned);
  shard = nullptr;
}

TEST_F(ShardLeaseTest, AnInstallationCountsAsAGrant) {
  Start();
  Probe();
  clock.Advance(absl::Minutes(1));
  EXPECT_EQ(SendTo(0, ContributionKind::kStatistics, 0, 0, 1)->reason(), ErrorReason::kNotActive);
  ASSERT_TRUE(shard->Install(MakeInstall(2)).ok());
  epoch = 2;
  EXPECT_TRUE(SendTo(0, ContributionKind::kStatistics, 0, 0, 1)->accepted());
  clock.Advance(absl::Seconds(5));
  EXPECT_EQ(SendTo(0, ContributionKind::kStatistics, 0, 1, 1)->reason(), ErrorReason::kNotActive);
}

TEST_F(ShardLeaseTest, ASessionThatWaitsNeedsNoLease) {
  spec.on_shard_loss = ShardLossPolicy::kWait;
  Start();
  Probe();
  clock.Advance(absl::Hours(1));
  EXPECT_EQ(Step(0, 0)->decision(), Decision::kPreconditioned);
}

TEST_F(ShardLeaseTest, ARestartedShardWaitsForTheCoordinator) {
  const auto journal = std::make_shared<MemoryJournal>();
  options.journal = journal.get();
  Start();
  Step(0, 0);
  shard = nullptr;
  journal->Restore(MakeShard());
  shard->replay().Finish();
  EXPECT_EQ(SendTo(0, ContributionKind::kStatistics, 1, 0, 1)->reason(), ErrorReason::kNotActive);
  Probe();
  clock.Advance(absl::Seconds(1));
  Probe();
  EXPECT_TRUE(SendTo(0, ContributionKind::kStatistics, 1, 0, 1)->accepted());
}

}  // namespace
}  // namespace precondor
