// SPDX-License-Identifier: Apache-2.0
#include "server/app/periodic.h"

#include <atomic>
#include <pthread.h>

#include "gtest/gtest.h"

#include "tests/support/wait_until.h"

namespace precondor {
namespace {

TEST(PeriodicTimersTest, EachComesBackUntilAllAreStopped) {
  std::atomic<int> calls = 0;
  std::atomic<int> other_calls = 0;
  PeriodicTimers timers;
  timers.Start("one", absl::Milliseconds(1), [&] { ++calls; });
  timers.Start("other", absl::Milliseconds(1), [&] { ++other_calls; });
  EXPECT_TRUE(WaitUntil([&] { return calls >= 3 && other_calls >= 3; }));
  timers.StopAll();
  const int seen = calls;
  timers.StopAll();
  timers.Start("late", absl::Milliseconds(1), [&] { ++calls; });
  timers.StopAll();
  EXPECT_EQ(calls, seen);
}

TEST(PeriodicTimersTest, StopDoesNotWaitForThePause) {
  std::atomic<int> calls = 0;
  {
    PeriodicTimers timers;
    timers.Start("hourly", absl::Hours(1), [&] { ++calls; });
    EXPECT_TRUE(WaitUntil([&] { return calls == 1; }));
  }
  EXPECT_EQ(calls, 1);
}

TEST(PeriodicTimersTest, ThreadsHaveTheTimersNames) {
  std::atomic<bool> named = false;
  PeriodicTimers timers;
  timers.Start("fifteen-letters", absl::Milliseconds(1), [&] {
    char name[16] = "";
    pthread_getname_np(pthread_self(), name, sizeof(name));
    if (std::string(name) == "fifteen-letters") named = true;  // the name comes after the first call, perhaps
  });
  EXPECT_TRUE(WaitUntil([&] { return named.load(); }));
}

}  // namespace
}  // namespace precondor
