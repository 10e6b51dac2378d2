// SPDX-License-Identifier: Apache-2.0
// Accounts for the memory that sessions reserve on a shard's device.
#pragma once

#include <cstdint>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"

#include "kernels/base/mutex.h"
#include "server/core/api/observer.h"

namespace precondor {

// Keeps the sum of the reservations. Thread-safe. The observer is told of every change, in order.
class MemoryAccount {
 public:
  // Tells the observer at once.
  MemoryAccount(int64_t capacity_bytes, ShardObserver& observer);

  // Returns RESOURCE_EXHAUSTED (CAPACITY), with needed, reserved and capacity bytes, if too little is left.
  absl::Status Reserve(absl::string_view session, int64_t bytes);
  void Release(int64_t bytes);
  int64_t reserved() const;
  int64_t capacity() const { return capacity_; }
  int64_t free() const { return capacity_ - reserved(); }

 private:
  void Report() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);

  const int64_t capacity_;
  ShardObserver& observer_;
  mutable Mutex mu_;
  int64_t reserved_ ABSL_GUARDED_BY(mu_) = 0;
};

}  // namespace precondor
