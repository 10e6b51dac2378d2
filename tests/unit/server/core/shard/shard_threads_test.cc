// SPDX-License-Identifier: Apache-2.0
// Many threads on one shard: what ThreadSanitizer looks at, and that threads change no answer.
#include <algorithm>
#include <atomic>
#include <thread>

#include "server/core/executors/thread_pool.h"
#include "tests/unit/server/core/shard/shard_fixture.h"

namespace precondor {
namespace {

class ShardThreadsTest : public ShardFixture {
 protected:
  struct Answers {
    Mutex mu;
    CondVar changed;
    int64_t arrived ABSL_GUARDED_BY(mu) = 0;
    int64_t failed ABSL_GUARDED_BY(mu) = 0;
    std::vector<float> sum ABSL_GUARDED_BY(mu);
  };

  // Every rank from its own thread, each contribution twice, steps in order.
  std::vector<float> RunJob(Executor& pool, uint64_t steps) {
    Shard crowded(options, *backend, pool, clock, logger, observer);
    EXPECT_TRUE(crowded.Install(MakeInstall()).ok());
    Answers answers;
    std::vector<std::thread> ranks;
    for (uint32_t rank = 0; rank < static_cast<uint32_t>(spec.world_size); ++rank) {
      ranks.emplace_back([&, rank] {
        for (uint64_t step = 0; step < steps; ++step) RunStep(crowded, answers, step, rank);
      });
    }
    for (std::thread& thread : ranks) thread.join();
    pool.Drain();
    EXPECT_EQ(crowded.in_flight(), 0);
    MutexLock lock(answers.mu);
    EXPECT_EQ(answers.failed, 0);
    return answers.sum;
  }

  void RunStep(Shard& crowded, Answers& answers, uint64_t step, uint32_t rank) {
    std::atomic<int> open = 0;
    for (uint32_t layer = 0; layer < spec.layers.size(); ++layer) {
      for (int copy = 0; copy < 2; ++copy) {
        ContributionHeader header = Header(ContributionKind::kStatistics, step, rank, layer);
        const float value = static_cast<float>(rank + 1) * 0.1f;
        SubmitTo(crowded, header, Filled(header, value), [&](absl::StatusOr<bool> ack) {
          if (!ack.ok()) Note(answers, nullptr);
        });
        header = Header(ContributionKind::kGradient, step, rank, layer);
        ++open;
        const bool first = copy == 0 && rank == 0;
        SubmitTo(
            crowded, header, Filled(header, value), [](const absl::StatusOr<bool>&) {},
            [&, first](const absl::StatusOr<GradientResult>& result) {
              if (!result.ok()) Note(answers, nullptr);
              if (result.ok() && first) Note(answers, result->bytes.get());
              MutexLock lock(answers.mu);
              --open;
              answers.changed.notify_all();
            });
      }
    }
    MutexLock lock(answers.mu);
    while (open.load() > 0) answers.changed.wait(answers.mu);
  }

  static void Note(Answers& answers, const Payload* bytes) {
    MutexLock lock(answers.mu);
    ++answers.arrived;
    if (bytes == nullptr) {
      ++answers.failed;
      return;
    }
    float value = 0;
    std::memcpy(&value, bytes->data(), sizeof(value));
    answers.sum.push_back(value);
  }
};

TEST_F(ShardThreadsTest, ThreadsChangeNoAnswer) {
  spec.world_size = 4;
  ThreadPoolExecutor two(2);
  ThreadPoolExecutor three(3);
  std::vector<float> first = RunJob(two, 40);
  std::vector<float> second = RunJob(three, 40);
  // Layers finish in any order within a step; their answers do not depend on it.
  std::sort(first.begin(), first.end());
  std::sort(second.begin(), second.end());
  EXPECT_EQ(first.size(), 80u);
  EXPECT_EQ(first, second);
}

TEST_F(ShardThreadsTest, EpochsAndRemovalInTheMidstOfWork) {
  spec.world_size = 2;
  ThreadPoolExecutor pool(2);
  Shard crowded(options, *backend, pool, clock, logger, observer);
  ASSERT_TRUE(crowded.Install(MakeInstall()).ok());
  std::atomic<bool> stop = false;
  std::atomic<int64_t> taken = 0;
  std::atomic<int64_t> told = 0;
  std::vector<std::thread> ranks;
  for (uint32_t rank = 0; rank < 2; ++rank) {
    ranks.emplace_back([&, rank] {
      for (uint64_t step = 0; !stop.load(); ++step) {
        ContributionHeader header = Header(ContributionKind::kGradient, step, rank);
        const std::vector<ShardSessionSummary> sessions = crowded.ListSessions();
        if (!sessions.empty()) header.key.epoch = sessions[0].epoch;
        SubmitTo(
            crowded, header, Filled(header, 1.0f), [&](const absl::StatusOr<bool>& ack) { taken += ack.ok() ? 1 : 0; },
            [&](const absl::StatusOr<GradientResult>&) { ++told; });
      }
    });
  }
  for (uint64_t next = 2; next < 200 || taken.load() == 0; ++next) {
    ASSERT_TRUE(crowded.Install(MakeInstall(next)).ok());
  }
  ASSERT_TRUE(*crowded.Remove(kSession));
  stop = true;
  for (std::thread& thread : ranks) thread.join();
  pool.Drain();
  EXPECT_GT(taken.load(), 0);
  EXPECT_EQ(taken.load(), told.load()) << "every gradient taken in is answered exactly once";
  EXPECT_EQ(crowded.in_flight(), 0);
  EXPECT_EQ(crowded.memory()->reserved(), 0);
}

}  // namespace
}  // namespace precondor
