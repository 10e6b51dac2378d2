// SPDX-License-Identifier: Apache-2.0
// Host memory that a session takes on a server besides its tensors: what is kept of its description, layers and ranks.
// Measured on a server with role `all`, and rounded up.
#pragma once

#include <cstdint>

#include "kernels/base/session_spec.h"

namespace precondor {

inline constexpr int64_t kBytesPerSession = int64_t{128} << 10;  // series of metrics, records, reports of losses
inline constexpr int64_t kBytesPerRank = 256;                    // membership, and further reports
inline constexpr int64_t kBytesPerTableRow = 256;                // of each layer of the session, on each server
inline constexpr int64_t kBytesPerLayer = 4096;                  // of each layer that a shard owns
inline constexpr int64_t kTableNames = 4, kLayerNames = 5;       // copies of a layer's name in these
inline constexpr int64_t kBytesPerLayerRank = 80;                // progress of one rank in one layer
inline constexpr int64_t kBytesPerRequest = 512;                 // of a rank that waits for a layer's answer

// Returns the bytes of the session's description and ranks, on each server that has the session.
inline int64_t SessionTableBytes(const SessionSpec& spec) {
  int64_t bytes = kBytesPerSession + spec.world_size * kBytesPerRank;
  for (const LayerSpec& layer : spec.layers) {
    bytes += kBytesPerTableRow + kTableNames * static_cast<int64_t>(layer.name.size());
  }
  return bytes;
}

// Returns the bytes of one layer on its shard. `contributors` is the number of ranks that wait for its answers.
inline int64_t LayerTableBytes(const SessionSpec& spec, const LayerSpec& layer, int64_t contributors) {
  return kBytesPerLayer + kLayerNames * static_cast<int64_t>(layer.name.size()) + spec.world_size * kBytesPerLayerRank +
         contributors * kBytesPerRequest;
}

}  // namespace precondor
