// SPDX-License-Identifier: Apache-2.0
#include "kernels/methods/scaling.h"

#include <algorithm>
#include <cmath>

#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"

#include "kernels/base/status_macros.h"

namespace precondor {
namespace {

absl::StatusOr<double> Norm(Backend& backend, ConstMatrixView x) {
  PRECONDOR_ASSIGN_OR_RETURN(const double square, backend.Dot(x, x));
  return std::sqrt(square);
}

absl::StatusOr<double> RescaleNorm(const MkorConfig& config, const LayerSpec& layer, Backend& backend,
                                   ConstMatrixView x) {
  if (config.rule != UpdateRule::kReference || !layer.has_bias) return Norm(backend, x);
  const ConstMatrixView bias(x.data + x.cols - 1, x.rows, 1, x.stride);
  PRECONDOR_ASSIGN_OR_RETURN(const double weight_norm, Norm(backend, x.Corner(x.rows, x.cols - 1)));
  PRECONDOR_ASSIGN_OR_RETURN(const double bias_norm, Norm(backend, bias));
  return weight_norm + bias_norm;
}

}  // namespace

absl::Status Rescale(const MkorConfig& config, const LayerSpec& layer, Backend& backend, double factor,
                     ConstMatrixView d, MatrixView u) {
  double scale = factor;
  if (config.scaling == Scaling::kNormRescale) {
    PRECONDOR_ASSIGN_OR_RETURN(const double d_norm, RescaleNorm(config, layer, backend, d));
    PRECONDOR_ASSIGN_OR_RETURN(const double u_norm, RescaleNorm(config, layer, backend, u));
    scale = u_norm > 0 ? d_norm / u_norm : 0.0;
  } else if (config.scaling == Scaling::kRmsClip) {
    PRECONDOR_ASSIGN_OR_RETURN(const double u_norm, Norm(backend, u));
    const double rms = factor * u_norm / std::sqrt(static_cast<double>(u.size()));
    if (rms > config.scaling_clip) scale *= config.scaling_clip / rms;
  }
  if (!std::isfinite(scale)) {
    return absl::InternalError(absl::StrCat("layer ", layer.name, ": expected a finite scale, got ", scale));
  }
  return scale == 1.0 ? absl::OkStatus() : backend.Axpby(scale, u, 0.0, u);
}

}  // namespace precondor
