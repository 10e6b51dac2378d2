// SPDX-License-Identifier: Apache-2.0
// What a set of layers takes on a shard, device by device.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "absl/status/statusor.h"

#include "kernels/methods/method_set.h"
#include "server/core/device_assignment.h"
#include "server/core/memory_account.h"
#include "server/core/shard/session_context.h"
#include "server/core/shard/session_factors.h"
#include "server/core/shard/shard_control.h"
#include "server/core/shard/shard_sessions.h"

namespace precondor {

// Where a session's layers are, and what is reserved for them.
struct LayerRoom {
  LayersOfDevices layers;
  SessionFactors::Sizes sizes;
  DeviceBytes bytes;  // of these, what applies
  DeviceBytes more;   // of that, what has been reserved with this room
};

// Gives the install's layers devices and reserves there what the session has not reserved yet, `reserved` being what
// it has. `known`: the session, null when it is new here. `held`: it has its factors. Errors: MemoryAccount's.
absl::StatusOr<LayerRoom> MakeRoom(ShardContext& shard, const ShardSessions& sessions, const SessionInstall& install,
                                   const MethodSet& methods, const SessionContext* known, bool held,
                                   const DeviceBytes& reserved);

std::vector<std::unique_ptr<SessionDevice>> MakeSessionDevices(const ShardContext& shard);

// The session's layers are where `layers` says, and their scratch is large enough. False: some stay on other devices.
bool GiveDevices(SessionContext& session, const LayersOfDevices& layers);

}  // namespace precondor
