// SPDX-License-Identifier: Apache-2.0
// How much the sessions of one tenant may take together.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/types/span.h"

#include "kernels/base/session_spec.h"
#include "kernels/methods/method_set.h"

namespace precondor {

// 0: no limit.
struct TenantLimits {
  int64_t sessions = 0;
  int64_t bytes = 0;  // of SessionBytes, on all shards together

  bool any() const { return sessions > 0 || bytes > 0; }
};

// Factors and staging of all layers, as placement counts them (LayerBytes).
int64_t SessionBytes(const SessionSpec& spec, const MethodSet& methods);

// What a session counts with. Without tenants (no access file) all sessions are one tenant's.
struct TenantSession {
  std::vector<std::string> tenants;
  int64_t bytes = 0;
};

// Whether a session named `name` may be opened beside `others`: ResourceExhausted CAPACITY with numbers where one of
// its tenants would have more than the limits.
absl::Status CheckTenantLimits(const TenantLimits& limits, absl::string_view name, const TenantSession& session,
                               absl::Span<const TenantSession> others);

}  // namespace precondor
