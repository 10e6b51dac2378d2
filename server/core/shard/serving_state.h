// SPDX-License-Identifier: Apache-2.0
// Whether a shard accepts calls, and whether it accepts new sessions.
#pragma once

#include <atomic>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"

#include "kernels/base/error_reason.h"

namespace precondor {

// Thread-safe. A shard serves from the start, unless BeginReplay is called first.
class ServingState {
 public:
  // Returns UNAVAILABLE from BeginReplay until FinishReplay.
  absl::Status Check() const {
    if (!replaying_.load(std::memory_order_acquire)) return absl::OkStatus();
    return absl::UnavailableError("the shard is bringing its sessions back");
  }
  // Returns UNAVAILABLE (DRAINING) after BeginDrain. `session` is the name of the session to be opened, for the
  // message.
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
