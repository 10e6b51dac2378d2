// SPDX-License-Identifier: Apache-2.0
#include "server/core/executors/thread_pool.h"

#include <algorithm>
#include <atomic>
#include <latch>
#include <string>
#include <sys/resource.h>
#include <thread>
#include <utility>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

#include "kernels/base/fiber.h"
#include "kernels/base/mutex.h"
#include "server/core/executors/strand_queue.h"
#include "tests/support/inline_executor.h"

namespace precondor {
namespace {

using ::testing::ElementsAre;

TEST(ThreadPoolExecutorTest, KeepsTheOrderOfEachStrandAndRunsItAlone) {
  constexpr int kStrands = 7;
  constexpr int kTasks = 500;
  ThreadPoolExecutor pool(4);
  // Not atomic on purpose: the strand alone orders the accesses, which ThreadSanitizer checks.
  std::vector<std::vector<int>> seen(kStrands);
  std::vector<uint64_t> strands;
  for (int s = 0; s < kStrands; ++s) strands.push_back(pool.NewStrand());
  for (int i = 0; i < kTasks; ++i) {
    for (int s = 0; s < kStrands; ++s) pool.Post(strands[s], [&seen, s, i] { seen[s].push_back(i); });
  }
  pool.Drain();
  for (const std::vector<int>& order : seen) {
    ASSERT_EQ(order.size(), static_cast<size_t>(kTasks));
    for (int i = 0; i < kTasks; ++i) ASSERT_EQ(order[i], i);
  }
}

TEST(ThreadPoolExecutorTest, StrandsRunBesideEachOther) {
  ThreadPoolExecutor pool(2);
  // Each task waits for the other: with one thread, or strands in turn, this would never end.
  std::atomic<int> here = 0;
  const auto meet = [&here] {
    ++here;
    while (here.load() < 2) std::this_thread::yield();
  };
  pool.Post(pool.NewStrand(), meet);
  pool.Post(pool.NewStrand(), meet);
  pool.Drain();
  EXPECT_EQ(here.load(), 2);
}

TEST(ThreadPoolExecutorTest, ASessionDoesNotWaitForAnothersTasks) {
  ThreadPoolExecutor pool(2);
  std::latch released(1);
  // The first has all threads, and work that waits. The others' tasks wait for each other, so that each needs a thread.
  for (int i = 0; i < 5; ++i) pool.Post(pool.NewStrandOf(1, 8), [&] { released.wait(); });
  for (int round = 0; round < 100; ++round) {
    std::latch others(3), done(2);
    for (const uint64_t session : {2, 3}) {
      pool.Post(pool.NewStrandOf(session, 8), [&] {
        others.arrive_and_wait();
        done.count_down();
      });
    }
    others.arrive_and_wait();
    done.wait();
  }
  released.count_down();
  pool.Drain();
}

TEST(ThreadPoolExecutorTest, ASessionHasNoMoreTasksAtOnceThanThereAreThreads) {
  ThreadPoolExecutor pool(2);
  std::latch begun(1), released(1);
  std::atomic<int> running = 0, most = 0, ran = 0;
  pool.Post(pool.NewStrandOf(1, 8), [&] {
    begun.count_down();
    released.wait();
  });
  begun.wait();
  pool.Post(pool.NewStrandOf(1, 8), [&] { released.wait(); });
  for (int i = 0; i < 200; ++i) {
    pool.Post(pool.NewStrandOf(2, 8), [&] {
      ++running;
      if (++ran == 20) released.count_down();  // then the threads take part
      // Long enough for a third one to come.
      for (int i = 0; i < 2000 && running <= 2; ++i) std::this_thread::yield();
      int now = running, before = most;
      while (before < now && !most.compare_exchange_weak(before, now)) {
      }
      --running;
    });
  }
  pool.Drain();
  EXPECT_EQ(ran, 200);
  EXPECT_LE(most, 2);
}

TEST(ThreadPoolExecutorTest, ASessionHasNoMoreTasksAtOnceThanItsLimit) {
  for (const int fibers : {0, 16}) {
    ThreadPoolExecutor pool(6, fibers);
    std::atomic<int> running = 0, most = 0, ran = 0;
    for (int i = 0; i < 200; ++i) {
      for (const uint64_t session : {1, 2}) {  // the other one has no limit, and ends too
        pool.Post(pool.NewStrandOf(session, session == 1 ? 2 : 100), [&, session] {
          ++ran;
          if (session == 2) return;
          const int now = ++running;
          int before = most;
          while (before < now && !most.compare_exchange_weak(before, now)) {
          }
          for (int i = 0; i < 200 && running <= 2; ++i) std::this_thread::yield();
          --running;
        });
      }
    }
    pool.Drain();
    EXPECT_EQ(ran, 400);
    EXPECT_LE(most, 2);
  }
}

TEST(ThreadPoolExecutorTest, ABatchOfTasksWakesTheThreadsForEachEighthAndAtItsEnd) {
  ThreadPoolExecutor pool(2);
  for (int round = 0; round < 200; ++round) {
    std::latch eight(8), last(1);
    {
      TaskBatch batch;
      for (int i = 0; i < 8; ++i) pool.Post(pool.NewStrand(), [&] { eight.count_down(); });
      eight.wait();
      pool.Post(pool.NewStrand(), [&] { last.count_down(); });
    }
    last.wait();
  }
}

TEST(ThreadPoolExecutorTest, ABatchOfTasksToTwoExecutorsWakesBoth) {
  ThreadPoolExecutor one(1), other(1);
  std::latch ran(2);
  {
    TaskBatch batch;
    one.Post(one.NewStrand(), [&] { ran.count_down(); });
    other.Post(other.NewStrand(), [&] { ran.count_down(); });
  }
  ran.wait();
}

TEST(StrandQueueTest, SessionsTakeTurnsAndTheirStrandsWithinThese) {
  StrandQueue queue(/*max_tasks_per_session=*/2);
  std::vector<std::pair<uint64_t, std::string>> strands;
  for (const auto& [session, name] :
       std::vector<std::pair<uint64_t, std::string>>{{7, "a"}, {7, "b"}, {7, "c"}, {9, "d"}, {9, "e"}}) {
    strands.emplace_back(queue.NewStrand(session, 2), name);
  }
  std::string order;
  for (int round = 0; round < 2; ++round) {
    for (const auto& [strand, name] : strands) queue.Push(strand, [&order, name = name] { order += name; });
  }
  while (queue.has_next()) {
    const StrandQueue::Next next = queue.Pop();
    next.task();
    queue.Finish(next.strand);
  }
  EXPECT_EQ(order, "adbecdaebc");
  EXPECT_TRUE(queue.empty());
  // Two of a session, and then none, though two are ready; of those that have none only the other one.
  for (const auto& [strand, name] : strands) queue.Push(strand, [] {});
  const uint64_t first = queue.Pop().strand;
  EXPECT_TRUE(queue.has_next_of_idle());
  const uint64_t other = queue.PopOfIdle().strand;
  EXPECT_FALSE(queue.has_next_of_idle());
  queue.Pop();
  queue.Pop();
  EXPECT_FALSE(queue.has_next()) << "c is ready";
  queue.Finish(first);
  EXPECT_TRUE(queue.has_next());
  queue.Finish(other);
  EXPECT_EQ(queue.running(), 2);
}

TEST(ThreadPoolExecutorTest, DestructorRunsWhatWasPostedEvenByTasks) {
  std::atomic<int> ran = 0;
  {
    ThreadPoolExecutor pool(2);
    const uint64_t strand = pool.NewStrand();
    pool.Post(strand, [&pool, &ran, strand] {  // runs in the destructor, when strand's scope has ended
      ++ran;
      pool.Post(strand, [&] { ++ran; });
    });
  }
  EXPECT_EQ(ran.load(), 2);
}

// Strands wait for it in no way, nor does Drain.
TEST(ThreadPoolExecutorTest, BackgroundTasksRunBesideStrandsOfHigherPriority) {
  Mutex mu;
  CondVar changed;
  bool go_on = false;
  int background = 0, strand = 0;
  ThreadPoolExecutor pool(1);
  pool.PostBackground([&] {
    MutexLock lock(mu);
    while (!go_on) changed.wait(mu);
    background = getpriority(PRIO_PROCESS, 0);
  });
  pool.Post(pool.NewStrand(), [&strand] { strand = getpriority(PRIO_PROCESS, 0); });
  pool.Drain();
  {
    MutexLock lock(mu);
    go_on = true;
    changed.notify_all();
  }
  Mutex done_mu;
  CondVar done_changed;
  bool done = false;
  pool.PostBackground([&] {
    MutexLock lock(done_mu);
    done = true;
    done_changed.notify_all();
  });
  {
    MutexLock lock(done_mu);
    while (!done) done_changed.wait(done_mu);
  }
  EXPECT_EQ(background, std::min(19, strand + 10));
}

TEST(ThreadPoolExecutorTest, DestructorRunsBackgroundTasksOfStrands) {
  std::atomic<int> ran = 0;
  {
    ThreadPoolExecutor pool(2);
    for (int i = 0; i < 10; ++i) {
      pool.Post(pool.NewStrand(), [&] { pool.PostBackground([&ran] { ++ran; }); });
    }
  }
  EXPECT_EQ(ran.load(), 10);
}

TEST(ThreadPoolExecutorTest, StrandNumbersAreNotReused) {
  ThreadPoolExecutor pool(1);
  const uint64_t first = pool.NewStrand();
  pool.Post(first, [] {});
  pool.Drain();
  EXPECT_NE(pool.NewStrand(), first);
  EXPECT_EQ(pool.parallelism(), 1);
}

// Stands for a device's driver.
class Collector final : public FiberScheduler {
 public:
  void Resume(Fiber& fiber) override {
    MutexLock lock(mu_);
    fibers_.push_back(&fiber);
    changed_.notify_one();
  }
  std::vector<Fiber*> Await(size_t count) {
    MutexLock lock(mu_);
    while (fibers_.size() < count) changed_.wait(mu_);
    return std::exchange(fibers_, {});
  }

