// SPDX-License-Identifier: Apache-2.0
#include "server/rpc/request_budget.h"

#include "absl/strings/str_cat.h"

#include "kernels/base/error_reason.h"

namespace precondor::rpc {

absl::Status RequestBudget::Begin(absl::string_view request, uint64_t encoded, uint64_t decoded) {
  if (decoded <= kFree) return absl::OkStatus();
  if (decoded > kMostBytes && decoded > 2 * encoded) {
    return absl::ResourceExhaustedError(absl::StrCat(request, ": expected at most ", kMostBytes,
                                                     " bytes when decoded, got a message of ", encoded,
                                                     " bytes that takes ", decoded));
  }
  const MutexLock lock(mu_);
  if (bounds_sum_ && bytes_ > 0 && bytes_ + decoded > kMostBytes) {
    return absl::UnavailableError(absl::StrCat(request, ": takes ", decoded,
                                               " bytes when decoded, and requests under way take ", bytes_, " of ",
                                               kMostBytes, "; try again later"));
  }
  bytes_ += decoded;
  return absl::OkStatus();
}

void RequestBudget::End(uint64_t decoded) {
  if (decoded <= kFree) return;
  const MutexLock lock(mu_);
  bytes_ -= decoded;
}

}  // namespace precondor::rpc
