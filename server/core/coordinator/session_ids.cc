// SPDX-License-Identifier: Apache-2.0
#include "server/core/coordinator/session_ids.h"

#include <algorithm>

namespace precondor {
namespace {

// Number of ids that are remembered. If a shard installs an abandoned session with an older id, it goes to quarantine.
constexpr size_t kAbandoned = 1000;

}  // namespace

uint64_t SessionIds::Next(absl::Time wall) {
  last_ = std::max(last_ + 1, static_cast<uint64_t>(std::max<int64_t>(absl::ToUnixNanos(wall), 1)));
  return last_;
}

void SessionIds::NoteUsed(uint64_t id) { last_ = std::max(last_, id); }

void SessionIds::Abandon(uint64_t id) {
  abandoned_.insert(id);
  if (abandoned_.size() > kAbandoned) abandoned_.erase(abandoned_.begin());
}

}  // namespace precondor
