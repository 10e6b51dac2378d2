// SPDX-License-Identifier: Apache-2.0
// Bad input never crashes, hangs or changes state, and says what was expected and what came. A second session, which
// sees only the good steps, tells what the answers have to be.
#include <algorithm>

#include "gmock/gmock.h"

#include "precondor/v1/shard.pb.h"
#include "precondor/v1/snapshot.pb.h"
#include "proto/wire/frame_codec.h"
#include "tests/loopback/generic_call.h"
#include "tests/loopback/raw_client.h"

namespace precondor {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

struct BadCase {
  const char* name;
  void (*spoil)(RawStep& step);  // spoils the gradient
  grpc::StatusCode code;
  v1::ErrorReason reason;
  const char* message;
};

const BadCase kCases[] = {
    {"UnknownSession", [](auto& r) { r.gradient.set_session_id(99); }, grpc::StatusCode::NOT_FOUND,
     v1::ERROR_REASON_UNKNOWN_SESSION, "99"},
    {"UnknownLayer", [](auto& r) { r.gradient.set_layer(9); }, grpc::StatusCode::NOT_FOUND,
     v1::ERROR_REASON_UNKNOWN_LAYER, "9"},
    {"UnknownRank", [](auto& r) { r.gradient.set_rank(5); }, grpc::StatusCode::NOT_FOUND, v1::ERROR_REASON_UNKNOWN_RANK,
     "5"},
    {"WrongShape",
     [](auto& r) {
       r.gradient.mutable_tensors(0)->set_dims(0, kRawCols[0]);
       r.gradient.mutable_tensors(0)->set_dims(1, kRawRows[0]);
     },
     grpc::StatusCode::INVALID_ARGUMENT, v1::ERROR_REASON_SHAPE_MISMATCH, "[3, 4]"},
    {"WrongDataType",
     [](auto& r) {
       r.gradient.mutable_tensors(0)->set_data_type(v1::DATA_TYPE_BF16);
       r.gradient.set_payload_bytes(24);
       r.payload.resize(24);
     },
     grpc::StatusCode::INVALID_ARGUMENT, v1::ERROR_REASON_DTYPE_MISMATCH, "bf16"},
    {"TooFewBytes",
     [](auto& r) {
       r.gradient.set_payload_bytes(44);
       r.payload.resize(44);
     },
     grpc::StatusCode::INVALID_ARGUMENT, v1::ERROR_REASON_SIZE_MISMATCH, "44"},
    {"FiveGigabytesClaimed",
     [](auto& r) {
       r.gradient.set_payload_bytes(uint64_t{5} << 30);
       r.gradient.mutable_tensors(0)->set_dims(0, 1 << 20);
       r.gradient.mutable_tensors(0)->set_dims(1, 1280);
     },
     grpc::StatusCode::INVALID_ARGUMENT, v1::ERROR_REASON_SHAPE_MISMATCH, "1048576"},
    {"StepFarAhead", [](auto& r) { r.gradient.set_step(1000); }, grpc::StatusCode::FAILED_PRECONDITION,
     v1::ERROR_REASON_STEP_TOO_FAR_AHEAD, "1000"},
    {"LaterEpoch", [](auto& r) { r.gradient.set_epoch(r.gradient.epoch() + 3); }, grpc::StatusCode::UNAVAILABLE,
     v1::ERROR_REASON_FUTURE_EPOCH, "epoch"},
    {"EarlierEpoch", [](auto& r) { r.gradient.set_epoch(0); }, grpc::StatusCode::FAILED_PRECONDITION,
     v1::ERROR_REASON_STALE_EPOCH, "epoch"},
    {"EarlierIncarnation", [](auto& r) { r.gradient.set_incarnation(6); }, grpc::StatusCode::FAILED_PRECONDITION,
     v1::ERROR_REASON_STALE_INCARNATION, "6"},
    {"ModeUnset", [](auto& r) { r.gradient.set_mode(v1::MODE_UNSPECIFIED); }, grpc::StatusCode::INVALID_ARGUMENT,
     v1::ERROR_REASON_MALFORMED, "mode"},
    {"KindOfAnAnswer", [](auto& r) { r.gradient.set_kind(v1::FRAME_KIND_RESULT); }, grpc::StatusCode::INVALID_ARGUMENT,
     v1::ERROR_REASON_MALFORMED, "kind"},
    {"NegativeDimension", [](auto& r) { r.gradient.mutable_tensors(0)->set_dims(0, -3); },
     grpc::StatusCode::INVALID_ARGUMENT, v1::ERROR_REASON_MALFORMED, "-3"},
};

void PrintTo(const BadCase& c, std::ostream* out) { *out << c.name; }

class ServerBadInputTest : public ::testing::TestWithParam<BadCase> {
 protected:
  void SetUp() override {
    job_ = server_.OpenAndJoin("job");
    twin_ = server_.OpenAndJoin("twin");
    ExpectEqualSteps(0);
  }

