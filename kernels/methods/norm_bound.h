// SPDX-License-Identifier: Apache-2.0
// A cheap lower bound of a spectral norm.
#pragma once

#include "absl/status/statusor.h"

#include "kernels/backend.h"

namespace precondor {

// Returns |x A'| for the unit vector x along A_i A, with A_i the longest row of A: at most the spectral norm of A, and
// seldom less than 0.7 of it. Returns 0 for A = 0. a [n, n] is symmetric, skew, or any normal matrix. Source:
// norm_lower_bound of Li's psgd_torch. Errors: FailedPrecondition for NaN or infinity; the backend's. Scratch: 2 n
// elements.
absl::StatusOr<double> NormLowerBound(Backend& backend, ConstMatrixView a);

}  // namespace precondor