 private:
  Mutex mu_;
  CondVar changed_;
  std::vector<Fiber*> fibers_ ABSL_GUARDED_BY(mu_);
};

TEST(ThreadPoolExecutorTest, OnFibersTasksThatWaitForADeviceLeaveTheirThreadToOthers) {
  for (const int threads : {1, 4}) {
    Collector device;
    ThreadPoolExecutor pool(threads, /*tasks_on_fibers=*/5);
    EXPECT_EQ(pool.parallelism(), 5);
    std::vector<uint64_t> strands;
    for (int i = 0; i < 7; ++i) strands.push_back(pool.NewStrand());
    std::atomic<int> begun = 0, ended = 0;
    std::vector<int> second(7, -1);
    for (int i = 0; i < 7; ++i) {
      pool.Post(strands[i], [&] {
        ++begun;
        Fiber::MoveTo(device);
        Fiber::Return();
        ++ended;
      });
      pool.Post(strands[i], [&second, &ended, i] { second[i] = ended; });
    }
    // As many as may run at once, and no strand's second task before its first has ended.
    std::vector<Fiber*> fibers = device.Await(5);
    EXPECT_EQ(begun, 5);
    EXPECT_EQ(ended, 0);
    for (Fiber* const fiber : fibers) EXPECT_EQ(fiber->Run(), Fiber::Outcome::kTaken);
    fibers = device.Await(2);
    EXPECT_EQ(begun, 7);
    for (Fiber* const fiber : fibers) EXPECT_EQ(fiber->Run(), Fiber::Outcome::kTaken);
    pool.Drain();
    EXPECT_EQ(ended, 7);
    for (const int seen : second) EXPECT_GE(seen, 1);
  }
}

TEST(ThreadPoolExecutorTest, DestructorWaitsForFibers) {
  Collector device;
  std::atomic<bool> ended = false;
  std::thread driver;
  {
    ThreadPoolExecutor pool(1, /*tasks_on_fibers=*/2);
    pool.Post(pool.NewStrand(), [&] {
      Fiber::MoveTo(device);
      Fiber::Return();
      ended = true;
    });
    driver = std::thread([&] { device.Await(1).front()->Run(); });
  }
  driver.join();
  EXPECT_TRUE(ended);
}

TEST(InlineExecutorTest, RunsInPostAndDefersNestedTasks) {
  InlineExecutor executor;
  std::vector<int> order;
  executor.Post(executor.NewStrand(), [&] {
    executor.Post(1, [&] { order.push_back(2); });
    order.push_back(1);
  });
  EXPECT_THAT(order, ElementsAre(1, 2));
}

}  // namespace
}  // namespace precondor
