// SPDX-License-Identifier: Apache-2.0
#include "server/periodic.h"

#include <atomic>

#include "gtest/gtest.h"

#include "tests/support/wait_until.h"

namespace precondor {
namespace {

TEST(PeriodicTest, ComesBackUntilItIsStopped) {
  std::atomic<int> calls = 0;
  Periodic periodic;
  periodic.Start(absl::Milliseconds(1), [&] { ++calls; });
  EXPECT_TRUE(WaitUntil([&] { return calls >= 3; }));
  periodic.Stop();
  const int seen = calls;
  periodic.Stop();
  EXPECT_EQ(calls, seen);
}

TEST(PeriodicTest, StopDoesNotWaitForThePause) {
  std::atomic<int> calls = 0;
  {
    Periodic periodic;
    periodic.Start(absl::Hours(1), [&] { ++calls; });
    EXPECT_TRUE(WaitUntil([&] { return calls == 1; }));
  }
  EXPECT_EQ(calls, 1);
}

TEST(PeriodicTest, NeedNotBeStarted) {
  Periodic periodic;
  periodic.Stop();
}

}  // namespace
}  // namespace precondor
