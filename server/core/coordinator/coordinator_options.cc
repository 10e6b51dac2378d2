// SPDX-License-Identifier: Apache-2.0
#include "server/core/coordinator/coordinator_options.h"

#include "absl/algorithm/container.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"

#include "kernels/base/error_reason.h"
#include "server/core/resources/reservation.h"

namespace precondor {
namespace {

absl::Status CheckOne(const TenantLimits& limits, absl::string_view name, absl::string_view tenant, int64_t sessions,
                      int64_t bytes, int64_t more_bytes) {
  const auto refusal = [&](const absl::AlphaNum& what) {
    return ReasonedStatus(absl::StatusCode::kResourceExhausted, ErrorReason::kCapacity,
                          absl::StrCat("session \"", name, "\": ",
                                       tenant.empty()                       ? "the server"
                                       : absl::StartsWith(tenant, "token ") ? "the caller's token"
                                                                            : tenant,
                                       ": expected at most ", what));
  };
  if (limits.sessions > 0 && sessions >= limits.sessions) {
    return refusal(absl::StrCat(limits.sessions, " sessions (tenant_max_sessions), got ", sessions, " and one more"));
  }
  if (limits.bytes > 0 && more_bytes > limits.bytes - bytes) {
    return refusal(absl::StrCat(limits.bytes, " bytes of factors and staging (tenant_max_bytes), got ", bytes, " in ",
                                sessions, " sessions and ", more_bytes, " more"));
  }
  return absl::OkStatus();
}

}  // namespace

int64_t SessionBytes(const SessionSpec& spec, const MethodSet& methods) {
  int64_t bytes = 0;
  for (uint32_t layer = 0; layer < spec.layers.size(); ++layer) {
    bytes = AddBytes(bytes, LayerBytes(spec, methods.of(layer), layer, kDefaultWindowSteps));
  }
  return bytes;
}

absl::Status CheckTenantLimits(const TenantLimits& limits, absl::string_view name, const TenantSession& session,
                               absl::Span<const TenantSession> others) {
  const std::vector<std::string> everyone = {""};
  for (const std::string& tenant : session.tenants.empty() ? everyone : session.tenants) {
    int64_t sessions = 0, bytes = 0;
    for (const TenantSession& other : others) {
      if (tenant.empty() ? !other.tenants.empty() : !absl::c_linear_search(other.tenants, tenant)) continue;
      ++sessions;
      bytes = AddBytes(bytes, other.bytes);
    }
    if (absl::Status status = CheckOne(limits, name, tenant, sessions, bytes, session.bytes); !status.ok()) {
      return status;
    }
  }
  return absl::OkStatus();
}

}  // namespace precondor
