// SPDX-License-Identifier: Apache-2.0
// Collectives between the backends of one process through host memory: for devices without a faster connection to each
// other, and for tests.
#pragma once

#include <memory>

#include "absl/time/time.h"

#include "kernels/backend.h"
#include "kernels/collective.h"
#include "kernels/device_group.h"

namespace precondor {

// Makes a Collective over the memory of `backend`, whose name is its backend_name(). It downloads what `ranks`, a
// Collective over host memory, moves, and uploads the results. An operation follows this thread's operations on the
// backend. Buffers are parts of matrices; for 16-bit elements, it reads and writes the whole f32 words that contain
// them. It holds no memory of the device, and owns `ranks`. `backend` must outlive it.
std::unique_ptr<Collective> MakeStagedCollective(std::unique_ptr<Collective> ranks, Backend& backend);

// Returns a Connect for DeviceGroup that makes LocalCollectives, staged if the backends' memory is not the host's.
// `timeout` applies to joining.
DeviceGroup::Connect ConnectLocally(absl::Duration timeout);

}  // namespace precondor
