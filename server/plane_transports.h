// SPDX-License-Identifier: Apache-2.0
// Selects the kind of communicator of sessions with data_plane COLLECTIVE.
#pragma once

#include "absl/status/statusor.h"

#include "server/config.h"
#include "server/plane/plane_transport.h"

namespace precondor {

// Returns the transport that config.plane_transport names. Returns Unavailable if it is nccl and NCCL cannot be loaded.
absl::StatusOr<PlaneTransport> MakePlaneTransport(const ServerConfig& config);

}  // namespace precondor
