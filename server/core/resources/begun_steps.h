// SPDX-License-Identifier: Apache-2.0
// Tracks the greatest step that has begun in one session on a shard. A rollback of the job sets it back.
#pragma once

#include <cstdint>

#include "absl/base/thread_annotations.h"

#include "kernels/base/mutex.h"
#include "kernels/base/session_spec.h"

namespace precondor {

// Thread-safe. Layers enter a new epoch one after the other, so a step that began before the last rollback can be
// reported after it. Such reports are ignored.
class BegunSteps {
 public:
  struct Last {
    uint64_t step = 0;  // greatest step that has begun since the last rollback; 0 until one has
    Mode mode = Mode::kSecondOrder;
  };

  // Notes that the job continues from `step` in epoch `rollback_epoch`. Does nothing unless that epoch is later than
  // the one of every earlier rollback.
  void RollBack(uint64_t rollback_epoch, uint64_t step) {
    MutexLock lock(mu_);
    if (rollback_epoch <= rollback_epoch_) return;
    rollback_epoch_ = rollback_epoch;
    rollback_step_ = step;
    last_.step = step == 0 ? 0 : step - 1;
  }

  // Notes that `step` has begun in `mode`. `rollback_epoch` is the epoch of the last rollback before the step began, or
  // 0 if there was none.
  void Begin(uint64_t rollback_epoch, uint64_t step, Mode mode) {
    MutexLock lock(mu_);
    if (rollback_epoch < rollback_epoch_ || step < last_.step) return;
    last_ = {.step = step, .mode = mode};
  }

  // Returns the step from which the job continued after the last rollback; 0 if there was none.
  uint64_t rollback_step() const {
    MutexLock lock(mu_);
    return rollback_step_;
  }

  Last last() const {
    MutexLock lock(mu_);
    return last_;
  }

 private:
  mutable Mutex mu_;
  uint64_t rollback_epoch_ ABSL_GUARDED_BY(mu_) = 0;
  uint64_t rollback_step_ ABSL_GUARDED_BY(mu_) = 0;
  Last last_ ABSL_GUARDED_BY(mu_);
};

}  // namespace precondor
