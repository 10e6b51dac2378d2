// SPDX-License-Identifier: Apache-2.0
// A Collective over host memory that uses NCCL, for ranks whose data crosses the network in any case. Each rank copies
// data to a CUDA device of its own and back.
#pragma once

#include <memory>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"

#include "kernels/collective.h"
#include "kernels/cuda/nccl_collective.h"

namespace precondor {

// Like MakeNcclCollective, but backend_name() is "cpu". Returns InvalidArgument if `options.stream` is not null. The
// collective keeps device memory for the inputs and outputs of the largest group so far.
absl::StatusOr<std::unique_ptr<Collective>> MakeHostNcclCollective(absl::string_view unique_id, int rank, int size,
                                                                   const NcclOptions& options, absl::Duration timeout);

}  // namespace precondor
