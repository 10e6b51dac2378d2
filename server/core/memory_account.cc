// SPDX-License-Identifier: Apache-2.0
#include "server/core/memory_account.h"

#include "absl/strings/str_cat.h"

#include "kernels/base/error_reason.h"
#include "server/policy/admission.h"

namespace precondor {

absl::Status MemoryAccount::Reserve(absl::string_view session, int64_t bytes) {
  MutexLock lock(mu_);
  const AdmissionDecision decision = DecideAdmission({.needed = bytes, .reserved = reserved_, .capacity = capacity_});
  if (!decision.admit) {
    return ReasonedStatus(absl::StatusCode::kResourceExhausted, ErrorReason::kCapacity,
                          absl::StrCat("session \"", session, "\" ", decision.reason));
  }
  reserved_ += bytes;
  // Told under the lock: the last that is told is the last that is true.
  observer_.OnReservedBytes(reserved_, capacity_);
  return absl::OkStatus();
}

void MemoryAccount::Release(int64_t bytes) {
  MutexLock lock(mu_);
  reserved_ -= bytes;
  observer_.OnReservedBytes(reserved_, capacity_);
}

int64_t MemoryAccount::reserved() const {
  MutexLock lock(mu_);
  return reserved_;
}

}  // namespace precondor
