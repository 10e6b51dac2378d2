// SPDX-License-Identifier: Apache-2.0
// Implements DevicePlane with CUDA IPC.
#pragma once

#include <memory>

#include "absl/status/statusor.h"

#include "kernels/device_plane.h"

namespace precondor {

// Creates a DevicePlane on CUDA device `device`. Returns Unavailable if the device does not exist. The first Upload
// or Download allocates 32 MiB of pinned host memory. No call changes the caller's current device.
absl::StatusOr<std::unique_ptr<DevicePlane>> MakeCudaPlane(int device);

}  // namespace precondor
