// SPDX-License-Identifier: Apache-2.0
// Lets the calls of one coordinator in, the newest, so that one that was replaced and does not know it changes nothing.
#pragma once

#include <cstdint>
#include <functional>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

#include "kernels/base/mutex.h"

namespace precondor {

// Every coordinator has a token that is greater than those before it (ShardControl::BecomeLeader), and shows it with
// each call. Thread-safe; mu_ is a leaf.
class FencingGate {
 public:
  // Makes a token durable. Called before the first call with it gets in, one at a time.
  using Remember = std::function<absl::Status(uint64_t token)>;
  explicit FencingGate(Remember remember) : remember_(std::move(remember)) {}

  // A call that has got in; calls with a greater token wait until it is destroyed.
  class Pass {
   public:
    explicit Pass(FencingGate* gate) : gate_(gate) {}
    Pass(Pass&& other) noexcept : gate_(std::exchange(other.gate_, nullptr)) {}
    Pass& operator=(Pass&&) = delete;
    ~Pass() {
      if (gate_ != nullptr) gate_->Leave();
    }

   private:
    FencingGate* gate_;
  };

  // InvalidArgument: token 0. FailedPrecondition STALE_LEADER: a greater one has been here; names both. Unavailable:
  // the token cannot be made durable.
  absl::StatusOr<Pass> Enter(uint64_t token);
  // Whether Enter waits neither for a disk nor for other calls.
  bool IsCurrent(uint64_t token) const;

  // That of the calls inside.
  uint64_t current() const;

  // The token of an earlier process of the shard, before the first Enter.
  void Restore(uint64_t token);

 private:
  void Leave();
  absl::Status CheckToken(uint64_t token) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);

  const Remember remember_;
  mutable Mutex mu_;
  CondVar changed_;
  uint64_t highest_ ABSL_GUARDED_BY(mu_) = 0;  // durable
  uint64_t seen_ ABSL_GUARDED_BY(mu_) = 0;     // the greatest that has been shown
  int64_t inside_ ABSL_GUARDED_BY(mu_) = 0;    // calls with `highest_`
  bool raising_ ABSL_GUARDED_BY(mu_) = false;
};

}  // namespace precondor
