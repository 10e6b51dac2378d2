// SPDX-License-Identifier: Apache-2.0
// Matchers of absl::Status and absl::StatusOr. A later Abseil has StatusIs too; `what` is a matcher of the message, or
// the reason that the status carries.
#pragma once

#include <string>
#include <type_traits>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "gmock/gmock.h"

#include "kernels/base/error_reason.h"

namespace precondor {

inline const absl::Status& StatusOf(const absl::Status& status) { return status; }
template <typename Value>
const absl::Status& StatusOf(const absl::StatusOr<Value>& value) {
  return value.status();
}

MATCHER_P(MessageIs, message, "") {
  *result_listener << StatusOf(arg);
  return ::testing::ExplainMatchResult(message, std::string(StatusOf(arg).message()), result_listener);
}
MATCHER_P(StatusIs, code, "") {
  *result_listener << StatusOf(arg);
  return StatusOf(arg).code() == code;
}
MATCHER_P(ReasonIs, reason, "") {
  *result_listener << StatusOf(arg);
  return GetErrorReason(StatusOf(arg)) == reason;
}
MATCHER_P2(ReasonIs, reason, message, "") {
  return ::testing::ExplainMatchResult(::testing::AllOf(ReasonIs(reason), MessageIs(message)), arg, result_listener);
}
MATCHER_P2(StatusIs, code, what, "") {
  if constexpr (std::is_same_v<what_type, ErrorReason>) {
    return ::testing::ExplainMatchResult(::testing::AllOf(StatusIs(code), ReasonIs(what)), arg, result_listener);
  } else {
    return ::testing::ExplainMatchResult(::testing::AllOf(StatusIs(code), MessageIs(what)), arg, result_listener);
  }
}
MATCHER_P3(StatusIs, code, reason, message, "") {
  return ::testing::ExplainMatchResult(::testing::AllOf(StatusIs(code), ReasonIs(reason, message)), arg,
                                       result_listener);
}

}  // namespace precondor
