// SPDX-License-Identifier: Apache-2.0
// Rings by their frames alone: what a server does with requests and ranges that the client library would never send,
// and when a link of the library asks.
#include <memory>
#include <string>
#include <utility>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

#include "client/cpp/src/shard_link.h"
#include "kernels/base/clock.h"
#include "tests/loopback/raw_client.h"
#include "tests/support/fake_plane.h"
#include "tests/support/temp_dir.h"
#include "tests/support/wait_until.h"

namespace precondor {
namespace {

using ::testing::HasSubstr;

constexpr char kReserved[] = "precondor_reserved_bytes";

ServerConfig Config(const TempDir& folder) {
  ServerConfig config;
  config.listen = {"unix:" + folder.path() + "/s", "127.0.0.1:0"};
  config.backend = "cuda";
  config.device_plane_bytes = int64_t{4} << 20;
  config.shared_memory_bytes = 0;
  return config;
}

// One stream of a stock client.
class Stream {
 public:
  explicit Stream(v1::PreconditionService::Stub& stub) {
    stream_ = stub.Exchange(&context_);
    credit = Read();
    EXPECT_EQ(credit.header().kind(), v1::FRAME_KIND_CREDIT);
  }
  ~Stream() {
    if (!ended_) context_.TryCancel();
    if (!ended_) (void)stream_->Finish();
  }
  v1::ExchangeResponse Read() {
    v1::ExchangeResponse frame;
    EXPECT_TRUE(stream_->Read(&frame));
    return frame;
  }
  // The answer to one frame.
  v1::ExchangeResponse Ask(const v1::ExchangeRequest& request) {
    EXPECT_TRUE(stream_->Write(request));
    return Read();
  }
  v1::ExchangeResponse AskForRing(const v1::Ring& ring) {
    v1::ExchangeRequest request;
    request.mutable_header()->set_kind(v1::FRAME_KIND_RING);
    *request.mutable_ring() = ring;
    return Ask(request);
  }
  v1::ExchangeResponse AskForRing(uint64_t bytes) {
    v1::Ring ring = credit.ring_offers(0);
    ring.set_bytes(bytes);
    return AskForRing(ring);
  }
  void End() {
    stream_->WritesDone();
    v1::ExchangeResponse frame;
    EXPECT_FALSE(stream_->Read(&frame));
    EXPECT_TRUE(stream_->Finish().ok());
    ended_ = true;
  }

  v1::ExchangeResponse credit;

 private:
  TimedContext context_;
  std::unique_ptr<grpc::ClientReaderWriter<v1::ExchangeRequest, v1::ExchangeResponse>> stream_;
  bool ended_ = false;
};

class RingFramesTest : public ::testing::Test {
 protected:
  v1::ExchangeRequest InRing(uint64_t offset) const {
    v1::ExchangeRequest request;
    *request.mutable_header() = RawHeader(job_, v1::FRAME_KIND_GRADIENT, 0, 0);
    request.mutable_header()->set_ring_offset(offset);
    return request;
  }
  static void ExpectRefused(const v1::ExchangeResponse& answer, v1::ErrorReason reason, const std::string& message) {
    EXPECT_EQ(answer.header().kind(), v1::FRAME_KIND_ERROR);
    EXPECT_EQ(answer.error().reason(), reason) << answer.error().message();
    EXPECT_THAT(answer.error().message(), HasSubstr(message));
  }

