// SPDX-License-Identifier: Apache-2.0
#include "server/core/resources/memory_account.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"

#include "kernels/base/error_reason.h"
#include "server/policy/admission.h"

namespace precondor {

int64_t DeviceBytes::total() const {
  constexpr int64_t kSaturated = int64_t{1} << 62;
  int64_t sum = 0;
  for (const int64_t bytes : of) sum = sum > kSaturated - bytes ? kSaturated : sum + bytes;
  return sum;
}

bool DeviceBytes::none() const {
  return std::all_of(of.begin(), of.end(), [](int64_t bytes) { return bytes == 0; });
}

DeviceBytes& DeviceBytes::operator+=(const DeviceBytes& more) {
  for (size_t i = 0; i < of.size(); ++i) of[i] += more.of[i];
  return *this;
}

DeviceBytes& DeviceBytes::operator-=(const DeviceBytes& less) {
  for (size_t i = 0; i < of.size(); ++i) of[i] -= less.of[i];
  return *this;
}

DeviceBytes operator+(DeviceBytes x, const DeviceBytes& y) { return x += y; }
DeviceBytes operator-(DeviceBytes x, const DeviceBytes& y) { return x -= y; }

MemoryAccount::MemoryAccount(std::vector<std::string> devices, int64_t capacity_bytes, ShardObserver& observer)
    : devices_(std::move(devices)), capacity_(capacity_bytes), observer_(observer), reserved_(none()) {
  MutexLock lock(mu_);
  Report();
}

absl::Status MemoryAccount::Reserve(absl::string_view session, const DeviceBytes& bytes) {
  MutexLock lock(mu_);
  bool admit = true;
  std::string reasons;
  for (size_t device = 0; device < devices_.size(); ++device) {
    const AdmissionDecision decision =
        DecideAdmission({.needed = bytes.of[device], .reserved = reserved_.of[device], .capacity = capacity_});
    admit = admit && decision.admit;
    if (devices_.size() > 1) absl::StrAppend(&reasons, device == 0 ? "" : "; ", devices_[device], " ");
    absl::StrAppend(&reasons, decision.reason);
  }
  observer_.OnAdmission(admit);
  if (!admit) {
    return ReasonedStatus(absl::StatusCode::kResourceExhausted, ErrorReason::kCapacity,
                          absl::StrCat("session \"", session, "\" ", reasons));
  }
  reserved_ += bytes;
  Report();
  return absl::OkStatus();
}

void MemoryAccount::ReserveUsed(const DeviceBytes& bytes) {
  MutexLock lock(mu_);
  reserved_ += bytes;
  Report();
}

void MemoryAccount::Release(const DeviceBytes& bytes) {
  MutexLock lock(mu_);
  reserved_ -= bytes;
  Report();
}

// Called under the lock, so that the last value that the observer gets is the current one.
void MemoryAccount::Report() {
  observer_.OnReservedBytes(reserved_.total(), capacity_ * static_cast<int64_t>(devices_.size()));
  for (size_t device = 0; device < devices_.size(); ++device) {
    observer_.OnDeviceMemory(devices_[device], reserved_.of[device], capacity_);
  }
}

DeviceBytes MemoryAccount::reserved() const {
  MutexLock lock(mu_);
  return reserved_;
}

}  // namespace precondor
