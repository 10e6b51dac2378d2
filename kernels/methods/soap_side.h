// SPDX-License-Identifier: Apache-2.0
// One side of a layer in method soap: the gradients' second moment and what is made of it (docs/methods/soap.md).
#pragma once

#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

#include "kernels/backend.h"

namespace precondor {

// One thread at a time. A side of size 1 or beyond max_factor_dim has no factor: both matrices are empty, and it acts
// as the identity.
struct SoapSide {
  int64_t size = 0;
  DeviceMatrix covariance;  // L or R
  DeviceMatrix factor;      // SOAP: eigenvectors as rows, by falling eigenvalue; SHAMPOO: the inverse root

  bool present() const { return !covariance.empty(); }
};

absl::StatusOr<SoapSide> MakeSoapSide(int64_t size, bool has_factor, Backend& backend);
absl::StatusOr<DeviceMatrix> CloneMatrix(ConstMatrixView from, Backend& backend);

// decay L + (1 - decay) g g' (kLeft) or g' g (kRight), as a matrix of its own; empty for a side without factor.
absl::StatusOr<DeviceMatrix> NextCovariance(const SoapSide& side, From from, ConstMatrixView g, double decay,
                                            Backend& backend);

// The eigenvectors of `covariance` as rows, by falling eigenvalue. Errors: SymmetricEigen's.
absl::StatusOr<DeviceMatrix> Eigenbasis(ConstMatrixView covariance, Backend& backend);

// One step of orthogonal iteration: the rows of the side's basis, sorted by their falling <q, L q>, times L, made
// orthonormal. `order` is what the sorting did.
struct RefreshedBasis {
  DeviceMatrix basis;
  std::vector<int64_t> order;
};
absl::StatusOr<RefreshedBasis> RefreshBasis(const SoapSide& side, Backend& backend);

// (scale L + epsilon |scale L| I)^-power; I for L = 0.
absl::StatusOr<DeviceMatrix> InverseRoot(ConstMatrixView covariance, double scale, double epsilon, double power,
                                         Backend& backend);

// y = F_L x F_R' (kNo) or F_L' x F_R (kYes) for the sides' factors, I where one is empty. y must not alias x.
// Scratch: x's elements.
absl::Status ApplySides(ConstMatrixView left, ConstMatrixView right, Transpose transpose, ConstMatrixView x,
                        MatrixView y, Backend& backend);

}  // namespace precondor
