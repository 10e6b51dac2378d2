// SPDX-License-Identifier: Apache-2.0
// The greatest step that has begun of a session on a shard. It begins anew when the job rolls back.
#pragma once

#include <cstdint>

#include "absl/base/thread_annotations.h"

#include "kernels/base/mutex.h"
#include "kernels/base/session_spec.h"

namespace precondor {

// Thread-safe. Layers come to a new epoch one after the other: a step of an epoch before the last rollback changes nothing.
class BegunSteps {
 public:
  struct Last {
    uint64_t step = 0;  // the greatest, 0 as long as none has begun
    Mode mode = Mode::kSecondOrder;
  };

  // In epoch `rollback_epoch` the job goes on with `step`.
  void RollBack(uint64_t rollback_epoch, uint64_t step) {
    MutexLock lock(mu_);
    if (rollback_epoch <= rollback_epoch_) return;
    rollback_epoch_ = rollback_epoch;
    last_.step = step == 0 ? 0 : step - 1;
  }

  // A step in the time since the rollback of `rollback_epoch`; 0: since the first epoch.
  void Begin(uint64_t rollback_epoch, uint64_t step, Mode mode) {
    MutexLock lock(mu_);
    if (rollback_epoch < rollback_epoch_ || step < last_.step) return;
    last_ = {.step = step, .mode = mode};
  }

  Last last() const {
    MutexLock lock(mu_);
    return last_;
  }

 private:
  mutable Mutex mu_;
  uint64_t rollback_epoch_ ABSL_GUARDED_BY(mu_) = 0;
  Last last_ ABSL_GUARDED_BY(mu_);
};

}  // namespace precondor
