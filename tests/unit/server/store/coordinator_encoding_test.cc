// SPDX-License-Identifier: Apache-2.0
#include "server/store/coordinator_encoding.h"

#include <cstring>
#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

#include "tests/unit/server/store/sample_records.h"

namespace precondor::store {
namespace {

using ::testing::HasSubstr;

std::vector<CoordinatorRecord> Samples() {
  return {SampleSession(7),
          MembershipRecord{8, SampleMembership()},
          LeaseRecord{9, SampleLease()},
          CloseRecord{0xFFFFFFFFFFFFFFFF},
          SessionRecord{},
          SampleSnapshots(11),
          ClosingRecord{12},
          LeaderRecord{13}};
}

TEST(CoordinatorEncodingTest, EveryKindComesBackAsItWas) {
  for (const CoordinatorRecord& record : Samples()) {
    const auto decoded = DecodeCoordinatorRecord(KindOf(record), EncodeCoordinatorRecord(record));
    ASSERT_TRUE(decoded.ok()) << decoded.status();
    EXPECT_TRUE(Same(*decoded, record)) << "kind " << KindOf(record);
    EXPECT_EQ(SessionIdOf(*decoded), SessionIdOf(record));
  }
}

// Written out by hand from docs/operate/storage.md: files of this version have to stay readable.
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
  const auto fallback_of = [&](const std::string& probe, uint32_t returns) {
    return u8(1) + u64(41) + u64(2) + u8(1) + f64(0.1) + f64(-0.0) + f64(3e-4) + u64(17) + f64(2.25) + u64(20) + probe +
           f64(0.5) + f64(0.25) + u32(11) + u8(2) + u64(30) + u32(returns) + u8(1) + u8(1);
  };
  const std::string fallback = fallback_of(u8(1) + std::string(160, '\0'), 0);
  const std::string lease = u64(104) + u64(2) + u64(0) + u8(1) + u64(64) + u8(2) + fallback;
  const std::string options = u64(3) + text("beta") + u8(1) + f64(0.99) + text("exact") + u8(0) + u8(1) + text("form") +
                              u8(2) + text(std::string("a\0b", 3));
  const std::string config = u8(4) + u8(1) + u64(500) + f64(0.95) + f64(0.8) + f64(0.7) + u32(1) + f64(0.6) + u32(2) +
                             u32(1000) + u32(20) + u32(100) + f64(0.1) + u32(3) + u8(0) + f64(0.5) + u32(1000) +
                             f64(0.05);
  const std::string layers =
      u64(2) + text("first") + u64(5) + u64(6) + u8(1) + text("second") + u64(1 << 20) + u64(1) + u8(0);
  const std::string spec = text("job") + u64(0xFEDCBA9876543210) + u32(3) + u8(2) + u8(2) + u32(2) + u32(20) + u32(30) +
                           u32(0) + u8(3) + u8(2) + text("mkor") + options + config + layers;
  const std::string placement =
      u64(2) + text("shard0") + text("host-one:1") + u64(1) + u32(0) + text("shard1") + text("") + u64(1) + u32(1);

  EXPECT_EQ(EncodeCoordinatorRecord(CloseRecord{258}), u8(6) + u64(258));
  EXPECT_EQ(EncodeCoordinatorRecord(ClosingRecord{258}), u8(6) + u64(258));
  EXPECT_EQ(EncodeCoordinatorRecord(LeaderRecord{259}), u8(6) + u64(259));
  EXPECT_EQ(EncodeCoordinatorRecord(MembershipRecord{8, SampleMembership()}), u8(6) + u64(8) + membership);
  EXPECT_EQ(EncodeCoordinatorRecord(LeaseRecord{9, SampleLease()}), u8(6) + u64(9) + lease);
  // Earlier versions of this program wrote probes and returns to second order.
  const std::string windows = u64(3) + f64(1.5) + f64(-0.25) + f64(2.5) + f64(9) +  //
                              u64(4) + f64(1.5) + f64(-0.25) + f64(2.5) + f64(9) +  //
                              u64(3) + f64(1.5) + f64(-0.25) + f64(2.5) + f64(1e-300);
  const std::string probe = u8(4) + u64(static_cast<uint64_t>(-5)) + windows + u64(6) + u64(7) + f64(0.7) + f64(0.8);
  const auto probed = DecodeCoordinatorRecord(
      kLeaseRecord, u8(7) + u64(9) + u64(104) + u64(2) + u64(0) + u8(1) + u64(64) + u8(2) + fallback_of(probe, 1));
  ASSERT_TRUE(probed.ok()) << probed.status();
  EXPECT_TRUE(Same(*probed, LeaseRecord{9, SampleLease()}));
  const std::string session = u64(7) + spec + placement + membership + lease;
  const std::string layer_methods = u64(1) + text("identity") + u64(0) + u8(4) + u64(1) + u32(1);
  const std::string shapes = u64(1) + u32(1) + u64(3) + u64(64) + u64(128) + u64(128);
  const std::string access = text("0123456789abcdef") + u64(1) + text("tenant a");
  const std::string delegates = u64(2) + u32(2) + u32(1);
  EXPECT_EQ(EncodeCoordinatorRecord(SampleSession(7)),
            u8(7) + session + u8(1) + layer_methods + shapes + u8(1) + access + delegates);
  for (const std::string& bad : {u64(1) + u32(2) + u64(1) + u64(1), u64(1) + u32(0) + u64(0)}) {
    EXPECT_EQ(DecodeCoordinatorRecord(kSessionRecord,
                                      u8(7) + session + u8(2) + layer_methods + bad + u8(2) + access + delegates)
                  .status()
                  .code(),
              absl::StatusCode::kDataLoss);
  }

