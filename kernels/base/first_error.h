// SPDX-License-Identifier: Apache-2.0
// Keeps the first error of an object that this error makes unusable, for checks at the start of every call.
#pragma once

#include <atomic>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"

#include "kernels/base/mutex.h"

namespace precondor {

// Holds the first error that was set. Thread-safe.
class FirstError {
 public:
  // Returns the first error, or OK if none was set. The OK path takes no lock, because all threads check it at each
  // operation.
  absl::Status Get() const {
    if (!is_set_) return absl::OkStatus();
    const MutexLock lock(mu_);
    return error_;
  }
  // Sets the error. Later calls have no effect.
  void Set(absl::Status error) {
    const MutexLock lock(mu_);
    if (is_set_) return;
    error_ = std::move(error);
    is_set_ = true;
  }

 private:
  std::atomic<bool> is_set_ = false;
  mutable Mutex mu_;
  absl::Status error_ ABSL_GUARDED_BY(mu_);
};

}  // namespace precondor
