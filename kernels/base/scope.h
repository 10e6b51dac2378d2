// SPDX-License-Identifier: Apache-2.0
// A scope guard that calls a begin function when it is made and an end function, whose error the owner can read, when
// it ends.
#pragma once

#include <utility>

#include "absl/status/status.h"

namespace precondor {

// Calls kBegin on `owner` at construction and kEnd at Finish or destruction. One thread at a time. `owner` must outlive
// it.
template <typename Owner, void (Owner::*kBegin)(), absl::Status (Owner::*kEnd)()>
class Scope {
 public:
  explicit Scope(Owner& owner) : owner_(&owner) { (owner.*kBegin)(); }
  ~Scope() { (void)Finish(); }
  Scope(const Scope&) = delete;
  Scope& operator=(const Scope&) = delete;
  // Calls kEnd and returns its status. Later calls do nothing and return OK.
  absl::Status Finish() {
    Owner* const owner = std::exchange(owner_, nullptr);
    return owner == nullptr ? absl::OkStatus() : (owner->*kEnd)();
  }

 private:
  Owner* owner_;
};

}  // namespace precondor
