// SPDX-License-Identifier: Apache-2.0
// The shards and the options that a coordinator is made with.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "absl/types/span.h"

#include "kernels/base/session_spec.h"
#include "kernels/methods/registry.h"
#include "server/core/api/shard_control.h"

namespace precondor {

// Limits for the sessions of one tenant together. 0 means no limit.
struct TenantLimits {
  int64_t sessions = 0;
  int64_t bytes = 0;  // sum of SessionBytes over all shards

  bool any() const { return sessions > 0 || bytes > 0; }
};

// Returns the bytes of factors and staging of all layers, as placement counts them (LayerBytes).
int64_t SessionBytes(const SessionSpec& spec, const MethodSet& methods);

// A session's share of its tenants' limits. Without tenants (no access file), all sessions belong to one tenant.
struct TenantSession {
  std::vector<std::string> tenants;
  int64_t bytes = 0;
  int64_t table_bytes = 0;  // SessionTableBytes
};

// Checks whether a session named `name` may be opened beside `others`. Returns RESOURCE_EXHAUSTED (CAPACITY), with the
// numbers, if one of its tenants would exceed the limits.
absl::Status CheckTenantLimits(const TenantLimits& limits, absl::string_view name, const TenantSession& session,
                               absl::Span<const TenantSession> others);

struct ShardEndpoint {
  // As configured; the journal names the shard so. Workers dial the address that the shard advertises, if it advertises
  // one. For the shard in this process it is a name that no address changes.
  std::string address;
  std::unique_ptr<ShardControl> control;
};

struct CoordinatorOptions {
  uint64_t lease_steps = 64;  // steps that a directive grants beyond the reported one
  bool standby = false;       // calls are UNAVAILABLE until Restore, because another coordinator may lead
  MethodFactory make_method = MakeMethod;
  absl::Duration probe_interval = absl::Seconds(1);  // time between probes of a shard
  TenantLimits tenant_limits;                        // for new sessions, not for restored ones
  int64_t table_bytes = 0;                           // most SessionTableBytes of all sessions; 0: no limit
  uint64_t snapshot_interval_steps = 0;              // between snapshots of a session; 0: only on request
  // Called once, with the reason, when a shard has reported that another coordinator has taken over. This coordinator
  // then calls no shard and answers UNAVAILABLE. Runs on any thread, without a lock. May be empty.
  std::function<void(const absl::Status&)> on_replaced;
};

}  // namespace precondor
