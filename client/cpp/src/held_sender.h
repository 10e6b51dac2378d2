// SPDX-License-Identifier: Apache-2.0
// Sends the gradients that wait for a next one, when a caller waits. Futures share it, and may outlive the worker.
#pragma once

#include <atomic>
#include <functional>
#include <utility>

#include "kernels/base/mutex.h"

namespace precondor {

// Thread-safe. Another rank may wait for a gradient that is held back, so every call that waits calls Send first.
class HeldSender {
 public:
  explicit HeldSender(std::function<void()> send) : send_(std::move(send)) {}

  // Records that something is held back.
  void NoteHeld() { holds_ = true; }
  // Sends it, if there is anything.
  void Send() {
    if (!holds_.exchange(false)) return;
    MutexLock lock(mu_);
    if (send_ != nullptr) send_();
  }
  // After this, Send does nothing.
  void Stop() {
    MutexLock lock(mu_);
    send_ = nullptr;
  }

 private:
  std::atomic<bool> holds_ = false;
  Mutex mu_;
  std::function<void()> send_ ABSL_GUARDED_BY(mu_);
};

}  // namespace precondor
