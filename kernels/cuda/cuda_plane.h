// SPDX-License-Identifier: Apache-2.0
// DevicePlane over CUDA IPC.
#pragma once

#include <memory>

#include "absl/status/statusor.h"

#include "kernels/device_plane.h"

namespace precondor {

// Takes 16 MiB of pinned memory when something is first copied from or to the host. Unavailable when there is no such
// device. Leaves callers' current device as it is.
absl::StatusOr<std::unique_ptr<DevicePlane>> MakeCudaPlane(int device);

}  // namespace precondor
