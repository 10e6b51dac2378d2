// SPDX-License-Identifier: Apache-2.0
// The thread that hands gradients in device memory over: it waits until they are computed, which their owner does not.
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

// Thread-safe. Answers are failed without its lock.
class DeviceCourier {
 public:
  struct Parcel {
    std::string what;  // for messages
    std::shared_ptr<DevicePlane> plane;
    // When the caller's streams have come there, the gradient is computed.
    std::vector<std::shared_ptr<const DevicePlane::Mark>> marks;
    std::shared_ptr<AnswerSink> answer;
    absl::Time deadline = absl::InfiniteFuture();
    // Called on the thread, once it is computed, after those before it; not when it has failed by then.
    std::function<void()> deliver;
  };

  ~DeviceCourier() { Stop(); }

  // The plane of a device as CUDA counts in this process; made, or found wanting for good, when it is first asked for.
  // Errors: LoadCudaPlane's.
  absl::StatusOr<std::shared_ptr<DevicePlane>> PlaneOf(int device);
  void Post(std::shared_ptr<const Parcel> parcel);
  // Fails what is past its deadline, be its stream where it may; the next deadline.
  absl::Time Tick(absl::Time now);
  // Fails everything, now and from now on.
  void Fail(const absl::Status& status);
  // Waits until everything so far has been delivered or has failed; false when something has not at the deadline.
  bool WaitIdle(absl::Time deadline);
  // Fails what is left as Cancelled and ends the thread, which waits for no stream.
  void Stop();

 private:
  using Item = std::shared_ptr<const Parcel>;

  void Loop();
  // Why it cannot be delivered.
  absl::Status AwaitMarks(const Parcel& parcel);
  static absl::Status LateError(const Parcel& parcel);

  Mutex mu_;
  CondVar changed_;
  std::map<int, absl::StatusOr<std::shared_ptr<DevicePlane>>> planes_ ABSL_GUARDED_BY(mu_);
  std::deque<Item> queue_ ABSL_GUARDED_BY(mu_);
  Item current_ ABSL_GUARDED_BY(mu_);  // that the thread is at
  absl::Status failed_ ABSL_GUARDED_BY(mu_);
  bool stopping_ ABSL_GUARDED_BY(mu_) = false;
  std::thread thread_ ABSL_GUARDED_BY(mu_);  // from the first parcel on
};

}  // namespace precondor
