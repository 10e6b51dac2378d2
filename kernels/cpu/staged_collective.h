// SPDX-License-Identifier: Apache-2.0
// Collectives between the backends of one process by way of the host's memory: for devices without a faster way to each
// other, and for tests.
#pragma once

#include <memory>

#include "absl/time/time.h"

#include "kernels/backend.h"
#include "kernels/collective.h"
#include "kernels/device_group.h"

namespace precondor {

// A Collective over the memory of `backend`, whose name is its backend_name(): what `ranks`, over host memory, moves is
// downloaded before and uploaded afterwards. It follows what this thread has asked the backend for. Buffers are parts
// of matrices; of 16-bit elements, the f32 words that they lie in are read and written whole. Holds no memory of the
// device. Both must outlive it, `ranks` as its own.
std::unique_ptr<Collective> MakeStagedCollective(std::unique_ptr<Collective> ranks, Backend& backend);

// For DeviceGroup: LocalCollectives, staged where the backends' memory is not the host's. `timeout` is for joining.
DeviceGroup::Connect ConnectLocally(absl::Duration timeout);

}  // namespace precondor
