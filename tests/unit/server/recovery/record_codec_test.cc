// SPDX-License-Identifier: Apache-2.0
#include "server/recovery/record_codec.h"

#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

#include "tests/unit/server/recovery/recovery_testing.h"

namespace precondor::recovery {
namespace {

std::string PayloadOf(const EncodedRecord& encoded) {
  std::string payload;
  for (const absl::string_view piece : encoded.Pieces()) absl::StrAppend(&payload, piece);
  return payload;
}

template <typename Record>
Record RoundTrip(const Record& one) {
  const ShardRecord record = one;
  const EncodedRecord encoded = EncodeRecord(record).value();
  EXPECT_EQ(SessionOf(record), 7u);
  return std::get<Record>(DecodeRecord(static_cast<uint8_t>(encoded.type), PayloadOf(encoded)).value());
}

void ExpectEqual(const LayerStep& got, const LayerStep& expected) {
  EXPECT_EQ(got.session_id, expected.session_id);
  EXPECT_EQ(got.layer, expected.layer);
  EXPECT_EQ(got.step, expected.step);
  EXPECT_EQ(got.rollback_epoch, expected.rollback_epoch);
  EXPECT_EQ(got.updates, expected.updates);
}

TEST(RecordCodec, KeepsAnInstall) {
  InstallRecord record = MakeInstall(7, 3);
  record.install.rollback_step = 12;
  record.install.rollback_epoch = 3;
  const SessionInstall got = RoundTrip(record).install;
  EXPECT_EQ(got.session_id, 7u);
  EXPECT_EQ(got.epoch, 3u);
  EXPECT_EQ(got.rollback_step, 12u);
  EXPECT_EQ(got.rollback_epoch, 3u);
  EXPECT_EQ(DescribeDifference(got.spec, record.install.spec), "");
  EXPECT_EQ(got.layers, record.install.layers);
  ASSERT_EQ(got.members.size(), 2u);
  EXPECT_EQ(got.members[1].incarnation, 6u);
}

TEST(RecordCodec, KeepsUpdatesBitForBit) {
  UpdateRecord record = MakeUpdate(7, 1, 4);
  record.contributions.push_back({.samples = 1, .bytes = {}, .scales = {2.0f, 3.0f}});
  const UpdateRecord got = RoundTrip(record);
  ExpectEqual(got.at, record.at);
  ASSERT_EQ(got.contributions.size(), 2u);
  EXPECT_EQ(got.contributions[0].samples, 9u);
  EXPECT_EQ(got.contributions[0].bytes, Payload({4, 4, 4}));
  EXPECT_EQ(got.contributions[0].scales, (std::array<float, 2>{1.0f, 0.25f}));
  EXPECT_TRUE(got.contributions[1].bytes.empty());
  ExpectEqual(RoundTrip(FailedUpdateRecord{record.at}).at, record.at);
  EXPECT_EQ(RoundTrip(RemoveRecord{7}).session_id, 7u);
  for (const bool back : {false, true}) {
    const QuarantineRecord got = RoundTrip(QuarantineRecord{.session_id = 7, .back = back, .last_step = 11});
    EXPECT_EQ(got.back, back);
    EXPECT_EQ(got.last_step, 11u);
  }
}

TEST(RecordCodec, KeepsPlans) {
  const PlanRecord record{.at = MakeUpdate(7, 0, 2).at,
                          .mode = Mode::kFirstOrder,
                          .plan = {.decision = Decision::kSkip, .factor_version = 8, .reason = "rank 1 abstained"}};
  const PlanRecord got = RoundTrip(record);
  ExpectEqual(got.at, record.at);
  EXPECT_EQ(got.mode, Mode::kFirstOrder);
  EXPECT_EQ(got.plan.decision, Decision::kSkip);
  EXPECT_EQ(got.plan.factor_version, 8u);
  EXPECT_EQ(got.plan.reason, "rank 1 abstained");
}

TEST(RecordCodec, KeepsImages) {
  LayerImage image{
      .at = MakeUpdate(7, 1, 3).at, .factor_version = 2, .outcomes = {}, .state = std::string("\0s\xff", 3)};
  image.outcomes.push_back({.step = 29, .mode = Mode::kFirstOrder, .updated = false, .plan = {}});
  image.outcomes.push_back({.step = 30,
                            .mode = Mode::kSecondOrder,
                            .updated = true,
                            .plan = Plan{.decision = Decision::kIdentity, .factor_version = 1, .reason = "x"}});
  const LayerImage got = DecodeImage(EncodeImageHead(image) + image.state).value();
  ExpectEqual(got.at, image.at);
  EXPECT_EQ(got.factor_version, 2u);
  EXPECT_EQ(got.state, image.state);
  ASSERT_EQ(got.outcomes.size(), 2u);
  EXPECT_EQ(got.outcomes[0].mode, Mode::kFirstOrder);
  EXPECT_FALSE(got.outcomes[0].updated || got.outcomes[0].plan.has_value());
  EXPECT_TRUE(got.outcomes[1].updated);
  EXPECT_EQ(got.outcomes[1].plan->reason, "x");
}

TEST(RecordCodec, RefusesOtherVersions) {
  const LayerImage image{.at = MakeUpdate(7, 1, 3).at, .factor_version = 2, .outcomes = {}, .state = "s"};
  std::string bytes = EncodeImageHead(image) + image.state;
  for (const char format : {0, 1, 2, 3, 4, 5, 7}) {
    bytes[0] = format;
    const absl::Status refused = DecodeImage(bytes).status();
    EXPECT_TRUE(absl::IsFailedPrecondition(refused)) << refused;
    EXPECT_EQ(refused.message(),
              absl::StrCat("layer image: format: expected 6, got ", static_cast<int>(format),
                           ", of another version: docs/operate/operations.md#upgrade says how to go on"));
  }
  for (const uint8_t type : {0, 6, 7, 8, 10}) {
    const absl::Status refused = DecodeRecord(type, "").status();
    EXPECT_TRUE(absl::IsFailedPrecondition(refused)) << refused;
    EXPECT_EQ(refused.message(), absl::StrCat("record type: expected 1 ... 5 or 9, got ", static_cast<int>(type)));
  }
}

TEST(RecordCodec, RefusesWhatItDidNotWrite) {
  const ShardRecord record = MakeUpdate(7, 1, 4);
  const std::string update = PayloadOf(EncodeRecord(record).value());
  for (size_t size = 0; size < update.size(); ++size) {
    EXPECT_TRUE(absl::IsDataLoss(DecodeRecord(3, update.substr(0, size)).status())) << size;
  }
  EXPECT_TRUE(absl::IsDataLoss(DecodeRecord(3, update + "x").status()));
  EXPECT_TRUE(absl::IsDataLoss(DecodeRecord(1, "no message").status()));
  const ShardRecord planned = PlanRecord{.at = {}, .plan = {}};
  std::string plan = EncodeRecord(planned).value().own;
  plan[36] = 9;  // the mode follows five numbers of 8, 4, 8, 8 and 8 bytes
  EXPECT_TRUE(absl::IsDataLoss(DecodeRecord(5, plan).status()));
  EXPECT_TRUE(absl::IsDataLoss(DecodeImage("abc").status()));
}

}  // namespace
}  // namespace precondor::recovery
