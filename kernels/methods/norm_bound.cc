// SPDX-License-Identifier: Apache-2.0
#include "kernels/methods/norm_bound.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "kernels/base/status_macros.h"

namespace precondor {

absl::StatusOr<double> NormLowerBound(Backend& backend, ConstMatrixView a) {
  std::vector<double> squares(a.rows);
  PRECONDOR_RETURN_IF_ERROR(backend.RowSquaredNorms(a, absl::MakeSpan(squares)));
  for (const double square : squares) {
    if (!std::isfinite(square)) {
      return absl::FailedPreconditionError("a factor's gradient: expected finite elements, got NaN or infinity");
    }
  }
  constexpr double kNegligible = 1e-70;  // squared length whose reciprocal would exceed f32
  const auto longest = std::max_element(squares.begin(), squares.end());
  if (longest == squares.end() || *longest < kNegligible) return 0.0;
  PRECONDOR_ASSIGN_OR_RETURN(DeviceMatrix rows, backend.Allocate(2, a.cols));
  const MatrixView x = rows.view().RowRange(0, 1), y = rows.view().RowRange(1, 1);
  // Normalised vectors, because the product of two of A's elements could overflow f32.
  PRECONDOR_RETURN_IF_ERROR(backend.Axpby(1 / std::sqrt(*longest), a.RowRange(longest - squares.begin(), 1), 0.0, y));
  PRECONDOR_RETURN_IF_ERROR(backend.Gemm(1.0, y, Transpose::kNo, a, Transpose::kNo, 0.0, x));
  PRECONDOR_ASSIGN_OR_RETURN(const double length, backend.Dot(x, x));
  if (length < kNegligible) return 0.0;
  PRECONDOR_RETURN_IF_ERROR(backend.Axpby(1 / std::sqrt(length), x, 0.0, x));
  PRECONDOR_RETURN_IF_ERROR(backend.Gemm(1.0, x, Transpose::kNo, a, Transpose::kYes, 0.0, y));
  PRECONDOR_ASSIGN_OR_RETURN(const double square, backend.Dot(y, y));
  return std::sqrt(square);
}

}  // namespace precondor
