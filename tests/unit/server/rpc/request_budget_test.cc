// SPDX-License-Identifier: Apache-2.0
#include "server/rpc/request_budget.h"

#include <gtest/gtest.h>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace precondor::rpc {
namespace {

using ::testing::HasSubstr;

constexpr uint64_t kMost = RequestBudget::kMostBytes;

TEST(RequestBudgetTest, WaitsForRoomAndGivesItBack) {
  RequestBudget budget;
  EXPECT_TRUE(budget.Begin("a", kMost, kMost - 10).ok());
  const absl::Status full = budget.Begin("Open", 500, 5000);
  EXPECT_TRUE(absl::IsUnavailable(full));
  EXPECT_NE(full.message().find("Open: the request takes 5000 bytes"), std::string::npos) << full;
  EXPECT_TRUE(budget.Begin("small", 100, RequestBudget::kFreeBytes).ok());
  budget.End(RequestBudget::kFreeBytes);
  budget.End(kMost - 10);
  EXPECT_TRUE(budget.Begin("a", 500, 5000).ok());
}

TEST(RequestBudgetTest, RefusesWhatIsTooLargeByItself) {
  RequestBudget budget;
  const absl::Status grown = budget.Begin("JoinSession", 1000, kMost + 1);
  EXPECT_TRUE(absl::IsResourceExhausted(grown));
  EXPECT_NE(grown.message().find("got one of 1000 bytes that takes 67108865"), std::string::npos) << grown;
  EXPECT_TRUE(budget.Begin("large", kMost, kMost).ok());
}

const absl::Time kStart = absl::FromUnixSeconds(1000);

// The calls of `tenant` that are admitted of a hundred at once.
int AdmittedAtOnce(CallLimits& limits, const std::string& tenant, absl::Time now) {
  int admitted = 0;
  for (int i = 0; i < 100; ++i) admitted += limits.Admit(tenant, now).ok() ? 1 : 0;
  return admitted;
}

TEST(CallLimitsTest, AdmitsASecondsCallsAtOnceAndThenAsTimeGoesBy) {
  CallLimits limits(10);
  EXPECT_EQ(AdmittedAtOnce(limits, "a", kStart), 10);
  EXPECT_EQ(AdmittedAtOnce(limits, "a", kStart + absl::Milliseconds(99)), 0);
  EXPECT_EQ(AdmittedAtOnce(limits, "a", kStart + absl::Milliseconds(501)), 5);
  EXPECT_EQ(AdmittedAtOnce(limits, "a", kStart + absl::Hours(1)), 10) << "no more after a long silence";
}

TEST(CallLimitsTest, TenantsDoNotTakeEachOthersCalls) {
  CallLimits limits(10);
  EXPECT_EQ(AdmittedAtOnce(limits, "a", kStart), 10);
  EXPECT_EQ(AdmittedAtOnce(limits, "b", kStart), 10);
}

TEST(CallLimitsTest, RefusesWithTheNumberAndZeroIsNoLimit) {
  CallLimits limits(1), none(0);
  ASSERT_TRUE(limits.Admit("a", kStart).ok());
  const absl::Status refused = limits.Admit("a", kStart);
  EXPECT_EQ(refused.code(), absl::StatusCode::kUnavailable);
  EXPECT_THAT(std::string(refused.message()), HasSubstr("at most 1 calls a second of one tenant (tenant_max_calls)"));
  EXPECT_EQ(AdmittedAtOnce(none, "a", kStart), 100);
}

}  // namespace

}  // namespace precondor::rpc
