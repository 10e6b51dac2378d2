// SPDX-License-Identifier: Apache-2.0
// What methods ask of the statistics that an update brings.
#pragma once

#include "absl/status/status.h"

#include "kernels/base/session_spec.h"
#include "kernels/methods/method.h"

namespace precondor {

// Both sides as vectors, at least one each. InvalidArgument names the layer and what came; neither the vectors' length
// nor their elements are looked at.
absl::Status ExpectVectors(const LayerSpec& layer, const LayerStatistics& statistics);

}  // namespace precondor
