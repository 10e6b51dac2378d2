// SPDX-License-Identifier: Apache-2.0
// Bounds the memory that streams share with workers of this host for their messages.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

#include "proto/wire/shared_memory.h"

namespace precondor::rpc {

// Thread-safe. Lifetime: outlives its holds.
class SharedMemoryLimit {
 public:
  // With `most_bytes` 0, no stream gets memory.
  explicit SharedMemoryLimit(int64_t most_bytes) : most_bytes_(most_bytes) {}

  struct GiveBack {
    void operator()(SharedMemoryLimit* limit) const { limit->bytes_.fetch_sub(kBytes); }
  };
  // The right to the memory of one stream; it ends with this object.
  using Hold = std::unique_ptr<SharedMemoryLimit, GiveBack>;

  int64_t bytes() const { return bytes_.load(); }
  // Whether to offer memory to `peer`, as gRPC names the peer of a call: it is on this host.
  bool MayOffer(const std::string& peer) const;
  // Returns RESOURCE_EXHAUSTED (CAPACITY) if other streams have all of it.
  absl::StatusOr<Hold> Take();

 private:
  static constexpr int64_t kBytes = static_cast<int64_t>(wire::SharedMemory::kBytes);

  const int64_t most_bytes_;
  std::atomic<int64_t> bytes_ = 0;
};

}  // namespace precondor::rpc
