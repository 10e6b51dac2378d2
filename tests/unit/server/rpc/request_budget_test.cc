// SPDX-License-Identifier: Apache-2.0
#include "server/rpc/request_budget.h"

#include <gtest/gtest.h>

namespace precondor::rpc {
namespace {

constexpr uint64_t kMost = RequestBudget::kMostBytes;

TEST(RequestBudgetTest, WaitsForRoomAndGivesItBack) {
  RequestBudget budget;
  EXPECT_TRUE(budget.Begin("a", kMost, kMost - 10).ok());
  const absl::Status full = budget.Begin("OpenSessionRequest", 500, 5000);
  EXPECT_TRUE(absl::IsUnavailable(full));
  EXPECT_NE(full.message().find("OpenSessionRequest: takes 5000 bytes when decoded"), std::string::npos) << full;
  EXPECT_TRUE(budget.Begin("small", 100, RequestBudget::kFree).ok());
  budget.End(RequestBudget::kFree);
  budget.End(kMost - 10);
  EXPECT_TRUE(budget.Begin("a", 500, 5000).ok());
}

TEST(RequestBudgetTest, RefusesWhatGrowsAndTakesLargeMessagesOneByOne) {
  RequestBudget budget;
  const absl::Status grown = budget.Begin("JoinSessionRequest", 1000, kMost + 1);
  EXPECT_TRUE(absl::IsResourceExhausted(grown));
  EXPECT_NE(grown.message().find("of 1000 bytes that takes 67108865"), std::string::npos) << grown;
  EXPECT_TRUE(budget.Begin("large", kMost, kMost + 1).ok());
  EXPECT_TRUE(absl::IsUnavailable(budget.Begin("large", kMost, kMost + 1)));
  budget.End(kMost + 1);
  EXPECT_TRUE(budget.Begin("large", kMost, kMost + 1).ok());
}

TEST(RequestBudgetTest, CallsThatWaitForEachOtherHaveNoSum) {
  RequestBudget budget(/*bounds_sum=*/false);
  for (int i = 0; i < 3; ++i) EXPECT_TRUE(budget.Begin("gradient", kMost, kMost + 100).ok());
  EXPECT_TRUE(absl::IsResourceExhausted(budget.Begin("gradient", 1000, kMost + 1)));
}

}  // namespace
}  // namespace precondor::rpc
