// SPDX-License-Identifier: Apache-2.0
// Gradients in device memory: the CUDA devices that they lie on, the queue that sends them once the device has computed
// them, and the receiver of an answer.
#pragma once

#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "absl/types/span.h"

#include "client/cpp/src/contribution.h"
#include "client/cpp/src/result_state.h"
#include "kernels/base/mutex.h"
#include "kernels/device_plane.h"
#include "kernels/region_copy_queue.h"

namespace precondor {

// A device's plane, and the queue that takes answers out of slots.
struct WorkerPlane {
  explicit WorkerPlane(std::shared_ptr<DevicePlane> of_device) : plane(std::move(of_device)), answers(*plane) {}
  const std::shared_ptr<DevicePlane> plane;
  RegionCopyQueue answers;
};

// Thread-safe. Outlives the links, whose answers its queues take.
class PlaneTable {
 public:
  // Returns the plane of a CUDA device, by its number in this process. The first call loads it; later calls return the
  // same plane or the same error. Errors: those of LoadCudaPlane.
  absl::StatusOr<WorkerPlane*> Of(int device);

 private:
  Mutex mu_;
  std::map<int, absl::StatusOr<std::unique_ptr<WorkerPlane>>> planes_ ABSL_GUARDED_BY(mu_);
};

// Writes the answer to `out` on the plane's device, and then sets the outcome of `future`. It does not use the caller's
// memory after that: Fail waits until a use in progress ends. Thread-safe. `plane` outlives this object.
class DeviceAnswer final : public AnswerSink {
 public:
  DeviceAnswer(std::string what, WorkerPlane& plane, MatrixView out, std::shared_ptr<PreconditionFuture::State> future)
      : what_(std::move(what)), plane_(plane), out_(out), future_(std::move(future)) {}

  absl::Status Begin(absl::Span<const wire::TensorFormat> tensors, uint64_t payload_bytes) override;
  absl::Status Append(uint64_t offset, const wire::ReceivedBytes& chunk) override;
  bool HasAllBytes() const override;
  void Restart() override;
  void TakeFromSlot(const float* values, size_t outstanding, RegionCopyQueue::Done done) override;
  bool Complete(Preconditioned outcome) override;
  bool Fail(absl::Status status) override;
  bool ready() const override { return future_->ready(); }

  // Begins a use of the caller's memory. Waits until an earlier use ends. Returns false, and begins none, if there is
  // an outcome. A thread must end its use before it sets the outcome.
  bool BeginUse();
  void EndUse();

 private:
  // Host memory for an answer that arrives as bytes.
  struct Host {
    std::vector<float> values;
    std::unique_ptr<PreconditionFuture::State> state;
  };
  std::shared_ptr<Host> host() const;
  // Like BeginUse; no use begins afterwards. The caller sets the outcome and then calls EndUse.
  bool BeginLastUse();

  const std::string what_;
  WorkerPlane& plane_;
  const MatrixView out_;
  const std::shared_ptr<PreconditionFuture::State> future_;
  mutable Mutex mu_;
  CondVar used_changed_;
  bool used_ ABSL_GUARDED_BY(mu_) = false;
  bool ended_ ABSL_GUARDED_BY(mu_) = false;  // no use begins any more
  std::shared_ptr<Host> host_ ABSL_GUARDED_BY(mu_);
};

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
