// SPDX-License-Identifier: Apache-2.0
#include "server/rpc/open_payloads.h"

#include "absl/strings/str_cat.h"

#include "kernels/base/error_reason.h"

namespace precondor::rpc {

absl::StatusOr<OpenPayloads::Hold> OpenPayloads::Begin(const ContributionKey& key, uint64_t bytes) {
  const Rank rank = {key.session_id, key.rank};
  const MutexLock lock(mu_);
  OfRank& open = ranks_[rank];
  if (open.payloads >= 2 && open.bytes + bytes > most_bytes_) {
    return ReasonedStatus(
        absl::StatusCode::kResourceExhausted, ErrorReason::kCapacity,
        absl::StrCat("session ", key.session_id, " step ", key.step, " layer ", key.layer, " rank ", key.rank,
                     ": expected at most ", most_bytes_, " bytes begun and not ended on all streams of a rank, got ",
                     bytes, " on top of ", open.bytes, " in ", open.payloads, " contributions"));
  }
  ++open.payloads;
  open.bytes += bytes;
  bytes_ += bytes;
  return Hold(this, GiveBack{rank, bytes});
}

uint64_t OpenPayloads::bytes() const {
  const MutexLock lock(mu_);
  return bytes_;
}

void OpenPayloads::End(const Rank& rank, uint64_t bytes) {
  const MutexLock lock(mu_);
  const auto open = ranks_.find(rank);
  open->second.bytes -= bytes;
  bytes_ -= bytes;
  if (--open->second.payloads == 0) ranks_.erase(open);
}

}  // namespace precondor::rpc
