// SPDX-License-Identifier: Apache-2.0
#include "kernels/methods/scaling.h"

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
  if (HasJointNorm(policy, layer)) return Norm(backend, x);
  const ConstMatrixView bias(x.data + x.cols - 1, x.rows, 1, x.stride);
  PRECONDOR_ASSIGN_OR_RETURN(const double weight_norm, Norm(backend, x.Corner(x.rows, x.cols - 1)));
  PRECONDOR_ASSIGN_OR_RETURN(const double bias_norm, Norm(backend, bias));
  return weight_norm + bias_norm;
}

}  // namespace

Scaling ReadScalingKind(OptionReader& reader, Scaling fallback) {
  return static_cast<Scaling>(reader.Choice("scaling", static_cast<int>(fallback), kScalingNames));
}

ScalingPolicy ReadScaling(OptionReader& reader, Scaling fallback) {
  constexpr double kHuge = 1e9;
  ScalingPolicy policy;
  policy.kind = ReadScalingKind(reader, fallback);
  policy.clip = reader.OpenNumber("scaling_clip", policy.kind == Scaling::kKlClip ? 1e-3 : 1.1, 0, kHuge);
  return policy;
}

bool HasJointNorm(const ScalingPolicy& policy, const LayerSpec& layer) {
  return !policy.separate_bias || !layer.has_bias;
}

absl::StatusOr<double> ScaleOf(const ScalingPolicy& policy, const LayerSpec& layer, double factor, int64_t elements,
                               double d_norm, double u_norm) {
  double scale = factor;
  if (!std::isfinite(d_norm)) {
    return absl::InvalidArgumentError(
        absl::StrCat("layer ", layer.name, ": gradient: expected finite elements, got NaN or infinity"));
  }
  if (policy.kind == Scaling::kNormRescale) {
    scale = u_norm > 0 ? d_norm / u_norm : 0.0;
  } else if (policy.kind == Scaling::kRmsClip) {
    const double rms = factor * u_norm / std::sqrt(static_cast<double>(elements));
    if (rms > policy.clip) scale *= policy.clip / rms;
  }
  if (!(scale * u_norm < std::numeric_limits<float>::max())) {
    return absl::FailedPreconditionError(absl::StrCat("layer ", layer.name, ": expected |U| within f32, got ",
                                                      scale * u_norm, "; scaling NORM_RESCALE bounds it"));
  }
  return scale;
}

absl::Status Rescale(const ScalingPolicy& policy, const LayerSpec& layer, Backend& backend, double factor,
                     ConstMatrixView d, MatrixView u) {
  PRECONDOR_ASSIGN_OR_RETURN(const double d_norm, RescaleNorm(policy, layer, backend, d));
  PRECONDOR_ASSIGN_OR_RETURN(const double u_norm, RescaleNorm(policy, layer, backend, u));
  PRECONDOR_ASSIGN_OR_RETURN(const double scale, ScaleOf(policy, layer, factor, u.size(), d_norm, u_norm));
  return backend.ScaleBy(scale, u, u);
}

}  // namespace precondor
