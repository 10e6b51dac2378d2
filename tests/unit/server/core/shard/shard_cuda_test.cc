// SPDX-License-Identifier: Apache-2.0
// A shard on a CUDA device, as a server makes it, on the host's imitation.
#include <latch>
#include <memory>
#include <string>
#include <vector>

#include "kernels/cuda/cuda_backend.h"
#include "kernels/cuda/launch_count.h"
#include "kernels/grouping/grouping_backend.h"
#include "kernels/methods/registry.h"
#include "server/core/executors/thread_pool.h"
#include "tests/support/cuda_host/stream.h"
#include "tests/support/memory_journal.h"
#include "tests/unit/server/core/shard/shard_fixture.h"

namespace precondor {
namespace {

using ::testing::HasSubstr;

class ShardCudaTest : public ShardFixture {
 protected:
  ShardCudaTest() {
    options.make_method = MakeMethod;
    spec.layers.clear();
    for (int64_t i = 0; i < 4; ++i) {
      spec.layers.push_back(
          {.name = std::string(1, static_cast<char>('a' + i)), .d_out = 17 + i, .d_in = 24 - i, .has_bias = false});
    }
  }
  ~ShardCudaTest() override {
    Clear();
    cuda_host::Recover();
    EXPECT_EQ(cuda_host::LiveObjects(), 0);
  }

  void Clear() {
    shard = nullptr;
    executor_ = nullptr;
    cuda_ = nullptr;
  }
  Shard& Make() {
    Clear();
    cuda_ = MakeGroupingBackend(MakeCudaBackend({}).value(), grouping_);
    executor_ = std::make_unique<ThreadPoolExecutor>(threads_, /*tasks_on_fibers=*/512);
    shard = std::make_unique<Shard>(options, *cuda_, *executor_, clock, logger, observer);
    return *shard;
  }
  void UseLowRankLayers(int64_t count) {
    spec.method = {.name = "mkor", .options = {{"representation", "LOW_RANK"}, {"rank", 64.0}}};
    spec.layers.clear();
    for (int64_t i = 0; i < count; ++i) {
      spec.layers.push_back({.name = absl::StrCat("l", i), .d_out = 17 + i, .d_in = 60 - i, .has_bias = false});
    }
  }
  std::vector<Payload> Answers(uint64_t step) {
    std::vector<Payload> answers;
    for (const GradientResult& result : RunStep(*shard, *executor_, step)) {
      EXPECT_EQ(result.decision, Decision::kPreconditioned) << result.reason;
      answers.push_back(result.bytes == nullptr ? Payload() : *result.bytes);
    }
    return answers;
  }

  GroupingOptions grouping_ = {.threads = 4};  // a server's fewest
  int threads_ = 3;
  std::unique_ptr<Backend> cuda_;
  std::unique_ptr<ThreadPoolExecutor> executor_;
};

// Every layer's update and answer pass through the threads of the executor, and share their launches on the driver's.
TEST_F(ShardCudaTest, AStepTakesTenLaunchesOnAnyNumberOfThreads) {
  constexpr int kLayers = 20;
  UseLowRankLayers(kLayers);
  grouping_.tasks_at_start = kLayers;
  std::vector<Payload> expected;
  for (const int threads : {1, 2, 16, 32}) {
    SCOPED_TRACE(absl::StrCat(threads, " threads"));
    threads_ = threads;
    ASSERT_TRUE(Make().Install(MakeInstall()).ok());
    for (uint64_t step = 0; step < 3; ++step) Answers(step);
    const int64_t before = cuda::launch_count;
    const std::vector<Payload> answers = Answers(3);
    EXPECT_LE(cuda::launch_count - before, 10);
    if (threads == 1) expected = answers;
    EXPECT_EQ(answers, expected);
  }
}

// The executor's only thread begins when all layers are sealed. With a patience without end the launches are those of
// tasks that come together, and each round ends: no sealed layer is expected for longer than it takes to come.
TEST_F(ShardCudaTest, AnUpdateTakesOneUploadALayerAndWaitsForSealedLayers) {
  constexpr int kLayers = 20;
  UseLowRankLayers(kLayers);
  threads_ = 1;
  std::vector<int64_t> launches_together;  // by step
  for (const bool together : {true, false}) {
    grouping_.tasks_at_start = together ? kLayers : 1;
    grouping_.patience = absl::Hours(1);
    ASSERT_TRUE(Make().Install(MakeInstall()).ok());
    for (uint64_t step = 0; step < 3; ++step) {
      const int64_t launches = cuda::launch_count, uploads = cuda_host::Uploads();
      std::latch all_are_sealed(1);
      ThreadPoolExecutor& threads = *executor_;
      threads.Post(threads.NewStrand(), [&] { all_are_sealed.wait(); });
      for (uint32_t layer = 0; layer < kLayers; ++layer) {
        for (uint32_t rank = 0; rank < static_cast<uint32_t>(spec.world_size); ++rank) {
          const ContributionHeader statistics = Header(ContributionKind::kStatistics, step, rank, layer);
          SubmitTo(*shard, statistics, Distinct(statistics),
                   [](const absl::StatusOr<bool>& ack) { EXPECT_TRUE(ack.ok()) << ack.status(); });
        }
      }
      all_are_sealed.count_down();
      threads.Drain();
      if (together) launches_together.push_back(cuda::launch_count - launches);
      EXPECT_EQ(cuda::launch_count - launches, launches_together[step]);
      // Besides those of the launches' tables.
      EXPECT_GE(cuda_host::Uploads() - uploads, kLayers);
      EXPECT_LT(cuda_host::Uploads() - uploads, 2 * kLayers);
      Answers(step);  // the statistics are repeated
    }
  }
}

TEST_F(ShardCudaTest, ComesBackToTheBit) {
  spec.method = {.name = "mkor", .options = {}};
  MemoryJournal journal;
  options.journal = &journal;
  options.snapshot_interval_steps = 3;
  ASSERT_TRUE(Make().Install(MakeInstall()).ok());
  for (uint64_t step = 0; step < 5; ++step) Answers(step);
  ASSERT_GT(journal.snapshots(), 0);
  const std::vector<Payload> expected = Answers(5);
  Make().replay().Begin();
  journal.Restore(*shard);
  ASSERT_TRUE(shard->replay().Finish().empty());
  ASSERT_TRUE(shard->Install(MakeInstall()).ok());
  EXPECT_EQ(Answers(5), expected);
  Clear();
}

TEST_F(ShardCudaTest, LayersOfALostDeviceAnswerIdentityAndWhy) {
  spec.method = {.name = "mkor", .options = {}};
  ASSERT_TRUE(Make().Install(MakeInstall()).ok());
  Answers(0);
  // Its next call, from this thread: nothing else runs.
  cuda_host::FailCall(0, cudaErrorECCUncorrectable);
  EXPECT_FALSE(cuda_->Allocate(1, 1).ok());
  for (uint64_t step = 1; step < 3; ++step) {
    for (const GradientResult& answer : RunStep(*shard, *executor_, step)) {
      EXPECT_EQ(answer.decision, Decision::kIdentity);
      EXPECT_EQ(answer.factor_version, 1u);
      EXPECT_THAT(answer.reason, HasSubstr("CUDA device 0 is lost"));
    }
  }
}

}  // namespace
}  // namespace precondor
