// SPDX-License-Identifier: Apache-2.0
// Large payloads that a session has freed and keeps for its next gradients: to get their pages from the system costs
// as much as to move them.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "kernels/base/mutex.h"
#include "kernels/base/session_spec.h"
#include "server/core/api/contribution.h"

namespace precondor {

// Returns the most bytes that a session keeps: for each rank its largest gradient, up to 64 MiB.
int64_t MostKeptBytes(const SessionSpec& spec);

// Thread-safe. Hold it by shared_ptr: what it has shared can outlive it.
class PayloadPool : public std::enable_shared_from_this<PayloadPool> {
 public:
  // Smaller payloads are malloc's, which keeps their pages.
  static constexpr uint64_t kLeastBytes = uint64_t{1} << 20;

  explicit PayloadPool(int64_t most_bytes) : most_bytes_(static_cast<uint64_t>(most_bytes)) {}

  // Returns an empty payload, with room for `bytes` if one is kept that is at most a quarter larger.
  Payload Take(uint64_t bytes);
  // Keeps the payload's memory if there is room for it. Its contents are of no use any more.
  void Give(Payload payload);
  // Returns the payload, whose memory is given back with its last reference.
  std::shared_ptr<const Payload> Share(Payload payload);

 private:
  const uint64_t most_bytes_;
  Mutex mu_;
  std::vector<Payload> kept_ ABSL_GUARDED_BY(mu_);
  uint64_t kept_bytes_ ABSL_GUARDED_BY(mu_) = 0;
};

}  // namespace precondor
