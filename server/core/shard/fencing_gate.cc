// SPDX-License-Identifier: Apache-2.0
#include "server/core/shard/fencing_gate.h"

#include <algorithm>

#include "absl/strings/str_cat.h"

#include "kernels/base/error_reason.h"
#include "kernels/base/status_macros.h"

namespace precondor {
namespace {

constexpr uint64_t kMaxTokenLead = uint64_t{366} * 24 * 3600 * 1'000'000'000;

}  // namespace

absl::Status FencingGate::CheckToken(uint64_t token) const {
  if (token == 0) return absl::InvalidArgumentError("fencing_token: expected anything but 0");
  // A coordinator's token is a count, or the time where that is greater (docs/develop/adr/0021-fencing-tokens.md).
  const int64_t now = std::max<int64_t>(0, absl::ToUnixNanos(clock_.Wall()));
  const uint64_t limit = std::max(seen_, static_cast<uint64_t>(now)) + kMaxTokenLead;
  if (token > limit) {
    return absl::InvalidArgumentError(
        absl::StrCat("fencing_token: expected at most ", limit,
                     ", a year above this shard's clock and the greatest token so far, got ", token));
  }
  if (token >= seen_) return absl::OkStatus();
  return ReasonedStatus(absl::StatusCode::kFailedPrecondition, ErrorReason::kStaleLeader,
                        absl::StrCat("fencing_token: expected at least ", seen_, ", got ", token,
                                     ": another coordinator has taken over"));
}

absl::StatusOr<FencingGate::Pass> FencingGate::Enter(uint64_t token) {
  mu_.Lock();
  absl::Status status;
  while ((status = CheckToken(token)).ok() && token > highest_) {
    seen_ = token;  // from here on no earlier token is admitted, so that inside_ falls to 0
    if (raising_ || inside_ > 0) {
      changed_.wait(mu_);
      continue;
    }
    raising_ = true;
    mu_.Unlock();
    const absl::Status remembered = remember_(token);
    mu_.Lock();
    raising_ = false;
    changed_.notify_all();
    if (!remembered.ok()) {
      status = absl::UnavailableError(absl::StrCat("fencing_token ", token, ": ", remembered.message()));
      break;
    }
    highest_ = std::max(highest_, token);
  }
  if (status.ok()) ++inside_;
  mu_.Unlock();
  if (!status.ok()) return status;
  return Pass(this);
}

bool FencingGate::IsCurrent(uint64_t token) const {
  MutexLock lock(mu_);
  return token == highest_ || token < seen_;
}

uint64_t FencingGate::current() const {
  MutexLock lock(mu_);
  return highest_;
}

void FencingGate::Restore(uint64_t token) {
  MutexLock lock(mu_);
  highest_ = seen_ = std::max(highest_, token);
}

void FencingGate::Leave() {
  MutexLock lock(mu_);
  --inside_;
  changed_.notify_all();
}

}  // namespace precondor
