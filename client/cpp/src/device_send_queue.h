// SPDX-License-Identifier: Apache-2.0
// Sends gradients in device memory once the device has computed them, so that the caller need not wait.
#pragma once

#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"

#include "client/cpp/src/answer_sink.h"
#include "kernels/base/mutex.h"
#include "kernels/device_plane.h"

namespace precondor {

// A first-in, first-out queue with one thread. Thread-safe; calls AnswerSink without holding its lock.
class DeviceSendQueue {
 public:
  struct PendingSend {
    std::string what;  // for messages
    std::shared_ptr<DevicePlane> plane;
    // The gradient is computed when the caller's streams have passed these marks.
    std::vector<std::shared_ptr<const DevicePlane::Mark>> marks;
    std::shared_ptr<AnswerSink> answer;
    absl::Time deadline = absl::InfiniteFuture();
    // Called on the queue's thread when the gradient is computed and all earlier sends are delivered or have failed.
    // Not called if this send has failed.
    std::function<void()> deliver;
  };

  ~DeviceSendQueue() { Stop(); }

  // The plane of a CUDA device, by its number in this process. The first call loads it; later calls return the same
  // plane or the same error. Errors: those of LoadCudaPlane.
  absl::StatusOr<std::shared_ptr<DevicePlane>> PlaneOf(int device);
  void Post(std::shared_ptr<const PendingSend> pending);
  // Fails each send whose deadline has passed, whether or not its gradient is computed. Returns the next deadline.
  absl::Time Tick(absl::Time now);
  // Fails all queued sends and every later one with `status`.
  void Fail(const absl::Status& status);
  // Waits until every send is delivered or has failed. Returns false if the deadline passes first.
  bool WaitIdle(absl::Time deadline);
  // Fails the remaining sends as Cancelled and ends the thread. Does not wait for a device stream.
  void Stop();

 private:
  using Item = std::shared_ptr<const PendingSend>;

  void Loop();
  // OK when the gradient is computed; otherwise why it cannot be delivered.
  absl::Status AwaitMarks(const PendingSend& pending);
  static absl::Status LateError(const PendingSend& pending);

  Mutex mu_;
  CondVar changed_;
  std::map<int, absl::StatusOr<std::shared_ptr<DevicePlane>>> planes_ ABSL_GUARDED_BY(mu_);
  std::deque<Item> queue_ ABSL_GUARDED_BY(mu_);
  Item current_ ABSL_GUARDED_BY(mu_);  // the send that the thread works on
  absl::Status failed_ ABSL_GUARDED_BY(mu_);
  bool stopping_ ABSL_GUARDED_BY(mu_) = false;
  std::thread thread_ ABSL_GUARDED_BY(mu_);  // started by the first Post
};

}  // namespace precondor
