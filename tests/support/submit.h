// SPDX-License-Identifier: Apache-2.0
// A contribution on its way into a shard, as server/rpc sends it: admitted by its header, then submitted.
#pragma once

#include <utility>

#include "server/core/shard/shard.h"

namespace precondor {

// `ack` also hears of a refused admission. `result` is not called for statistics.
inline void SubmitTo(Shard& shard, ContributionHeader header, Payload payload, const AckFn& ack, ResultFn result = {}) {
  const uint64_t bytes =
      header.on_device == nullptr ? payload.size() : static_cast<uint64_t>(header.on_device->bytes());
  absl::StatusOr<AdmittedContribution> admitted = shard.data_plane().AdmitContribution(std::move(header), bytes);
  if (!admitted.ok()) return ack(admitted.status());
  shard.data_plane().Submit(*std::move(admitted), std::move(payload), ack, std::move(result));
}

}  // namespace precondor
