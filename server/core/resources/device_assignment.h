// SPDX-License-Identifier: Apache-2.0
// Assigns the layers of a session to the devices of a shard.
#pragma once

#include <cstdint>
#include <vector>

#include "absl/types/span.h"

#include "kernels/base/session_spec.h"
#include "kernels/methods/method_set.h"
#include "server/core/api/shard_control.h"
#include "server/core/resources/memory_account.h"

namespace precondor {

struct AssignmentDevice {
  int64_t free_bytes = 0;
  double load = 0;      // cost of the layers of other sessions on the device
  int parallelism = 1;  // of its executor
};

// The layers of each device, ascending.
using LayersOfDevices = std::vector<std::vector<uint32_t>>;

// Assigns layers by longest processing time first, with the costs of EstimateLayers: layers by descending cost go to
// the least loaded device that has room for everything that the session then reserves there. If a layer finds no room,
// starts again with layers by descending size, each of which goes to the device that it fills best. If that fails too,
// ignores the bounds, and MemoryAccount refuses the assignment with each device's numbers. Ties go to the device with
// more room, then to the lower layer and device: equal inputs give equal assignments.
LayersOfDevices AssignDevices(const SessionSpec& spec, const MethodSet& methods, absl::Span<const uint32_t> layers,
                              int window_steps, absl::Span<const AssignmentDevice> devices);

}  // namespace precondor
