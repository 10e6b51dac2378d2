// SPDX-License-Identifier: Apache-2.0
// Assembles layers that an operator or a worker sends in pieces (SnapshotService.RestoreLayer).
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <utility>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"

#include "kernels/base/clock.h"
#include "kernels/base/mutex.h"
#include "server/core/api/shard_journal.h"

namespace precondor::recovery {

struct LayerPiece {
  uint64_t session_id = 0;
  uint64_t step = 0;
  uint32_t layer = 0;
  uint64_t offset = 0;
  uint64_t total_bytes = 0;  // of the whole layer
  uint32_t checksum = 0;     // CRC-32C of the whole layer
  bool fetched = false;      // a saved state; otherwise an image
  absl::string_view data;
};

// Collects the pieces of up to kMaxLayers layers, one of each session, and decodes a layer when it is complete. Memory
// is bounded: the caller limits the size of each layer, after it has checked that the layer can be restored.
// Thread-safe.
class LayerUploads {
 public:
  static constexpr size_t kMaxLayers = 4;
  // An incomplete layer that has received no piece for this long is dropped when another layer begins.
  static constexpr absl::Duration kIdle = absl::Seconds(30);

  explicit LayerUploads(const Clock& clock) : clock_(clock) {}

  // Adds a piece; a piece with offset 0 starts the layer again. Returns the layer's image, with the piece's session,
  // layer and step, if this piece completes it, and nullopt otherwise. `state_bytes` is the greatest size of the
  // layer's state. Returns OUT_OF_RANGE if it is not the next piece or goes beyond total_bytes; RESOURCE_EXHAUSTED if
  // total_bytes exceeds state_bytes + kMostImageHeadBytes, or (CAPACITY) another layer of the session or kMaxLayers
  // other layers are incomplete; DATA_LOSS if the checksum is wrong; or the errors of DecodeImage.
  absl::StatusOr<std::optional<LayerImage>> Add(const LayerPiece& piece, uint64_t state_bytes);

 private:
  using Key = std::pair<uint64_t, uint32_t>;  // session id and layer
  struct Upload {
    std::string bytes;
    absl::Time last_piece;
  };
  // Drops idle layers. Returns RESOURCE_EXHAUSTED if one of the session, or kMaxLayers, remain.
  absl::Status MakeRoom(uint64_t session_id, const std::string& what) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);

  const Clock& clock_;
  Mutex mu_;
  std::map<Key, Upload> begun_ ABSL_GUARDED_BY(mu_);
};

}  // namespace precondor::recovery
