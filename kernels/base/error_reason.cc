// SPDX-License-Identifier: Apache-2.0
#include "kernels/base/error_reason.h"

#include <iterator>

#include "absl/strings/cord.h"
#include "absl/types/optional.h"

namespace precondor {
namespace {

constexpr absl::string_view kPayloadUrl = "precondor/error-reason";

constexpr absl::string_view kNames[] = {
    "UNSPECIFIED",        "MALFORMED",     "UNKNOWN_SESSION", "UNKNOWN_LAYER", "UNKNOWN_RANK",      "SHAPE_MISMATCH",
    "DTYPE_MISMATCH",     "SIZE_MISMATCH", "STALE_EPOCH",     "FUTURE_EPOCH",  "STALE_INCARNATION", "STALE_STEP",
    "STEP_TOO_FAR_AHEAD", "CONFLICT",      "NON_FINITE",      "OVER_NORM",     "MODE_CONFLICT",     "SPEC_MISMATCH",
    "NOT_STATISTIC_STEP", "NOT_DELEGATE",  "NOT_OWNER",       "CAPACITY",      "DRAINING",          "NOT_ACTIVE",
    "DUPLICATE_FRAME",    "STATE_LOST",    "STALE_LEADER",
};
static_assert(std::size(kNames) == static_cast<size_t>(ErrorReason::kStaleLeader) + 1);
static_assert(std::size(kNames) == kErrorReasonCount);

}  // namespace

absl::string_view ErrorReasonName(ErrorReason reason) {
  const auto index = static_cast<size_t>(reason);
  return index < std::size(kNames) ? kNames[index] : kNames[0];
}

absl::Status ReasonedStatus(absl::StatusCode code, ErrorReason reason, absl::string_view message) {
  absl::Status status(code, message);
  status.SetPayload(kPayloadUrl, absl::Cord(ErrorReasonName(reason)));
  return status;
}

absl::Status MalformedError(absl::string_view message) {
  return ReasonedStatus(absl::StatusCode::kInvalidArgument, ErrorReason::kMalformed, message);
}

ErrorReason GetErrorReason(const absl::Status& status) {
  const absl::optional<absl::Cord> payload = status.GetPayload(kPayloadUrl);
  if (!payload.has_value()) return ErrorReason::kUnspecified;
  for (size_t i = 0; i < std::size(kNames); ++i) {
    if (*payload == kNames[i]) return static_cast<ErrorReason>(i);
  }
  return ErrorReason::kUnspecified;
}

}  // namespace precondor
