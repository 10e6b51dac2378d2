// SPDX-License-Identifier: Apache-2.0
// Admits only the calls of the newest coordinator, so that one that was replaced and does not know it changes nothing.
#pragma once

#include <cstdint>
#include <functional>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

#include "kernels/base/clock.h"
#include "kernels/base/mutex.h"

namespace precondor {

// Admits only calls with the greatest fencing token that has been shown. Each coordinator has a greater token than
// those before it (ShardControl::BecomeLeader), and shows it with each call. Thread-safe; mu_ is a leaf.
class FencingGate {
 public:
  // Makes a token durable. Called before the first call with that token is admitted, for one token at a time.
  using Remember = std::function<absl::Status(uint64_t token)>;
  FencingGate(const Clock& clock, Remember remember) : clock_(clock), remember_(std::move(remember)) {}

  // An admitted call. Calls with a greater token wait until it is destroyed.
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

  // Admits a call; may wait for the disk and for other calls. Returns
  // - INVALID_ARGUMENT if the token is 0, or more than a year, in nanoseconds, above both the wall clock and the
  // greatest
  //   token that has been shown: no later coordinator could have a greater one;
  // - FAILED_PRECONDITION (STALE_LEADER), naming both tokens, if a greater token has been shown;
  // - UNAVAILABLE if the token cannot be made durable.
  absl::StatusOr<Pass> Enter(uint64_t token);
  // Returns true if Enter would wait neither for a disk nor for other calls.
  bool IsCurrent(uint64_t token) const;

  // Returns the token of the admitted calls.
  uint64_t current() const;

  // Sets the token of an earlier process of the shard. Precondition: Enter has not been called.
  void Restore(uint64_t token);

 private:
  void Leave();
  absl::Status CheckToken(uint64_t token) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);

  const Clock& clock_;
  const Remember remember_;
  mutable Mutex mu_;
  CondVar changed_;
  uint64_t highest_ ABSL_GUARDED_BY(mu_) = 0;  // durable
  uint64_t seen_ ABSL_GUARDED_BY(mu_) = 0;     // greatest token that has been shown
  int64_t inside_ ABSL_GUARDED_BY(mu_) = 0;    // admitted calls, all with `highest_`
  bool raising_ ABSL_GUARDED_BY(mu_) = false;
};

}  // namespace precondor