  // One good step of both sessions: the same bytes, and the same factors behind them.
  void ExpectEqualSteps(uint64_t step) {
    for (int layer = 0; layer < 2; ++layer) {
      v1::ExchangeResponse got, want;
      const grpc::Status of_job = server_.Precondition(RawRequest(job_, step, layer), &got);
      ASSERT_TRUE(of_job.ok()) << of_job.error_message();
      const grpc::Status of_twin = server_.Precondition(RawRequest(twin_, step, layer), &want);
      ASSERT_TRUE(of_twin.ok()) << of_twin.error_message();
      EXPECT_EQ(got.outcome().decision(), v1::DECISION_PRECONDITIONED);
      EXPECT_EQ(got.payload(), want.payload());
      EXPECT_EQ(got.outcome().factor_version(), want.outcome().factor_version());
    }
    const auto got = server_.Stats("job");
    const auto want = server_.Stats("twin");
    ASSERT_EQ(got.size(), want.size());
    for (size_t i = 0; i < got.size(); ++i) {
      EXPECT_EQ(got[i].factor_version(), want[i].factor_version());
      EXPECT_EQ(got[i].accepted(), want[i].accepted());
      EXPECT_EQ(got[i].preconditioned(), want[i].preconditioned());
      EXPECT_EQ(got[i].last_sealed_step(), want[i].last_sealed_step());
      EXPECT_EQ(got[i].state_bytes(), want[i].state_bytes());
    }
  }

