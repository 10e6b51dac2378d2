// SPDX-License-Identifier: Apache-2.0
#include "client/cpp/src/restore.h"

#include <cstddef>
#include <string>

#include "absl/strings/str_cat.h"
#include "absl/time/time.h"

#include "kernels/base/clock.h"
#include "kernels/base/error_reason.h"
#include "kernels/base/status_macros.h"

namespace precondor {
namespace {

constexpr size_t kPieceBytes = size_t{1} << 20;
constexpr absl::Duration kPause = absl::Milliseconds(100);
// A shard assembles the layers of a few sessions at a time.
constexpr absl::Duration kMostWait = absl::Minutes(2);

absl::StatusOr<bool> SendOnce(ControlClient& shard, v1::RestoreLayerRequest& piece, absl::string_view bytes,
                              Canceller& canceller) {
  size_t offset = 0;
  bool restored = false;
  do {
    const absl::string_view data = bytes.substr(offset, kPieceBytes);
    piece.set_offset(offset);
    piece.set_data(std::string(data));
    PRECONDOR_ASSIGN_OR_RETURN(const auto taken, shard.Call<v1::RestoreLayerResponse>(piece, canceller));
    restored = taken.restored();
    offset += data.size();
  } while (offset < bytes.size());
  return restored;
}

}  // namespace

absl::Status SendLayer(ControlClient& shard, v1::RestoreLayerRequest piece, absl::string_view bytes,
                       Canceller& canceller) {
  piece.set_total_bytes(bytes.size());
  const absl::Time deadline = MonotonicNow() + kMostWait;
  while (true) {
    const absl::StatusOr<bool> restored = SendOnce(shard, piece, bytes, canceller);
    if (restored.ok()) {
      if (*restored) return absl::OkStatus();
      return absl::InternalError(
          absl::StrCat("layer ", piece.layer(), ": was sent completely, but the shard expects more"));
    }
    // Other sessions are restored there, or an answer was lost and a piece was sent twice.
    const bool again =
        GetErrorReason(restored.status()) == ErrorReason::kCapacity || absl::IsOutOfRange(restored.status());
    if (!again || MonotonicNow() + kPause >= deadline || !canceller.Pause(kPause)) return restored.status();
  }
}

}  // namespace precondor
