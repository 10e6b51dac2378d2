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
#include "absl/time/time.h"

#include "kernels/base/clock.h"
#include "kernels/base/mutex.h"
#include "server/core/shard/shard_journal.h"

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

// Thread-safe. Memory: what has come of layers that are not whole yet, at most kMaxLayers of them. Each is at most as
// large as the caller allows, who has checked by then that the layer can be restored.
class LayerUploads {
 public:
  static constexpr size_t kMaxLayers = 4;
  // A layer of which no piece comes for so long gives its place to another one.
  static constexpr absl::Duration kIdle = absl::Seconds(30);
  // Of an image, besides the state: its head and the plans of the last steps.
  static constexpr uint64_t kHeadBytes = 64 << 10;

  explicit LayerUploads(const Clock& clock) : clock_(clock) {}

  // The layer's image, in the place that the piece names, once this piece makes it whole. `state_bytes`: the most that
  // the layer's state can have. OutOfRange: not the next piece, or beyond the total; ResourceExhausted: over
  // state_bytes + kHeadBytes, or too many layers at once; DataLoss: what came is not what the snapshot held.
  absl::StatusOr<std::optional<LayerImage>> Add(const LayerPiece& piece, uint64_t state_bytes);

 private:
  using Key = std::pair<uint64_t, uint32_t>;  // session and layer
  struct Upload {
    std::string bytes;
    absl::Time last_piece;
  };
  // OK when there is room for one more.
  absl::Status MakeRoom(const std::string& what) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);

  const Clock& clock_;
  Mutex mu_;
  std::map<Key, Upload> begun_ ABSL_GUARDED_BY(mu_);
};

}  // namespace precondor::recovery
