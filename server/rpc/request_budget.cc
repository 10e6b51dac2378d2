// SPDX-License-Identifier: Apache-2.0
#include "server/rpc/request_budget.h"

#include <algorithm>

#include "absl/strings/str_cat.h"

#include "kernels/base/error_reason.h"

namespace precondor::rpc {

absl::Status RequestBudget::Begin(absl::string_view method, uint64_t encoded, uint64_t decoded) {
  if (decoded <= kFreeBytes) return absl::OkStatus();
  if (decoded > kMostBytes) {
    return absl::ResourceExhaustedError(absl::StrCat(method, ": expected a request of at most ", kMostBytes,
                                                     " bytes when it is decoded, got one of ", encoded,
                                                     " bytes that takes ", decoded));
  }
  const MutexLock lock(mu_);
  if (bytes_ + decoded > kMostBytes) {
    return ReasonedStatus(
        absl::StatusCode::kUnavailable, ErrorReason::kCapacity,
        absl::StrCat(method, ": the request takes ", decoded, " bytes when it is decoded, and others take ", bytes_,
                     " of ", kMostBytes, " at the moment; try again later"));
  }
  bytes_ += decoded;
  return absl::OkStatus();
}

void RequestBudget::End(uint64_t decoded) {
  if (decoded <= kFreeBytes) return;
  const MutexLock lock(mu_);
  bytes_ -= decoded;
}

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