  RawServer server_;
  v1::JoinSessionResponse job_, twin_;
};

TEST_P(ServerBadInputTest, FrameIsRefusedAndTheStreamGoesOn) {
  RawStep spoiled = RawRequest(job_, 1, 0);
  GetParam().spoil(spoiled);
  RawStream stream(server_);
  EXPECT_GT(stream.credit, 0u);
  EXPECT_EQ(stream.Ask(spoiled.gradient, spoiled.payload), v1::FRAME_KIND_ERROR);
  EXPECT_EQ(stream.answer.error().code(), GetParam().code) << stream.answer.error().message();
  EXPECT_EQ(stream.answer.error().reason(), GetParam().reason) << stream.answer.error().message();
  EXPECT_THAT(stream.answer.error().message(), HasSubstr(GetParam().message));
  // The same stream takes a good contribution afterwards: the statistics that the next step has anyway.
  const RawStep good = RawRequest(job_, 1, 0);
  EXPECT_EQ(stream.Ask(good.statistics, good.statistics_payload), v1::FRAME_KIND_ACK)
      << stream.answer.error().message();
  EXPECT_FALSE(stream.answer.duplicate());
  EXPECT_TRUE(stream.Finish([](const v1::ExchangeResponse& answer) { ADD_FAILURE() << answer.DebugString(); }).ok());
  ExpectEqualSteps(1);
}

INSTANTIATE_TEST_SUITE_P(Headers, ServerBadInputTest, ::testing::ValuesIn(kCases),
                         [](const auto& info) { return std::string(info.param.name); });

TEST(ServerStreamTest, GarbageEndsTheStreamAlone) {
  RawServer server;
  const v1::JoinSessionResponse job = server.OpenAndJoin("job");
  RawStream stream(server);
  v1::ExchangeRequest frame;
  // An unknown field of a message is passed over by protobuf; 256 KiB of other fields are not a frame.
  frame.GetReflection()->MutableUnknownFields(&frame)->AddLengthDelimited(9)->assign(400'000, 'x');
  stream.Send(frame);
  const grpc::Status status = stream.End();
  EXPECT_EQ(status.error_code(), grpc::StatusCode::INVALID_ARGUMENT);
  EXPECT_EQ(DetailOf(status).reason(), v1::ERROR_REASON_MALFORMED);
  v1::ExchangeResponse response;
  EXPECT_TRUE(server.Precondition(RawRequest(job, 0, 0), &response).ok());
}

TEST(ServerStreamTest, BundledFramesAreTakenAndAnsweredAsIfAlone) {
  RawServer server;
  const v1::JoinSessionResponse one = server.OpenAndJoin("one"), bundled = server.OpenAndJoin("bundled"),
                                inside = server.OpenAndJoin("inside");
  // Statistics and gradient of both layers, a refused one between them.
  const auto frames = [](const v1::JoinSessionResponse& job) {
    std::vector<v1::ExchangeRequest> all;
    for (int layer = 0; layer < 2; ++layer) {
      for (v1::FrameKind kind : {v1::FRAME_KIND_STATISTICS, v1::FRAME_KIND_GRADIENT}) {
        v1::ExchangeRequest& frame = all.emplace_back();
        *frame.mutable_header() = RawHeader(job, kind, 0, layer);
        frame.set_payload(RawFloats(static_cast<int>(frame.header().payload_bytes() / 4), 3));
      }
      if (layer == 0) all.emplace_back().mutable_header()->set_kind(v1::FRAME_KIND_ACK);
    }
    return all;
  };
  // The form of development versions: a frame's payload is inside the frame.
  const auto older = [&](const v1::JoinSessionResponse& job) {
    v1::ExchangeRequest bundle;
    for (const v1::ExchangeRequest& frame : frames(job)) *bundle.add_bundle() = frame;
    return bundle;
  };
  // The answers to the frames, sorted, without what tells the sessions apart.
  const auto answers = [&server](const std::vector<v1::ExchangeRequest>& messages) {
    RawStream stream(server);
    for (const v1::ExchangeRequest& message : messages) stream.Send(message);
    std::vector<std::string> got;
    const auto add = [&got](v1::ExchangeResponse answer) {
      answer.mutable_header()->clear_session_id();
      answer.mutable_header()->clear_epoch();
      got.push_back(answer.DebugString());
    };
    EXPECT_TRUE(stream.Finish(add).ok());
    std::sort(got.begin(), got.end());
    return got;
  };
  const std::vector<std::string> alone = answers(frames(one));
  EXPECT_EQ(alone.size(), 4u + 2 + 1) << "acknowledgements, results, refusal";
  EXPECT_EQ(answers({BundleOf(frames(bundled))}), alone);
  EXPECT_EQ(answers({older(inside)}), alone);
}

TEST(ServerStreamTest, BundlesBesideOrInsideOthersOrTooLargeOnesEndTheStream) {
  RawServer server;
  const v1::JoinSessionResponse job = server.OpenAndJoin("job");
  v1::ExchangeRequest nested, beside, many;
  nested.add_bundle()->add_bundle();
  beside.add_bundle();
  *beside.mutable_header() = RawHeader(job, v1::FRAME_KIND_GRADIENT, 0, 0);
  for (int i = 0; i <= wire::kMaxBundleFrames; ++i) many.add_bundle();
  v1::ExchangeRequest frame;
  *frame.mutable_header() = RawHeader(job, v1::FRAME_KIND_GRADIENT, 0, 0);
  frame.set_payload(RawFloats(static_cast<int>(frame.header().payload_bytes() / 4), 3));
  const v1::ExchangeRequest good = BundleOf<v1::ExchangeRequest>({frame, frame});
  v1::ExchangeRequest few = good, long_payload = good, wraps = good, twice = good;
  few.mutable_bundled_bytes()->RemoveLast();
  long_payload.mutable_payload()->append("more");
  wraps.set_bundled_bytes(0, ~uint64_t{0});
  wraps.set_bundled_bytes(1, good.payload().size() + 1);
  twice.mutable_bundle(0)->set_payload("own");
  for (const v1::ExchangeRequest& bad : {nested, beside, many, few, long_payload, wraps, twice}) {
    RawStream stream(server);
    stream.Send(bad);
    EXPECT_EQ(DetailOf(stream.End()).reason(), v1::ERROR_REASON_MALFORMED);
  }
  EXPECT_EQ(server.Stats("job")[0].accepted(), 0u);
}

TEST(ServerStreamTest, ResumeIsAcknowledgedOrRefusedByItsKey) {
  RawServer server;
  const v1::JoinSessionResponse job = server.OpenAndJoin("job");
  RawStream stream(server);
  const v1::ExchangeResponse& answer = stream.answer;
  const auto resume = [&](int layer, uint64_t step) {
    v1::FrameHeader header = RawHeader(job, v1::FRAME_KIND_RESUME, step, 0);
    header.set_layer(layer);
    stream.Ask(header);
    EXPECT_EQ(answer.contribution(), v1::FRAME_KIND_RESUME);
    EXPECT_EQ(answer.header().step(), step);
  };
  resume(0, 7);
  EXPECT_EQ(answer.header().kind(), v1::FRAME_KIND_ACK) << answer.DebugString();
  resume(99, 7);
  EXPECT_EQ(answer.header().kind(), v1::FRAME_KIND_ERROR);
  EXPECT_EQ(answer.error().reason(), v1::ERROR_REASON_UNKNOWN_LAYER);
  // Its word binds the rank.
  v1::ExchangeResponse response;
  EXPECT_EQ(DetailOf(server.Precondition(RawRequest(job, 6, 0), &response)).reason(), v1::ERROR_REASON_STALE_STEP);
  EXPECT_TRUE(server.Precondition(RawRequest(job, 7, 0), &response).ok());
}

// A few bytes ask for megabytes. Nothing of a bundle's answers is written before all of it is handled.
TEST(ServerStreamTest, FetchesAreAnsweredAsFarAsTheStreamMayHaveWaiting) {
  RawServer server;
  v1::SessionSpec spec = RawServer::Spec("job");
  spec.set_exchange(v1::EXCHANGE_MODE_REPLAY);
  spec.mutable_method()->mutable_mkor()->set_representation("DENSE");
  spec.mutable_layers()->DeleteSubrange(1, 1);
  spec.mutable_layers(0)->set_d_out(1024);
  spec.mutable_layers(0)->set_d_in(1024);
  const v1::JoinSessionResponse job = server.OpenAndJoin(spec);
  constexpr int kFetches = 3000;
  v1::ExchangeRequest fetch;
  *fetch.mutable_header() = RawHeader(job, v1::FRAME_KIND_FETCH, 0, 0);
  fetch.mutable_header()->clear_tensors();
  fetch.mutable_header()->clear_payload_bytes();
  RawStream stream(server);
  stream.Send(BundleOf(std::vector<v1::ExchangeRequest>(kFetches, fetch)));
  uint64_t bytes = 0, state = 0;
  int results = 0, refused = 0;
  const auto count = [&](const v1::ExchangeResponse& answer) {
    EXPECT_EQ(answer.contribution(), v1::FRAME_KIND_FETCH);
    bytes += answer.payload().size();
    state = std::max<uint64_t>(state, answer.header().payload_bytes());
    if (answer.header().kind() == v1::FRAME_KIND_RESULT && answer.header().chunk_offset() == 0) ++results;
    if (answer.header().kind() != v1::FRAME_KIND_ERROR) return;
    ++refused;
    EXPECT_EQ(answer.error().reason(), v1::ERROR_REASON_CAPACITY);
  };
  EXPECT_TRUE(stream.Finish(count).ok());
  EXPECT_EQ(results + refused, kFetches);
  EXPECT_GE(results, 1);
  EXPECT_EQ(bytes, static_cast<uint64_t>(results) * state);
  EXPECT_LT(bytes, stream.credit + 2 * state);
}

TEST(ServerStreamTest, DisconnectInTheMiddleOfAContributionLeavesNothing) {
  RawServer server;
  const v1::JoinSessionResponse job = server.OpenAndJoin("job");
  {
    RawStream stream(server);
    stream.Send(RawHeader(job, v1::FRAME_KIND_GRADIENT, 0, 0), RawFloats(3, 1));  // a quarter of it
    stream.Cancel();
    EXPECT_FALSE(stream.Finish().ok());
  }
  EXPECT_EQ(server.Stats("job")[0].accepted(), 0u);
  v1::ExchangeResponse response;
  const grpc::Status status = server.Precondition(RawRequest(job, 0, 0), &response);
  EXPECT_TRUE(status.ok()) << status.error_message();
}

TEST(ServerStreamTest, MoreStreamsOfARankHoldNoMore) {
  ServerConfig config;
  config.credit_bytes = 1 << 20;
  RawServer server(config);
  v1::SessionSpec spec = RawServer::Spec("job");
  constexpr int kRows = 640, kCols = 512;  // more than the credit
  spec.mutable_layers(0)->set_d_out(kRows);
  spec.mutable_layers(0)->set_d_in(kCols);
  const v1::JoinSessionResponse job = server.OpenAndJoin(spec);
  v1::ExchangeRequest begun;
  *begun.mutable_header() = RawHeader(job, v1::FRAME_KIND_GRADIENT, 0, 0);
  begun.mutable_header()->mutable_tensors(0)->set_dims(0, kRows);
  begun.mutable_header()->mutable_tensors(0)->set_dims(1, kCols);
  begun.mutable_header()->set_payload_bytes(uint64_t{4} * kRows * kCols);
  begun.set_payload(RawFloats(1, 1));
  v1::ExchangeRequest marker;  // is answered when what came before it has been handled
  marker.mutable_header()->set_kind(v1::FRAME_KIND_ACK);

  // Whether a stream may begin the contribution.
  const auto begins = [&](RawStream& stream) {
    stream.Send(begun);
    stream.Send(marker);
    stream.Read();
    if (stream.answer.error().reason() == v1::ERROR_REASON_MALFORMED) return true;  // the marker's
    EXPECT_EQ(stream.answer.error().reason(), v1::ERROR_REASON_CAPACITY) << stream.answer.error().DebugString();
    EXPECT_THAT(stream.answer.error().message(), HasSubstr("2097152"));
    stream.Read();
    return false;
  };
  RawStream one(server), two(server), three(server);
  EXPECT_TRUE(begins(one));
  EXPECT_TRUE(begins(two));
  EXPECT_FALSE(begins(three));
  one.Cancel();
  const absl::Time deadline = absl::Now() + absl::Seconds(60);  // the server hears of it
  bool begun_at_last = false;
  while (!begun_at_last && absl::Now() < deadline) begun_at_last = begins(three);
  EXPECT_TRUE(begun_at_last);
  // A contribution that is complete makes room too, and so does one that is refused later on.
  RawStream four(server), five(server);
  EXPECT_FALSE(begins(four));
  v1::ExchangeRequest later = begun;
  later.mutable_header()->set_chunk_offset(4);
  later.set_payload(RawFloats(kRows * kCols - 1, 1));
  two.Send(later);
  EXPECT_EQ(two.Read(), v1::FRAME_KIND_ACK) << two.answer.error().DebugString();
  EXPECT_TRUE(begins(four));
  later.mutable_header()->set_chunk_offset(8);
  three.Send(later);
  three.Read();
  EXPECT_EQ(three.answer.error().reason(), v1::ERROR_REASON_SIZE_MISMATCH) << three.answer.error().DebugString();
  EXPECT_TRUE(begins(five));
}

TEST(ServerStreamTest, OversizeMessageIsRefused) {
  ServerConfig config;
  config.max_message_bytes = 4 << 20;
  RawServer server(config);
  const v1::JoinSessionResponse job = server.OpenAndJoin("job");
  RawStep request = RawRequest(job, 0, 0);
  request.payload.resize(5 << 20);
  v1::ExchangeResponse response;
  EXPECT_EQ(server.Precondition(request, &response).error_code(), grpc::StatusCode::RESOURCE_EXHAUSTED);
  EXPECT_TRUE(server.Precondition(RawRequest(job, 0, 0), &response).ok());
}

// Ids, epoch and incarnation as a process has seen them in an error or a list.
TEST(ServerSessionTest, WithoutTheSecretNoNumberIsOfUse) {
  RawServer server;
  v1::JoinSessionResponse seen = server.OpenAndJoin("job");
  const v1::JoinSessionResponse job = seen;
  EXPECT_EQ(job.secret().size(), 16u);
  for (const std::string& secret : {std::string(), std::string(16, 'x')}) {
    seen.set_secret(secret);
    v1::ExchangeResponse response;
    const grpc::Status refused = server.Precondition(RawRequest(seen, 0, 0), &response);
    EXPECT_EQ(refused.error_code(), grpc::StatusCode::PERMISSION_DENIED);
    EXPECT_THAT(refused.error_message(), Not(HasSubstr("job\"")));
    RawStream stream(server);
    for (const v1::FrameKind kind :
         {v1::FRAME_KIND_GRADIENT, v1::FRAME_KIND_RESUME, v1::FRAME_KIND_FETCH, v1::FRAME_KIND_PULL}) {
      v1::FrameHeader header = RawHeader(seen, kind, 0, 0);
      std::string payload;
      if (kind == v1::FRAME_KIND_GRADIENT) {
        payload = RawFloats(kRawRows[0] * kRawCols[0], 1);
      } else {
        header.clear_tensors();
        header.clear_payload_bytes();
      }
      EXPECT_EQ(stream.Ask(header, payload), v1::FRAME_KIND_ERROR);
      EXPECT_EQ(stream.answer.error().code(), static_cast<int>(grpc::StatusCode::PERMISSION_DENIED))
          << stream.answer.DebugString();
    }
    const auto call = [&](auto method, auto request, auto answer) {
      request.set_session_id(seen.session_id());
      request.set_incarnation(kRawIncarnation);
      request.set_secret(secret);
      grpc::ClientContext context;
      return ((*server.sessions).*method)(&context, request, &answer).error_code();
    };
    v1::ReportStepRequest report;
    report.set_epoch(seen.epoch());
    using Stub = v1::SessionService::Stub;
    EXPECT_EQ(call(&Stub::ReportStep, report, v1::ReportStepResponse()), grpc::StatusCode::PERMISSION_DENIED);
    EXPECT_EQ(call(&Stub::LeaveSession, v1::LeaveSessionRequest(), v1::LeaveSessionResponse()),
              grpc::StatusCode::PERMISSION_DENIED);
  }
  v1::ExchangeResponse response;
  EXPECT_TRUE(server.Precondition(RawRequest(job, 0, 0), &response).ok());
  EXPECT_EQ(server.Stats("job")[0].accepted(), 2u) << "nothing of the others' was taken in";
}

TEST(ServerSessionTest, OneCallReportsSeveralSteps) {
  RawServer server;
  const v1::JoinSessionResponse job = server.OpenAndJoin("job");
  const auto limit = static_cast<int>(job.directive().report_limit());
  const auto call = [&](uint64_t step, int earlier, double seconds_ago, v1::ReportStepResponse& response) {
    v1::ReportStepRequest request;
    request.set_session_id(job.session_id());
    request.set_epoch(job.epoch());
    request.set_incarnation(kRawIncarnation);
    request.set_secret(job.secret());
    request.set_step(step);
    request.set_samples(1);
    for (int i = 0; i < earlier; ++i) {
      v1::StepReport* const before = request.add_earlier();
      before->set_step(step - static_cast<uint64_t>(earlier - i));
      before->set_samples(1);
      before->set_seconds_ago(seconds_ago);
    }
    grpc::ClientContext context;
    return server.sessions->ReportStep(&context, request, &response);
  };
  v1::ReportStepResponse first, second;
  ASSERT_TRUE(call(0, 0, 0, first).ok());
  const uint64_t lease = first.directive().lease_through_step();
  EXPECT_EQ(call(60, limit, 0, second).error_message(), "earlier: expected at most 63 steps, got 64");
  for (const double wrong : {-1.0, 1e9, std::numeric_limits<double>::quiet_NaN()}) {
    const grpc::Status refused = call(3, 2, wrong, second);
    EXPECT_EQ(refused.error_code(), grpc::StatusCode::INVALID_ARGUMENT);
    EXPECT_THAT(refused.error_message(), HasSubstr("step 1 seconds_ago: expected 0 to 86400, got "));
  }
  ASSERT_TRUE(call(3, 2, 0.5, second).ok());
  EXPECT_EQ(second.directive().lease_through_step(), lease + 3);
  EXPECT_EQ(call(lease + 5, 1, 0, second).error_code(), grpc::StatusCode::FAILED_PRECONDITION) << "beyond the lease";
}

TEST(ServerSessionTest, AFrameShowsTheSecretOnceForItsStream) {
  RawServer server;
  const v1::JoinSessionResponse job = server.OpenAndJoin("job");
  RawStream stream(server);
  for (const bool refused : {true, false, false}) {  // the refused one shows the secret
    v1::FrameHeader header = RawHeader(job, v1::FRAME_KIND_STATISTICS, 0, 0);
    if (refused) {
      header.set_payload_bytes(1);
    } else {
      header.clear_secret();
    }
    EXPECT_EQ(stream.Ask(header, RawFloats(kRawRows[0] + kRawCols[0], 1)),
              refused ? v1::FRAME_KIND_ERROR : v1::FRAME_KIND_ACK)
        << stream.answer.DebugString();
    EXPECT_TRUE(stream.answer.header().secret().empty());
  }
}

TEST(ServerSessionTest, MoreThanATenantsLimitsAreRefused) {
  ServerConfig config;
  config.tenant_max_sessions = 1;
  RawServer by_number(config);
  EXPECT_TRUE(by_number.Open(RawServer::Spec("one")).ok());
  const grpc::Status second = by_number.Open(RawServer::Spec("two"));
  EXPECT_EQ(second.error_code(), grpc::StatusCode::RESOURCE_EXHAUSTED);
  EXPECT_EQ(DetailOf(second).reason(), v1::ERROR_REASON_CAPACITY);
  config.tenant_max_sessions = 0;
  config.tenant_max_bytes = 1;
  RawServer by_bytes(config);
  EXPECT_THAT(by_bytes.Open(RawServer::Spec("one")).error_message(), HasSubstr("at most 1 bytes"));
}

// Fields that no message has, of three bytes each.
std::string UnknownFields(int count) {
  std::string bytes;
  for (int i = 0; i < count; ++i) bytes += std::string("\xf8\x3f\x01", 3);
  return bytes;
}

TEST(ServerBadInputTest, EveryCallRefusesARequestThatGrowsWhenItIsDecoded) {
  RawServer server;
  ServerConfig of_shard;
  of_shard.role = ServerRole::kShard;  // has the service by which a coordinator leads it
  RawServer shard(of_shard);
  const std::string grows = UnknownFields(1'500'000);  // 72 MB
  int refused = 0;
  for (const auto* file :
       {v1::OpenSessionRequest::descriptor()->file(), v1::GetModeRequest::descriptor()->file(),
        v1::ListMissingRanksRequest::descriptor()->file(), v1::RestoreLayerRequest::descriptor()->file(),
        v1::DescribeShardRequest::descriptor()->file()}) {
    const auto* service = file->service(0);
    RawServer& serves = service->name() == "ShardService" ? shard : server;
    for (int i = 0; i < service->method_count(); ++i) {
      if (service->method(i)->client_streaming()) continue;
      const std::string path = absl::StrCat("/", service->full_name(), "/", service->method(i)->name());
      GenericCall call(serves.channel(), path, grows);
      call.Read();
      const grpc::Status status = call.End();
      EXPECT_EQ(status.error_code(), grpc::StatusCode::RESOURCE_EXHAUSTED) << path << ": " << status.error_message();
      ++refused;
    }
  }
  EXPECT_EQ(refused, 23);
}

TEST(ServerBadInputTest, WhatRequestsTakeIsGivenBack) {
  RawServer server;
  const std::string large = UnknownFields(60'000);  // 2.9 MB, or a thirtieth of what all requests may take
  for (int i = 0; i < 30; ++i) {
    GenericCall good(server.channel(), "/precondor.v1.AdminService/ListSessions", large);
    good.Read();
    const grpc::Status status = good.End();
    EXPECT_TRUE(status.ok()) << status.error_message();
    GenericCall bad(server.channel(), "/precondor.v1.AdminService/ListSessions", large + "\x0a");
    bad.Read();
    EXPECT_FALSE(bad.End().ok());
  }
}

}  // namespace
}  // namespace precondor
