// SPDX-License-Identifier: Apache-2.0
#include "server/rpc/call_limits.h"

#include <algorithm>

#include "absl/strings/str_cat.h"

namespace precondor::rpc {

absl::Status CallLimits::Admit(const std::string& tenant, absl::Time now) {
  if (!any()) return absl::OkStatus();
  MutexLock lock(mu_);
  const auto [found, is_new] = buckets_.try_emplace(tenant, Bucket{.calls = per_second_, .filled = now});
  Bucket& bucket = found->second;
  bucket.calls = std::min(per_second_, bucket.calls + per_second_ * absl::ToDoubleSeconds(now - bucket.filled));
  bucket.filled = now;
  if (bucket.calls < 1) {
    return absl::UnavailableError(
        absl::StrCat("expected at most ", per_second_,
                     " calls a second of one tenant (tenant_max_calls), got more: repeat it later"));
  }
  bucket.calls -= 1;
  return absl::OkStatus();
}

}  // namespace precondor::rpc
