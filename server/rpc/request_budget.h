// SPDX-License-Identifier: Apache-2.0
// Bounds the memory of decoded requests, all unary calls together.
#pragma once

#include <cstdint>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/strings/string_view.h"

#include "kernels/base/mutex.h"

namespace precondor::rpc {

// Counts decoded requests from their arrival until their calls end. Thread-safe.
class RequestBudget {
 public:
  // Of all requests together, but for those below kFree. A session of 65,536 layers takes a third of it.
  static constexpr uint64_t kMostBytes = uint64_t{64} << 20;
  // Requests of up to this size are neither counted nor refused, so that ranks go on while others fill the budget.
  static constexpr uint64_t kFree = 4096;

  // With false, only messages that are made to grow are refused: for calls that wait for each other.
  explicit RequestBudget(bool bounds_sum = true) : bounds_sum_(bounds_sum) {}

  // Counts a request of `encoded` bytes that takes `decoded` bytes when it is decoded. Returns RESOURCE_EXHAUSTED if
  // that is more than kMostBytes and more than twice `encoded`, as of a message that is made to grow; UNAVAILABLE while
  // the other requests leave no room for it. A request larger than kMostBytes has to be alone.
  absl::Status Begin(absl::string_view request, uint64_t encoded, uint64_t decoded);
  // Precondition: Begin has returned OK for a request of this size.
  void End(uint64_t decoded);

 private:
  const bool bounds_sum_;
  Mutex mu_;
  uint64_t bytes_ ABSL_GUARDED_BY(mu_) = 0;
};

}  // namespace precondor::rpc
