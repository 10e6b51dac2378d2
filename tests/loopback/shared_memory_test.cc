// SPDX-License-Identifier: Apache-2.0
// A server answers a stock client through shared memory, and survives a hostile one.
#include "proto/wire/shared_memory.h"

#include <atomic>
#include <chrono>
#include <memory>
#include <optional>
#include <string>
#include <thread>

#include "gmock/gmock.h"

#include "proto/wire/frame_codec.h"
#include "tests/loopback/raw_client.h"
#include "tests/support/wait_until.h"

namespace precondor {
namespace {

using ::testing::HasSubstr;

// A stream that has asked for shared memory.
class SharedStream : public RawStream {
 public:
  explicit SharedStream(RawServer& server) : RawStream(server) {
    Ask();
    if (answer.header().kind() != v1::FRAME_KIND_RING) return;
    auto memory = wire::SharedMemory::Open(answer.ring().handle());
    EXPECT_TRUE(memory.ok()) << memory.status();
    memory_ = *std::move(memory);
    writer_.emplace(memory_->ToServer());
    reader_.emplace(memory_->ToClient());
  }
  v1::FrameKind Ask() {
    v1::ExchangeRequest request;
    request.mutable_header()->set_kind(v1::FRAME_KIND_RING);
    request.mutable_ring()->set_kind(v1::RING_KIND_MESSAGES);
    Send(request);
    return Read();
  }
  wire::SharedMemory& memory() { return *memory_; }
  void SendShared(const std::string& message) {
    EXPECT_TRUE(*writer_->Write({message}));
    memory_->server_doorbell().Ring();
  }
  void SendShared(const v1::FrameHeader& header, const std::string& payload) {
    v1::ExchangeRequest frame;
    *frame.mutable_header() = header;
    frame.set_payload(payload);
    SendShared(frame.SerializeAsString());
  }
  // Returns false if the server has made no room in a second.
  bool TrySendShared(const std::string& message) {
    const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(1);
    absl::StatusOr<bool> written = false;
    while (written.ok() && !*written && std::chrono::steady_clock::now() < end) written = writer_->Write({message});
    EXPECT_TRUE(written.ok()) << written.status();
    memory_->server_doorbell().Ring();
    return written.ok() && *written;
  }
  v1::ExchangeResponse ReadShared() {
    v1::ExchangeResponse response;
    EXPECT_TRUE(WaitUntil([&] {
      const auto front = reader_->Front();
      EXPECT_TRUE(front.ok()) << front.status();
      if (!front.ok() || !front->has_value()) return !front.ok();
      EXPECT_TRUE(response.ParseFromString(std::string(**front)));
      reader_->Pop();
      return true;
    }));
    return response;
  }

 private:
  std::unique_ptr<wire::SharedMemory> memory_;
  std::optional<wire::PipeWriter> writer_;
  std::optional<wire::PipeReader> reader_;
};

class SharedMemoryStreamTest : public ::testing::Test {
 protected:
  static ServerConfig Config() {
    ServerConfig config;
    config.shared_memory_bytes = static_cast<int64_t>(wire::SharedMemory::kBytes);
    return config;
  }
  // Opens `stream` once the server has taken the memory of an earlier one back.
  void Open(std::optional<SharedStream>& stream) {
    ASSERT_TRUE(WaitUntil([&] {
      stream.emplace(server_);
      return stream->answer.header().kind() == v1::FRAME_KIND_RING;
    }));
  }
  // The server answers other jobs as before.
  void ExpectServes() {
    v1::ExchangeResponse response;
    const grpc::Status status = server_.Precondition(RawRequest(server_.OpenAndJoin("other"), 0, 0), &response);
    EXPECT_TRUE(status.ok()) << status.error_message();
  }

