// SPDX-License-Identifier: Apache-2.0
// When a (step, layer) stops waiting for contributions. A pure function.
#pragma once

#include <cstdint>
#include <string>

#include "absl/time/time.h"

namespace precondor {

struct SealingInput {
  int64_t members = 0;    // who may contribute
  int64_t present = 0;    // contributions that count
  int64_t abstained = 0;  // abstentions and refused payloads
  double quorum = 1.0;    // fraction of the members that suffices at the deadline, in (0, 1]
  absl::Duration deadline = absl::InfiniteDuration();  // from when the step could have been sealed
  absl::Duration waited = absl::ZeroDuration();        // since then
};

enum class SealingVerdict : uint8_t { kWait, kSeal, kSkip };

struct SealingDecision {
  SealingVerdict verdict = SealingVerdict::kWait;
  std::string reason;
};

// All members in: kSeal, or kSkip when no contribution counts. Past the deadline: kSeal with a quorum of contributions,
// kSkip below.
SealingDecision DecideSealing(const SealingInput& input);

}  // namespace precondor
