// SPDX-License-Identifier: Apache-2.0
// Bounds the payloads that each rank has begun and not completed, over all its streams and unary calls, so that a rank
// cannot make the server use more memory by opening more streams.
#pragma once

#include <cstdint>
#include <memory>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/container/flat_hash_map.h"
#include "absl/status/statusor.h"

#include "kernels/base/mutex.h"
#include "server/core/api/contribution.h"

namespace precondor::rpc {

// Counts the incomplete payloads of each rank. Thread-safe. Lifetime: outlives its holds.
class OpenPayloads {
 private:
  using Rank = std::pair<uint64_t, uint32_t>;  // session and rank

 public:
  // A rank can have two streams if one has broken and the server has not noticed yet. Each can hold `credit_bytes`, or
  // one larger payload.
  explicit OpenPayloads(uint64_t credit_bytes) : most_bytes_(2 * credit_bytes) {}

  struct GiveBack {
    Rank rank;
    uint64_t bytes = 0;
    void operator()(OpenPayloads* payloads) const { payloads->End(rank, bytes); }
  };
  // A counted payload; the count ends with this object.
  using Hold = std::unique_ptr<OpenPayloads, GiveBack>;

  // Counts a payload of `bytes` for the key's rank. Returns RESOURCE_EXHAUSTED (CAPACITY) if the rank has two payloads
  // or more and would have more than twice the credit. The client can retry.
  absl::StatusOr<Hold> Begin(const ContributionKey& key, uint64_t bytes);

  // Sum over all ranks.
  uint64_t bytes() const;

 private:
  struct OfRank {
    uint64_t payloads = 0, bytes = 0;
  };
  void End(const Rank& rank, uint64_t bytes);

  const uint64_t most_bytes_;
  mutable Mutex mu_;
  absl::flat_hash_map<Rank, OfRank> ranks_ ABSL_GUARDED_BY(mu_);  // only ranks with incomplete payloads
  uint64_t bytes_ ABSL_GUARDED_BY(mu_) = 0;
};

}  // namespace precondor::rpc
