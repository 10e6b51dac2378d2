// SPDX-License-Identifier: Apache-2.0
// The last step of a precondition: how long U may be. Policies: docs/methods/mkor.md.
#pragma once

#include <cstdint>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

#include "kernels/backend.h"
#include "kernels/base/method_traits.h"
#include "kernels/base/session_spec.h"
#include "kernels/methods/options.h"

namespace precondor {

struct ScalingPolicy {
  Scaling kind = Scaling::kNormRescale;
  double clip = 1.1;           // bound of KL_CLIP or RMS_CLIP
  bool separate_bias = false;  // NORM_RESCALE: |X| is the sum of the weight's and the bias' norms
};

// Option `scaling`, a name of Scaling.
Scaling ReadScalingKind(OptionReader& reader, Scaling fallback);
// Options `scaling` and `scaling_clip`, positive: by default 0.001 for KL_CLIP, 1.1 otherwise.
ScalingPolicy ReadScaling(OptionReader& reader, Scaling fallback);

// Whether |X| is one norm of all elements.
bool HasJointNorm(const ScalingPolicy& policy, const LayerSpec& layer);

// What U / factor is multiplied by, from the lengths of d and of U / factor, which has `elements`; the rest as Rescale.
absl::StatusOr<double> ScaleOf(const ScalingPolicy& policy, const LayerSpec& layer, double factor, int64_t elements,
                               double d_norm, double u_norm);

// u comes as U / factor. NORM_RESCALE: u = U |D| / |U| (zero for a zero U); |X| is the joint norm, or with
// separate_bias and a bias column the sum of two. RMS_CLIP: u = U min(1, clip / rms(U)). NONE and KL_CLIP: u = U;
// KL_CLIP's factor is common to all layers and the client's. Errors: InvalidArgument for a non-finite d,
// FailedPrecondition for a U beyond f32.
absl::Status Rescale(const ScalingPolicy& policy, const LayerSpec& layer, Backend& backend, double factor,
                     ConstMatrixView d, MatrixView u);

}  // namespace precondor
