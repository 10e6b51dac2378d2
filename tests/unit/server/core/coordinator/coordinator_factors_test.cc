// SPDX-License-Identifier: Apache-2.0
// When shards hold a session's factors: as long as a step needs them, and again before one is promised that does.
#include "kernels/methods/registry.h"
#include "tests/unit/server/core/coordinator/coordinator_fixture.h"

namespace precondor {
namespace {

class CoordinatorFactorsTest : public CoordinatorFixture {
 protected:
  void Begin() {
    id = Open();
    for (uint32_t rank = 0; rank < 2; ++rank) ASSERT_TRUE(coordinator->JoinSession("job", rank, 5, 0).ok());
  }
  Directive ReportAll(uint64_t step, uint64_t epoch = 1) {
    clock.Advance(absl::Seconds(1));
    EXPECT_TRUE(coordinator->ReportStep(Report(id, epoch, 0, step, 1)).ok());
    auto directive = coordinator->ReportStep(Report(id, epoch, 1, step, 1));
    EXPECT_TRUE(directive.ok()) << directive.status();
    return *directive;
  }
  void FallBackAt(uint64_t step) { spec.fallback = {.policy = FallbackPolicy::kAtStep, .at_step = step}; }
  bool Released(size_t shard) { return shards[shard]->released[id]; }
  std::vector<ModeInterval> Modes() { return coordinator->GetSession("job")->modes; }

