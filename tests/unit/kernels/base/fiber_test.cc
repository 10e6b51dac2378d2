// SPDX-License-Identifier: Apache-2.0
#include "kernels/base/fiber.h"

#include <deque>
#include <memory>
#include <thread>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace precondor {
namespace {

using ::testing::ElementsAre;

// Keeps the fibers that come, for the test to run.
class Collector final : public FiberScheduler {
 public:
  void Resume(Fiber& fiber) override { fibers_.push_back(&fiber); }
  Fiber& Take() {
    Fiber& fiber = *fibers_.front();
    fibers_.pop_front();
    return fiber;
  }
  bool empty() const { return fibers_.empty(); }

 private:
  std::deque<Fiber*> fibers_;
};

TEST(FiberTest, GoesOnWhereItHasSuspendedItself) {
  Collector home;
  const std::unique_ptr<Fiber> one = Fiber::Make(home), other = Fiber::Make(home);
  std::vector<int> seen;
  const auto count = [&seen](int from) {
    for (int i = from; i < from + 3; ++i) {
      seen.push_back(i);
      Fiber::Suspend();
    }
  };
  one->Set([&] { count(0); }, 0);
  other->Set([&] { count(10); }, 0);
  for (int i = 0; i < 3; ++i) {
    EXPECT_EQ(one->Run(), Fiber::Outcome::kSuspended);
    EXPECT_EQ(other->Run(), Fiber::Outcome::kSuspended);
  }
  EXPECT_EQ(one->Run(), Fiber::Outcome::kEnded);
  EXPECT_EQ(other->Run(), Fiber::Outcome::kEnded);
  EXPECT_THAT(seen, ElementsAre(0, 10, 1, 11, 2, 12));
  one->Set([&] { seen.clear(); }, 0);  // the same stack serves the next function
  EXPECT_EQ(one->Run(), Fiber::Outcome::kEnded);
  EXPECT_THAT(seen, ElementsAre());
}

TEST(FiberTest, GoesOnOnTheThreadThatRunsIt) {
  Collector home, driver;
  const std::unique_ptr<Fiber> fiber = Fiber::Make(home);
  std::vector<std::thread::id> threads;
  std::vector<bool> at_home;
  const auto note = [&] {
    EXPECT_EQ(Fiber::Current(), fiber.get());
    threads.push_back(std::this_thread::get_id());
    at_home.push_back(Fiber::Current()->at_home());
  };
  fiber->Set(
      [&] {
        note();
        Fiber::MoveTo(driver);
        note();
        RunBlocking(note);
        note();
        Fiber::Return();
        RunBlocking(note);
      },
      7);
  EXPECT_EQ(fiber->order(), 7u);
  EXPECT_EQ(Fiber::Current(), nullptr);
  EXPECT_EQ(fiber->Run(), Fiber::Outcome::kTaken);
  EXPECT_EQ(Fiber::Current(), nullptr);
  std::thread::id other;
  std::thread([&] {
    other = std::this_thread::get_id();
    EXPECT_EQ(driver.Take().Run(), Fiber::Outcome::kTaken);
  }).join();
  EXPECT_EQ(home.Take().Run(), Fiber::Outcome::kTaken);
  EXPECT_EQ(driver.Take().Run(), Fiber::Outcome::kTaken);
  EXPECT_EQ(home.Take().Run(), Fiber::Outcome::kEnded);
  const std::thread::id here = std::this_thread::get_id();
  EXPECT_THAT(threads, ElementsAre(here, other, here, here, here));
  EXPECT_THAT(at_home, ElementsAre(true, false, true, false, true));
  EXPECT_TRUE(home.empty() && driver.empty());
}

TEST(FiberTest, KeepsLocalsOfItsOwnAndArguments) {
  Collector home;
  std::vector<std::unique_ptr<Fiber>> fibers;
  std::vector<double> sums(50);
  for (size_t i = 0; i < sums.size(); ++i) {
    fibers.push_back(Fiber::Make(home));
    fibers[i]->Set(
        [&sums, i] {
          double numbers[500];  // on the stack
          for (int n = 0; n < 500; ++n) numbers[n] = static_cast<double>(i) + n;
          Fiber::Current()->local() = std::make_shared<size_t>(i);
          Fiber::Suspend();
          for (const double number : numbers) sums[i] += number;
          EXPECT_EQ(*static_cast<size_t*>(Fiber::Current()->local().get()), i);
        },
        i);
  }
  for (const auto& fiber : fibers) EXPECT_EQ(fiber->Run(), Fiber::Outcome::kSuspended);
  for (auto fiber = fibers.rbegin(); fiber != fibers.rend(); ++fiber) {
    EXPECT_EQ((*fiber)->Run(), Fiber::Outcome::kEnded);
  }
  for (size_t i = 0; i < sums.size(); ++i) EXPECT_EQ(sums[i], 500.0 * static_cast<double>(i) + 500 * 499 / 2);
}

TEST(FiberTest, OnAThreadsOwnStackRunAtHomeOnlyCalls) {
  bool called = false;
  RunBlocking([&] { called = true; });
  EXPECT_TRUE(called);
}

}  // namespace
}  // namespace precondor
