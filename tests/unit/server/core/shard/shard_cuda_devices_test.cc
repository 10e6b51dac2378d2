// SPDX-License-Identifier: Apache-2.0
// A shard on several CUDA devices, as a server makes them, on the host's imitation: which ends the process when one
// device's work touches another's memory.
#include <latch>
#include <memory>
#include <set>
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

class ShardCudaDevicesTest : public ShardFixture {
 protected:
  ShardCudaDevicesTest() {
    cuda_host::SetDeviceCount(2);
    options.make_method = MakeMethod;
    spec.layers.clear();
    for (int64_t i = 0; i < 4; ++i) {
      spec.layers.push_back(
          {.name = std::string(1, static_cast<char>('a' + i)), .d_out = 17 + i, .d_in = 24 - i, .has_bias = false});
    }
  }
  ~ShardCudaDevicesTest() override {
    Clear();
    cuda_host::Recover();
    EXPECT_EQ(cuda_host::LiveObjects(), 0);
    cuda_host::SetDeviceCount(1);
  }

  void Clear() {
    shard = nullptr;
    for (const auto& device : devices_) device->threads = nullptr;
    devices_.clear();
  }
  Shard& Make(int count) {
    Clear();
    std::vector<ShardDevice> devices;
    for (int device = 0; device < count; ++device) {
      TestDevice& made = *devices_.emplace_back(std::make_unique<TestDevice>());
      made.backend = MakeGroupingBackend(MakeCudaBackend({.device = device}).value(), grouping_);
      made.threads = std::make_unique<ThreadPoolExecutor>(threads_, /*tasks_on_fibers=*/512);
      devices.push_back({.name = absl::StrCat("cuda:", device), .backend = *made.backend, .executor = *made.threads});
    }
    shard = std::make_unique<Shard>(options, std::move(devices), clock, logger, observer);
    return *shard;
  }
  // All ranks' contributions to a step; the layers' answers.
  std::vector<GradientResult> Step(uint64_t step) {
    std::vector<absl::StatusOr<GradientResult>> results(spec.layers.size());
    for (uint32_t layer = 0; layer < spec.layers.size(); ++layer) {
      for (uint32_t rank = 0; rank < static_cast<uint32_t>(spec.world_size); ++rank) {
        const ContributionHeader statistics = Header(ContributionKind::kStatistics, step, rank, layer);
        SubmitTo(*shard, statistics, Distinct(statistics),
                 [](const absl::StatusOr<bool>& ack) { EXPECT_TRUE(ack.ok()) << ack.status(); });
        const ContributionHeader gradient = Header(ContributionKind::kGradient, step, rank, layer);
        SubmitTo(
            *shard, gradient, Distinct(gradient),
            [](const absl::StatusOr<bool>& ack) { EXPECT_TRUE(ack.ok()) << ack.status(); },
            [&results, rank, layer](absl::StatusOr<GradientResult> result) {
              if (rank == 0) results[layer] = std::move(result);
            });
      }
    }
    for (const auto& device : devices_) device->threads->Drain();
    std::vector<GradientResult> answers;
    for (absl::StatusOr<GradientResult>& result : results) {
      EXPECT_TRUE(result.ok()) << result.status();
      answers.push_back(result.ok() ? *std::move(result) : GradientResult());
    }
    return answers;
  }
  std::vector<Payload> Answers(uint64_t step) {
    std::vector<Payload> answers;
    for (const GradientResult& result : Step(step)) {
      EXPECT_EQ(result.decision, Decision::kPreconditioned) << result.reason;
      answers.push_back(result.bytes == nullptr ? Payload() : *result.bytes);
    }
    return answers;
  }

  struct TestDevice {
    std::unique_ptr<Backend> backend;
    std::unique_ptr<ThreadPoolExecutor> threads;
  };
  GroupingOptions grouping_ = {.threads = 4};  // a server's fewest
  int threads_ = 3;                            // of each device
  std::vector<std::unique_ptr<TestDevice>> devices_;
};

TEST_F(ShardCudaDevicesTest, TwoDevicesGiveTheBitsOfOneAndMixNothing) {
  for (const char* method : {"mkor", "kfac"}) {
    SCOPED_TRACE(method);
    spec.method = {.name = method, .options = {}};
    if (spec.method.name == "kfac") spec.method.options["refresh_lag"] = 2.0;
    std::vector<std::vector<Payload>> expected;
    for (const int count : {1, 2}) {
      ASSERT_TRUE(Make(count).Install(MakeInstall()).ok());
      std::vector<std::vector<Payload>> answers;
      for (uint64_t step = 0; step < 6; ++step) answers.push_back(Answers(step));
      if (count == 1) expected = answers;
      EXPECT_EQ(answers, expected);
      for (const auto& device : devices_) EXPECT_GT(device->backend->allocated_bytes(), 0);
    }
  }
}

