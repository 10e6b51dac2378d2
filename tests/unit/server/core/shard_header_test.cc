// SPDX-License-Identifier: Apache-2.0
// Every way in which a header can be wrong, and that nothing changes when it is.
#include <functional>

#include "tests/unit/server/core/shard_fixture.h"

namespace precondor {
namespace {

using ::testing::HasSubstr;

struct BadHeader {
  const char* what;
  std::function<void(ContributionHeader&)> spoil;
  absl::StatusCode code;
  ErrorReason reason;
  const char* message;  // part of it
};

class ShardHeaderTest : public ShardFixture {
 protected:
  void ExpectRefused(ContributionHeader header, const BadHeader& bad) {
    Payload payload = Filled(header, 1);
    const uint64_t bytes = payload.size();
    bad.spoil(header);
    const absl::Status status = shard->CheckHeader(header, bytes);
    EXPECT_EQ(status.code(), bad.code) << bad.what << ": " << status;
    EXPECT_EQ(GetErrorReason(status), bad.reason) << bad.what << ": " << status;
    EXPECT_THAT(std::string(status.message()), HasSubstr(bad.message)) << bad.what;
    const auto reply = Send(header, std::move(payload));
    EXPECT_FALSE(reply->accepted()) << bad.what;
    EXPECT_EQ(reply->reason(), bad.reason) << bad.what;
    EXPECT_FALSE(reply->result.has_value()) << bad.what;
  }
  // The step is what it would be if the refused had never come.
  void ExpectUntouched() {
    EXPECT_EQ(StatsOf(0).accepted, 0u);
    EXPECT_EQ(shard->in_flight(), 0);
    for (uint32_t rank : {0, 1}) EXPECT_TRUE(Statistics(0, rank, 1)->accepted());
    Gradient(0, 0, 1);
    const auto reply = Gradient(0, 1, 1);
    ASSERT_TRUE(reply->result.has_value());
    EXPECT_EQ(reply->decision(), Decision::kPreconditioned);
    EXPECT_EQ((*reply->result)->factor_version, 1u);
  }
};

using absl::StatusCode;

TEST_F(ShardHeaderTest, RefusesWhatDoesNotFitAndChangesNothing) {
  Start();
  const std::vector<BadHeader> table = {
      {"session", [](auto& h) { h.key.session_id = 99; }, StatusCode::kNotFound, ErrorReason::kUnknownSession, "99"},
      {"old epoch", [](auto& h) { h.key.epoch = 0; }, StatusCode::kFailedPrecondition, ErrorReason::kStaleEpoch,
       "expected epoch 1, got 0"},
      {"new epoch", [](auto& h) { h.key.epoch = 2; }, StatusCode::kUnavailable, ErrorReason::kFutureEpoch, "got 2"},
      {"rank", [](auto& h) { h.key.rank = 2; }, StatusCode::kNotFound, ErrorReason::kUnknownRank, "rank below 2"},
      {"old incarnation", [](auto& h) { h.key.incarnation = 0; }, StatusCode::kFailedPrecondition,
       ErrorReason::kStaleIncarnation, "held by incarnation 1, got 0"},
      {"new incarnation", [](auto& h) { h.key.incarnation = 2; }, StatusCode::kNotFound, ErrorReason::kUnknownRank,
       "has not joined"},
      {"layer", [](auto& h) { h.key.layer = 2; }, StatusCode::kNotFound, ErrorReason::kUnknownLayer, "layer below 2"},
      {"no samples", [](auto& h) { h.samples = 0; }, StatusCode::kInvalidArgument, ErrorReason::kMalformed, "got 0"},
      {"a step that counts over", [](auto& h) { h.key.step = ~uint64_t{0}; }, StatusCode::kInvalidArgument,
       ErrorReason::kMalformed, "step: expected at most 281474976710656"},
      {"samples", [](auto& h) { h.samples = ~uint64_t{0}; }, StatusCode::kInvalidArgument, ErrorReason::kMalformed,
       "samples"},
      {"tensors", [](auto& h) { h.tensors.emplace_back(); }, StatusCode::kInvalidArgument, ErrorReason::kMalformed,
       "tensors"},
      {"no tensors", [](auto& h) { h.tensors.clear(); }, StatusCode::kInvalidArgument, ErrorReason::kMalformed,
       "got 0"},
      {"dtype", [](auto& h) { h.tensors[0].dtype = DType::kBF16; }, StatusCode::kInvalidArgument,
       ErrorReason::kDTypeMismatch, "expected f32, got bf16"},
      {"shape", [](auto& h) { std::swap(h.tensors[0].dims[0], h.tensors[0].dims[1]); }, StatusCode::kInvalidArgument,
       ErrorReason::kShapeMismatch, "expected ["},
      {"rank of the tensor", [](auto& h) { h.tensors[0].dims.assign(100000, 1); }, StatusCode::kInvalidArgument,
       ErrorReason::kShapeMismatch, ", ...]"},
      {"negative",
       [](auto& h) {
         h.tensors[0].dims = {-1, -6};
       },
       StatusCode::kInvalidArgument, ErrorReason::kShapeMismatch, "[-1, -6]"},
      {"scale 0", [](auto& h) { h.tensors[0].scale = 0; }, StatusCode::kInvalidArgument, ErrorReason::kMalformed,
       "scale"},
      {"scale nan", [](auto& h) { h.tensors[0].scale = std::nanf(""); }, StatusCode::kInvalidArgument,
       ErrorReason::kMalformed, "scale"},
  };
  for (const BadHeader& bad : table) {
    ExpectRefused(Header(ContributionKind::kStatistics, 0, 0), bad);
    ExpectRefused(Header(ContributionKind::kGradient, 0, 0), bad);
  }
  ExpectUntouched();
}

TEST_F(ShardHeaderTest, RefusesPayloadsOfAnotherSize) {
  Start();
  const ContributionHeader header = Header(ContributionKind::kGradient, 0, 0);
  for (const uint64_t bytes : {uint64_t{0}, uint64_t{23}, uint64_t{25}, uint64_t{5} << 30}) {
    const absl::Status status = shard->CheckHeader(header, bytes);
    EXPECT_EQ(GetErrorReason(status), ErrorReason::kSizeMismatch) << bytes;
    EXPECT_THAT(std::string(status.message()), HasSubstr("expected a payload of 24 bytes"));
  }
  EXPECT_THAT(std::string(shard->CheckHeader(header, 0).message()),
              HasSubstr("session \"job\" step 0 layer 0 \"first\" rank 0"));
  EXPECT_TRUE(shard->CheckHeader(header, 24).ok());
  EXPECT_EQ(Send(header, Payload(23))->reason(), ErrorReason::kSizeMismatch);
  ContributionHeader abstention = header;
  abstention.abstain = true;
  EXPECT_EQ(GetErrorReason(shard->CheckHeader(abstention, 24)), ErrorReason::kMalformed);
  abstention.tensors.clear();
  EXPECT_EQ(GetErrorReason(shard->CheckHeader(abstention, 24)), ErrorReason::kSizeMismatch);
  EXPECT_TRUE(shard->CheckHeader(abstention, 0).ok());
  ExpectUntouched();
}

TEST_F(ShardHeaderTest, RefusesStatisticsAtOtherSteps) {
  spec.inv_freq = 10;
  spec.warmup_steps = 2;
  Start();
  EXPECT_EQ(Statistics(2, 0, 1)->reason(), ErrorReason::kNotStatisticStep);
  EXPECT_TRUE(Statistics(1, 0, 1)->accepted());
}

TEST_F(ShardHeaderTest, RefusesLayersOfAnotherShard) {
  MakeShard();
  SessionInstall install = MakeInstall();
  install.layers = {1};
  ASSERT_TRUE(shard->Install(install).ok());
  EXPECT_EQ(Gradient(0, 0, 1)->reason(), ErrorReason::kNotOwner);
}

TEST_F(ShardHeaderTest, WaitsForAllRanks) {
  MakeShard();
  SessionInstall install = MakeInstall();
  install.members.pop_back();
  ASSERT_TRUE(shard->Install(install).ok());
  const auto early = Gradient(0, 0, 1);
  EXPECT_EQ(early->reason(), ErrorReason::kNotActive);
  EXPECT_EQ(early->ack->status().code(), absl::StatusCode::kUnavailable);
  EXPECT_THAT(std::string(early->ack->status().message()), HasSubstr("1 of 2 ranks"));
  ASSERT_TRUE(shard->Install(MakeInstall()).ok());
  EXPECT_TRUE(Gradient(0, 0, 1)->accepted());
}

TEST_F(ShardHeaderTest, CountsRejectionsByReason) {
  class Counting final : public Observer {
   public:
    void OnRejected(absl::string_view job, ContributionKind, ErrorReason reason) override {
      seen.emplace_back(job, reason);
    }
    std::vector<std::pair<std::string, ErrorReason>> seen;
  } counting;
  shard = std::make_unique<Shard>(options, *backend, executor, clock, logger, counting);
  ASSERT_TRUE(shard->Install(MakeInstall()).ok());
  Gradient(0, 0, std::nanf(""));
  ContributionHeader unknown = Header(ContributionKind::kGradient, 0, 0);
  unknown.key.session_id = 99;
  Send(unknown, {});
  EXPECT_THAT(counting.seen, ::testing::ElementsAre(std::make_pair(std::string("job"), ErrorReason::kNonFinite),
                                                    std::make_pair(std::string(""), ErrorReason::kUnknownSession)));
  EXPECT_EQ(StatsOf(0).rejected, 1u);
  shard.reset();
}

}  // namespace
}  // namespace precondor
