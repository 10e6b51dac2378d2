// SPDX-License-Identifier: Apache-2.0
// Work that comes back: a thread of its own that does it again and again until it is stopped.
#pragma once

#include <functional>
#include <thread>

#include "absl/time/time.h"

#include "kernels/base/mutex.h"

namespace precondor {

// Not to be moved. Start and Stop by one thread.
class Periodic {
 public:
  Periodic() = default;
  ~Periodic() { Stop(); }
  Periodic(const Periodic&) = delete;
  Periodic& operator=(const Periodic&) = delete;

  // Calls `work` at once and then `pause` after each time it came back.
  void Start(absl::Duration pause, std::function<void()> work);
  // Waits for the call under way. Idempotent.
  void Stop();

 private:
  void Run(absl::Duration pause, const std::function<void()>& work);

  Mutex mu_;
  CondVar stop_requested_;
  bool stop_ ABSL_GUARDED_BY(mu_) = false;
  std::thread thread_;
};

}  // namespace precondor
