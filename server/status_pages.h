// SPDX-License-Identifier: Apache-2.0
// What the metrics port shows besides /metrics: JSON that is made when it is asked for, so that nothing by layer has to
// be a label of a metric. docs/monitoring.md has the fields.
#pragma once

#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

#include "server/core/coordinator/coordinator.h"
#include "server/core/shard/shard.h"

namespace precondor {

// Counters and factor state of each layer of a session, or of all sessions for an empty name; none without a shard.
// NotFound: no session of that name.
absl::StatusOr<std::string> LayersPage(const Shard* shard, absl::string_view session);

struct StatusSubject {
  absl::string_view version, role;
  bool draining = false;
  const Shard* shard = nullptr;              // null: it is none
  const Coordinator* coordinator = nullptr;  // likewise
};
// The sessions that a server knows, as coordinator, as shard or as both.
std::string StatusPage(const StatusSubject& subject);

}  // namespace precondor
