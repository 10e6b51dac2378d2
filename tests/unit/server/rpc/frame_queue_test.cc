// SPDX-License-Identifier: Apache-2.0
#include "server/rpc/frame_queue.h"

#include <gmock/gmock.h>
#include <grpcpp/support/byte_buffer.h>
#include <gtest/gtest.h>
#include <memory>
#include <string>

namespace precondor::rpc {
namespace {

using ::testing::ElementsAre;

constexpr size_t kLimitBytes = 2500;

v1::ExchangeResponse Ack(uint64_t step) {
  v1::ExchangeResponse response;
  response.mutable_header()->set_kind(v1::FRAME_KIND_ACK);
  response.mutable_header()->set_step(step);
  return response;
}

class FrameQueueTest : public ::testing::Test {
 protected:
  // Steps of the frames of each message written, in order.
  void Record(const grpc::ByteBuffer& message) {
    auto decoded = wire::DecodeResponse(message);
    ASSERT_TRUE(decoded.ok()) << decoded.status();
    std::vector<uint64_t> steps;
    for (const v1::ExchangeResponse& part : decoded->message.bundle()) steps.push_back(part.header().step());
    if (steps.empty()) steps.push_back(decoded->message.header().step());
    written.push_back(steps);
    sizes.assign(decoded->message.bundled_bytes().begin(), decoded->message.bundled_bytes().end());
    if (decoded->message.bundle_size() > 0) {
      EXPECT_TRUE(wire::TakeBundledPayloads(*decoded).ok());
    }
  }
  void PushPayload(uint64_t step, size_t bytes) {
    auto payload = std::make_shared<std::string>(bytes, 'x');
    queue.Push(Ack(step), {payload->data(), payload->size(), payload});
  }

