// SPDX-License-Identifier: Apache-2.0
// Bounds the memory of decoded requests, of all control calls together.
#pragma once

#include <cstdint>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/strings/string_view.h"

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

}  // namespace precondor::rpc
