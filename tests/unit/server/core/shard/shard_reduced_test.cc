// SPDX-License-Identifier: Apache-2.0
// Gradients that a communicator has added up: answered like those that come one by one, and never beside them.
#include <limits>
#include <random>

#include "server/core/reservation.h"
#include "tests/unit/server/core/shard/shard_fixture.h"

namespace precondor {
namespace {

using ::testing::Each;
using ::testing::FloatEq;
using ::testing::HasSubstr;

class ShardReducedTest : public ShardFixture {
 protected:
  ShardReducedTest() { spec.data_plane = DataPlane::kCollective; }

  // Of layer 0, all elements `value`.
  ReducedGradient Reduced(uint64_t step, float value, std::vector<ReducedGradient::Share> shares) const {
    return {.session_id = kSession,
            .epoch = epoch,
            .step = step,
            .layer = 0,
            .mode = Mode::kSecondOrder,
            .shares = std::move(shares),
            .average = EncodeValues(DType::kF32, std::vector<float>(6, value))};
  }
  std::shared_ptr<Reply> Submit(ReducedGradient gradient) {
    auto reply = std::make_shared<Reply>();
    const absl::Status status =
        shard->data_plane().SubmitReduced(std::move(gradient), [reply](absl::StatusOr<GradientResult> answer) {
          EXPECT_FALSE(reply->result.has_value()) << "answered twice";
          reply->result = std::move(answer);
        });
    if (status.ok()) {
      reply->ack = false;
    } else {
      EXPECT_FALSE(reply->result.has_value()) << "refused and answered";
      reply->ack = status;
    }
    return reply;
  }
  void BothStatistics(uint64_t step) {
    Statistics(step, 0, 1);
    Statistics(step, 1, 1);
  }
};

TEST_F(ShardReducedTest, AnAverageIsPreconditionedAndAnswered) {
  Start();
  BothStatistics(0);
  const auto reply = Submit(Reduced(0, 4.0f, {{1}, {3}}));
  ASSERT_TRUE(reply->result.has_value());
  EXPECT_EQ(reply->decision(), Decision::kPreconditioned);
  EXPECT_THAT(reply->values(), Each(FloatEq(8.0f)));
  EXPECT_EQ(StatsOf(0).accepted, 4u);  // two statistics, two gradients
  EXPECT_EQ(StatsOf(0).preconditioned, 1u);
  EXPECT_EQ(shard->in_flight(), 0);
}

TEST_F(ShardReducedTest, WaitsForTheStatisticsOfAllRanks) {
  Start();
  Statistics(0, 1, 1);
  const auto reply = Submit(Reduced(0, 1.0f, {{1}, {1}}));
  EXPECT_TRUE(reply->accepted());
  EXPECT_FALSE(reply->result.has_value());
  Statistics(0, 0, 1);
  ASSERT_TRUE(reply->result.has_value());
  EXPECT_EQ((*reply->result)->factor_version, 1u);
}

TEST_F(ShardReducedTest, WhatComesOverGrpcAfterwardsIsARepetition) {
  Start();
  BothStatistics(0);
  const auto reply = Submit(Reduced(0, 2.0f, {{1}, {1}}));
  for (uint32_t rank : {1u, 0u}) {
    const auto again = Gradient(0, rank, 17.0f);
    EXPECT_TRUE(again->duplicate());
    ASSERT_TRUE(again->result.has_value());
    EXPECT_EQ((*again->result)->bytes, (*reply->result)->bytes);
  }
  EXPECT_EQ(shard->in_flight(), 0);
  BothStatistics(1);
  EXPECT_TRUE(Submit(Reduced(1, 1.0f, {{1}, {1}}))->result.has_value());
}

TEST_F(ShardReducedTest, WhatHasComeOverGrpcStays) {
  Start();
  BothStatistics(0);
  const auto first = Gradient(0, 1, 3.0f);
  const auto reduced = Submit(Reduced(0, 100.0f, {{1}, {1}}));
  EXPECT_EQ(reduced->ack->status().code(), absl::StatusCode::kAborted);
  EXPECT_THAT(std::string(reduced->ack->status().message()), HasSubstr("have come over gRPC"));
  const auto second = Gradient(0, 0, 5.0f);
  ASSERT_TRUE(first->result.has_value() && second->result.has_value());
  EXPECT_THAT(second->values(), Each(FloatEq(8.0f)));
  EXPECT_EQ(Submit(Reduced(0, 100.0f, {{1}, {1}}))->ack->status().code(), absl::StatusCode::kAborted) << "sealed";
  EXPECT_EQ(shard->in_flight(), 0);
}

TEST_F(ShardReducedTest, ARankWithoutAGradientMakesAllSkip) {
  Start();
  BothStatistics(0);
  const auto abstained = Submit(Reduced(0, 1.0f, {{5}, {0}}));
  ASSERT_TRUE(abstained->result.has_value());
  EXPECT_EQ(abstained->decision(), Decision::kSkip);
  EXPECT_THAT((*abstained->result)->reason, HasSubstr("rank 1 abstained"));
  EXPECT_TRUE(Abstain(ContributionKind::kGradient, 0, 1)->duplicate());
  BothStatistics(1);
  const auto refused = Submit(Reduced(1, 1.0f, {{0, true}, {5}}));
  ASSERT_TRUE(refused->result.has_value());
  EXPECT_THAT((*refused->result)->reason, HasSubstr("rank 0 sent a payload that was not finite"));
}

TEST_F(ShardReducedTest, AnAverageThatIsNotFiniteIsSkipped) {
  Start();
  BothStatistics(0);
  const auto reply = Submit(Reduced(0, std::numeric_limits<float>::infinity(), {{1}, {1}}));
  ASSERT_TRUE(reply->result.has_value());
  EXPECT_EQ(reply->decision(), Decision::kSkip);
  EXPECT_THAT((*reply->result)->reason, HasSubstr("not finite"));
}

TEST_F(ShardReducedTest, RefusesWhatDoesNotBelong) {
  Start();
  const auto refusal = [this](const ReducedGradient& gradient) { return Submit(gradient)->ack->status(); };
  ReducedGradient good = Reduced(5, 1.0f, {{1}, {1}});
  ReducedGradient bad = good;
  bad.session_id = 99;
  EXPECT_EQ(GetErrorReason(refusal(bad)), ErrorReason::kUnknownSession);
  bad = good;
  bad.epoch = 2;
  EXPECT_EQ(GetErrorReason(refusal(bad)), ErrorReason::kFutureEpoch);
  bad = good;
  bad.layer = 2;
  EXPECT_EQ(GetErrorReason(refusal(bad)), ErrorReason::kUnknownLayer);
  bad = good;
  bad.average.pop_back();
  EXPECT_THAT(std::string(refusal(bad).message()), HasSubstr("expected 2 shares and 24 bytes"));
  bad = good;
  bad.shares.pop_back();
  EXPECT_EQ(GetErrorReason(refusal(bad)), ErrorReason::kMalformed);
  bad = good;
  bad.shares[1].samples = (uint64_t{1} << 40) + 1;
  EXPECT_THAT(std::string(refusal(bad).message()), HasSubstr("samples"));
  Statistics(5, 0, 1);
  bad = good;
  bad.mode = Mode::kFirstOrder;
  EXPECT_EQ(GetErrorReason(refusal(bad)), ErrorReason::kModeConflict);
  EXPECT_TRUE(Submit(good)->accepted());
  EXPECT_EQ(GetErrorReason(refusal(Reduced(2, 1.0f, {{1}, {1}}))), ErrorReason::kStaleStep);
  ASSERT_TRUE(shard->Install(MakeInstall(2)).ok());
  EXPECT_EQ(GetErrorReason(refusal(Reduced(6, 1.0f, {{1}, {1}}))), ErrorReason::kStaleEpoch);
  EXPECT_TRUE(shard->data_plane().IsInEpoch(kSession, 2));
  EXPECT_FALSE(shard->data_plane().IsInEpoch(kSession, 1));
  EXPECT_FALSE(shard->data_plane().IsInEpoch(99, 2));
}

TEST_F(ShardReducedTest, ASessionOverGrpcTakesNone) {
  spec.data_plane = DataPlane::kGrpc;
  Start();
  const absl::Status status = Submit(Reduced(0, 1.0f, {{1}, {1}}))->ack->status();
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(status.message()), HasSubstr("with GRPC"));
}

TEST_F(ShardReducedTest, ANewEpochGivesTheSameAnswerToWhoeverHasNone) {
  Start();
  BothStatistics(0);
  const auto before = Submit(Reduced(0, 2.0f, {{1}, {1}}));
  incarnations[1] = 2;
  epoch = 2;
  ASSERT_TRUE(shard->Install(MakeInstall(2)).ok());
  for (uint32_t rank : {0u, 1u}) {
    const auto again = Gradient(0, rank, 3.0f);
    ASSERT_TRUE(again->result.has_value()) << rank;
    EXPECT_EQ((*again->result)->bytes, (*before->result)->bytes);
  }
}

TEST_F(ShardReducedTest, AnEpochsEndReachesWhoWaits) {
  Start();
  const auto reply = Submit(Reduced(0, 2.0f, {{1}, {1}}));
  EXPECT_FALSE(reply->result.has_value());
  epoch = 2;
  ASSERT_TRUE(shard->Install(MakeInstall(2)).ok());
  ASSERT_TRUE(reply->result.has_value());
  EXPECT_EQ(GetErrorReason(reply->result->status()), ErrorReason::kStaleEpoch);
}

// What LocalCollective does, written out: shares in f32, added in rank order, the shard's zero last.
std::vector<float> SumInRankOrder(const std::vector<std::vector<float>>& gradients,
                                  const std::vector<uint64_t>& samples) {
  double total = 0;
  for (uint64_t n : samples) total += static_cast<double>(n);
  std::vector<float> sum(gradients[0].size());
  for (size_t k = 0; k < sum.size(); ++k) {
    volatile float value = static_cast<float>(static_cast<double>(samples[0]) / total) * gradients[0][k];
    for (size_t r = 1; r < gradients.size(); ++r) {
      volatile float term = static_cast<float>(static_cast<double>(samples[r]) / total) * gradients[r][k];
      value = value + term;
    }
    sum[k] = value + 0.0f;
  }
  return sum;
}

TEST_F(ShardReducedTest, GradientsOverGrpcAreAddedUpToTheSameBits) {
  needs_statistics = false;
  spec.world_size = 3;
  spec.layers = {{.name = "wide", .d_out = 20, .d_in = 30, .has_bias = false}};
  std::mt19937_64 random(20);
  std::normal_distribution<float> normal;
  const std::vector<uint64_t> samples = {3, 1, 7};
  std::vector<std::vector<float>> gradients(3, std::vector<float>(600));
  for (auto& gradient : gradients) {
    for (float& value : gradient) value = normal(random) * std::exp(4 * normal(random));
  }
  gradients[0][5] = gradients[1][5] = gradients[2][5] = -0.0f;
  const std::vector<float> expected = SumInRankOrder(gradients, samples);
  for (const std::vector<uint32_t>& order : std::vector<std::vector<uint32_t>>{{0, 1, 2}, {2, 0, 1}}) {
    Start();
    std::shared_ptr<Reply> reply;
    for (uint32_t rank : order) {
      ContributionHeader header = Header(ContributionKind::kGradient, 0, rank);
      header.samples = samples[rank];
      header.tensors[0].scale = rank == 1 ? 0.25f : 1.0f;
      reply = Send(header, EncodeValues(DType::kF32, gradients[rank], header.tensors[0].scale));
    }
    ASSERT_TRUE(reply->result.has_value());
    const std::vector<float> values = reply->values();  // version 0: once the average
    EXPECT_EQ(0, std::memcmp(values.data(), expected.data(), values.size() * sizeof(float)));
  }
}

TEST_F(ShardReducedTest, ReservesZerosInsteadOfSums) {
  const MethodSet methods = *MethodSet::Make(spec, options.make_method);
  const auto staging = [&](DataPlane plane, int32_t world_size) {
    SessionSpec with = spec;
    with.data_plane = plane;
    with.world_size = world_size;
    return ComputeReservation(with, methods, {0, 1}, /*window_steps=*/2, /*parallelism=*/2).staging;
  };
  // Two layers of 6 elements, two steps: f64 for sums, f32 for zeros.
  EXPECT_EQ(staging(DataPlane::kGrpc, 2) - staging(DataPlane::kCollective, 2), 2 * 2 * 6 * (8 - 4));
  EXPECT_EQ(staging(DataPlane::kCollective, 1) - staging(DataPlane::kGrpc, 1), 2 * 2 * 6 * 4);
}

TEST_F(ShardReducedTest, TellsARankWhatItMayKnow) {
  Start();
  const ContributionKey key = {.session_id = kSession, .epoch = 1, .rank = 1, .incarnation = 1};
  const auto part = shard->data_plane().PartOf(key);
  ASSERT_TRUE(part.ok()) << part.status();
  EXPECT_EQ(part->spec, spec);
  EXPECT_EQ(part->layers, (std::vector<uint32_t>{0, 1}));
  ContributionKey stranger = key;
  stranger.rank = 2;
  EXPECT_EQ(GetErrorReason(shard->data_plane().PartOf(stranger).status()), ErrorReason::kUnknownRank);
  stranger = key;
  stranger.epoch = 0;
  EXPECT_EQ(GetErrorReason(shard->data_plane().PartOf(stranger).status()), ErrorReason::kStaleEpoch);
}

}  // namespace
}  // namespace precondor