  std::vector<std::vector<uint64_t>> written;
  std::vector<uint64_t> sizes;  // of the last message's payloads
  bool written_at_once = false;
  int resumed = 0;
  int drained = 0;
  FrameQueue queue{FrameQueue::Events{.write =
                                          [this](const grpc::ByteBuffer* message, bool) {
                                            Record(*message);
                                            return written_at_once;
                                          },
                                      .resume = [this] { ++resumed; },
                                      .drained = [this] { ++drained; }},
                   kLimitBytes};
};

TEST_F(FrameQueueTest, WritesOneMessageAtATimeInOrder) {
  queue.Push(Ack(1));
  queue.Push(Ack(2));
  queue.Push(Ack(3));
  EXPECT_THAT(written, ElementsAre(ElementsAre(1u)));
  queue.Written();
  queue.Written();
  EXPECT_THAT(written, ElementsAre(ElementsAre(1u), ElementsAre(2u), ElementsAre(3u)));
}

TEST_F(FrameQueueTest, WritesOnIfTheTransportHasTakenTheMessageAtOnce) {
  written_at_once = true;
  queue.Hold();
  queue.Push(Ack(1));
  queue.Push(Ack(2));
  queue.Release();
  queue.Push(Ack(3));
  EXPECT_THAT(written, ElementsAre(ElementsAre(1u), ElementsAre(2u), ElementsAre(3u)));
  queue.HalfClose();
  EXPECT_EQ(drained, 1);
}

TEST(FrameQueueTimesTest, TellsHowLongTheLastFrameOfAnAnswerWaited) {
  absl::Time now = absl::UnixEpoch();
  std::vector<absl::Duration> waits;
  FrameQueue queue(FrameQueue::Events{.write = [](const grpc::ByteBuffer*, bool) { return false; },
                                      .resume = [] {},
                                      .drained = [] {},
                                      .now = [&now] { return now; },
                                      .replied = [&waits](absl::Duration wait) { waits.push_back(wait); }},
                   kLimitBytes);
  const auto payload = std::make_shared<std::string>(10, 'x');
  v1::ExchangeResponse answer;
  answer.mutable_header()->set_kind(v1::FRAME_KIND_RESULT);
  answer.mutable_header()->set_payload_bytes(20);
  queue.Push(Ack(1));
  queue.Push(answer, {payload->data(), 10, payload});
  answer.mutable_header()->set_chunk_offset(10);
  queue.Push(answer, {payload->data(), 10, payload});
  for (int i = 0; i < 3; ++i) {
    now += absl::Seconds(1);
    queue.Written();
  }
  EXPECT_THAT(waits, ElementsAre(absl::Seconds(3)));
}

TEST_F(FrameQueueTest, BundlesWhatWaitsOnceThePeerTakesThem) {
  queue.AllowBundles();
  queue.Push(Ack(1));
  queue.Push(Ack(2));
  PushPayload(3, 10);
  PushPayload(4, wire::kMaxBundledFrameBytes - 1);
  PushPayload(5, wire::kMaxBundledFrameBytes);  // alone
  queue.Push(Ack(6));
  queue.Written();
  EXPECT_THAT(sizes, ElementsAre(0u, 10u, wire::kMaxBundledFrameBytes - 1));
  for (int i = 0; i < 2; ++i) queue.Written();
  EXPECT_THAT(written, ElementsAre(ElementsAre(1u), ElementsAre(2u, 3u, 4u), ElementsAre(5u), ElementsAre(6u)));
}

TEST_F(FrameQueueTest, BundlesEndAtTheLimits) {
  queue.AllowBundles();
  constexpr size_t kBytes = wire::kMaxBundledFrameBytes - 1, kFit = wire::kMaxBundlePayloadBytes / kBytes;
  queue.Hold();
  for (uint64_t step = 0; step <= kFit; ++step) PushPayload(step, kBytes);
  queue.Release();
  EXPECT_EQ(written.back().size(), kFit);
  queue.Written();
  EXPECT_EQ(written.back(), std::vector<uint64_t>{kFit});
  v1::ExchangeResponse large = Ack(7);
  large.mutable_outcome()->set_reason(std::string(wire::kMaxBundleHeaderBytes / 2, 'x'));
  queue.Hold();
  for (int i = 0; i < 3; ++i) queue.Push(large);
  queue.Release();
  for (int i = 0; i < 3; ++i) queue.Written();
  EXPECT_EQ(written.size(), 5u) << "two headers are more than the limit";
}

// As many as a session with many layers has, with numbers as large as in service: none is lost.
TEST_F(FrameQueueTest, ThousandsOfSmallFramesFitTheirBundles) {
  v1::ExchangeResponse ack = Ack(1 << 20);
  ack.mutable_header()->set_session_id(1795901426172836207);
  ack.mutable_header()->set_incarnation(1795901426173931293);
  ack.mutable_header()->set_epoch(3);
  ack.mutable_header()->set_mode(v1::MODE_SECOND_ORDER);
  ack.set_contribution(v1::FRAME_KIND_STATISTICS);
  constexpr size_t kFrames = 20000;
  queue.AllowBundles();
  queue.Hold();
  for (size_t i = 0; i < kFrames; ++i) queue.Push(ack);
  queue.Release();
  size_t frames = 0;
  for (size_t messages = 1; frames < kFrames && messages <= 10; ++messages) {
    ASSERT_EQ(written.size(), messages);
    frames += written.back().size();
    queue.Written();
  }
  EXPECT_EQ(frames, kFrames);
}

TEST_F(FrameQueueTest, HoldsWhatIsPushedUntilReleased) {
  queue.AllowBundles();
  queue.Hold();
  queue.Push(Ack(1));
  queue.Push(Ack(2));
  EXPECT_TRUE(written.empty());
  queue.Release();
  EXPECT_THAT(written, ElementsAre(ElementsAre(1u, 2u)));
}

TEST_F(FrameQueueTest, SmallFramesCountAsTheMemoryThatTheyTake) {
  for (uint64_t step = 0; step < 3; ++step) queue.Push(Ack(step));
  EXPECT_FALSE(queue.PauseWhenFull());
  queue.Push(Ack(3));
  EXPECT_TRUE(queue.PauseWhenFull());
}

TEST_F(FrameQueueTest, AFullQueueAsksToPauseAndResumesOnceWhenItIsNoLongerFull) {
  PushPayload(1, 600);  // being written: it waits no more
  EXPECT_FALSE(queue.PauseWhenFull());
  PushPayload(2, 600);
  EXPECT_FALSE(queue.PauseWhenFull());
  PushPayload(3, 600);
  EXPECT_TRUE(queue.PauseWhenFull());
  EXPECT_EQ(resumed, 0);
  queue.Written();
  EXPECT_EQ(resumed, 1);
  queue.Written();
  EXPECT_EQ(resumed, 1);
  EXPECT_FALSE(queue.PauseWhenFull());
}

TEST_F(FrameQueueTest, AClosedQueueNeitherWritesNorResumes) {
  PushPayload(1, 600);
  PushPayload(2, 600);
  PushPayload(3, 600);
  EXPECT_TRUE(queue.PauseWhenFull());
  EXPECT_TRUE(queue.Close());
  EXPECT_FALSE(queue.Close());
  queue.Written();
  queue.Push(Ack(4));
  EXPECT_EQ(resumed, 0);
  EXPECT_EQ(written.size(), 1u);
}

TEST_F(FrameQueueTest, OwesAnAnswerOfANameOnceAndNoneWhileItIsFull) {
  EXPECT_TRUE(queue.AddNamedPendingAnswer("layer 1"));
  EXPECT_FALSE(queue.AddNamedPendingAnswer("layer 1"));
  EXPECT_TRUE(queue.AddNamedPendingAnswer("layer 2"));
  PushPayload(1, 600);  // being written
  PushPayload(2, 600);
  queue.MarkAnsweredOnce("layer 1");
  EXPECT_TRUE(queue.AddNamedPendingAnswer("layer 1"));
  PushPayload(3, 600);
  queue.MarkAnsweredOnce("layer 1");
  EXPECT_FALSE(queue.AddNamedPendingAnswer("layer 1")) << "two payloads wait";
  queue.Written();
  EXPECT_TRUE(queue.AddNamedPendingAnswer("layer 1"));
  queue.HalfClose();
  queue.Written();
  queue.Written();
  queue.MarkAnsweredOnce("layer 1");
  EXPECT_EQ(drained, 0);
  queue.MarkAnsweredOnce("layer 2");
  EXPECT_EQ(drained, 1);
}

TEST_F(FrameQueueTest, IsDrainedWhenHalfClosedAnsweredAndWritten) {
  queue.AddPendingAnswer();
  queue.HalfClose();
  EXPECT_EQ(drained, 0);
  queue.Push(Ack(1));
  queue.MarkAnswered();
  EXPECT_EQ(drained, 0);
  queue.Written();
  EXPECT_EQ(drained, 1);
}

}  // namespace
}  // namespace precondor::rpc
