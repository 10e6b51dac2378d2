// SPDX-License-Identifier: Apache-2.0
// Runs operations OrthogonalIteration of many matrices by shifted CholeskyQR3 in f32: three times g = x x', g = l l',
// x = l^-1 x, from x = the rows of q a, sorted and of length 1. The first g gets a shift, because x is ill-conditioned
// if q is far from the eigenvectors (Fukaya et al., arXiv:1809.11085). All matrices of a size take ten calls of cuBLAS
// and cuSOLVER for a batch of fixed size (kernels/cuda/batched_products.h), and all sizes together five launches.
// Matrices that take more than `most_scratch_bytes` run in several parts, one after another.
//
// The last g shows whether a factorization has failed, or x has been too ill-conditioned for them: its distance from I,
// in Frobenius' norm, is then not below kLargestDistance, up to which the result is orthonormal to f32
// (docs/develop/adr/0032-soap-in-batches.md).
#pragma once

#include <cstdint>

#include "absl/status/status.h"
#include "absl/types/span.h"

#include "kernels/cuda/device.h"
#include "kernels/operation.h"

namespace precondor::cuda {

constexpr double kLargestDistance = 0.5;

// Waits for the device once. Sets done[i] to false if operation i has to be computed in another way: its outputs are
// unspecified then. Otherwise the contract is that of kernels/cuda/grouped_operations.h.
absl::Status RunOrthogonalIterations(Device& device, absl::Span<const operation::OrthogonalIteration* const> operations,
                                     absl::Span<bool> done, int64_t most_scratch_bytes = int64_t{256} << 20);

}  // namespace precondor::cuda