  const TempDir folder_;
  RawServer server_{Config(folder_)};
  v1::JoinSessionResponse job_ = server_.OpenAndJoin("job");
};

TEST_F(RingFramesTest, AreOfferedToPeersOfThisHostsSocketAlone) {
  EXPECT_EQ(Stream(*server_.data).credit.ring_offers_size(), 1);
  const auto tcp = v1::PreconditionService::NewStub(
      grpc::CreateChannel(server_.app().addresses()[1], grpc::InsecureChannelCredentials()));
  Stream far(*tcp);
  EXPECT_EQ(far.credit.ring_offers_size(), 0);
  v1::Ring ring = Stream(*server_.data).credit.ring_offers(0);
  const v1::ExchangeResponse refused = far.AskForRing(ring);
  ExpectRefused(refused, v1::ERROR_REASON_MALFORMED, "none was offered");
  EXPECT_EQ(refused.contribution(), v1::FRAME_KIND_RING);
}

TEST_F(RingFramesTest, OneAStreamIsGranted) {
  Stream stream(*server_.data);
  v1::Ring other = stream.credit.ring_offers(0);
  other.set_device("0123456789abcdef");
  ExpectRefused(stream.AskForRing(other), v1::ERROR_REASON_MALFORMED, "another device");
  ExpectRefused(stream.AskForRing(0), v1::ERROR_REASON_MALFORMED, "0 bytes");
  const v1::ExchangeResponse granted = stream.AskForRing(1);
  EXPECT_EQ(granted.header().kind(), v1::FRAME_KIND_RING);
  EXPECT_EQ(granted.ring().bytes(), uint64_t{2} << 20);
  EXPECT_EQ(granted.ring().handle().size(), 64u);
  ExpectRefused(stream.AskForRing(1), v1::ERROR_REASON_MALFORMED, "one a stream");
}

TEST_F(RingFramesTest, BadFramesAreRefusedAndChangeNothing) {
  {
    Stream without(*server_.data);
    ExpectRefused(without.Ask(InRing(0)), v1::ERROR_REASON_MALFORMED, "without a ring");
  }
  Stream stream(*server_.data);
  ASSERT_EQ(stream.AskForRing(1).header().kind(), v1::FRAME_KIND_RING);
  ExpectRefused(stream.Ask(InRing(4)), v1::ERROR_REASON_MALFORMED, "multiple of 256");
  ExpectRefused(stream.Ask(InRing(uint64_t{2} << 20)), v1::ERROR_REASON_MALFORMED, "within");
  ExpectRefused(stream.Ask(InRing(~uint64_t{255})), v1::ERROR_REASON_MALFORMED, "within");
  v1::ExchangeRequest twice = InRing(0);
  twice.set_payload("x");
  ExpectRefused(stream.Ask(twice), v1::ERROR_REASON_MALFORMED, "without payload");
  v1::ExchangeRequest later = InRing(0);
  later.mutable_header()->set_chunk_offset(4);
  ExpectRefused(stream.Ask(later), v1::ERROR_REASON_MALFORMED, "without payload");
  v1::ExchangeRequest short_one = InRing(0);
  short_one.mutable_header()->set_payload_bytes(4);
  ExpectRefused(stream.Ask(short_one), v1::ERROR_REASON_SIZE_MISMATCH, "48");
  v1::ExchangeRequest scaled = InRing(0);
  scaled.mutable_header()->mutable_tensors(0)->set_scale(2);
  ExpectRefused(stream.Ask(scaled), v1::ERROR_REASON_MALFORMED, "scale 1");
  v1::ExchangeRequest abstention = InRing(0);
  abstention.mutable_header()->set_abstain(true);
  abstention.mutable_header()->clear_tensors();
  abstention.mutable_header()->set_payload_bytes(0);
  ExpectRefused(stream.Ask(abstention), v1::ERROR_REASON_MALFORMED, "in a ring");
  v1::ExchangeRequest statistics = InRing(0);
  *statistics.mutable_header() = RawHeader(job_, v1::FRAME_KIND_STATISTICS, 0, 0);
  statistics.mutable_header()->set_ring_offset(0);
  ExpectRefused(stream.Ask(statistics), v1::ERROR_REASON_MALFORMED, "in a ring");
  RawStep without_ring = RawRequest(job_, 0, 0);  // on a stream of its own
  without_ring.gradient.set_ring_offset(0);
  v1::ExchangeResponse response;
  EXPECT_EQ(server_.Precondition(without_ring, &response).error_code(), grpc::StatusCode::INVALID_ARGUMENT);
  // Nothing has been counted.
  without_ring.gradient.clear_ring_offset();
  EXPECT_TRUE(server_.Precondition(without_ring, &response).ok());
  EXPECT_EQ(response.outcome().decision(), v1::DECISION_PRECONDITIONED);
  stream.End();
}

// Fresh memory holds NaN here, as any may.
TEST_F(RingFramesTest, WhatLiesThereIsLookedAt) {
  Stream stream(*server_.data);
  ASSERT_EQ(stream.AskForRing(1).header().kind(), v1::FRAME_KIND_RING);
  ExpectRefused(stream.Ask(InRing(256)), v1::ERROR_REASON_NON_FINITE, "not finite");
  // The range is the worker's again.
  v1::ExchangeRequest other_layer;
  *other_layer.mutable_header() = RawHeader(job_, v1::FRAME_KIND_GRADIENT, 0, 1);
  other_layer.mutable_header()->set_ring_offset(256);
  ExpectRefused(stream.Ask(other_layer), v1::ERROR_REASON_NON_FINITE, "not finite");
}

TEST_F(RingFramesTest, MemoryComesBackWithTheStreamsEnd) {
  const double before = Metric(server_, kReserved);
  ASSERT_GT(before, 0);
  Stream ordered(*server_.data);
  ASSERT_EQ(ordered.AskForRing(1).header().kind(), v1::FRAME_KIND_RING);
  EXPECT_EQ(Metric(server_, kReserved), before + (2 << 20));
  ordered.End();
  EXPECT_TRUE(WaitUntil([&] { return Metric(server_, kReserved) == before; }));
  {
    Stream broken(*server_.data);
    ASSERT_EQ(broken.AskForRing(1).header().kind(), v1::FRAME_KIND_RING);
  }
  // Its peer may be one that is alive and has yet to notice.
  const absl::Time since = MonotonicNow();
  EXPECT_TRUE(WaitUntil([&] { return Metric(server_, kReserved) == before; }));
  EXPECT_GE(MonotonicNow() - since, absl::Seconds(5));
}

class RingLinkTest : public RingFramesTest {
 protected:
  // Connected by its Tick. Waits for an open stream as long as it is let.
  std::unique_ptr<ShardLink> LinkTo(const std::string& address) {
    ShardLink::Options options;
    options.security = std::make_shared<wire::ChannelSecurity>();
    options.address = address;
    options.session = "job";
    options.session_id = job_.session_id();
    options.incarnation = kRawIncarnation;
    options.epoch = job_.epoch();
    options.connect_timeout = absl::Hours(1);
    options.result_timeout = absl::Hours(1);
    ShardLink::Hooks hooks;
    hooks.wake = [] {};
    hooks.fatal = [](const absl::Status& status) { ADD_FAILURE() << status; };
    return std::make_unique<ShardLink>(std::move(options), std::move(hooks), traffic_);
  }
  static absl::StatusOr<PayloadPath::Place> Take(ShardLink& link, const std::shared_ptr<DevicePlane>& plane,
                                                 absl::Time deadline = absl::InfiniteFuture()) {
    return link.path().TakeSlot(
        plane, [] { return uint64_t{48}; }, 0, 48, deadline);
  }

