// SPDX-License-Identifier: Apache-2.0
// Sends gradients in device memory once the device has computed them, so that the caller need not wait.
#pragma once

#include <deque>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "absl/types/span.h"

#include "client/cpp/src/answer_sink.h"
#include "client/cpp/src/plane_table.h"
#include "kernels/base/mutex.h"
#include "kernels/device_plane.h"

namespace precondor {

// A first-in, first-out queue with one thread, which delivers together what is computed at about one time. Thread-safe;
// calls AnswerSink without holding its lock.
class DeviceSendQueue {
 public:
  struct PendingSend {
    virtual ~PendingSend() = default;
    std::string what;  // for messages
    WorkerPlane* plane = nullptr;
    // The gradient is computed when the caller's streams have passed these marks.
    std::vector<std::shared_ptr<const DevicePlane::Mark>> marks;
    std::shared_ptr<AnswerSink> answer;
    absl::Time deadline = absl::InfiniteFuture();
  };
  using Item = std::shared_ptr<const PendingSend>;
  // Called on the queue's thread with sends of one plane, in order, whose gradients are computed. All earlier sends are
  // delivered or have failed.
  using Deliver = std::function<void(absl::Span<const Item>)>;

  // The thread waits until `outstanding` sends are queued, which is as many as the worker makes in a step, but for no
  // more than `patience`.
  DeviceSendQueue(Deliver deliver, size_t outstanding, absl::Duration patience = RegionCopyQueue::kPatience)
      : deliver_(std::move(deliver)), outstanding_(outstanding), patience_(patience) {}
  ~DeviceSendQueue() { Stop(); }

  void Post(Item pending);
  // Fails each send whose deadline has passed, whether or not its gradient is computed. Returns the next deadline.
  absl::Time Tick(absl::Time now);
  // Fails all queued sends and every later one with `status`.
  void Fail(const absl::Status& status);
  // Waits until every send is delivered or has failed. Returns false if the deadline passes first.
  bool WaitIdle(absl::Time deadline);
  // Fails the remaining sends as Cancelled and ends the thread. Does not wait for a device stream.
  void Stop();

 private:
  void Loop();
  // Returns the first sends of current_ that are to be delivered together, at least one, or one that has failed.
  std::vector<Item> AwaitFirst(std::vector<Item> sends);
  // OK when the gradient is computed; otherwise why it cannot be delivered.
  absl::Status AwaitMarks(const PendingSend& pending);
  // Returns whether the gradient is computed, without waiting. Returns false after an error.
  static bool IsComputed(const PendingSend& pending);
  static absl::Status LateError(const PendingSend& pending);

  const Deliver deliver_;
  const size_t outstanding_;
  const absl::Duration patience_;

  Mutex mu_;
  CondVar changed_;
  std::deque<Item> queue_ ABSL_GUARDED_BY(mu_);
  std::vector<Item> current_ ABSL_GUARDED_BY(mu_);  // taken by the thread, and neither delivered nor failed
  absl::Status failed_ ABSL_GUARDED_BY(mu_);
  bool stopping_ ABSL_GUARDED_BY(mu_) = false;
  std::thread thread_ ABSL_GUARDED_BY(mu_);  // started by the first Post
};

}  // namespace precondor
