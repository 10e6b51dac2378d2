// SPDX-License-Identifier: Apache-2.0
// Loads NCCL from the library libprecondor-nccl.so at run time, so that the same program also runs where NCCL is
// missing.
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

// Loads the library. Returns OK if it and NCCL exist, and otherwise the error of LoadNewNcclId.
absl::Status FindNccl();
// Call NewNcclId and MakeHostNcclCollective in the library. Return Unavailable if the library or NCCL is missing,
// FailedPrecondition if the library is of another version, and otherwise what the called function returns. Thread-safe.
absl::StatusOr<std::string> LoadNewNcclId();
absl::StatusOr<std::unique_ptr<Collective>> LoadHostNcclCollective(absl::string_view unique_id, int rank, int size,
                                                                   const NcclOptions& options, absl::Duration timeout);
// Returns the function with which a DeviceGroup connects its backends, which are on these CUDA devices in their order.
// The communicators' operations follow the backends' streams. `timeout` is for joining. The function returns
// InvalidArgument if `devices` and the backends differ in number, and otherwise the errors above and those of
// MakeNcclCollective.
DeviceGroup::Connect ConnectByNccl(std::vector<int> devices, absl::Duration timeout);

}  // namespace precondor
