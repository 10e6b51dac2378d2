// SPDX-License-Identifier: Apache-2.0
// Limits for the sessions of one tenant together.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/types/span.h"

#include "kernels/base/session_spec.h"
#include "kernels/methods/registry.h"

namespace precondor {

// 0 means no limit.
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

}  // namespace precondor
