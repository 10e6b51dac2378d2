// SPDX-License-Identifier: Apache-2.0
// One side of a layer in method soap: the gradients' second moment along it, and the basis or root that is computed
// from it (docs/use/methods/soap.md). Tensors are [sizes[0], the rest], contiguous.
#pragma once

#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"

#include "kernels/backend.h"
#include "kernels/methods/tensor.h"

namespace precondor {

// The matrices of one side. One thread at a time. A side without factor has two empty matrices and acts as the
// identity.
struct SoapSide {
  DeviceMatrix covariance;  // running average L of G_(k) G_(k)', with G_(k) the gradient with this dimension as rows
  DeviceMatrix factor;      // SOAP: eigenvectors as rows, by descending eigenvalue; SHAMPOO: the inverse root

  bool present() const { return !covariance.empty(); }
};

absl::StatusOr<SoapSide> MakeSoapSide(int64_t size, bool has_factor, Backend& backend);
absl::StatusOr<DeviceMatrix> CloneMatrix(ConstMatrixView from, Backend& backend);

// Returns decay L + (1 - decay) G_(k) G_(k)' in new memory.
absl::StatusOr<DeviceMatrix> NextCovariance(const SoapSide& side, ModeMatrix& gradient, double decay,
                                            ProductPrecision precision, Backend& backend);

// Returns the eigenvectors of `covariance` as rows, by descending eigenvalue. Errors: those of SymmetricEigen.
absl::StatusOr<DeviceMatrix> Eigenbasis(ConstMatrixView covariance, Backend& backend);

// Returns (scale L + epsilon |scale L| I)^-power, or I for L = 0.
absl::StatusOr<DeviceMatrix> InverseRoot(ConstMatrixView covariance, double scale, double epsilon, double power,
                                         Backend& backend);

// x = op(F_k) x along each mode k whose factor is not empty. Scratch: ModeScratchElements.
absl::Status ApplyFactors(absl::Span<const int64_t> sizes, absl::Span<const ConstMatrixView> factors,
                          Transpose transpose, ProductPrecision precision, DeviceMatrix& x, Backend& backend);
// Permutes x along each mode by the mode's order; an empty order leaves the mode unchanged. Scratch:
// ModeScratchElements.
absl::Status Reorder(absl::Span<const int64_t> sizes, absl::Span<const std::vector<int64_t>> orders, DeviceMatrix& x,
                     Backend& backend);
// Upper bound of the elements that ApplyFactors and Reorder allocate: a tensor and, for a mode between others, two
// copies as matrices.
int64_t ModeScratchElements(absl::Span<const int64_t> sizes);

}  // namespace precondor
