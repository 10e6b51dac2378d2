// SPDX-License-Identifier: Apache-2.0
// What methods ask of the gradient that they precondition.
#pragma once

#include "absl/status/status.h"

#include "kernels/backend.h"
#include "kernels/base/session_spec.h"

namespace precondor {

// [d_out, d_in]. InvalidArgument names the layer and what came; the elements are not looked at.
absl::Status ExpectGradient(const LayerSpec& layer, ConstMatrixView d);

// The same, and finite. Errors of the backend.
absl::Status ExpectFiniteGradient(const LayerSpec& layer, ConstMatrixView d, Backend& backend);

}  // namespace precondor
