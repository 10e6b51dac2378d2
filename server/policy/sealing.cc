// SPDX-License-Identifier: Apache-2.0
#include "server/policy/sealing.h"

#include <cmath>

#include "absl/strings/str_cat.h"

namespace precondor {

SealingDecision DecideSealing(const SealingInput& input) {
  const int64_t arrived = input.present + input.abstained;
  const std::string count =
      absl::StrCat(input.present, " contributions and ", input.abstained, " abstentions of ", input.members);
  if (arrived >= input.members) {
    if (input.present == 0) return {SealingVerdict::kSkip, absl::StrCat("no contribution: ", count)};
    return {SealingVerdict::kSeal, absl::StrCat("complete: ", count)};
  }
  if (input.waited < input.deadline) return {SealingVerdict::kWait, absl::StrCat("waiting: ", count)};
  // Rounds up, with a tolerance for the error of quorum * members, so that 2/3 of 3 is 2.
  const int64_t needed = static_cast<int64_t>(std::ceil(input.quorum * static_cast<double>(input.members) - 1e-9));
  const std::string deadline = absl::StrCat(", deadline ", absl::FormatDuration(input.deadline), " passed");
  if (input.present > 0 && input.present >= needed) {
    return {SealingVerdict::kSeal, absl::StrCat("quorum of ", needed, ": ", count, deadline)};
  }
  return {SealingVerdict::kSkip, absl::StrCat("below the quorum of ", needed, ": ", count, deadline)};
}

}  // namespace precondor
