// SPDX-License-Identifier: Apache-2.0
// Pages of the metrics port in addition to /metrics.
#pragma once

#include <string>

#include "absl/strings/string_view.h"
#include "absl/time/time.h"

#include "server/core/coordinator/coordinator.h"
#include "server/core/shard/shard.h"

namespace precondor {

struct StatusSubject {
  absl::string_view version, role;
  bool draining = false;
  absl::Time now = {};                       // on the monotonic clock
  const Shard* shard = nullptr;              // null if the server is not a shard
  const Coordinator* coordinator = nullptr;  // null if the server is not a coordinator
};
// Returns the sessions that the server knows as coordinator, shard or both, as JSON.
std::string StatusPage(const StatusSubject& subject);

// HTML of the metrics port's status page: one page without external assets. It reads /status and /metrics of its server
// every two seconds, and changes nothing. The plots' history is in the browser, 124,800 bytes a job.
extern const char kStatusHtml[];

}  // namespace precondor