  std::string stale = spec;  // of a session that had a staleness
  stale[stale.find(u32(30) + u32(0)) + 4] = 1;
  const auto decoded =
      DecodeCoordinatorRecord(kSessionRecord, u8(7) + u64(7) + stale + placement + membership + lease + u8(2) +
                                                  layer_methods + shapes + u8(1) + access + delegates);
  ASSERT_TRUE(decoded.ok()) << decoded.status();
  EXPECT_TRUE(Same(*decoded, SampleSession(7)));

  SessionRecord alike = SampleSession(7);
  alike.spec.delegates.clear();
  const auto of_version_6 =
      DecodeCoordinatorRecord(kSessionRecord, u8(6) + session + u8(2) + layer_methods + shapes + u8(2) + access);
  ASSERT_TRUE(of_version_6.ok()) << of_version_6.status();
  EXPECT_TRUE(Same(*of_version_6, alike));
  // So an earlier program can take over: it reads all records of sessions without delegates.
  EXPECT_EQ(EncodeCoordinatorRecord(alike), u8(6) + session + u8(1) + layer_methods + shapes + u8(1) + access);
  alike.access = {};
  const auto of_version_5 =
      DecodeCoordinatorRecord(kSessionRecord, u8(5) + session + u8(2) + layer_methods + shapes + u8(2));
  ASSERT_TRUE(of_version_5.ok()) << of_version_5.status();
  EXPECT_TRUE(Same(*of_version_5, alike));
  const auto of_version_4 = DecodeCoordinatorRecord(kSessionRecord, u8(4) + session + u8(2) + layer_methods + shapes);
  ASSERT_TRUE(of_version_4.ok()) << of_version_4.status();
  EXPECT_TRUE(Same(*of_version_4, alike));
  alike.spec.layers[1].shape.clear();
  const auto of_version_3 = DecodeCoordinatorRecord(kSessionRecord, u8(3) + session + u8(2) + layer_methods);
  ASSERT_TRUE(of_version_3.ok()) << of_version_3.status();
  EXPECT_TRUE(Same(*of_version_3, alike));
  alike.spec.layer_methods.clear();
  const auto of_version_2 = DecodeCoordinatorRecord(kSessionRecord, u8(2) + session + u8(2));
  ASSERT_TRUE(of_version_2.ok()) << of_version_2.status();
  EXPECT_TRUE(Same(*of_version_2, alike));
  const auto of_version_1 = DecodeCoordinatorRecord(kSessionRecord, u8(1) + session);
  ASSERT_TRUE(of_version_1.ok()) << of_version_1.status();
  EXPECT_TRUE(Same(*of_version_1, alike));
  for (const std::string& bad : {session.substr(0, session.size() - 1), session + u8(1), std::string()}) {
    EXPECT_EQ(DecodeCoordinatorRecord(kSessionRecord, u8(1) + bad).status().code(), absl::StatusCode::kDataLoss);
  }
  const auto close_of_version_1 = DecodeCoordinatorRecord(kCloseRecord, u8(1) + u64(258));
  ASSERT_TRUE(close_of_version_1.ok()) << close_of_version_1.status();
  EXPECT_TRUE(Same(*close_of_version_1, CloseRecord{258}));
}

TEST(CoordinatorEncodingTest, BytesThatAreCutShortOrLongerAreDataLoss) {
  for (const CoordinatorRecord& record : Samples()) {
    const std::string bytes = EncodeCoordinatorRecord(record);
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
  std::string bytes = EncodeCoordinatorRecord(record);
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

TEST(CoordinatorEncodingTest, NewerVersionsAndKindsAreNamed) {
  std::string bytes = EncodeCoordinatorRecord(CloseRecord{1});
  bytes[0] = 8;
  const absl::Status version = DecodeCoordinatorRecord(kCloseRecord, bytes).status();
  EXPECT_EQ(version.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(version.message()), HasSubstr("version 8"));
  const absl::Status kind = DecodeCoordinatorRecord(8, bytes).status();
  EXPECT_EQ(kind.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(kind.message()), HasSubstr("kind 8"));
}

}  // namespace
}  // namespace precondor::store
