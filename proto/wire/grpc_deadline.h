// SPDX-License-Identifier: Apache-2.0
// Converts time-outs to deadlines of gRPC calls.
#pragma once

#include <algorithm>
#include <chrono>

#include "absl/time/time.h"

namespace precondor::wire {

// Returns the deadline for a call that starts now. Pass it to gRPC immediately: gRPC converts it to its monotonic
// clock, after which a change of the wall clock has no effect.
inline std::chrono::system_clock::time_point GrpcDeadline(absl::Duration timeout) {
  return std::chrono::system_clock::now() +
         std::chrono::duration_cast<std::chrono::system_clock::duration>(
             absl::ToChronoNanoseconds(std::clamp(timeout, absl::ZeroDuration(), absl::Hours(24 * 365))));
}

}  // namespace precondor::wire
