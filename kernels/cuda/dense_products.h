// SPDX-License-Identifier: Apache-2.0
// Computes dense products l d r of many layers. One launch expands all factors that are stored in tiles. Then, for the
// layers of each shape, cuBLAS makes products l d, and then (l d) r, in batches of a fixed size
// (kernels/cuda/fixed_batches.h), in bf16, TF32 or f32. In f32, products below 0.5 GFLOP use kernels/cuda/products.h
// instead. The contract is that of kernels/cuda/grouped_operations.h.
#pragma once

#include "absl/status/status.h"
#include "absl/types/span.h"

#include "kernels/cuda/device.h"
#include "kernels/cuda/symmetric_tiles.h"
#include "kernels/operation.h"

namespace precondor::cuda {

// Returns the job that computes the matrix of `form`. `weights` holds the weights of the form in device memory.
SymmetricJob JobOfForm(const SymmetricForm& form, const double* weights);
// Runs the operations in stream order. Waits for the device if an operation asks for squares.
absl::Status RunDensePreconditions(Device& device, absl::Span<const operation::DensePrecondition* const> operations);

}  // namespace precondor::cuda
