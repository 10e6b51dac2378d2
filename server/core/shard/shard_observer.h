// SPDX-License-Identifier: Apache-2.0
// What a shard tells of its sessions, its memory and its devices.
#pragma once

#include <cstdint>
#include <vector>

#include "absl/strings/string_view.h"

namespace precondor {

// See Observer for how the calls come.
class ShardObserver {
 public:
  virtual ~ShardObserver() = default;
  // A shard has a session of this job, or no longer. The removal of an old session may come after the installation of
  // a new one with its name; each installation has one removal, later.
  virtual void OnSessionInstalled(absl::string_view train_job) {}
  virtual void OnSessionRemoved(absl::string_view train_job) {}
  // What a session has reserved on a shard: once installed, and when its factors are released or begin anew.
  virtual void OnSessionMemory(absl::string_view train_job, int64_t reserved) {}
  // The part of that which the session needs in first order too.
  virtual void OnSessionGradientMemory(absl::string_view train_job, int64_t reserved) {}
  // Ranks that the others have been waiting for, for longer than is normal; empty once they are not.
  virtual void OnStragglers(absl::string_view train_job, const std::vector<uint32_t>& ranks) {}
  // A session's factors are needed again: so many layers have those that were kept, so many fresh ones.
  virtual void OnFactorsReturned(absl::string_view train_job, int64_t kept_layers, int64_t fresh_layers) {}
  virtual void OnShardSessions(int64_t sessions) {}
  virtual void OnQuarantinedSessions(int64_t sessions) {}
  // A reservation of a session's memory, or of part of it, was granted or refused for want of room.
  virtual void OnAdmission(bool admitted) {}
  // On all devices of a shard together, and on each, by its name.
  virtual void OnReservedBytes(int64_t reserved, int64_t capacity) {}
  virtual void OnDeviceMemory(absl::string_view device, int64_t reserved, int64_t capacity) {}
  // A shard has the device; later, not: a fault has ended its use.
  virtual void OnDevice(absl::string_view device, bool usable) {}
};

}  // namespace precondor