// Every layer's update and answer pass through the threads of the executor, and share their launches on the driver's.
TEST_F(ShardCudaDevicesTest, AStepTakesTenLaunchesOnAnyNumberOfThreads) {
  constexpr int kLayers = 20;
  spec.method = {.name = "mkor", .options = {{"representation", "LOW_RANK"}, {"rank", 64.0}}};
  spec.layers.clear();
  for (int64_t i = 0; i < kLayers; ++i) {
    spec.layers.push_back({.name = absl::StrCat("l", i), .d_out = 17 + i, .d_in = 60 - i, .has_bias = false});
  }
  grouping_.tasks_at_start = kLayers;
  std::vector<Payload> expected;
  for (const int threads : {1, 2, 16, 32}) {
    SCOPED_TRACE(absl::StrCat(threads, " threads"));
    threads_ = threads;
    ASSERT_TRUE(Make(1).Install(MakeInstall()).ok());
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
TEST_F(ShardCudaDevicesTest, AnUpdateTakesOneUploadALayerAndWaitsForSealedLayers) {
  constexpr int kLayers = 20;
  spec.method = {.name = "mkor", .options = {{"representation", "LOW_RANK"}, {"rank", 64.0}}};
  spec.layers.clear();
  for (int64_t i = 0; i < kLayers; ++i) {
    spec.layers.push_back({.name = absl::StrCat("l", i), .d_out = 17 + i, .d_in = 60 - i, .has_bias = false});
  }
  threads_ = 1;
  std::vector<int64_t> launches_together;  // by step
  for (const bool together : {true, false}) {
    grouping_.tasks_at_start = together ? kLayers : 1;
    grouping_.patience = absl::Hours(1);
    ASSERT_TRUE(Make(1).Install(MakeInstall()).ok());
    for (uint64_t step = 0; step < 3; ++step) {
      const int64_t launches = cuda::launch_count, uploads = cuda_host::Uploads();
      std::latch all_are_sealed(1);
      ThreadPoolExecutor& threads = *devices_[0]->threads;
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

TEST_F(ShardCudaDevicesTest, ComesBackOnTheOtherNumberOfDevices) {
  spec.method = {.name = "mkor", .options = {}};
  ASSERT_TRUE(Make(1).Install(MakeInstall()).ok());
  for (uint64_t step = 0; step < 5; ++step) Answers(step);
  const std::vector<Payload> expected = Answers(5);
  for (const int before : {1, 2}) {
    MemoryJournal journal;
    options.journal = &journal;
    options.snapshot_interval_steps = 3;
    ASSERT_TRUE(Make(before).Install(MakeInstall()).ok());
    for (uint64_t step = 0; step < 5; ++step) Answers(step);
    ASSERT_GT(journal.snapshots(), 0);
    Make(3 - before).replay().Begin();
    journal.Restore(*shard);
    ASSERT_TRUE(shard->replay().Finish().empty());
    ASSERT_TRUE(shard->Install(MakeInstall()).ok());
    EXPECT_EQ(Answers(5), expected);
    Clear();
    options.journal = nullptr;
  }
}

TEST_F(ShardCudaDevicesTest, ALostDeviceTakesItsOwnLayersAlone) {
  spec.method = {.name = "mkor", .options = {}};
  ASSERT_TRUE(Make(2).Install(MakeInstall()).ok());
  Answers(0);
  std::set<uint32_t> of_the_lost;
  const auto layers = shard->GetLayerStats("job").value();
  for (const LayerStats& layer : layers) {
    if (layer.device == 1) of_the_lost.insert(layer.layer);
  }
  ASSERT_FALSE(of_the_lost.empty());
  ASSERT_LT(of_the_lost.size(), spec.layers.size());
  // Its next call, from this thread: nothing else runs.
  cuda_host::FailCall(0, cudaErrorECCUncorrectable);
  EXPECT_FALSE(devices_[1]->backend->Allocate(1, 1).ok());
  for (uint64_t step = 1; step < 3; ++step) {
    const std::vector<GradientResult> answers = Step(step);
    for (uint32_t layer = 0; layer < answers.size(); ++layer) {
      const bool lost = of_the_lost.contains(layer);
      EXPECT_EQ(answers[layer].decision, lost ? Decision::kIdentity : Decision::kPreconditioned) << layer;
      EXPECT_EQ(answers[layer].factor_version, lost ? 1u : step + 1) << layer;
      EXPECT_THAT(answers[layer].reason, HasSubstr(lost ? "CUDA device 1 is lost" : ""));
    }
  }
}

}  // namespace
}  // namespace precondor
