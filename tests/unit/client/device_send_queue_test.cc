// SPDX-License-Identifier: Apache-2.0
// Gradients in device memory whose streams are slow, hang, or come when no call waits any more.
#include <algorithm>
#include <map>
#include <memory>
#include <thread>
#include <utility>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

#include "client/cpp/src/device_gradients.h"
#include "kernels/base/clock.h"
#include "tests/support/fake_plane.h"

namespace precondor {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

constexpr absl::Duration kAmple = absl::Minutes(1);

// One [1, 2] gradient: where its answer goes, and what waits for it.
struct Sent {
  explicit Sent(WorkerPlane& plane)
      : state(std::make_shared<PreconditionFuture::State>("layer 0", MatrixView(), false, false)),
        answer(std::make_shared<DeviceAnswer>("layer 0", plane, MatrixView(out.data(), 1, 2), state)) {}
  std::vector<float> out = {7, 7};
  std::shared_ptr<PreconditionFuture::State> state;
  std::shared_ptr<DeviceAnswer> answer;
};

class DeviceSendQueueTest : public ::testing::Test {
 protected:
  void Post(const Sent& sent, absl::Time deadline, int name) {
    auto pending = std::make_shared<DeviceSendQueue::PendingSend>();
    pending->what = "layer 0";
    pending->plane = &of_worker_;
    pending->marks.push_back(*plane_->Record(nullptr));
    pending->answer = sent.answer;
    pending->deadline = deadline;
    names_[pending.get()] = name;
    send_queue_.Post(std::move(pending));
  }

  void Deliver(absl::Span<const DeviceSendQueue::Item> sends) {
    batches_.push_back(sends.size());
    for (const DeviceSendQueue::Item& item : sends) delivered_.push_back(names_.at(item.get()));
  }

