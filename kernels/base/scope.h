// SPDX-License-Identifier: Apache-2.0
// What begins with an object and ends with it, or with an error that its owner wants to hear of before.
#pragma once

#include <utility>

#include "absl/status/status.h"

namespace precondor {

// One thread at a time. `owner` outlives it.
template <typename Owner, void (Owner::*kBegin)(), absl::Status (Owner::*kEnd)()>
class Scope {
 public:
  explicit Scope(Owner& owner) : owner_(&owner) { (owner.*kBegin)(); }
  ~Scope() { (void)Finish(); }
  Scope(const Scope&) = delete;
  Scope& operator=(const Scope&) = delete;
  // Ends it, once; later calls do nothing.
  absl::Status Finish() {
    Owner* const owner = std::exchange(owner_, nullptr);
    return owner == nullptr ? absl::OkStatus() : (owner->*kEnd)();
  }

 private:
  Owner* owner_;
};

}  // namespace precondor
