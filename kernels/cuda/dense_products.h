// SPDX-License-Identifier: Apache-2.0
// Dense products l d r of many layers: all expansions in one launch, then for the layers of each shape one call of
// cuBLAS for all l d and one for all (l d) r, in bf16, TF32 or, from .5 GFLOP on, f32. As in
// kernels/cuda/grouped_operations.h, but that cuBLAS does not promise what it gives alone
// (docs/adr/0015-dense-products-in-groups.md, 0025-measured-on-a-gpu.md).
#pragma once

#include "absl/status/status.h"
#include "absl/types/span.h"

#include "kernels/cuda/device.h"
#include "kernels/cuda/symmetric_tiles.h"
#include "kernels/operation.h"

namespace precondor::cuda {

// What expands the form, whose weights are there on the device.
SymmetricJob JobOfForm(const SymmetricForm& form, const double* weights);
// In stream order; waits for the device where one asks for squares.
absl::Status RunDensePreconditions(Device& device, absl::Span<const operation::DensePrecondition* const> operations);

}  // namespace precondor::cuda
