// SPDX-License-Identifier: Apache-2.0
// Numbers of sessions: which come next, and which of those that are not open shards may still hear of.
#pragma once

#include <cstdint>
#include <set>

#include "absl/time/time.h"

namespace precondor {

// Not thread-safe.
class SessionIds {
 public:
  // Greater than any before. From the wall clock, so that a coordinator that lost its table does not give an old number
  // out again.
  uint64_t Next(absl::Time wall);
  // The numbers that follow are greater than this one.
  void NoteUsed(uint64_t id);

  // This process did not open the session after all, or has closed it: shards that hear of it later, by a call that was
  // late, are told to remove it. Only the greatest 1,000 numbers are remembered.
  void Abandon(uint64_t id);
  bool IsAbandoned(uint64_t id) const { return abandoned_.contains(id); }

 private:
  uint64_t last_ = 0;
  std::set<uint64_t> abandoned_;
};

}  // namespace precondor
