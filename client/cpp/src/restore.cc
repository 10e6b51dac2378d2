// SPDX-License-Identifier: Apache-2.0
#include "client/cpp/src/restore.h"

#include <algorithm>
#include <cstddef>
#include <string>

#include "absl/strings/str_cat.h"

#include "kernels/base/status_macros.h"

namespace precondor {
namespace {

constexpr size_t kPieceBytes = size_t{1} << 20;

}  // namespace

absl::Status SendLayer(ControlClient& shard, v1::RestoreLayerRequest piece, absl::string_view bytes,
                       Canceller& canceller) {
  piece.set_total_bytes(bytes.size());
  size_t offset = 0;
  bool restored = false;
  do {
    const absl::string_view data = bytes.substr(offset, kPieceBytes);
    piece.set_offset(offset);
    piece.set_data(std::string(data));
    PRECONDOR_ASSIGN_OR_RETURN(const v1::RestoreLayerResponse taken, shard.RestoreLayer(piece, canceller));
    restored = taken.restored();
    offset += data.size();
  } while (offset < bytes.size());
  if (restored) return absl::OkStatus();
  return absl::InternalError(
      absl::StrCat("layer ", piece.layer(), ": was sent completely, but the shard expects more"));
}

}  // namespace precondor
