// SPDX-License-Identifier: Apache-2.0
// What control calls may take: memory of decoded requests, and calls of a tenant in a second.
#pragma once

#include <cstdint>
#include <string>

#include "absl/base/thread_annotations.h"
#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"

#include "kernels/base/mutex.h"

namespace precondor::rpc {

// Counts decoded requests from their arrival until their calls have ended. Thread-safe.
class RequestBudget {
 public:
  // Bounds the sum of all requests that are counted. A session of 65,536 layers takes half of it.
  static constexpr uint64_t kMostBytes = uint64_t{64} << 20;
  // Requests of up to this size are neither counted nor refused, so that ranks go on while others fill the budget.
  static constexpr uint64_t kFreeBytes = 4096;

  // Counts a request that takes `decoded` bytes when it is decoded. Returns RESOURCE_EXHAUSTED if that is more than
  // kMostBytes, and UNAVAILABLE while the other requests leave no room for it.
  absl::Status Begin(absl::string_view method, uint64_t encoded, uint64_t decoded);
  // Precondition: Begin has returned OK for a request of this size.
  void End(uint64_t decoded);

 private:
  Mutex mu_;
  uint64_t bytes_ ABSL_GUARDED_BY(mu_) = 0;
};

// Limits the calls that each tenant begins in a second, so that one tenant's calls leave threads to the others. A token
// bucket for each tenant, which is full after a second without calls. Thread-safe.
class CallLimits {
 public:
  // `per_second` is at least 0, which means no limit.
  explicit CallLimits(int64_t per_second) : per_second_(static_cast<double>(per_second)) {}

  bool any() const { return per_second_ > 0; }
  // Counts a call that begins at `now`, a monotonic time. Returns UNAVAILABLE, which clients repeat after a pause, if
  // the tenant has begun as many as it may.
  absl::Status Admit(const std::string& tenant, absl::Time now);

 private:
  struct Bucket {
    double calls = 0;  // that the tenant may begin now
    absl::Time filled;
  };

  const double per_second_;
  Mutex mu_;
  absl::flat_hash_map<std::string, Bucket> buckets_ ABSL_GUARDED_BY(mu_);  // of the access file's tenants
};

}  // namespace precondor::rpc
