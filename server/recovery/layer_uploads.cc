// SPDX-License-Identifier: Apache-2.0
#include "server/recovery/layer_uploads.h"

#include <algorithm>

#include "absl/strings/str_cat.h"

#include "kernels/base/error_reason.h"
#include "kernels/base/status_macros.h"
#include "server/recovery/record_codec.h"
#include "server/store/crc32c.h"

namespace precondor::recovery {

absl::Status LayerUploads::MakeRoom(uint64_t session_id, const std::string& what) {
  const absl::Time now = clock_.Now();
  std::erase_if(begun_, [now](const auto& entry) { return now - entry.second.last_piece >= kIdle; });
  const auto own = begun_.lower_bound(Key(session_id, 0));
  if (own != begun_.end() && own->first.first == session_id) {
    return ReasonedStatus(
        absl::StatusCode::kResourceExhausted, ErrorReason::kCapacity,
        absl::StrCat(what, "layer ", own->first.second, " of the session is being sent; expected one after the other"));
  }
  if (begun_.size() < kMaxLayers) return absl::OkStatus();
  return ReasonedStatus(absl::StatusCode::kResourceExhausted, ErrorReason::kCapacity,
                        absl::StrCat(what, kMaxLayers, " other layers are being sent; try again later"));
}

absl::StatusOr<std::optional<LayerImage>> LayerUploads::Add(const LayerPiece& piece, uint64_t state_bytes) {
  const std::string what = absl::StrCat("session_id ", piece.session_id, " layer ", piece.layer, ": ");
  if (piece.total_bytes > state_bytes + kMostImageHeadBytes) {
    return absl::ResourceExhaustedError(
        absl::StrCat(what, "expected at most ", state_bytes + kMostImageHeadBytes, " bytes, got ", piece.total_bytes));
  }
  std::string bytes;
  {
    MutexLock lock(mu_);
    const Key key(piece.session_id, piece.layer);
    if (piece.offset == 0) begun_.erase(key);
    const auto found = begun_.find(key);
    const uint64_t have = found == begun_.end() ? 0 : found->second.bytes.size();
    if (piece.offset != have || have > piece.total_bytes || piece.data.size() > piece.total_bytes - have) {
      return absl::OutOfRangeError(absl::StrCat(what, "expected offset ", have, " and at most ",
                                                piece.total_bytes - std::min(have, piece.total_bytes),
                                                " bytes, got offset ", piece.offset, " and ", piece.data.size()));
    }
    if (found == begun_.end()) PRECONDOR_RETURN_IF_ERROR(MakeRoom(piece.session_id, what));
    Upload& upload = begun_[key];
    upload.bytes.append(piece.data.data(), piece.data.size());
    upload.last_piece = clock_.Now();
    if (upload.bytes.size() < piece.total_bytes) return std::nullopt;
    bytes = std::move(upload.bytes);
    begun_.erase(key);
  }
  LayerImage image;
  if (piece.fetched) {
    image.state = std::move(bytes);
  } else {
    const uint32_t checksum = store::Crc32c(bytes);
    if (checksum != piece.checksum) {
      return absl::DataLossError(absl::StrCat(what, "expected checksum ", piece.checksum, ", got ", checksum));
    }
    PRECONDOR_ASSIGN_OR_RETURN(image, DecodeImage(bytes));
  }
  image.at = {.session_id = piece.session_id, .layer = piece.layer, .step = piece.step};
  return image;
}

}  // namespace precondor::recovery
