// SPDX-License-Identifier: Apache-2.0
// Repeats work in regular intervals.
#pragma once

#include <functional>
#include <string>
#include <thread>
#include <vector>

#include "absl/time/time.h"

#include "kernels/base/mutex.h"

namespace precondor {

// Timers, each with a name and a thread, so that a timer whose work hangs does not delay the others. Calls of Start and
// StopAll must not overlap.
class PeriodicTimers {
 public:
  PeriodicTimers() = default;
  ~PeriodicTimers() { StopAll(); }
  PeriodicTimers(const PeriodicTimers&) = delete;
  PeriodicTimers& operator=(const PeriodicTimers&) = delete;

  // Calls `work` immediately, and again `pause` after each return. `name` becomes the thread's name in `top -H` and
  // debuggers; it must have at most 15 characters.
  void Start(const std::string& name, absl::Duration pause, std::function<void()> work);
  // Stops all timers and waits for running calls. Idempotent. A timer that is started later does not run.
  void StopAll();

 private:
  void Run(absl::Duration pause, const std::function<void()>& work);

  Mutex mu_;
  CondVar stop_requested_;
  bool stop_ ABSL_GUARDED_BY(mu_) = false;
  std::vector<std::thread> threads_;
};

}  // namespace precondor
