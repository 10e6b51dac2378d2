// SPDX-License-Identifier: Apache-2.0
// A session's layers on a shard become others.
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

}  // namespace
}  // namespace precondor
