// SPDX-License-Identifier: Apache-2.0
// Layers of a snapshot that come in pieces.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <utility>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

#include "kernels/base/mutex.h"
#include "server/core/shard_journal.h"

namespace precondor::recovery {

struct LayerPiece {
  uint64_t session_id = 0;
  uint64_t step = 0;
  uint32_t layer = 0;
  uint64_t offset = 0;
  uint64_t total_bytes = 0;  // of the layer
  uint32_t checksum = 0;     // CRC-32C of the layer
  absl::string_view data;
};

// Thread-safe. Memory: what has come of layers that are not whole yet, at most kMaxLayers of them.
class LayerUploads {
 public:
  static constexpr size_t kMaxLayers = 4;

  // `limit_bytes`: of one layer.
  explicit LayerUploads(uint64_t limit_bytes) : limit_bytes_(limit_bytes) {}

  // The layer's image, in the place that the piece names, once this piece makes it whole. OutOfRange: not the next
  // piece, or beyond the total; ResourceExhausted: over the limit, or too many layers at once; DataLoss: what came is
  // not what the snapshot held.
  absl::StatusOr<std::optional<LayerImage>> Add(const LayerPiece& piece);

 private:
  const uint64_t limit_bytes_;
  Mutex mu_;
  std::map<std::pair<uint64_t, uint32_t>, std::string> begun_ ABSL_GUARDED_BY(mu_);  // by session and layer
};

}  // namespace precondor::recovery
