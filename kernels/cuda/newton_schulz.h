// SPDX-License-Identifier: Apache-2.0
// Runs operations NewtonSchulz of many layers. One launch adds all gradients to their momentum. Each iteration takes
// three calls of cuBLAS for a batch of layers of one shape, and one launch for all layers; one more launch writes the
// answers. Layers whose iterations take more than `most_scratch_bytes`, without what unused places of a batch share,
// run in several parts, one after another.
//
// A batch has as many products as BatchSize says, however many layers there are, and drops those that are unused. So
// the products of a layer are always part of a call that differs from other calls in addresses alone, and an answer has
// the same bits in any company if cuBLAS computes the products of a batch alike, wherever they stand in it
// (docs/develop/adr/0031-newton-schulz-in-batches.md).
#pragma once

#include <cstdint>

#include "absl/status/status.h"
#include "absl/types/span.h"

#include "kernels/cuda/device.h"
#include "kernels/operation.h"

namespace precondor::cuda {

// Waits for the device. The contract is that of kernels/cuda/grouped_operations.h.
absl::Status RunNewtonSchulz(Device& device, absl::Span<const operation::NewtonSchulz* const> operations,
                             int64_t most_scratch_bytes = int64_t{256} << 20);

}  // namespace precondor::cuda
