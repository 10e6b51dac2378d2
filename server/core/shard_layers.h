// SPDX-License-Identifier: Apache-2.0
// What a set of layers takes on a shard, device by device.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "kernels/methods/method_set.h"
#include "server/core/device_assignment.h"
#include "server/core/memory_account.h"
#include "server/core/session_context.h"
#include "server/core/session_factors.h"
#include "server/core/shard_control.h"

namespace precondor {

// Where a session's layers are, and what is reserved for them.
struct LayerRoom {
  LayersOfDevices layers;
  SessionFactors::Sizes sizes;
  DeviceBytes bytes;  // of these, what applies
  DeviceBytes more;   // of that, what has been reserved with this room
};

std::vector<std::unique_ptr<SessionDevice>> MakeSessionDevices(const ShardContext& shard);

// The session's layers are where `layers` says, and their scratch is large enough. False: some stay on other devices.
bool GiveDevices(SessionContext& session, const LayersOfDevices& layers);

}  // namespace precondor