  TrafficCounters traffic_;
};

TEST_F(RingLinkTest, AGradientOfAnotherDeviceLeavesTheRingToOthers) {
  const auto here = std::make_shared<FakePlane>(Stream(*server_.data).credit.ring_offers(0).device());
  here->maps = true;
  const auto link = LinkTo(server_.app().addresses()[0]);
  link->Tick(MonotonicNow());
  const absl::Status refused = Take(*link, std::make_shared<FakePlane>("another")).status();
  EXPECT_EQ(refused.code(), absl::StatusCode::kUnavailable);
  EXPECT_THAT(std::string(refused.message()), HasSubstr("another device than the gradient's"));
  const auto place = Take(*link, here);
  EXPECT_TRUE(place.ok()) << place.status();
}

TEST_F(RingLinkTest, AShardThatIsDownIsWaitedForOnce) {
  const auto plane = std::make_shared<FakePlane>();
  const auto link = LinkTo("unix:" + folder_.path() + "/absent");
  // The gradient's deadline is sooner than connect_timeout.
  const absl::Status first = Take(*link, plane, MonotonicNow() + absl::Milliseconds(10)).status();
  EXPECT_EQ(first.code(), absl::StatusCode::kUnavailable);
  EXPECT_THAT(std::string(first.message()), HasSubstr("no stream"));
  EXPECT_EQ(Take(*link, plane).status(), first);
}

TEST(RingConfigTest, NeedsASocketAndADevice) {
  const TempDir folder;
  NullLogger logger;
  ServerConfig config = Config(folder);
  config.listen = {"127.0.0.1:0"};
  const absl::Status refused = App::Start(config, logger).status();
  EXPECT_EQ(refused.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(refused.message()), HasSubstr("expected a unix: address"));
  // Without a device there is nothing to offer, and the server runs.
  config = Config(folder);
  config.backend = "cpu";
  RawServer server(config);
  EXPECT_EQ(Stream(*server.data).credit.ring_offers_size(), 0);
}

}  // namespace
}  // namespace precondor
