// SPDX-License-Identifier: Apache-2.0
#include "kernels/methods/scaling.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"

#include "kernels/base/status_macros.h"

namespace precondor {
namespace {

absl::StatusOr<double> Norm(Backend& backend, ConstMatrixView x) {
  PRECONDOR_ASSIGN_OR_RETURN(const double square, backend.Dot(x, x));
  return std::sqrt(square);
}

absl::StatusOr<double> RescaleNorm(const ScalingPolicy& policy, const LayerSpec& layer, Backend& backend,
                                   ConstMatrixView x) {
  if (!policy.separate_bias || !layer.has_bias) return Norm(backend, x);
  const ConstMatrixView bias(x.data + x.cols - 1, x.rows, 1, x.stride);
  PRECONDOR_ASSIGN_OR_RETURN(const double weight_norm, Norm(backend, x.Corner(x.rows, x.cols - 1)));
  PRECONDOR_ASSIGN_OR_RETURN(const double bias_norm, Norm(backend, bias));
  return weight_norm + bias_norm;
}

// u *= scale for any scale whose result fits f32, itself within f32's range or not.
absl::Status ScaleInPlace(Backend& backend, double scale, MatrixView u) {
  constexpr double kLargestFactor = 1e30;
  while (scale > kLargestFactor) {
    PRECONDOR_RETURN_IF_ERROR(backend.Axpby(kLargestFactor, u, 0.0, u));
    scale /= kLargestFactor;
  }
  return scale == 1.0 ? absl::OkStatus() : backend.Axpby(scale, u, 0.0, u);
}

}  // namespace

Scaling ReadScalingKind(OptionReader& reader, Scaling fallback) {
  return static_cast<Scaling>(
      reader.Choice("scaling", static_cast<int>(fallback), {"NORM_RESCALE", "KL_CLIP", "RMS_CLIP", "NONE"}));
}

ScalingPolicy ReadScaling(OptionReader& reader, Scaling fallback) {
  constexpr double kHuge = 1e9;
  ScalingPolicy policy;
  policy.kind = ReadScalingKind(reader, fallback);
  policy.clip = reader.OpenNumber("scaling_clip", policy.kind == Scaling::kKlClip ? 1e-3 : 1.1, 0, kHuge);
  return policy;
}

absl::Status Rescale(const ScalingPolicy& policy, const LayerSpec& layer, Backend& backend, double factor,
                     ConstMatrixView d, MatrixView u) {
  double scale = factor;
  PRECONDOR_ASSIGN_OR_RETURN(const double d_norm, RescaleNorm(policy, layer, backend, d));
  PRECONDOR_ASSIGN_OR_RETURN(const double u_norm, RescaleNorm(policy, layer, backend, u));
  if (!std::isfinite(d_norm)) {
    return absl::InvalidArgumentError(
        absl::StrCat("layer ", layer.name, ": gradient: expected finite elements, got NaN or infinity"));
  }
  if (policy.kind == Scaling::kNormRescale) {
    scale = u_norm > 0 ? d_norm / u_norm : 0.0;
  } else if (policy.kind == Scaling::kRmsClip) {
    const double rms = factor * u_norm / std::sqrt(static_cast<double>(u.size()));
    if (rms > policy.clip) scale *= policy.clip / rms;
  }
  if (!(scale * u_norm < std::numeric_limits<float>::max())) {
    return absl::FailedPreconditionError(absl::StrCat("layer ", layer.name, ": expected |U| within f32, got ",
                                                      scale * u_norm, "; scaling NORM_RESCALE bounds it"));
  }
  return ScaleInPlace(backend, scale, u);
}

}  // namespace precondor
