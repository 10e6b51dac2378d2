// SPDX-License-Identifier: Apache-2.0
// Allocates session ids, and remembers those that shards may still learn of although the session is not open.
#pragma once

#include <cstdint>
#include <set>

#include "absl/time/time.h"

namespace precondor {

// Not thread-safe.
class SessionIds {
 public:
  // Returns an id that is greater than all earlier ones. It comes from the wall clock, so that a coordinator that has
  // lost its journal does not reuse ids.
  uint64_t Next(absl::Time wall);
  // Makes later ids greater than this one.
  void NoteUsed(uint64_t id);

  // Notes that this process has not opened the session after all, or has closed it. A shard that installs it later,
  // from a delayed call, is told to remove it. Only the greatest 1,000 ids are remembered.
  void Abandon(uint64_t id);
  bool IsAbandoned(uint64_t id) const { return abandoned_.contains(id); }

 private:
  uint64_t last_ = 0;
  std::set<uint64_t> abandoned_;
};

}  // namespace precondor
