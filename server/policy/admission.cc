// SPDX-License-Identifier: Apache-2.0
#include "server/policy/admission.h"

#include "absl/strings/str_cat.h"

namespace precondor {

AdmissionDecision DecideAdmission(const AdmissionInput& input) {
  AdmissionDecision decision;
  // Subtracted instead of added, because `needed` depends on a client's layer table and may be near the end of the
  // range.
  decision.admit = input.needed <= input.capacity - input.reserved;
  decision.reason = absl::StrCat(decision.admit ? "fits: " : "does not fit: ", "needed ", input.needed,
                                 " bytes, reserved ", input.reserved, " of capacity ", input.capacity);
  return decision;
}

}  // namespace precondor
