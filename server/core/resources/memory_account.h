// SPDX-License-Identifier: Apache-2.0
// Accounts for the memory that sessions reserve on a shard's devices.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"

#include "kernels/base/mutex.h"
#include "server/core/api/shard_observer.h"

namespace precondor {

// Bytes on each of a shard's devices, by the device's index. Operands of an operator have equally many devices.
struct DeviceBytes {
  std::vector<int64_t> of;
  int64_t total() const;  // saturates at 2^62
  bool none() const;      // true if 0 on every device
  DeviceBytes& operator+=(const DeviceBytes& more);
  DeviceBytes& operator-=(const DeviceBytes& less);
  bool operator==(const DeviceBytes&) const = default;
};
DeviceBytes operator+(DeviceBytes x, const DeviceBytes& y);
DeviceBytes operator-(DeviceBytes x, const DeviceBytes& y);

// Keeps the sum of the reservations on each device. Thread-safe. The observer is told of every change, in order.
class MemoryAccount {
 public:
  // `devices` are the names of the devices, each with `capacity_bytes`. Tells the observer at once.
  MemoryAccount(std::vector<std::string> devices, int64_t capacity_bytes, ShardObserver& observer);

  // Reserves `bytes` on all devices, or on none if it returns an error. Returns RESOURCE_EXHAUSTED (CAPACITY), with
  // needed, reserved and capacity bytes of each device, if one has too little.
  absl::Status Reserve(absl::string_view session, const DeviceBytes& bytes);
  // Reserves bytes that are in use already, also beyond the capacity.
  void ReserveUsed(const DeviceBytes& bytes);
  void Release(const DeviceBytes& bytes);
  DeviceBytes reserved() const;
  DeviceBytes none() const { return {std::vector<int64_t>(devices_.size())}; }
  int64_t capacity() const { return capacity_; }  // of each device

 private:
  void Report() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);

  const std::vector<std::string> devices_;
  const int64_t capacity_;
  ShardObserver& observer_;
  mutable Mutex mu_;
  DeviceBytes reserved_ ABSL_GUARDED_BY(mu_);
};

}  // namespace precondor
