// SPDX-License-Identifier: Apache-2.0
// Factors that no rank needs: their memory is freed, and later contributions find none or fresh ones.
#include <fstream>
#include <malloc.h>
#include <thread>
#include <unistd.h>

#include "kernels/base/sanitizers.h"
#include "kernels/methods/registry.h"
#include "server/core/executors/thread_pool.h"
#include "server/core/resources/reservation.h"
#include "tests/support/memory_journal.h"
#include "tests/unit/server/core/shard/shard_fixture.h"

namespace precondor {
namespace {

using ::testing::Each;
using ::testing::FloatEq;
using ::testing::HasSubstr;

constexpr bool kOwnAllocator = !PRECONDOR_HAS_ASAN && !PRECONDOR_HAS_TSAN;

int64_t ResidentBytes() {
  std::ifstream statm("/proc/self/statm");
  int64_t total = 0, resident = 0;
  statm >> total >> resident;
  return resident * sysconf(_SC_PAGESIZE);
}

class ShardFactorsTest : public ShardFixture {
 protected:
  absl::Status Hold(uint64_t version, bool hold) {
    return shard->HoldFactors({.session_id = kSession, .version = version, .hold = hold});
  }
  std::shared_ptr<Reply> Step(uint64_t step, float value = 1) {
    for (uint32_t rank = 0; rank < 2; ++rank) Statistics(step, rank, 1);
    Gradient(step, 0, value);
    return Gradient(step, 1, value);
  }
};

// By hand, in first order: per layer the gradients of two steps, 2 * (2 * 6 * 4 + 6 * 8), and the slots of both kinds
// for 2 ranks * 3 steps.
constexpr int64_t kFirstOrder = 2 * (192 + 2 * 2 * 3 * kBytesPerContribution) + kTables;

TEST_F(ShardFactorsTest, ReleasedFactorsGiveTheirReservationBack) {
  struct Recorder final : Observer {
    void OnSessionMemory(absl::string_view, int64_t reserved) override { seen.push_back(reserved); }
    std::vector<int64_t> seen;
  } recorder;
  shard = std::make_unique<Shard>(options, *backend, executor, clock, logger, recorder);
  ASSERT_TRUE(shard->Install(MakeInstall()).ok());
  const int64_t held = shard->memory()->reserved();
  EXPECT_EQ(Step(0)->decision(), Decision::kPreconditioned);
  EXPECT_FALSE(shard->Describe()->sessions[0].factors_released);
  ASSERT_TRUE(Hold(1, false).ok());
  EXPECT_EQ(shard->memory()->reserved(), kFirstOrder);
  EXPECT_EQ(*shard->Install(MakeInstall()), kFirstOrder) << "installing again changes nothing";
  EXPECT_TRUE(shard->Describe()->sessions[0].factors_released);
  EXPECT_EQ(backend->allocated_bytes(), 0) << "the scratch of both kinds goes as well";
  ASSERT_TRUE(Hold(2, true).ok());
  EXPECT_EQ(shard->memory()->reserved(), held);
  EXPECT_EQ(recorder.seen, (std::vector<int64_t>{held, kFirstOrder, held}));
  EXPECT_TRUE(*shard->Remove(kSession));
  EXPECT_EQ(shard->memory()->reserved(), 0);
}

TEST_F(ShardFactorsTest, WithoutFactorsEveryAnswerIsTheAverageAndStatisticsDoNothing) {
  Start();
  Step(0);
  ASSERT_TRUE(Hold(1, false).ok());
  const auto reply = Step(1, 5);
  EXPECT_EQ(reply->decision(), Decision::kIdentity);
  EXPECT_THAT((*reply->result)->reason, HasSubstr("no factors since the fallback"));
  EXPECT_THAT(reply->values(), Each(FloatEq(5)));
  EXPECT_EQ(log->updates().size(), 1u);
  EXPECT_EQ(StatsOf(0).factor_version, 0u);
  EXPECT_EQ(StatsOf(0).input_representation, "none");
}

TEST_F(ShardFactorsTest, ReturningBeginsWithFreshFactors) {
  Start();
  Step(0);
  Step(1);
  ASSERT_TRUE(Hold(1, false).ok());
  ASSERT_TRUE(Hold(2, true).ok());
  // Versions count from nothing again: one update before this answer, U = 2 D.
  const auto reply = Step(2, 3);
  EXPECT_EQ((*reply->result)->factor_version, 1u);
  EXPECT_THAT(reply->values(), Each(FloatEq(6)));
}

TEST_F(ShardFactorsTest, OnlyAGreaterVersionChangesAnything) {
  Start();
  const int64_t held = shard->memory()->reserved();
  ASSERT_TRUE(Hold(5, true).ok());
  ASSERT_TRUE(Hold(4, false).ok());
  ASSERT_TRUE(Hold(5, false).ok());
  EXPECT_EQ(shard->memory()->reserved(), held);
  ASSERT_TRUE(Hold(6, false).ok());
  ASSERT_TRUE(Hold(6, true).ok());
  EXPECT_EQ(shard->memory()->reserved(), kFirstOrder);
  EXPECT_EQ(GetErrorReason(shard->HoldFactors({.session_id = 99, .version = 9, .hold = false})),
            ErrorReason::kUnknownSession);
}

TEST_F(ShardFactorsTest, ALaterCoordinatorsVersionsBeginAgain) {
  Start();
  const auto hold = [&](uint64_t token, uint64_t version, bool hold) {
    const auto pass = shard->Admit(token);
    return pass.ok() ? Hold(version, hold) : pass.status();
  };
  ASSERT_TRUE(hold(7, 5, true).ok());
  ASSERT_TRUE(hold(8, 1, false).ok());
  EXPECT_EQ(shard->memory()->reserved(), kFirstOrder);
  ASSERT_TRUE(hold(8, 1, true).ok());
  EXPECT_EQ(shard->memory()->reserved(), kFirstOrder) << "said already";
  EXPECT_EQ(GetErrorReason(hold(7, 6, true)), ErrorReason::kStaleLeader);
  EXPECT_EQ(shard->memory()->reserved(), kFirstOrder);
}

TEST_F(ShardFactorsTest, ReturningIsRefusedWhenTheMemoryIsTakenAndNothingChanges) {
  MakeShard();
  ASSERT_TRUE(shard->Install(MakeInstall()).ok());
  const int64_t held = shard->memory()->reserved();
  options.capacity_bytes = kFirstOrder + held - 1;
  Start();
  ASSERT_TRUE(Hold(1, false).ok());
  SessionInstall other = MakeInstall();
  other.session_id = kSession + 1;
  other.spec.name = "other";
  other.factors_released = true;
  ASSERT_EQ(*shard->Install(other), kFirstOrder) << "begins without factors";
  const absl::Status refused = Hold(2, true);
  EXPECT_EQ(refused.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(GetErrorReason(refused), ErrorReason::kCapacity);
  EXPECT_THAT(std::string(refused.message()),
              HasSubstr(absl::StrCat("needed ", held - kFirstOrder, " bytes, reserved ", 2 * kFirstOrder)));
  EXPECT_EQ(shard->memory()->reserved(), 2 * kFirstOrder);
  EXPECT_EQ(Step(0)->decision(), Decision::kIdentity);
  // The same question again once there is room.
  ASSERT_TRUE(*shard->Remove(other.session_id));
  ASSERT_TRUE(Hold(2, true).ok());
  EXPECT_EQ(shard->memory()->reserved(), held);
}

// The last snapshot knows of the hold at some intervals, and at others does not.
TEST_F(ShardFactorsTest, AShardThatComesBackHasTheFactorsThatItHadOrNone) {
  for (const uint64_t interval : {0, 1, 2, 3}) {
    SCOPED_TRACE(interval);
    MemoryJournal journal;
    options.journal = &journal;
    options.snapshot_interval_steps = interval;
    shard.reset();
    Start();
    const int64_t held = shard->memory()->reserved();
    const auto come_back = [&] {
      MakeShard();
      journal.Restore(*shard);
      EXPECT_TRUE(shard->replay().Finish().empty());
    };
    const auto both_layers = [&](uint64_t step) {
      for (uint32_t rank = 0; rank < 2; ++rank) {
        for (const ContributionKind kind : {ContributionKind::kStatistics, ContributionKind::kGradient}) {
          const ContributionHeader header = Header(kind, step, rank, 1);
          Send(header, Filled(header, 1));
        }
      }
      return Step(step);
    };
    both_layers(0);
    both_layers(1);
    ASSERT_TRUE(Hold(1, false).ok());
    come_back();
    EXPECT_EQ(shard->memory()->reserved(), kFirstOrder);
    EXPECT_TRUE(shard->Describe()->sessions[0].factors_released);
    EXPECT_EQ(both_layers(2)->decision(), Decision::kIdentity);
    come_back();
    EXPECT_EQ(both_layers(3)->decision(), Decision::kIdentity);
    ASSERT_TRUE(Hold(2, true).ok());
    come_back();
    EXPECT_EQ(shard->memory()->reserved(), held);
    EXPECT_THAT(both_layers(4)->values(), Each(FloatEq(2))) << "fresh factors, and one update";
    come_back();
    const auto reply = both_layers(5);
    EXPECT_EQ((*reply->result)->factor_version, 2u);
    EXPECT_THAT(reply->values(), Each(FloatEq(3)));
    come_back();
    EXPECT_EQ(shard->memory()->reserved(), held);
  }
}

TEST_F(ShardFactorsTest, FactorsComeBackWithLessMemoryThanTheyNeed) {
  MemoryJournal journal;
  options.journal = &journal;
  MakeShard();
  SessionInstall install = MakeInstall();
  install.factors_released = true;
  ASSERT_TRUE(shard->Install(install).ok());
  ASSERT_TRUE(Hold(1, true).ok());
  Step(0);
  const int64_t held = shard->memory()->reserved();
  options.capacity_bytes = held - 1;
  MakeShard();
  journal.Restore(*shard);
  EXPECT_TRUE(shard->replay().Finish().empty());
  EXPECT_EQ(shard->memory()->reserved(), held);
  EXPECT_EQ((*Step(1)->result)->factor_version, 2u);
}

TEST_F(ShardFactorsTest, AllAreDroppedWhenTheShardWasLostWhileSomeWereReleased) {
  MemoryJournal journal;
  options.journal = &journal;
  Start();
  Step(0);
  const int64_t held = shard->memory()->reserved();
  const LayerStep first{.session_id = kSession, .layer = 0, .updates = 2};
  journal.Append(FactorsRecord{.at = first, .held = false});
  MakeShard();
  journal.Restore(*shard);
  EXPECT_TRUE(shard->replay().Finish().empty());
  EXPECT_EQ(shard->memory()->reserved(), kFirstOrder);
  ASSERT_TRUE(Hold(1, false).ok()) << "the coordinator repeats it";
  EXPECT_EQ(shard->memory()->reserved(), kFirstOrder);
  ASSERT_TRUE(Hold(2, true).ok());
  EXPECT_EQ(shard->memory()->reserved(), held);
  EXPECT_EQ((*Step(1)->result)->factor_version, 1u) << "fresh factors";
}

TEST_F(ShardFactorsTest, AllBeginAnewWhenTheShardWasLostWhileSomeHadReturned) {
  MemoryJournal journal;
  options.journal = &journal;
  Start();
  Step(0);
  const int64_t held = shard->memory()->reserved();
  ASSERT_TRUE(Hold(5, false).ok());
  const LayerStep second{.session_id = kSession, .layer = 1, .updates = 2};
  journal.Append(FactorsRecord{.at = second, .held = true});
  MakeShard();
  journal.Restore(*shard);
  EXPECT_TRUE(shard->replay().Finish().empty());
  EXPECT_EQ(shard->memory()->reserved(), kFirstOrder);
  ASSERT_TRUE(Hold(6, true).ok()) << "the coordinator repeats it";
  EXPECT_EQ(shard->memory()->reserved(), held);
  EXPECT_EQ((*Step(1)->result)->factor_version, 1u) << "fresh factors";
}

// Two dense factors of d = 1500 are 18 MB in f32: the backend and the process get them back.
TEST_F(ShardFactorsTest, MemoryGoesBackToTheSystem) {
  constexpr int64_t kSide = 1500;
  constexpr int64_t kFactors = 2 * kSide * kSide * 4;
  spec.world_size = 1;
  spec.layers = {{.name = "wide", .d_out = kSide, .d_in = kSide, .has_bias = false}};
  spec.method = {.name = "mkor", .options = {{"representation", std::string("DENSE")}}};
  options.make_method = MakeMethod;
  options.trim_memory = [] { malloc_trim(0); };
  Start();
  Statistics(0, 0, 1);
  EXPECT_EQ(Gradient(0, 0, 1)->decision(), Decision::kPreconditioned);
  EXPECT_GE(backend->allocated_bytes(), kFactors);
  EXPECT_GE(StatsOf(0).state_bytes, kFactors);
  const int64_t resident = ResidentBytes();
  ASSERT_TRUE(Hold(1, false).ok());
  EXPECT_EQ(backend->allocated_bytes(), 0);
  EXPECT_EQ(StatsOf(0).state_bytes, 0);
  if (!kOwnAllocator) GTEST_SKIP() << "a sanitizer's allocator keeps what is freed";
  EXPECT_LE(ResidentBytes(), resident - kFactors * 9 / 10);
}

TEST_F(ShardFactorsTest, HoldingAndReleasingFromManyThreadsEndsWithTheGreatestVersion) {
  MemoryJournal journal;
  for (int round = 0; round < 40; ++round) {
    options.journal = round < 20 ? nullptr : &journal;
    ThreadPoolExecutor pool(3);
    Shard crowded(options, *backend, pool, clock, logger, observer);
    ASSERT_TRUE(crowded.Install(MakeInstall()).ok());
    const int64_t held = crowded.memory()->reserved();
    std::vector<std::thread> threads;
    for (uint64_t thread = 0; thread < 4; ++thread) {
      threads.emplace_back([&, thread] {
        for (uint64_t i = 0; i < 25; ++i) {
          const uint64_t version = 4 * i + thread + 1;
          // Another one may be making factors, or layers may be letting go of them; this one is then not needed.
          (void)crowded.HoldFactors({.session_id = kSession, .version = version, .hold = version % 2 == 0});
        }
      });
    }
    for (std::thread& thread : threads) thread.join();
    pool.Drain();
    ASSERT_TRUE(crowded.HoldFactors({.session_id = kSession, .version = 1000, .hold = round % 2 == 0}).ok());
    pool.Drain();
    EXPECT_EQ(crowded.memory()->reserved(), round % 2 == 0 ? held : kFirstOrder);
    // A hold that is under way when a session goes is not given back twice.
    (void)crowded.HoldFactors({.session_id = kSession, .version = 1001, .hold = round % 2 != 0});
    EXPECT_TRUE(*crowded.Remove(kSession));
    pool.Drain();
    EXPECT_EQ(crowded.memory()->reserved(), 0);
  }
}

}  // namespace
}  // namespace precondor
