// SPDX-License-Identifier: Apache-2.0
// What ranks have begun to send and not ended, over all streams: so that opening more streams takes no more memory.
#pragma once

#include <cstdint>
#include <memory>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/container/flat_hash_map.h"
#include "absl/status/statusor.h"

#include "kernels/base/mutex.h"
#include "server/core/contribution.h"

namespace precondor::rpc {

// Thread-safe. Its holds die before it does.
class OpenPayloads {
 private:
  using Rank = std::pair<uint64_t, uint32_t>;  // of a session

 public:
  // A rank may have two streams, of which one has broken and is not known to have: each may hold its credit, or one
  // payload that is larger.
  explicit OpenPayloads(uint64_t credit_bytes) : most_bytes_(2 * credit_bytes) {}

  struct GiveBack {
    Rank rank;
    uint64_t bytes = 0;
    void operator()(OpenPayloads* payloads) const { payloads->End(rank, bytes); }
  };
  // One payload that is counted, until it dies.
  using Hold = std::unique_ptr<OpenPayloads, GiveBack>;

  // ResourceExhausted CAPACITY, with numbers, beyond twice the credit: it is worth trying again.
  absl::StatusOr<Hold> Begin(const ContributionKey& key, uint64_t bytes);

 private:
  struct OfRank {
    uint64_t payloads = 0, bytes = 0;
  };
  void End(const Rank& rank, uint64_t bytes);

  const uint64_t most_bytes_;
  Mutex mu_;
  absl::flat_hash_map<Rank, OfRank> ranks_ ABSL_GUARDED_BY(mu_);  // that have some
};

}  // namespace precondor::rpc
