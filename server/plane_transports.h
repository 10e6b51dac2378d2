// SPDX-License-Identifier: Apache-2.0
// The kinds of communicator that sessions with data_plane COLLECTIVE may have.
#pragma once

#include "absl/status/statusor.h"

#include "server/config.h"
#include "server/plane/plane_transport.h"

namespace precondor {

// That of config.plane_transport. Unavailable where it is nccl and NCCL cannot be loaded.
absl::StatusOr<PlaneTransport> MakePlaneTransport(const ServerConfig& config);

}  // namespace precondor