  RawServer server_{Config()};
  v1::JoinSessionResponse job_ = server_.OpenAndJoin("job");
};

TEST_F(SharedMemoryStreamTest, AnswersThroughItAsByGrpc) {
  const RawStep request = RawRequest(job_, 0, 0);
  const v1::JoinSessionResponse other = server_.OpenAndJoin("other");
  v1::ExchangeResponse want;
  ASSERT_TRUE(server_.Precondition(RawRequest(other, 0, 0), &want).ok());
  SharedStream stream(server_);
  stream.SendShared(request.statistics, request.statistics_payload);
  EXPECT_EQ(stream.ReadShared().header().kind(), v1::FRAME_KIND_ACK);
  stream.SendShared(request.gradient, request.payload);
  EXPECT_EQ(stream.ReadShared().header().kind(), v1::FRAME_KIND_ACK);
  const v1::ExchangeResponse result = stream.ReadShared();
  EXPECT_EQ(result.header().kind(), v1::FRAME_KIND_RESULT);
  EXPECT_EQ(result.payload(), want.payload());
  const grpc::Status status = stream.Finish();
  EXPECT_TRUE(status.ok()) << status.error_message();
}

TEST_F(SharedMemoryStreamTest, IsAskedForOnceAndFirst) {
  SharedStream stream(server_);
  v1::ExchangeRequest again;
  again.mutable_header()->set_kind(v1::FRAME_KIND_RING);
  again.mutable_ring()->set_kind(v1::RING_KIND_MESSAGES);
  stream.SendShared(again.SerializeAsString());
  EXPECT_THAT(stream.ReadShared().error().message(), HasSubstr("before anything else"));
  stream.SendShared(RawHeader(job_, v1::FRAME_KIND_GRADIENT, 0, 0), RawFloats(12, 1));
  EXPECT_EQ(stream.ReadShared().header().kind(), v1::FRAME_KIND_ACK);
  RawStream late(server_);
  EXPECT_EQ(late.Ask(RawHeader(job_, v1::FRAME_KIND_GRADIENT, 0, 1), RawFloats(10, 1)), v1::FRAME_KIND_ACK);
  late.Send(again);
  EXPECT_EQ(late.Read(), v1::FRAME_KIND_ERROR);
  EXPECT_THAT(late.answer.error().message(), HasSubstr("before anything else"));
}

TEST_F(SharedMemoryStreamTest, AClientThatCannotMapItGivesItBackAndUsesGrpc) {
  SharedStream stream(server_);
  ASSERT_EQ(stream.answer.header().kind(), v1::FRAME_KIND_RING);
  EXPECT_EQ(static_cast<RawStream&>(stream).Ask(RawHeader(job_, v1::FRAME_KIND_GRADIENT, 0, 0), RawFloats(12, 1)),
            v1::FRAME_KIND_ACK);
  std::optional<SharedStream> other;
  Open(other);  // although the first stream is open
}

TEST_F(SharedMemoryStreamTest, OthersUseGrpcWhenItIsTaken) {
  {
    SharedStream first(server_);
    EXPECT_EQ(first.answer.header().kind(), v1::FRAME_KIND_RING);
    SharedStream second(server_);
    ASSERT_EQ(second.answer.header().kind(), v1::FRAME_KIND_ERROR);
    EXPECT_EQ(second.answer.error().reason(), v1::ERROR_REASON_CAPACITY);
    EXPECT_EQ(static_cast<RawStream&>(second).Ask(RawHeader(job_, v1::FRAME_KIND_GRADIENT, 0, 0), RawFloats(12, 1)),
              v1::FRAME_KIND_ACK);
    EXPECT_TRUE(first.Finish().ok());
  }
  std::optional<SharedStream> third;
  Open(third);
}

TEST_F(SharedMemoryStreamTest, MessagesOnBothWaysEndTheStream) {
  SharedStream stream(server_);
  stream.SendShared(RawHeader(job_, v1::FRAME_KIND_GRADIENT, 0, 0), RawFloats(12, 1));
  EXPECT_EQ(stream.ReadShared().header().kind(), v1::FRAME_KIND_ACK);
  stream.Send(RawHeader(job_, v1::FRAME_KIND_GRADIENT, 1, 0), RawFloats(12, 1));
  EXPECT_EQ(stream.End().error_code(), grpc::StatusCode::INVALID_ARGUMENT);
  ExpectServes();
}

TEST_F(SharedMemoryStreamTest, WhatIsNoMessageEndsTheStream) {
  SharedStream stream(server_);
  stream.SendShared(std::string(1000, '\xFF'));
  EXPECT_EQ(stream.End().error_code(), grpc::StatusCode::INVALID_ARGUMENT);
  ExpectServes();
}

TEST_F(SharedMemoryStreamTest, BrokenPositionsEndTheStream) {
  SharedStream stream(server_);
  stream.memory().ToServer().positions->written.store(~uint64_t{0} - 4);
  stream.memory().server_doorbell().Ring();
  EXPECT_EQ(stream.End().error_code(), grpc::StatusCode::INTERNAL);
  std::optional<SharedStream> other;
  ASSERT_NO_FATAL_FAILURE(Open(other));
  other->memory().ToClient().positions->read.store(1 << 30);
  other->SendShared(RawHeader(job_, v1::FRAME_KIND_GRADIENT, 0, 0), RawFloats(12, 1));
  EXPECT_EQ(other->End().error_code(), grpc::StatusCode::INTERNAL);
  ExpectServes();
}

TEST_F(SharedMemoryStreamTest, AClientThatReadsNoAnswersIsReadNoMore) {
  SharedStream stream(server_);
  v1::ExchangeRequest frame;
  *frame.mutable_header() = RawHeader(job_, v1::FRAME_KIND_GRADIENT, 0, 0);
  frame.mutable_header()->set_session_id(job_.session_id() + 1);  // answered by an ERROR
  frame.set_payload(RawFloats(12, 1));
  const std::string message = frame.SerializeAsString();
  constexpr int kMostFrames = 1'000'000;
  int frames = 0;
  while (frames < kMostFrames && stream.TrySendShared(message)) ++frames;
  EXPECT_LT(frames, kMostFrames);
  ExpectServes();  // meanwhile
  EXPECT_EQ(stream.ReadShared().header().kind(), v1::FRAME_KIND_ERROR);
  stream.Cancel();
  (void)stream.End();
  std::optional<SharedStream> other;
  Open(other);
}

TEST_F(SharedMemoryStreamTest, AClientThatRewritesMessagesHarmsItselfAlone) {
  std::atomic<bool> ends = false;
  for (int round = 0; round < 20; ++round) {
    std::optional<SharedStream> stream;
    ASSERT_NO_FATAL_FAILURE(Open(stream));
    const wire::PipeMemory memory = stream->memory().ToServer();
    ends = false;
    std::thread rewriter([&] {
      for (uint64_t i = 0; !ends; ++i) memory.data[i * 7919 % 4096] = static_cast<uint8_t>(i);
    });
    for (int i = 0; i < 20; ++i) {
      stream->SendShared(RawHeader(job_, v1::FRAME_KIND_GRADIENT, static_cast<uint64_t>(i), 0), RawFloats(12, 1));
    }
    ends = true;
    rewriter.join();
    stream->Cancel();
    (void)stream->End();
  }
  ExpectServes();
}

}  // namespace
}  // namespace precondor
