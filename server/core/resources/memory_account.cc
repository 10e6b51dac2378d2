// SPDX-License-Identifier: Apache-2.0
#include "server/core/resources/memory_account.h"

#include "absl/strings/str_cat.h"

#include "kernels/base/error_reason.h"

namespace precondor {

MemoryAccount::MemoryAccount(int64_t capacity_bytes, ShardObserver& observer)
    : capacity_(capacity_bytes), observer_(observer) {
  MutexLock lock(mu_);
  Report();
}

absl::Status MemoryAccount::Reserve(absl::string_view session, int64_t bytes) {
  MutexLock lock(mu_);
  // Subtracted instead of added, because `bytes` depends on a client's layer table and may be near the end of the
  // range.
  const bool fits = bytes <= capacity_ - reserved_;
  observer_.OnAdmission(fits);
  if (!fits) {
    return ReasonedStatus(absl::StatusCode::kResourceExhausted, ErrorReason::kCapacity,
                          absl::StrCat("session \"", session, "\" does not fit: needed ", bytes, " bytes, reserved ",
                                       reserved_, " of capacity ", capacity_));
  }
  reserved_ += bytes;
  Report();
  return absl::OkStatus();
}

void MemoryAccount::Release(int64_t bytes) {
  MutexLock lock(mu_);
  reserved_ -= bytes;
  Report();
}

// Called under the lock, so that the last value that the observer gets is the current one.
void MemoryAccount::Report() { observer_.OnReservedBytes(reserved_, capacity_); }

int64_t MemoryAccount::reserved() const {
  MutexLock lock(mu_);
  return reserved_;
}

}  // namespace precondor
