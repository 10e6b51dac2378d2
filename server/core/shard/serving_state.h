// SPDX-License-Identifier: Apache-2.0
// Whether a shard takes calls, and new sessions.
#pragma once

#include <atomic>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"

#include "kernels/base/error_reason.h"

namespace precondor {

// Thread-safe. A shard serves from the start, unless BeginReplay is called before anything else.
class ServingState {
 public:
  // Unavailable from BeginReplay to FinishReplay.
  absl::Status Check() const {
    if (!replaying_.load(std::memory_order_acquire)) return absl::OkStatus();
    return absl::UnavailableError("the shard is bringing its sessions back");
  }
  // Unavailable DRAINING: no session begins here any more. `session` is the name of one that would.
  absl::Status CheckNotDraining(absl::string_view session) const {
    if (!draining_.load(std::memory_order_acquire)) return absl::OkStatus();
    return ReasonedStatus(absl::StatusCode::kUnavailable, ErrorReason::kDraining,
                          absl::StrCat("session \"", session, "\": the shard is draining"));
  }

  void BeginReplay() { replaying_.store(true, std::memory_order_release); }
  void FinishReplay() { replaying_.store(false, std::memory_order_release); }
  void BeginDrain() { draining_.store(true, std::memory_order_release); }

 private:
  std::atomic<bool> replaying_ = false;
  std::atomic<bool> draining_ = false;
};

}  // namespace precondor
