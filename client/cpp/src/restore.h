// SPDX-License-Identifier: Apache-2.0
// Sends a layer's factors to the shard of a session that is being restored.
#pragma once

#include "absl/status/status.h"
#include "absl/strings/string_view.h"

#include "client/cpp/src/control.h"
#include "precondor/v1/snapshot.pb.h"

namespace precondor {

// Sends `bytes` in pieces. `piece` has every field except total_bytes, offset and data. While the shard has no room for
// the layer, tries again for at most two minutes. Returns the errors of RestoreLayer, or INTERNAL if the shard has
// every byte and still waits for more.
absl::Status SendLayer(ControlClient& shard, v1::RestoreLayerRequest piece, absl::string_view bytes,
                       Canceller& canceller);

}  // namespace precondor