  uint64_t id = 0;
};

TEST_F(CoordinatorFactorsTest, AreReleasedOnceAllHaveFinishedTheirLastStepInSecondOrder) {
  FallBackAt(12);
  Begin();
  for (uint64_t step = 0; step < 11; ++step) ReportAll(step);
  ASSERT_TRUE(coordinator->ReportStep(Report(id, 1, 0, 11, 1)).ok());
  coordinator->Reconcile();
  EXPECT_FALSE(Released(0)) << "rank 1 still works on step 11";
  ASSERT_TRUE(coordinator->ReportStep(Report(id, 1, 1, 11, 1)).ok());
  EXPECT_FALSE(Released(0)) << "no call waits for it";
  coordinator->Reconcile();
  EXPECT_TRUE(Released(0));
  EXPECT_TRUE(Released(1));
  EXPECT_FALSE(shards[0]->installed.at(id).factors_released) << "known when it was installed";
  // A shard that was lost does not reserve for them again.
  shards[1]->installed.clear();
  coordinator->Reconcile();
  EXPECT_TRUE(shards[1]->installed.at(id).factors_released);
}

TEST_F(CoordinatorFactorsTest, AreKeptWhileNothingIsDecided) {
  Begin();
  for (uint64_t step = 0; step < 30; ++step) ReportAll(step);
  coordinator->Reconcile();
  EXPECT_FALSE(Released(0));
  EXPECT_TRUE(shards[0]->factors_version.empty()) << "and no shard is asked";
}

TEST_F(CoordinatorFactorsTest, AreHeldAgainBeforeAReturnIsWrittenDown) {
  FallBackAt(5);
  Begin();
  for (uint64_t step = 0; step < 8; ++step) ReportAll(step);
  coordinator->Reconcile();
  ASSERT_TRUE(Released(0) && Released(1));
  bool written = false;
  journal.during_append = [&](const CoordinatorRecord& record) {
    const auto* lease = std::get_if<LeaseRecord>(&record);
    if (lease == nullptr || lease->lease.schedule.back().mode != Mode::kSecondOrder) return;
    written = true;
    EXPECT_FALSE(Released(0));
    EXPECT_FALSE(Released(1));
  };
  clock.Advance(absl::Seconds(1));
  EXPECT_EQ(coordinator->SetMode("job", Mode::kSecondOrder)->modes.back().mode, Mode::kSecondOrder);
  EXPECT_TRUE(written);
  clock.Advance(absl::Seconds(1));
  coordinator->Reconcile();
  EXPECT_FALSE(Released(0)) << "steps in second order are to come";
}

// Simulator seed 1011408: a shard that came back without factors told one rank so, and gave them to the next.
TEST_F(CoordinatorFactorsTest, AreHeldAgainBeforeAReturnThatEndsAgain) {
  FallBackAt(60);
  Begin();
  ASSERT_TRUE(coordinator->SetMode("job", Mode::kFirstOrder).ok());
  for (uint64_t step = 0; step < 30; ++step) ReportAll(step);
  coordinator->Reconcile();
  ASSERT_TRUE(Released(0) && Released(1));
  const std::vector<ModeInterval> before = Modes();
  shards[1]->refuse_factors = true;
  clock.Advance(absl::Seconds(1));
  EXPECT_EQ(coordinator->SetMode("job", std::nullopt)->modes, before);
  shards[1]->refuse_factors = false;
  uint64_t step = 30;
  for (; step < 45; ++step) ReportAll(step);
  EXPECT_EQ(Modes().back(), (ModeInterval{60, Mode::kFirstOrder}));
  EXPECT_EQ(Modes()[Modes().size() - 2].mode, Mode::kSecondOrder);
  EXPECT_FALSE(Released(0) || Released(1));
}

TEST_F(CoordinatorFactorsTest, AShardWithoutRoomKeepsTheSessionInFirstOrder) {
  FallBackAt(5);
  Begin();
  for (uint64_t step = 0; step < 8; ++step) ReportAll(step);
  coordinator->Reconcile();
  const std::vector<ModeInterval> before = Modes();
  shards[1]->refuse_factors = true;
  clock.Advance(absl::Seconds(1));
  EXPECT_EQ(coordinator->SetMode("job", Mode::kSecondOrder)->modes, before);
  EXPECT_FALSE(Released(0)) << "asked first, and had room";
  clock.Advance(absl::Seconds(1));
  coordinator->Reconcile();
  EXPECT_TRUE(Released(0)) << "given back";
  shards[1]->refuse_factors = false;
  // Tried again once a lease's steps, ten, are over.
  uint64_t step = 8;
  for (; step < 17; ++step) ReportAll(step);
  EXPECT_EQ(Modes(), before);
  const uint64_t granted = ReportAll(step++).lease_through_step;
  ReportAll(step++);
  EXPECT_EQ(Modes().back().mode, Mode::kSecondOrder);
  EXPECT_GT(Modes().back().first_step, granted);
  EXPECT_FALSE(Released(0) || Released(1));
}

TEST_F(CoordinatorFactorsTest, AreHeldAgainBeforeRanksWithFactorsGoBack) {
  options.make_method = MakeMethod;
  MakeCoordinator();
  spec.exchange = ExchangeMode::kReplay;
  spec.method.name = "mkor";
  FallBackAt(5);
  Begin();
  for (uint64_t step = 0; step < 8; ++step) ReportAll(step);
  coordinator->Reconcile();
  ASSERT_TRUE(Released(0) && Released(1));
  for (const auto& shard : shards) {
    shard->during_install = [&] { EXPECT_FALSE(Released(0) || Released(1)) << "a rank could ask for them"; };
  }
  shards[1]->refuse_factors = true;
  const int installs = shards[0]->installs;
  clock.Advance(absl::Seconds(1));
  EXPECT_FALSE(coordinator->JoinSession("job", 0, 6, 3).ok()) << "there is no room";
  EXPECT_EQ(shards[0]->installs, installs);
  shards[1]->refuse_factors = false;
  clock.Advance(absl::Seconds(1));
  const auto joined = coordinator->JoinSession("job", 0, 6, 3);
  ASSERT_TRUE(joined.ok()) << joined.status();
  EXPECT_GT(shards[0]->installs, installs);
  EXPECT_EQ(shards[0]->installed.at(id).rollback_step, 3u);
}

TEST_F(CoordinatorFactorsTest, LeasesGoOnWhileThereIsNoRoom) {
  FallBackAt(5);
  Begin();
  for (uint64_t step = 0; step < 8; ++step) ReportAll(step);
  coordinator->Reconcile();
  for (const auto& shard : shards) shard->refuse_factors = true;
  ASSERT_TRUE(coordinator->SetMode("job", Mode::kSecondOrder).ok());
  for (uint64_t step = 8; step < 60; ++step) EXPECT_GE(ReportAll(step).lease_through_step, step + 1);
  EXPECT_EQ(Modes().back().mode, Mode::kFirstOrder);
}

TEST_F(CoordinatorFactorsTest, AreHeldAgainWhenTheJobGoesBackToStepsInSecondOrder) {
  FallBackAt(12);
  Begin();
  for (uint64_t step = 0; step < 20; ++step) ReportAll(step);
  coordinator->Reconcile();
  ASSERT_TRUE(Released(0) && Released(1));
  // A process that takes its step up where the other one left it changes nothing.
  clock.Advance(absl::Seconds(1));
  ASSERT_TRUE(coordinator->JoinSession("job", 1, 6, 20).ok());
  EXPECT_TRUE(Released(0) && Released(1));
  shards[0]->gone = 4;
  clock.Advance(absl::Seconds(1));
  ASSERT_TRUE(coordinator->JoinSession("job", 1, 7, 4).ok());
  EXPECT_FALSE(Released(0));
  EXPECT_FALSE(Released(1));
}

TEST_F(CoordinatorFactorsTest, AWorkerThatNeedsReleasedOnesItselfTakesTheJobBack) {
  FallBackAt(12);
  spec.exchange = ExchangeMode::kReplay;
  spec.method.name = "identity";  // one that may be asked for
  options.make_method = MakeMethod;
  MakeCoordinator();
  Begin();
  for (uint64_t step = 0; step < 14; ++step) ReportAll(step);
  coordinator->Reconcile();
  ASSERT_TRUE(Released(0) && Released(1));
  clock.Advance(absl::Seconds(1));
  EXPECT_EQ(coordinator->JoinSession("job", 1, 6, 12)->directive.rollback_epoch, 0u) << "in first order";
  EXPECT_TRUE(Released(0) && Released(1));
  clock.Advance(absl::Seconds(1));
  // The shards keep the step, and not the factors for it.
  const auto joined = coordinator->JoinSession("job", 1, 7, 11);
  EXPECT_EQ(joined->directive.rollback_epoch, joined->epoch);
  EXPECT_EQ(joined->directive.resume_step, 11u);
  EXPECT_FALSE(Released(0));
  EXPECT_FALSE(Released(1));
}

TEST_F(CoordinatorFactorsTest, ARestartForgetsNothingOfIt) {
  FallBackAt(5);
  Begin();
  for (uint64_t step = 0; step < 80; ++step) ReportAll(step);
  coordinator->Reconcile();
  ASSERT_TRUE(Released(0));
  clock.Advance(absl::Seconds(1));
  MakeCoordinator();
  ASSERT_TRUE(coordinator->Restore(journal.records).ok());
  coordinator->Reconcile();
  EXPECT_TRUE(Released(0));
  clock.Advance(absl::Seconds(1));
  EXPECT_EQ(coordinator->SetMode("job", Mode::kSecondOrder)->modes.back().mode, Mode::kSecondOrder);
  EXPECT_FALSE(Released(0));
}

}  // namespace
}  // namespace precondor
