// SPDX-License-Identifier: Apache-2.0
#include <set>
#include <string>

#include "gtest/gtest.h"

#include "kernels/base/check.h"
#include "kernels/base/error_reason.h"
#include "kernels/base/status_macros.h"

namespace precondor {
namespace {

TEST(ErrorReasonTest, RidesOnAStatus) {
  const absl::Status status = ReasonedStatus(absl::StatusCode::kAborted, ErrorReason::kConflict, "step 3");
  EXPECT_EQ(status.code(), absl::StatusCode::kAborted);
  EXPECT_EQ(status.message(), "step 3");
  const absl::Status copy = status;
  EXPECT_EQ(GetErrorReason(copy), ErrorReason::kConflict);
}

TEST(ErrorReasonTest, IsUnspecifiedWhereNoneWasGiven) {
  EXPECT_EQ(GetErrorReason(absl::OkStatus()), ErrorReason::kUnspecified);
  EXPECT_EQ(GetErrorReason(absl::InternalError("x")), ErrorReason::kUnspecified);
}

TEST(ErrorReasonTest, EveryReasonSurvivesAndHasItsOwnName) {
  std::set<std::string> names;
  for (int i = 0; i <= static_cast<int>(ErrorReason::kStaleLeader); ++i) {
    const auto reason = static_cast<ErrorReason>(i);
    names.insert(std::string(ErrorReasonName(reason)));
    EXPECT_EQ(GetErrorReason(ReasonedStatus(absl::StatusCode::kInternal, reason, "")), reason);
  }
  EXPECT_EQ(names.size(), static_cast<size_t>(ErrorReason::kStaleLeader) + 1);
}

absl::StatusOr<int> Half(int x) {
  if (x % 2 != 0) return absl::InvalidArgumentError("odd");
  return x / 2;
}

absl::StatusOr<int> Quarter(int x) {
  PRECONDOR_ASSIGN_OR_RETURN(const int half, Half(x));
  PRECONDOR_RETURN_IF_ERROR(Half(half).status());
  return half / 2;
}

TEST(StatusMacrosTest, ReturnEarly) {
  EXPECT_EQ(*Quarter(8), 2);
  EXPECT_FALSE(Quarter(3).ok());
  EXPECT_FALSE(Quarter(6).ok());
}

TEST(CheckDeathTest, AbortsAndNamesTheCondition) {
  const int n = 1;
  PRECONDOR_CHECK(n == 1);
  EXPECT_DEATH(PRECONDOR_CHECK(n == 2), "n == 2");
}

}  // namespace
}  // namespace precondor
