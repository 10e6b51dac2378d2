// SPDX-License-Identifier: Apache-2.0
// The last step of a precondition: how long U may be. Policies: docs/methods/mkor.md.
#pragma once

#include "absl/status/status.h"

#include "kernels/backend.h"
#include "kernels/base/session_spec.h"
#include "kernels/methods/mkor_config.h"

namespace precondor {

// u comes as U / factor. NORM_RESCALE: u = U |D| / |U| (zero for a zero U); under rule REFERENCE with a bias column
// |X| is the sum of the weight's and the bias' norms, as in the authors' package, otherwise the joint norm. RMS_CLIP: u
// = U min(1, clip / rms(U)). NONE and KL_CLIP: u = U; KL_CLIP's factor is common to all layers and the client's.
absl::Status Rescale(const MkorConfig& config, const LayerSpec& layer, Backend& backend, double factor,
                     ConstMatrixView d, MatrixView u);

}  // namespace precondor
