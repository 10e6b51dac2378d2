// SPDX-License-Identifier: Apache-2.0
// The last step of preconditioning: scaling U. docs/use/methods/mkor.md defines the policies.
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

// Reads option `scaling`, a name of Scaling.
Scaling ReadScalingKind(OptionReader& reader, Scaling fallback);
// Reads options `scaling` and `scaling_clip`. The latter is positive; its default is 0.001 for KL_CLIP and 1.1
// otherwise.
ScalingPolicy ReadScaling(OptionReader& reader, Scaling fallback);

// Returns whether |X| is one norm of all elements.
bool HasJointNorm(const ScalingPolicy& policy, const LayerSpec& layer);

// Returns the number by which U / factor, which has `elements`, is multiplied, from the norms of d and of U / factor.
// Policies and errors are those of Rescale.
absl::StatusOr<double> ScaleOf(const ScalingPolicy& policy, const LayerSpec& layer, double factor, int64_t elements,
                               double d_norm, double u_norm);

// Scales u, which is U / factor on input. NORM_RESCALE: u = U |D| / |U| (zero for a zero U); |X| is the joint norm, or
// with separate_bias and a bias column the sum of two norms. RMS_CLIP: u = U min(1, clip / rms(U)). NONE and KL_CLIP: u
// = U; the client applies KL_CLIP's factor, which is common to all layers. Errors: InvalidArgument for a non-finite d,
// FailedPrecondition for a U beyond f32.
absl::Status Rescale(const ScalingPolicy& policy, const LayerSpec& layer, Backend& backend, double factor,
                     ConstMatrixView d, MatrixView u);

}  // namespace precondor
