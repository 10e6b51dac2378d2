// SPDX-License-Identifier: Apache-2.0
// The deadline of a call, as gRPC takes it.
#pragma once

#include <algorithm>
#include <chrono>

#include "absl/time/time.h"

namespace precondor::wire {

// To be handed over at once: gRPC makes it a time of its monotonic clock when it gets it, so that a wall clock which is
// set later does no harm.
inline std::chrono::system_clock::time_point GrpcDeadline(absl::Duration timeout) {
  return std::chrono::system_clock::now() +
         std::chrono::duration_cast<std::chrono::system_clock::duration>(
             absl::ToChronoNanoseconds(std::clamp(timeout, absl::ZeroDuration(), absl::Hours(24 * 365))));
}

}  // namespace precondor::wire
