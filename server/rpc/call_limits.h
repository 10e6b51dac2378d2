// SPDX-License-Identifier: Apache-2.0
// Limits for the calls that each tenant begins in a second, so that one tenant's calls leave threads to the others.
#pragma once

#include <cstdint>
#include <string>

#include "absl/base/thread_annotations.h"
#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"
#include "absl/time/time.h"

#include "kernels/base/mutex.h"

namespace precondor::rpc {

// A token bucket for each tenant, which is full after a second without calls. Thread-safe.
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
