// SPDX-License-Identifier: Apache-2.0
#include "kernels/methods/gradient.h"

#include <cmath>

#include "absl/strings/str_cat.h"

#include "kernels/base/method_traits.h"
#include "kernels/base/status_macros.h"

namespace precondor {

absl::Status ExpectGradient(const LayerSpec& layer, ConstMatrixView d) {
  if (d.rows == layer.d_out && d.cols == layer.d_in) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat("layer ", layer.name, ": gradient: expected [", layer.d_out, ", ",
                                                 layer.d_in, "], got [", d.rows, ", ", d.cols, "]"));
}

absl::Status ExpectLearnableGradient(const LayerSpec& layer, ConstMatrixView d, Backend& backend) {
  PRECONDOR_RETURN_IF_ERROR(ExpectGradient(layer, d));
  PRECONDOR_ASSIGN_OR_RETURN(const double square, backend.Dot(d, d));
  return ExpectLearnableNorm(layer, square);
}

absl::Status ExpectLearnableNorm(const LayerSpec& layer, double square) {
  if (square <= kMaxLearntGradientNorm * kMaxLearntGradientNorm) return absl::OkStatus();
  if (!std::isfinite(square)) {
    return absl::InvalidArgumentError(
        absl::StrCat("layer ", layer.name, ": gradient: expected finite elements, got NaN or infinity"));
  }
  return absl::InvalidArgumentError(absl::StrCat("layer ", layer.name, ": gradient: expected a norm of at most ",
                                                 kMaxLearntGradientNorm, ", got ", std::sqrt(square)));
}

}  // namespace precondor
