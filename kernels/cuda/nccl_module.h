// SPDX-License-Identifier: Apache-2.0
// NCCL for programs that also run where it is not: it lies in a library of its own, libprecondor-nccl.so, which is
// loaded when it is asked for.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"

#include "kernels/collective.h"
#include "kernels/cuda/nccl_collective.h"
#include "kernels/device_group.h"

namespace precondor {

// OK where the library and NCCL are there.
absl::Status FindNccl();
// NewNcclId and MakeHostNcclCollective out of the library; Unavailable when it, or NCCL, is missing,
// FailedPrecondition when it belongs to another version. Thread-safe.
absl::StatusOr<std::string> LoadNewNcclId();
absl::StatusOr<std::unique_ptr<Collective>> LoadHostNcclCollective(absl::string_view unique_id, int rank, int size,
                                                                   const NcclOptions& options, absl::Duration timeout);
// For DeviceGroup, of backends on these CUDA devices in their order, with communicators that follow the backends'
// streams. `timeout` is for joining. Errors as above, and those of MakeNcclCollective.
DeviceGroup::Connect ConnectByNccl(std::vector<int> devices, absl::Duration timeout);

}  // namespace precondor
