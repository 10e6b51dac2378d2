// SPDX-License-Identifier: Apache-2.0
#include "kernels/methods/soap_side.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "kernels/base/status_macros.h"

namespace precondor {
namespace {

// Maps x along each mode for which `wanted` returns true: map(mode, side, from, to) fills the new tensor's matrix `to`
// from the old tensor's matrix `from`.
template <typename Wanted, typename Map>
absl::Status MapModes(absl::Span<const int64_t> sizes, DeviceMatrix& x, Backend& backend, Wanted wanted, Map map) {
  DeviceMatrix next;
  for (size_t mode = 0; mode < sizes.size(); ++mode) {
    if (!wanted(mode)) continue;
    if (next.empty()) {
      PRECONDOR_ASSIGN_OR_RETURN(next, backend.AllocateScratch(x.rows(), x.cols()));
    }
    PRECONDOR_ASSIGN_OR_RETURN(ModeMatrix from, ModeMatrix::Of(sizes, mode, x.view(), backend));
    PRECONDOR_ASSIGN_OR_RETURN(ModeMatrix to, ModeMatrix::ToFill(sizes, mode, next.view(), backend));
    PRECONDOR_RETURN_IF_ERROR(map(mode, from.side(), from.view(), to.view()));
    PRECONDOR_RETURN_IF_ERROR(to.WriteBack(backend));
    std::swap(x, next);
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<SoapSide> MakeSoapSide(int64_t size, bool has_factor, Backend& backend) {
  SoapSide side;
  if (!has_factor) return side;
  PRECONDOR_ASSIGN_OR_RETURN(side.covariance, backend.Allocate(size, size));
  PRECONDOR_ASSIGN_OR_RETURN(side.factor, backend.Allocate(size, size));
  return side;
}

absl::StatusOr<DeviceMatrix> CloneMatrix(ConstMatrixView from, Backend& backend) {
  PRECONDOR_ASSIGN_OR_RETURN(DeviceMatrix copy, backend.AllocateScratch(from.rows, from.cols));
  PRECONDOR_RETURN_IF_ERROR(backend.Copy(from, copy.view()));
  return copy;
}

absl::StatusOr<DeviceMatrix> NextCovariance(const SoapSide& side, ModeMatrix& gradient, double decay,
                                            ProductPrecision precision, Backend& backend) {
  PRECONDOR_ASSIGN_OR_RETURN(DeviceMatrix next, CloneMatrix(side.covariance.view(), backend));
  const ConstMatrixView g = gradient.view();
  const bool left = gradient.side() == From::kLeft;
  PRECONDOR_RETURN_IF_ERROR(
      backend.Gemm(1 - decay, g, Transpose(!left), g, Transpose(left), decay, next.view(), precision));
  return next;
}

absl::StatusOr<DeviceMatrix> Eigenbasis(ConstMatrixView covariance, Backend& backend) {
  const int64_t n = covariance.rows;
  std::vector<double> values(n);
  std::vector<int64_t> order(n);
  for (int64_t i = 0; i < n; ++i) order[i] = n - 1 - i;  // SymmetricEigen's order is ascending
  PRECONDOR_ASSIGN_OR_RETURN(DeviceMatrix ascending, backend.AllocateScratch(n, n));
  PRECONDOR_RETURN_IF_ERROR(backend.SymmetricEigen(covariance, absl::MakeSpan(values), ascending.view()));
  PRECONDOR_ASSIGN_OR_RETURN(DeviceMatrix basis, backend.AllocateScratch(n, n));
  PRECONDOR_RETURN_IF_ERROR(backend.Gather(order, {}, ascending.view(), basis.view()));
  return basis;
}

absl::StatusOr<DeviceMatrix> InverseRoot(ConstMatrixView covariance, double scale, double epsilon, double power,
                                         Backend& backend) {
  const int64_t n = covariance.rows;
  std::vector<double> values(n);
  PRECONDOR_ASSIGN_OR_RETURN(DeviceMatrix root, backend.Allocate(n, n));
  PRECONDOR_ASSIGN_OR_RETURN(DeviceMatrix vectors, backend.AllocateScratch(n, n));
  PRECONDOR_RETURN_IF_ERROR(backend.SymmetricEigen(covariance, absl::MakeSpan(values), vectors.view()));
  const double largest = scale * values.back();
  if (!(largest > 0)) {
    PRECONDOR_RETURN_IF_ERROR(backend.AddDiagonal(1.0, root.view()));
    return root;
  }
  // With half of the power on either side of Q, the root is symmetric except for the product's rounding.
  for (double& value : values) {
    value = std::pow(std::max(scale * value, 0.0) + epsilon * largest, -power / 2);
  }
  PRECONDOR_RETURN_IF_ERROR(backend.ScaleRows(values, vectors.view(), vectors.view()));
  PRECONDOR_RETURN_IF_ERROR(
      backend.Gemm(1.0, vectors.view(), Transpose::kYes, vectors.view(), Transpose::kNo, 0.0, root.view()));
  return root;
}

absl::Status ApplyFactors(absl::Span<const int64_t> sizes, absl::Span<const ConstMatrixView> factors,
                          Transpose transpose, ProductPrecision precision, DeviceMatrix& x, Backend& backend) {
  return MapModes(
      sizes, x, backend, [&](size_t mode) { return factors[mode].rows > 0; },
      [&](size_t mode, From side, ConstMatrixView from, MatrixView to) {
        const Transpose other = Transpose(transpose == Transpose::kNo);
        return side == From::kLeft
                   ? backend.Gemm(1.0, factors[mode], transpose, from, Transpose::kNo, 0.0, to, precision)
                   : backend.Gemm(1.0, from, Transpose::kNo, factors[mode], other, 0.0, to, precision);
      });
}

absl::Status Reorder(absl::Span<const int64_t> sizes, absl::Span<const std::vector<int64_t>> orders, DeviceMatrix& x,
                     Backend& backend) {
  return MapModes(
      sizes, x, backend, [&](size_t mode) { return !orders[mode].empty(); },
      [&](size_t mode, From side, ConstMatrixView from, MatrixView to) {
        if (side == From::kLeft) return backend.Gather(orders[mode], {}, from, to);
        return backend.Gather({}, orders[mode], from, to);
      });
}

int64_t ModeScratchElements(absl::Span<const int64_t> sizes) { return (sizes.size() > 2 ? 3 : 1) * ElementsOf(sizes); }

}  // namespace precondor
