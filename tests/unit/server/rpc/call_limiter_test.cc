// SPDX-License-Identifier: Apache-2.0
#include "server/rpc/call_limiter.h"

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace precondor::rpc {
namespace {

using ::testing::HasSubstr;

const absl::Time kStart = absl::FromUnixSeconds(1000);

// The calls of `tenant` that are admitted of a hundred at once.
int AdmittedAtOnce(CallLimiter& limiter, const std::string& tenant, absl::Time now) {
  int admitted = 0;
  for (int i = 0; i < 100; ++i) admitted += limiter.Admit(tenant, now).ok() ? 1 : 0;
  return admitted;
}

TEST(CallLimiterTest, AdmitsASecondsCallsAtOnceAndThenAsTimeGoesBy) {
  CallLimiter limiter(10);
  EXPECT_EQ(AdmittedAtOnce(limiter, "a", kStart), 10);
  EXPECT_EQ(AdmittedAtOnce(limiter, "a", kStart + absl::Milliseconds(99)), 0);
  EXPECT_EQ(AdmittedAtOnce(limiter, "a", kStart + absl::Milliseconds(501)), 5);
  EXPECT_EQ(AdmittedAtOnce(limiter, "a", kStart + absl::Hours(1)), 10) << "no more after a long silence";
}

TEST(CallLimiterTest, TenantsDoNotTakeEachOthersCalls) {
  CallLimiter limiter(10);
  EXPECT_EQ(AdmittedAtOnce(limiter, "a", kStart), 10);
  EXPECT_EQ(AdmittedAtOnce(limiter, "b", kStart), 10);
}

TEST(CallLimiterTest, RefusesWithTheNumberAndZeroIsNoLimit) {
  CallLimiter limiter(1), none(0);
  ASSERT_TRUE(limiter.Admit("a", kStart).ok());
  const absl::Status refused = limiter.Admit("a", kStart);
  EXPECT_EQ(refused.code(), absl::StatusCode::kUnavailable);
  EXPECT_THAT(std::string(refused.message()), HasSubstr("at most 1 calls a second of one tenant (tenant_max_calls)"));
  EXPECT_EQ(AdmittedAtOnce(none, "a", kStart), 100);
}

}  // namespace
}  // namespace precondor::rpc
