// SPDX-License-Identifier: Apache-2.0
// Places a session's layers on the devices of a shard and reserves memory for them.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "absl/status/statusor.h"

#include "kernels/methods/method_set.h"
#include "server/core/api/shard_control.h"
#include "server/core/resources/device_assignment.h"
#include "server/core/resources/memory_account.h"
#include "server/core/resources/session_context.h"
#include "server/core/shard/session_factors.h"
#include "server/core/shard/shard_sessions.h"

namespace precondor {

// A session's layers by device, and the memory for them.
struct LayerReservation {
  LayersOfDevices layers;
  SessionFactors::Sizes sizes;
  DeviceBytes bytes;  // the one of `sizes` that applies
};

// Assigns devices to the layers of the install, of a session that is new here, and reserves their memory. Returns the
// errors of MemoryAccount::Reserve.
absl::StatusOr<LayerReservation> MakeRoom(ShardContext& shard, const ShardSessions& sessions,
                                          const SessionInstall& install, const MethodSet& methods);

std::vector<std::unique_ptr<SessionDevice>> MakeSessionDevices(const ShardContext& shard);

// Puts the layers of a session that is being made on the devices of `layers`, and sets the size of their scratch
// blocks.
void GiveDevices(SessionContext& session, const LayersOfDevices& layers);

}  // namespace precondor
