// SPDX-License-Identifier: Apache-2.0
#include "server/recovery/record_codec.h"

#include <cstring>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

#include "kernels/base/byte_codec.h"
#include "proto/wire/spec_codec.h"
#include "tests/support/status_matchers.h"
#include "tests/unit/server/recovery/recovery_testing.h"
#include "tests/unit/server/recovery/sample_records.h"

namespace precondor::recovery {
namespace {

using ::testing::HasSubstr;

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
    EXPECT_THAT(DecodeImage(bytes),
                StatusIs(absl::StatusCode::kFailedPrecondition,
                         absl::StrCat("layer image: format: expected 6, got ", static_cast<int>(format),
                                      ", of another version: docs/operate/operations.md#upgrade says how to go on")));
  }
  for (const uint8_t type : {0, 6, 7, 8, 10}) {
    EXPECT_THAT(DecodeRecord(type, ""),
                StatusIs(absl::StatusCode::kFailedPrecondition,
                         absl::StrCat("record type: expected 1 ... 5 or 9, got ", static_cast<int>(type))));
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

std::vector<CoordinatorRecord> Samples() {
  SessionRecord empty;
  empty.spec.statistics = StatisticsKind::kMean;  // for sketches, 0 would come back as their number
  return {SampleSession(7),
          MembershipRecord{8, SampleMembership()},
          LeaseRecord{9, SampleLease()},
          CloseRecord{0xFFFFFFFFFFFFFFFF},
          empty,
          SampleSnapshots(11),
          ClosingRecord{12},
          LeaderRecord{13}};
}

std::string Encoded(const CoordinatorRecord& record) {
  const absl::StatusOr<std::string> bytes = EncodeCoordinatorRecord(record);
  EXPECT_TRUE(bytes.ok()) << bytes.status();
  return bytes.value_or("");
}

TEST(CoordinatorEncodingTest, EveryKindComesBackAsItWas) {
  for (const CoordinatorRecord& record : Samples()) {
    const auto decoded = DecodeCoordinatorRecord(KindOf(record), Encoded(record));
    ASSERT_TRUE(decoded.ok()) << decoded.status();
    EXPECT_TRUE(Same(*decoded, record)) << "kind " << KindOf(record);
    EXPECT_EQ(SessionIdOf(*decoded), SessionIdOf(record));
  }
}

// Written out by hand from docs/operate/storage.md: files of this format have to stay readable.
TEST(CoordinatorEncodingTest, TheBytesAreThoseOfTheFormat) {
  const auto u64 = [](uint64_t value) {
    std::string bytes(8, '\0');
    for (int i = 0; i < 8; ++i) bytes[i] = static_cast<char>(value >> 8 * i & 255);
    return bytes;
  };
  const auto f64 = [&](double value) {
    uint64_t bits;
    std::memcpy(&bits, &value, 8);
    return u64(bits);
  };
  const auto u32 = [&](uint32_t value) { return u64(value).substr(0, 4); };
  const auto u8 = [](int value) { return std::string(1, static_cast<char>(value)); };
  const auto text = [&](const std::string& value) { return u64(value.size()) + value; };

  const std::string membership = u64(4) + u64(3) + u64(12) + u64(3) + u64(7) + u64(0) + u64(9) + u64(3) + u64(1) +
                                 u64(2) + u64(3) + u64(3) + u64(7) + u64(8) + u64(9);
  const std::string fallback = u8(1) + u64(41) + u64(2) + u8(1) + f64(0.1) + f64(-0.0) + f64(3e-4) + u64(17) +
                               f64(2.25) + u64(20) + f64(0.5) + f64(0.25) + u32(11) + u8(2) + u64(30) + u8(1) + u8(1);
  const std::string lease = u64(104) + u64(2) + u64(0) + u8(1) + u64(64) + u8(2) + fallback;
  const std::string placement =
      u64(2) + text("shard0") + text("host-one:1") + u64(1) + u32(0) + text("shard1") + text("") + u64(1) + u32(1);
  const std::string access = text("0123456789abcdef") + u64(1) + text("tenant a");
  const std::string parts =
      u64(2) + text("shard0") + u64(9) + u64(1) + u32(0) + text("shard1") + u64(0) + u64(1) + u32(1);
  const std::string snapshots = u64(1) + u64(5) + u64(640) + u64(2) + u8(3) + text("shard1: down") + parts + u8(1);
  const std::string spec = wire::EncodeSessionSpec(SampleSpec())->SerializeAsString();

  EXPECT_EQ(Encoded(CloseRecord{258}), u8(8) + u64(258));
  EXPECT_EQ(Encoded(ClosingRecord{258}), u8(8) + u64(258));
  EXPECT_EQ(Encoded(LeaderRecord{259}), u8(8) + u64(259));
  EXPECT_EQ(Encoded(MembershipRecord{8, SampleMembership()}), u8(8) + u64(8) + membership);
  EXPECT_EQ(Encoded(LeaseRecord{9, SampleLease()}), u8(8) + u64(9) + lease);
  EXPECT_EQ(Encoded(SampleSnapshots(7)), u8(8) + u64(7) + snapshots);
  EXPECT_EQ(Encoded(SampleSession(7)), u8(8) + u64(7) + placement + membership + lease + access + text(spec));
}

TEST(CoordinatorEncodingTest, ADescriptionThatCannotBeWrittenOrReadIsNamed) {
  SessionRecord record = SampleSession(7);
  record.spec.method.options["rnk"] = 3.0;
  EXPECT_THAT(EncodeCoordinatorRecord(record),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("method.mkor: expected one of")));
  // As a later version might write it.
  record = SampleSession(7);
  v1::SessionSpec spec = *wire::EncodeSessionSpec(record.spec);
  const std::string whole = Encoded(record);
  const std::string before = whole.substr(0, whole.size() - spec.SerializeAsString().size() - sizeof(uint64_t));
  const auto read = [&] {
    std::string bytes = before;
    PutBytes(bytes, spec.SerializeAsString());
    return DecodeCoordinatorRecord(kSessionRecord, bytes).status();
  };
  EXPECT_TRUE(read().ok()) << read();
  spec.GetReflection()->MutableUnknownFields(&spec)->AddVarint(77, 1);
  EXPECT_EQ(read().code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(read().message(), "session: SessionSpec: expected the fields of this version, got field 77 of a later one");
  spec.GetReflection()->MutableUnknownFields(&spec)->Clear();
  v1::Layer& layer = *spec.mutable_layers(0);
  layer.GetReflection()->MutableUnknownFields(&layer)->AddVarint(78, 1);
  EXPECT_EQ(read().message(), "session: Layer: expected the fields of this version, got field 78 of a later one");
  layer.GetReflection()->MutableUnknownFields(&layer)->Clear();
  v1::MkorConfig& mkor = *spec.mutable_method()->mutable_mkor();
  mkor.GetReflection()->MutableUnknownFields(&mkor)->AddVarint(55, 1);
  EXPECT_EQ(read().code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(read().message()), HasSubstr("got unknown field 55"));
}

TEST(CoordinatorEncodingTest, BytesThatAreCutShortOrLongerAreDataLoss) {
  for (const CoordinatorRecord& record : Samples()) {
    const std::string bytes = Encoded(record);
    for (size_t length = 0; length < bytes.size(); ++length) {
      EXPECT_EQ(DecodeCoordinatorRecord(KindOf(record), bytes.substr(0, length)).status().code(),
                absl::StatusCode::kDataLoss)
          << "kind " << KindOf(record) << ", " << length << " of " << bytes.size();
    }
    EXPECT_EQ(DecodeCoordinatorRecord(KindOf(record), bytes + "x").status().code(), absl::StatusCode::kDataLoss);
  }
}

TEST(CoordinatorEncodingTest, NoBytesAreTakenForAValueThatDoesNotExist) {
  const CoordinatorRecord record =
      LeaseRecord{1, {.durable_through = 1, .schedule = {{0, Mode::kFirstOrder}}, .fallback = {}}};
  std::string bytes = Encoded(record);
  const size_t mode = 1 + 8 + 8 + 8 + 8;
  ASSERT_EQ(bytes[mode], 2);
  for (const char bad : {0, 3, 127}) {
    bytes[mode] = bad;
    EXPECT_EQ(DecodeCoordinatorRecord(kLeaseRecord, bytes).status().code(), absl::StatusCode::kDataLoss) << int{bad};
  }
  // A count that no memory could hold.
  bytes[mode] = 2;
  bytes[1 + 8 + 8 + 7] = 127;
  EXPECT_EQ(DecodeCoordinatorRecord(kLeaseRecord, bytes).status().code(), absl::StatusCode::kDataLoss);
}

TEST(CoordinatorEncodingTest, OtherFormatsAndKindsAreNamed) {
  std::string bytes = Encoded(CloseRecord{1});
  for (const char format : {0, 1, 6, 7, 9}) {
    bytes[0] = format;
    EXPECT_THAT(DecodeCoordinatorRecord(kCloseRecord, bytes),
                StatusIs(absl::StatusCode::kFailedPrecondition,
                         absl::StrCat("coordinator record: format: expected 8, got ", static_cast<int>(format),
                                      ", of another version: docs/operate/operations.md#upgrade says how to go on")));
  }
  EXPECT_THAT(DecodeCoordinatorRecord(8, bytes),
              StatusIs(absl::StatusCode::kFailedPrecondition, HasSubstr("kind 8, this program knows 1 to 7")));
}

}  // namespace

}  // namespace precondor::recovery
