// SPDX-License-Identifier: Apache-2.0
#include "server/core/shard/shard_upkeep.h"

#include "absl/time/time.h"

#include "server/core/shard/shard_session.h"

namespace precondor {

void ShardUpkeep::SealOverdue() {
  if (shard_.options.statistics_deadline == absl::InfiniteDuration()) return;
  const absl::Time now = shard_.clock.Now();
  for (const std::shared_ptr<ShardSession>& session : sessions_.All()) {
    for (const uint32_t layer : session->owned()) session->layer(layer)->SealOverdue(now);
  }
}

void ShardUpkeep::FreeReleasedFactors() {
  for (const std::shared_ptr<ShardSession>& session : sessions_.All()) session->factors().FreeReleased();
}

void ShardUpkeep::ReportStragglers() {
  if (shard_.options.slow_worker == absl::InfiniteDuration()) return;
  const absl::Time since = shard_.clock.Now() - shard_.options.slow_worker;
  for (const std::shared_ptr<ShardSession>& session : sessions_.All()) session->ReportStragglers(since);
}

size_t ShardUpkeep::CountLostDevices() {
  size_t count = 0;
  for (const DeviceUse& device : DescribeDevices(shard_)) {
    if (device.fault.empty()) continue;
    ++count;
    {
      MutexLock lock(mu_);
      if (!lost_devices_.insert(device.name).second) continue;
    }
    shard_.observer.OnDevice(device.name, false);
    shard_.logger.Log(Severity::kError, "device lost", {{"device", device.name}, {"reason", device.fault}});
  }
  return count;
}

}  // namespace precondor
