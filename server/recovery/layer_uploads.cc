// SPDX-License-Identifier: Apache-2.0
#include "server/recovery/layer_uploads.h"

#include <algorithm>

#include "absl/strings/str_cat.h"

#include "kernels/base/status_macros.h"
#include "server/recovery/record_codec.h"
#include "server/store/crc32c.h"

namespace precondor::recovery {

absl::StatusOr<std::optional<LayerImage>> LayerUploads::Add(const LayerPiece& piece) {
  const std::string what = absl::StrCat("session_id ", piece.session_id, " layer ", piece.layer, ": ");
  if (piece.total_bytes > limit_bytes_) {
    return absl::ResourceExhaustedError(
        absl::StrCat(what, "expected at most ", limit_bytes_, " bytes, got ", piece.total_bytes));
  }
  std::string bytes;
  {
    MutexLock lock(mu_);
    const std::pair<uint64_t, uint32_t> key(piece.session_id, piece.layer);
    if (piece.offset == 0) begun_.erase(key);
    const auto found = begun_.find(key);
    const uint64_t have = found == begun_.end() ? 0 : found->second.size();
    if (piece.offset != have || piece.data.size() > piece.total_bytes - have) {
      return absl::OutOfRangeError(absl::StrCat(what, "expected offset ", have, " and at most ",
                                                piece.total_bytes - std::min(have, piece.total_bytes),
                                                " bytes, got offset ", piece.offset, " and ", piece.data.size()));
    }
    if (found == begun_.end() && begun_.size() >= kMaxLayers) {
      return absl::ResourceExhaustedError(absl::StrCat(what, kMaxLayers, " others are being sent; one after another"));
    }
    std::string& begun = begun_[key];
    begun.append(piece.data.data(), piece.data.size());
    if (begun.size() < piece.total_bytes) return std::nullopt;
    bytes = std::move(begun);
    begun_.erase(key);
  }
  const uint32_t checksum = store::Crc32c(bytes);
  if (checksum != piece.checksum) {
    return absl::DataLossError(absl::StrCat(what, "expected checksum ", piece.checksum, ", got ", checksum));
  }
  PRECONDOR_ASSIGN_OR_RETURN(LayerImage image, DecodeImage(bytes));
  image.at = {.session_id = piece.session_id, .layer = piece.layer, .step = piece.step};
  return image;
}

}  // namespace precondor::recovery
