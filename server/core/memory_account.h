// SPDX-License-Identifier: Apache-2.0
// What sessions have reserved of the memory of a shard's devices.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"

#include "kernels/base/mutex.h"
#include "server/core/shard/shard_observer.h"

namespace precondor {

// Bytes on each of a shard's devices, by the device's place. Operands have as many devices.
struct DeviceBytes {
  std::vector<int64_t> of;
  int64_t total() const;  // 2^62 where it would be more
  bool none() const;      // 0 on every device
  DeviceBytes& operator+=(const DeviceBytes& more);
  DeviceBytes& operator-=(const DeviceBytes& less);
  bool operator==(const DeviceBytes&) const = default;
};
DeviceBytes operator+(DeviceBytes x, const DeviceBytes& y);
DeviceBytes operator-(DeviceBytes x, const DeviceBytes& y);
// What `x` has beyond `y` on each device; 0 where it has less.
DeviceBytes Excess(const DeviceBytes& x, const DeviceBytes& y);

// Thread-safe. The observer hears of every change, in order.
class MemoryAccount {
 public:
  // `devices` has their names; the capacity is each one's. The observer hears of it at once.
  MemoryAccount(std::vector<std::string> devices, int64_t capacity_bytes, ShardObserver& observer);

  // On all devices or, with an error, on none. ResourceExhausted CAPACITY, with what was needed, reserved and there, of
  // each device.
  absl::Status Reserve(absl::string_view session, const DeviceBytes& bytes);
  void Release(const DeviceBytes& bytes);
  DeviceBytes reserved() const;
  DeviceBytes none() const { return {std::vector<int64_t>(devices_.size())}; }
  int64_t capacity() const { return capacity_; }  // of each

 private:
  void Tell() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);

  const std::vector<std::string> devices_;
  const int64_t capacity_;
  ShardObserver& observer_;
  mutable Mutex mu_;
  DeviceBytes reserved_ ABSL_GUARDED_BY(mu_);
};

}  // namespace precondor
