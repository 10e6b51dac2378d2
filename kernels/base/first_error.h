// SPDX-License-Identifier: Apache-2.0
// The first error of something that is lost with it, and that every call asks about.
#pragma once

#include <atomic>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"

#include "kernels/base/mutex.h"

namespace precondor {

// Thread-safe.
class FirstError {
 public:
  // OK until there was one: then without a lock, which all threads would want at each operation.
  absl::Status Get() const {
    if (!is_set_) return absl::OkStatus();
    const MutexLock lock(mu_);
    return error_;
  }
  // Later ones change nothing.
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
