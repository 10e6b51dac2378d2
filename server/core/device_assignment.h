// SPDX-License-Identifier: Apache-2.0
// Which of a shard's devices has which layer of a session.
#pragma once

#include <cstdint>
#include <vector>

#include "absl/types/span.h"

#include "kernels/base/session_spec.h"
#include "kernels/methods/method_set.h"
#include "server/core/memory_account.h"
#include "server/core/shard/shard_control.h"

namespace precondor {

struct AssignmentDevice {
  int64_t free_bytes = 0;
  double load = 0;      // cost of the layers that it has of other sessions
  int parallelism = 1;  // of its executor
};

// By device, ascending.
using LayersOfDevices = std::vector<std::vector<uint32_t>>;

// Longest processing time first, by the costs of EstimateLayers: layers by descending cost go to the least loaded
// device that has room for all that the session then reserves there. Where one finds none, layers by descending size go
// to the device that they fill best. Where that does not do either, as if there were no bound: MemoryAccount refuses
// that with each device's numbers. `fixed` has the device of layers that have one, by layer, and -1 for others. Ties go
// to the device with more room, then to the lower layer and device: equal inputs give equal assignments. `ranks` is
// that of ReservationSums: a layer that is split needs room for its parts on all devices, is work for all alike, and
// goes to the one with most room.
LayersOfDevices AssignDevices(const SessionSpec& spec, const MethodSet& methods, absl::Span<const uint32_t> layers,
                              absl::Span<const int> fixed, absl::Span<const MeasuredCost> costs, int window_steps,
                              absl::Span<const AssignmentDevice> devices, int ranks);

}  // namespace precondor
