// SPDX-License-Identifier: Apache-2.0
// A Collective over host memory by NCCL, for ranks whose data goes over the network anyway: what it moves is copied to
// a device of each rank's and back.
#pragma once

#include <memory>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"

#include "kernels/collective.h"
#include "kernels/cuda/nccl_collective.h"

namespace precondor {

// As MakeNcclCollective, with backend_name() "cpu". `options.stream` must be null. On the device it holds what the
// largest group so far reads and writes.
absl::StatusOr<std::unique_ptr<Collective>> MakeHostNcclCollective(absl::string_view unique_id, int rank, int size,
                                                                   const NcclOptions& options, absl::Duration timeout);

}  // namespace precondor
