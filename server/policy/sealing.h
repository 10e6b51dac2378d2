// SPDX-License-Identifier: Apache-2.0
// Decides when a step of a layer stops waiting for contributions. A pure function.
#pragma once

#include <cstdint>
#include <string>

#include "absl/time/time.h"

namespace precondor {

struct SealingInput {
  int64_t members = 0;    // number of ranks that may contribute
  int64_t present = 0;    // number of contributions that count
  int64_t abstained = 0;  // number of abstentions and refused payloads
  double quorum = 1.0;    // fraction of the members that suffices at the deadline, in (0, 1]
  absl::Duration deadline = absl::InfiniteDuration();  // measured from the time when the step could first be sealed
  absl::Duration waited = absl::ZeroDuration();        // time since then
};

enum class SealingVerdict : uint8_t { kWait, kSeal, kSkip };

struct SealingDecision {
  SealingVerdict verdict = SealingVerdict::kWait;
  std::string reason;
};

// If all members have contributed or abstained: kSeal, or kSkip if no contribution counts. After the deadline: kSeal if
// the contributions reach the quorum, otherwise kSkip. Otherwise kWait.
SealingDecision DecideSealing(const SealingInput& input);

}  // namespace precondor