  const std::shared_ptr<FakePlane> plane_ = std::make_shared<FakePlane>();
  WorkerPlane of_worker_{plane_};
  std::map<const DeviceSendQueue::PendingSend*, int> names_;
  // read while the send queue is idle
  std::vector<int> delivered_;
  std::vector<size_t> batches_;
  const Sent first_{of_worker_}, second_{of_worker_};
  DeviceSendQueue send_queue_{[this](absl::Span<const DeviceSendQueue::Item> sends) { Deliver(sends); }, 1};
};

TEST_F(DeviceSendQueueTest, DeliversInOrderWhatItsStreamHasMade) {
  plane_->hangs = true;
  Post(first_, absl::InfiniteFuture(), 1);
  Post(second_, absl::InfiniteFuture(), 2);
  EXPECT_FALSE(send_queue_.WaitIdle(MonotonicNow()));
  plane_->hangs = false;
  ASSERT_TRUE(send_queue_.WaitIdle(MonotonicNow() + kAmple));
  EXPECT_THAT(delivered_, ElementsAre(1, 2));
}

TEST_F(DeviceSendQueueTest, WhatHasBeenComputedWhenItLooksIsDeliveredTogether) {
  plane_->hangs = true;
  constexpr int kSends = 144;
  for (int i = 0; i < kSends; ++i) Post(first_, absl::InfiniteFuture(), i);
  plane_->hangs = false;
  ASSERT_TRUE(send_queue_.WaitIdle(MonotonicNow() + kAmple));
  // The first ones may be the thread's before the others are queued.
  EXPECT_LE(batches_.size(), 2u);
  ASSERT_EQ(delivered_.size(), static_cast<size_t>(kSends));
  EXPECT_TRUE(std::is_sorted(delivered_.begin(), delivered_.end()));
}

TEST_F(DeviceSendQueueTest, TheSendsOfAStepWaitForEachOther) {
  DeviceSendQueue of_three([this](absl::Span<const DeviceSendQueue::Item> sends) { batches_.push_back(sends.size()); },
                           3, absl::Hours(1));
  for (int i = 0; i < 3; ++i) {
    EXPECT_TRUE(batches_.empty());
    auto pending = std::make_shared<DeviceSendQueue::PendingSend>();
    pending->plane = &of_worker_;
    pending->answer = first_.answer;
    of_three.Post(std::move(pending));
  }
  ASSERT_TRUE(of_three.WaitIdle(MonotonicNow() + kAmple));
  EXPECT_THAT(batches_, ElementsAre(3));
}

TEST_F(DeviceSendQueueTest, GoesOnWhenAllThatWaitedForOthersWereLate) {
  DeviceSendQueue of_two([this](absl::Span<const DeviceSendQueue::Item> sends) { batches_.push_back(sends.size()); }, 2,
                         absl::Microseconds(100));
  const auto post = [&](absl::Time deadline) {
    auto pending = std::make_shared<DeviceSendQueue::PendingSend>();
    pending->plane = &of_worker_;
    pending->answer = std::make_shared<DeviceAnswer>("layer 0", of_worker_, MatrixView(), first_.state);
    pending->deadline = deadline;
    of_two.Post(std::move(pending));
  };
  const absl::Time now = MonotonicNow();
  for (int i = 0; i < 1000; ++i) {  // so that the thread finds nothing at the end of its patience now and then
    post(now + kAmple);
    of_two.Tick(now + 2 * kAmple);
  }
  post(absl::InfiniteFuture());
  post(absl::InfiniteFuture());
  EXPECT_TRUE(of_two.WaitIdle(MonotonicNow() + kAmple));
}

TEST_F(DeviceSendQueueTest, AStreamThatHangsHoldsUpNoDeadline) {
  plane_->hangs = true;
  const absl::Time now = MonotonicNow();
  Post(first_, now + kAmple, 1);
  Post(second_, now + 2 * kAmple, 2);
  EXPECT_EQ(send_queue_.Tick(now), now + kAmple);
  EXPECT_FALSE(first_.state->ready());
  // Whether it is the thread's current one or still waits for its turn.
  EXPECT_EQ(send_queue_.Tick(now + 2 * kAmple), absl::InfiniteFuture());
  for (const Sent* sent : {&first_, &second_}) {
    ASSERT_TRUE(sent->state->ready());
    const absl::Status late = sent->state->Wait().status();
    EXPECT_EQ(late.code(), absl::StatusCode::kDeadlineExceeded);
    EXPECT_THAT(std::string(late.message()), HasSubstr("layer 0"));
  }
}

TEST_F(DeviceSendQueueTest, ItsThreadGoesOnAtTheDeadlineOfWhatHangs) {
  plane_->hangs = true;
  Post(first_, MonotonicNow() + absl::Milliseconds(5), 1);
  EXPECT_EQ(first_.state->Wait().status().code(), absl::StatusCode::kDeadlineExceeded);
  ASSERT_TRUE(send_queue_.WaitIdle(MonotonicNow() + kAmple));
  plane_->hangs = false;
  Post(second_, absl::InfiniteFuture(), 2);
  ASSERT_TRUE(send_queue_.WaitIdle(MonotonicNow() + kAmple));
  EXPECT_THAT(delivered_, ElementsAre(2));
}

TEST_F(DeviceSendQueueTest, WhatIsLateInTheQueueIsNotDelivered) {
  Post(first_, MonotonicNow() - absl::Seconds(1), 1);
  EXPECT_EQ(first_.state->Wait().status().code(), absl::StatusCode::kDeadlineExceeded);
  ASSERT_TRUE(send_queue_.WaitIdle(MonotonicNow() + kAmple));
  EXPECT_TRUE(delivered_.empty());
}

TEST_F(DeviceSendQueueTest, AFailureEndsAllThatWaitAndAllToCome) {
  plane_->hangs = true;
  Post(first_, absl::InfiniteFuture(), 1);
  send_queue_.Fail(absl::AbortedError("told to"));
  Post(second_, absl::InfiniteFuture(), 2);
  EXPECT_EQ(first_.state->Wait().status(), absl::AbortedError("told to"));
  EXPECT_EQ(second_.state->Wait().status(), absl::AbortedError("told to"));
  ASSERT_TRUE(send_queue_.WaitIdle(MonotonicNow() + kAmple));
  EXPECT_TRUE(delivered_.empty());
}

TEST_F(DeviceSendQueueTest, EndsWhileAStreamHangs) {
  plane_->hangs = true;
  Post(first_, absl::InfiniteFuture(), 1);
  Post(second_, absl::InfiniteFuture(), 2);
  send_queue_.Stop();
  EXPECT_EQ(first_.state->Wait().status().code(), absl::StatusCode::kCancelled);
  EXPECT_EQ(second_.state->Wait().status().code(), absl::StatusCode::kCancelled);
}

TEST_F(DeviceSendQueueTest, AfterAnOutcomeTheCallersMemoryIsItsOwn) {
  const std::vector<float> late = {1, 2};
  ASSERT_TRUE(first_.answer->Fail(absl::DeadlineExceededError("late")));
  absl::Status taken = absl::UnknownError("not called");
  first_.answer->TakeFromSlot(late.data(), 1, [&](const absl::Status& status) { taken = status; });
  EXPECT_TRUE(taken.ok()) << taken;
  EXPECT_FALSE(first_.answer->BeginUse());
  // One that has come as bytes meanwhile.
  ASSERT_TRUE(second_.answer->Begin({{.dtype = DType::kF32, .dims = {1, 2}}}, 8).ok());
  ASSERT_TRUE(second_.answer->Fail(absl::DeadlineExceededError("late")));
  for (const Sent* sent : {&first_, &second_}) {
    EXPECT_FALSE(sent->answer->Complete({Decision::kPreconditioned, 1, 0, ""}));
    EXPECT_THAT(sent->out, ElementsAre(7, 7));
  }
}

TEST_F(DeviceSendQueueTest, NobodyHearsOfAFailureWhileTheCallersMemoryIsUsed) {
  ASSERT_TRUE(first_.answer->BeginUse());
  std::thread failing([&] { first_.answer->Fail(absl::DeadlineExceededError("late")); });
  EXPECT_FALSE(first_.state->WaitFor(absl::Milliseconds(50)));
  first_.answer->EndUse();
  EXPECT_EQ(first_.state->Wait().status().code(), absl::StatusCode::kDeadlineExceeded);
  failing.join();
}

}  // namespace
}  // namespace precondor
