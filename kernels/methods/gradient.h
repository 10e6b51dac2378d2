// SPDX-License-Identifier: Apache-2.0
// Checks of the gradient that a method preconditions.
#pragma once

#include "absl/status/status.h"

#include "kernels/backend.h"
#include "kernels/base/session_spec.h"

namespace precondor {

// Returns InvalidArgument, with the layer and the actual shape, if d is not [d_out, d_in]. Does not read the elements.
absl::Status ExpectGradient(const LayerSpec& layer, ConstMatrixView d);

// Returns InvalidArgument, with the layer, if d is not [d_out, d_in], not finite, or of a norm above
// kMaxLearntGradientNorm. Also returns the backend's errors.
absl::Status ExpectLearnableGradient(const LayerSpec& layer, ConstMatrixView d, Backend& backend);

// Returns InvalidArgument, with the layer, if |d|^2, which is `square`, is not finite or above
// kMaxLearntGradientNorm^2.
absl::Status ExpectLearnableNorm(const LayerSpec& layer, double square);

}  // namespace precondor
