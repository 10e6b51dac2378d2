// SPDX-License-Identifier: Apache-2.0
// One side of a layer in method soap: the gradients' second moment along it and what is made of that
// (docs/methods/soap.md). Tensors are [sizes[0], the rest], contiguous.
#pragma once

#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"

#include "kernels/backend.h"
#include "kernels/methods/tensor.h"

namespace precondor {

// One thread at a time. Of a side without factor both matrices are empty, and it acts as the identity.
struct SoapSide {
  DeviceMatrix covariance;  // G_(k) G_(k)', G_(k) the gradient with this dimension as rows
  DeviceMatrix factor;      // SOAP: eigenvectors as rows, by falling eigenvalue; SHAMPOO: the inverse root

  bool present() const { return !covariance.empty(); }
};

absl::StatusOr<SoapSide> MakeSoapSide(int64_t size, bool has_factor, Backend& backend);
absl::StatusOr<DeviceMatrix> CloneMatrix(ConstMatrixView from, Backend& backend);

// decay L + (1 - decay) G_(k) G_(k)', as a matrix of its own.
absl::StatusOr<DeviceMatrix> NextCovariance(const SoapSide& side, ModeMatrix& gradient, double decay, Backend& backend);

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

// x becomes op(F_k) x along each mode k whose factor is not empty. Scratch: ModeScratchElements.
absl::Status ApplyFactors(absl::Span<const int64_t> sizes, absl::Span<const ConstMatrixView> factors,
                          Transpose transpose, DeviceMatrix& x, Backend& backend);
// x's places along each mode become those that its order names; an empty order leaves them. Scratch as above.
absl::Status Reorder(absl::Span<const int64_t> sizes, absl::Span<const std::vector<int64_t>> orders, DeviceMatrix& x,
                     Backend& backend);
// What the two allocate at most: a tensor, and both of them as matrices for a mode between others.
int64_t ModeScratchElements(absl::Span<const int64_t> sizes);

}  // namespace precondor
