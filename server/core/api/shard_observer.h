// SPDX-License-Identifier: Apache-2.0
// Events that a shard reports about its sessions, memory and device.
#pragma once

#include <cstdint>
#include <vector>

#include "absl/strings/string_view.h"

namespace precondor {

// Observer has the rules for calls. By default every method does nothing.
class ShardObserver {
 public:
  virtual ~ShardObserver() = default;
  // A session of this job was installed on a shard, or removed. Every install is followed by one removal. The removal
  // of an old session can come after the install of a new session of that name.
  virtual void OnSessionInstalled(absl::string_view train_job) {}
  virtual void OnSessionRemoved(absl::string_view train_job) {}
  // Bytes that a session has reserved.
  virtual void OnSessionMemory(absl::string_view train_job, int64_t reserved) {}
  // Ranks that the other ranks have been waiting for longer than is normal; empty when there are none any longer.
  virtual void OnStragglers(absl::string_view train_job, const std::vector<uint32_t>& ranks) {}
  virtual void OnShardSessions(int64_t sessions) {}
  virtual void OnQuarantinedSessions(int64_t sessions) {}
  // Memory for a session, or for a part of it, was reserved, or refused for lack of room.
  virtual void OnAdmission(bool admitted) {}
  virtual void OnReservedBytes(int64_t reserved, int64_t capacity) {}
  // The shard has the device; later with false: a fault has made it unusable.
  virtual void OnDevice(absl::string_view device, bool usable) {}
};

}  // namespace precondor
