// SPDX-License-Identifier: Apache-2.0
// Work that is repeated until it is stopped.
#pragma once

#include <functional>
#include <string>
#include <thread>
#include <vector>

#include "absl/time/time.h"

#include "kernels/base/mutex.h"

namespace precondor {

// Timers, each with a name and a thread of its own, so that one whose work hangs delays none of the others. Start and
// StopAll are called by one thread at a time.
class PeriodicTimers {
 public:
  PeriodicTimers() = default;
  ~PeriodicTimers() { StopAll(); }
  PeriodicTimers(const PeriodicTimers&) = delete;
  PeriodicTimers& operator=(const PeriodicTimers&) = delete;

  // Calls `work` at once, and then `pause` after each time it returns. The thread has the name, of at most 15
  // characters, which `top -H` and debuggers show.
  void Start(const std::string& name, absl::Duration pause, std::function<void()> work);
  // Stops all timers, and waits for the calls under way. Idempotent; a timer that is started later does not run.
  void StopAll();

 private:
  void Run(absl::Duration pause, const std::function<void()>& work);

  Mutex mu_;
  CondVar stop_requested_;
  bool stop_ ABSL_GUARDED_BY(mu_) = false;
  std::vector<std::thread> threads_;
};

}  // namespace precondor
