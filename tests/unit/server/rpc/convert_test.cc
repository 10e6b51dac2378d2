// SPDX-License-Identifier: Apache-2.0
#include "server/rpc/convert.h"

#include <functional>
#include <limits>
#include <memory>
#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

#include "kernels/base/error_reason.h"
#include "tests/support/status_matchers.h"
#include "tests/support/text_proto.h"

namespace precondor::rpc {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

v1::FrameHeader GradientHeader() {
  return FromText<v1::FrameHeader>(R"(
    session_id: 18446744073709551615 epoch: 2 step: 1099511627776 layer: 4 rank: 5 incarnation: 6
    kind: FRAME_KIND_GRADIENT mode: MODE_FIRST_ORDER samples: 32 abstain: true
    tensors { data_type: DATA_TYPE_F16 dims: 7 dims: 8 scale: 0.5 })");
}

TEST(ConvertTest, DecodesEveryFieldOfAHeader) {
  const absl::StatusOr<ContributionHeader> decoded = DecodeHeader(GradientHeader());
  ASSERT_TRUE(decoded.ok()) << decoded.status();
  const ContributionKey key = {.session_id = std::numeric_limits<uint64_t>::max(),
                               .epoch = 2,
                               .step = uint64_t{1} << 40,
                               .layer = 4,
                               .rank = 5,
                               .incarnation = 6};
  EXPECT_EQ(decoded->key, key);
  EXPECT_EQ(decoded->kind, ContributionKind::kGradient);
  EXPECT_EQ(decoded->mode, Mode::kFirstOrder);
  EXPECT_EQ(decoded->samples, 32u);
  EXPECT_TRUE(decoded->abstain);
  ASSERT_EQ(decoded->tensors.size(), 1u);
  EXPECT_EQ(decoded->tensors[0].dtype, DType::kF16);
  EXPECT_THAT(decoded->tensors[0].dims, ElementsAre(7, 8));
  EXPECT_EQ(decoded->tensors[0].scale, 0.5f);
}

TEST(ConvertTest, DecodesStatisticsAndFillsTheScale) {
  v1::FrameHeader header = GradientHeader();
  header.set_kind(v1::FRAME_KIND_STATISTICS);
  header.set_mode(v1::MODE_SECOND_ORDER);
  header.mutable_tensors(0)->clear_scale();
  *header.add_tensors() = header.tensors(0);
  header.mutable_tensors(1)->set_data_type(v1::DATA_TYPE_BF16);
  const absl::StatusOr<ContributionHeader> decoded = DecodeHeader(header);
  ASSERT_TRUE(decoded.ok()) << decoded.status();
  EXPECT_EQ(decoded->kind, ContributionKind::kStatistics);
  EXPECT_EQ(decoded->mode, Mode::kSecondOrder);
  ASSERT_EQ(decoded->tensors.size(), 2u);
  EXPECT_EQ(decoded->tensors[0].scale, 1.0f);
  EXPECT_EQ(decoded->tensors[1].dtype, DType::kBF16);
}

TEST(ConvertTest, RefusesHeadersAndNamesTheField) {
  struct Case {
    std::function<void(v1::FrameHeader&)> spoil;
    std::string names;
    ErrorReason reason = ErrorReason::kMalformed;
  };
  const std::vector<Case> cases = {
      {[](auto& h) { h.clear_kind(); }, "header.kind: expected STATISTICS, GRADIENT or PULL, got 0"},
      {[](auto& h) { h.set_kind(v1::FRAME_KIND_RESULT); }, "header.kind"},
      {[](auto& h) { h.set_kind(static_cast<v1::FrameKind>(99)); }, "got 99"},
      {[](auto& h) { h.clear_mode(); }, "header.mode"},
      {[](auto& h) { h.set_mode(static_cast<v1::Mode>(9)); }, "header.mode"},
      {[](auto& h) { h.mutable_tensors(0)->clear_data_type(); }, "tensors[0].data_type"},
      {[](auto& h) { h.mutable_tensors(0)->clear_dims(); }, "tensors[0].dims"},
      {[](auto& h) { h.mutable_tensors(0)->set_dims(1, -1); }, "tensors[0].dims"},
      {[](auto& h) { h.mutable_tensors(0)->set_scale(std::numeric_limits<float>::infinity()); }, "tensors[0].scale"},
      {[](auto& h) { h.mutable_tensors(0)->set_dims(0, std::numeric_limits<int64_t>::max()); }, "tensors[0]",
       ErrorReason::kSizeMismatch},
  };
  for (const Case& spoilt : cases) {
    v1::FrameHeader header = GradientHeader();
    spoilt.spoil(header);
    EXPECT_THAT(DecodeHeader(header),
                StatusIs(absl::StatusCode::kInvalidArgument, spoilt.reason, HasSubstr(spoilt.names)))
        << spoilt.names;
  }
}

TEST(ConvertTest, AnAnswerHasTheKeyOfItsContributionAlone) {
  v1::FrameHeader contribution = GradientHeader();
  contribution.set_chunk_offset(3);
  contribution.set_payload_bytes(112);
  EXPECT_THAT(AnswerHeader(contribution, v1::FRAME_KIND_ACK), EqualsText(R"(
    session_id: 18446744073709551615 epoch: 2 step: 1099511627776 layer: 4 rank: 5 incarnation: 6
    kind: FRAME_KIND_ACK mode: MODE_FIRST_ORDER)"));
}

TEST(ConvertTest, ResultCarriesItsTensorAndOutcome) {
  GradientResult result{.decision = Decision::kPreconditioned,
                        .factor_version = 12,
                        .inner_product = -0.25,
                        .reason = "",
                        .tensors = {{.dtype = DType::kBF16, .dims = {2, 3}, .scale = 1.0f}},
                        .bytes = std::make_shared<const Payload>(12)};
  v1::FrameHeader header;
  v1::Outcome outcome;
  EncodeResult(result, header, outcome);
  EXPECT_THAT(outcome, EqualsText("decision: DECISION_PRECONDITIONED factor_version: 12 inner_product: -0.25"));
  EXPECT_THAT(header, EqualsText("tensors { data_type: DATA_TYPE_BF16 dims: 2 dims: 3 } payload_bytes: 12"));
}

TEST(ConvertTest, ASkipHasNoTensorAndItsReasonIsText) {
  const GradientResult result{.decision = Decision::kSkip,
                              .factor_version = 1,
                              .inner_product = 0,
                              .reason = "rank 1: \xff",
                              .tensors = {{.dtype = DType::kF32, .dims = {2, 3}, .scale = 1.0f}},
                              .bytes = nullptr};
  v1::FrameHeader header;
  v1::Outcome outcome;
  EncodeResult(result, header, outcome);
  EXPECT_EQ(outcome.decision(), v1::DECISION_SKIP);
  EXPECT_EQ(header.tensors_size(), 0);
  EXPECT_EQ(header.payload_bytes(), 0u);
  v1::Outcome parsed;
  EXPECT_TRUE(parsed.ParseFromString(outcome.SerializeAsString())) << "a string field must be UTF-8";
  EXPECT_THAT(parsed.reason(), HasSubstr("rank 1: "));
}

TEST(ConvertTest, DirectiveAndShardMapKeepOrder) {
  const Directive directive = {
      .lease_through_step = 70,
      .modes = {{.first_step = 0, .mode = Mode::kSecondOrder}, {.first_step = 50, .mode = Mode::kFirstOrder}},
      .epoch = 3};
  EXPECT_THAT(EncodeDirective(directive), EqualsText(R"(
    lease_through_step: 70 epoch: 3 report_limit: 64
    modes { first_step: 0 mode: MODE_SECOND_ORDER } modes { first_step: 50 mode: MODE_FIRST_ORDER })"));
  EXPECT_THAT(EncodeShardMap(9, {{.address = "b:2", .layers = {0, 2}}, {.address = "a:1", .layers = {1}}}),
              EqualsText(R"(
    epoch: 9 assignments { address: "b:2" layers: 0 layers: 2 } assignments { address: "a:1" layers: 1 })"));
}

SessionInstall MakeInstall() {
  SessionInstall install;
  install.session_id = 77;
  install.epoch = 4;
  install.spec.name = "job";
  install.spec.seed = 5;
  install.spec.world_size = 3;
  install.spec.exchange = ExchangeMode::kDelegate;
  install.spec.sketches = 2;
  install.spec.gradient_dtype = DType::kBF16;
  install.spec.method.name = "mkor";
  install.spec.layers = {{.name = "a", .d_out = 2, .d_in = 3, .has_bias = true},
                         {.name = "b", .d_out = 4, .d_in = 5, .has_bias = false},
                         {.name = "c", .d_out = 6, .d_in = 7, .has_bias = false}};
  install.layers = {0, 2};
  install.members = {{.rank = 2, .incarnation = 9}, {.rank = 0, .incarnation = 8}};
  return install;
}

TEST(ConvertTest, AnInstallComesBackTheSame) {
  const absl::StatusOr<v1::InstallSessionRequest> request = EncodeInstall(MakeInstall());
  ASSERT_TRUE(request.ok()) << request.status();
  v1::InstallSessionRequest parsed;
  ASSERT_TRUE(parsed.ParseFromString(request->SerializeAsString()));
  const absl::StatusOr<SessionInstall> install = DecodeInstall(parsed);
  ASSERT_TRUE(install.ok()) << install.status();
  EXPECT_EQ(install->session_id, 77u);
  EXPECT_EQ(install->epoch, 4u);
  EXPECT_EQ(install->spec, MakeInstall().spec);
  EXPECT_THAT(install->layers, ElementsAre(0u, 2u));
  ASSERT_EQ(install->members.size(), 2u);
  EXPECT_EQ(install->members[0].rank, 2u);
  EXPECT_EQ(install->members[0].incarnation, 9u);
  EXPECT_EQ(install->members[1].rank, 0u);
  EXPECT_EQ(install->members[1].incarnation, 8u);
}

TEST(ConvertTest, InstallsThatMakeNoSenseAreRefused) {
  struct Case {
    std::function<void(v1::InstallSessionRequest&)> spoil;
    std::string names;
    ErrorReason reason;
  };
  using Request = v1::InstallSessionRequest;
  const std::vector<Case> cases = {
      {[](auto& r) { r.clear_spec(); }, "name", ErrorReason::kUnspecified},
      {[](auto& r) { r.mutable_spec()->set_exchange(static_cast<v1::ExchangeMode>(99)); }, "exchange",
       ErrorReason::kMalformed},
      {[](auto& r) { r.mutable_spec()->set_name("a b"); }, "name", ErrorReason::kUnspecified},
      {[](auto& r) { r.set_layers(1, 3); }, "layers[1]: expected ascending places below 3, got 3",
       ErrorReason::kUnknownLayer},
      {[](auto& r) { r.set_layers(0, 2); }, "layers[1]: expected ascending places below 3, got 2",
       ErrorReason::kUnknownLayer},
      {[](auto& r) { r.mutable_members(0)->set_rank(3); }, "members: expected ranks below 3, got 3",
       ErrorReason::kUnknownRank},
      {[](auto& r) { r.mutable_members(0)->set_rank(0); }, "members: expected each rank once, got 0 twice",
       ErrorReason::kMalformed},
  };
  for (const Case& spoilt : cases) {
    Request request = *EncodeInstall(MakeInstall());
    spoilt.spoil(request);
    EXPECT_THAT(DecodeInstall(request),
                StatusIs(absl::StatusCode::kInvalidArgument, spoilt.reason, HasSubstr(spoilt.names)))
        << spoilt.names;
  }
}

TEST(ConvertTest, AnInstallOfAMethodThatTheWireLacksIsRefused) {
  SessionInstall install = MakeInstall();
  install.spec.method.name = "nonsense";
  EXPECT_THAT(EncodeInstall(install), StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("nonsense")));
}

TEST(ConvertTest, ADescriptionComesBackTheSame) {
  const ShardDescription description = {
      .advertise_address = "gpu0:7071",
      .device = {"cuda:3", int64_t{80} << 30, 12345, "a fault", std::string("a\0ring", 6)},
      .sessions = {{.session_id = 3, .name = "job", .epoch = 2, .reserved_bytes = 9, .joined = 4}}};
  v1::DescribeShardResponse parsed;
  ASSERT_TRUE(parsed.ParseFromString(EncodeDescription(description).SerializeAsString()));
  const ShardDescription decoded = DecodeDescription(parsed);
  EXPECT_EQ(decoded.advertise_address, "gpu0:7071");
  EXPECT_EQ(decoded.device.name, "cuda:3");
  EXPECT_EQ(decoded.device.capacity_bytes, int64_t{80} << 30);
  EXPECT_EQ(decoded.device.reserved_bytes, 12345);
  EXPECT_EQ(decoded.device.fault, "a fault");
  EXPECT_EQ(decoded.device.ring_device, std::string("a\0ring", 6));
  ASSERT_EQ(decoded.sessions.size(), 1u);
  EXPECT_EQ(decoded.sessions[0].session_id, 3u);
  EXPECT_EQ(decoded.sessions[0].name, "job");
  EXPECT_EQ(decoded.sessions[0].epoch, 2u);
  EXPECT_EQ(decoded.sessions[0].reserved_bytes, 9);
  EXPECT_EQ(decoded.sessions[0].joined, 4u);
}

TEST(ConvertTest, NumbersOfADescriptionThatCoreCannotCountDoNotTurnNegative) {
  v1::DescribeShardResponse response;
  response.set_capacity_bytes(std::numeric_limits<uint64_t>::max());
  const ShardDescription decoded = DecodeDescription(response);
  EXPECT_EQ(decoded.device.capacity_bytes, std::numeric_limits<int64_t>::max());
}

TEST(ConvertTest, LayerStatsAreEncodedFieldByField) {
  LayerStats stats;
  stats.layer = 1;
  stats.name = "first";
  stats.factor_version = 2;
  stats.input_representation = "low_rank";
  stats.output_representation = "dense";
  stats.input_rank = 3;
  stats.output_rank = 4;
  stats.input_damping = 0.5;
  stats.output_damping = 0.25;
  stats.failed_decompositions = 12;
  stats.factor_resets = 13;
  stats.state_bytes = int64_t{1} << 40;
  stats.accepted = 5;
  stats.duplicates = 6;
  stats.rejected = 7;
  stats.preconditioned = 8;
  stats.identity = 9;
  stats.skipped = 10;
  stats.last_sealed_step = 11;
  stats.update_seconds = 0.125;
  stats.precondition_seconds = 0.0625;
  const auto expected = FromText<v1::LayerStats>(R"(
      layer: 1 name: "first" factor_version: 2 input_representation: "low_rank" output_representation: "dense"
      input_rank: 3 output_rank: 4 input_damping: 0.5 output_damping: 0.25 failed_decompositions: 12
      factor_resets: 13 state_bytes: 1099511627776 accepted: 5 duplicates: 6 rejected: 7 preconditioned: 8 identity: 9 skipped: 10
      last_sealed_step: 11 update_seconds: 0.125 precondition_seconds: 0.0625)");
  EXPECT_THAT(EncodeLayerStats(stats), EqualsText(expected.DebugString()));
  // A new field is to be set above.
  std::vector<const google::protobuf::FieldDescriptor*> set;
  expected.GetReflection()->ListFields(expected, &set);
  EXPECT_EQ(static_cast<int>(set.size()), expected.GetDescriptor()->field_count());
}

}  // namespace
}  // namespace precondor::rpc
