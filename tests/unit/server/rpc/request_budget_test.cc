// SPDX-License-Identifier: Apache-2.0
#include "server/rpc/request_budget.h"

#include <gtest/gtest.h>

namespace precondor::rpc {
namespace {

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

}  // namespace
}  // namespace precondor::rpc
