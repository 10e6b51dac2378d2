// SPDX-License-Identifier: Apache-2.0
// Copies payloads into and out of shared regions on a thread of its own, so that no other thread waits for the memory's
// device, and copies that meet share one wait.
#pragma once

#include <cstddef>
#include <functional>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/time/time.h"

#include "kernels/base/mutex.h"
#include "kernels/device_plane.h"

namespace precondor {

// Thread-safe. Lifetime: `memory` outlives the queue.
class RegionCopyQueue {
 public:
  using Done = std::function<void(const absl::Status&)>;

  // The default of `patience`: less than the waits that it saves where many layers are answered at about one time.
  static constexpr absl::Duration kPatience = absl::Microseconds(200);

  // `patience` is the longest time that a copy waits for others.
  explicit RegionCopyQueue(DevicePlane& memory, absl::Duration patience = kPatience)
      : memory_(memory), patience_(patience) {}
  // Makes the copies that wait, and ends the thread.
  ~RegionCopyQueue();
  RegionCopyQueue(const RegionCopyQueue&) = delete;
  RegionCopyQueue& operator=(const RegionCopyQueue&) = delete;

  // Queues a copy. `outstanding` is the number of copies that may come at about this time, this one included, of this
  // stream alone where several share the queue. While fewer are queued, they wait for the others, up to `patience`.
  // Then all become one call of DevicePlane::Copy, and each `done` is called with its status, on the queue's thread,
  // in the order of Post. `done` owns what keeps the memory of both sides mapped; the queue releases it after the call.
  void Post(RegionCopy copy, size_t outstanding, Done done);

 private:
  void Loop();

  DevicePlane& memory_;
  const absl::Duration patience_;
  Mutex mu_;
  CondVar changed_;
  std::vector<RegionCopy> copies_ ABSL_GUARDED_BY(mu_);
  std::vector<Done> done_ ABSL_GUARDED_BY(mu_);  // done_[i] belongs to copies_[i]
  size_t outstanding_ ABSL_GUARDED_BY(mu_) = 0;  // as the last Post has it
  bool stopping_ ABSL_GUARDED_BY(mu_) = false;
  std::thread thread_ ABSL_GUARDED_BY(mu_);  // started by the first Post
};

}  // namespace precondor
