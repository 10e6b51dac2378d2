// SPDX-License-Identifier: Apache-2.0
// What sessions have reserved of a shard's memory.
#pragma once

#include <cstdint>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"

#include "kernels/base/mutex.h"
#include "server/core/observer.h"

namespace precondor {

// Thread-safe. The observer hears of every change, in order.
class MemoryAccount {
 public:
  MemoryAccount(int64_t capacity_bytes, Observer& observer) : capacity_(capacity_bytes), observer_(observer) {}

  // ResourceExhausted CAPACITY, with what was needed, reserved and there; nothing is reserved then.
  absl::Status Reserve(absl::string_view session, int64_t bytes);
  void Release(int64_t bytes);
  int64_t reserved() const;

 private:
  const int64_t capacity_;
  Observer& observer_;
  mutable Mutex mu_;
  int64_t reserved_ ABSL_GUARDED_BY(mu_) = 0;
};

}  // namespace precondor
