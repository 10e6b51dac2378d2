// SPDX-License-Identifier: Apache-2.0
#include "tests/sim/sim_coordinator.h"

#include <utility>

#include "tests/sim/sim_control.h"
#include "tests/sim/world.h"

namespace precondor::sim {
namespace {

constexpr int64_t kReconcileMicros = 20'000;
constexpr int64_t kProbeMicros = 5'000;
constexpr int64_t kRestartMicros = 5'000;

}  // namespace

class SimCoordinator::Disk final : public CoordinatorJournal {
 public:
  explicit Disk(SimCoordinator& owner) : owner_(owner) {}
  absl::Status Append(const CoordinatorRecord& record) override {
    if (!owner_.MayAct()) return absl::CancelledError("the coordinator died");
    return owner_.journal_.Append(record);
  }
  absl::Status Compact(absl::Span<const CoordinatorRecord> records) override {
    if (!owner_.MayAct()) return absl::CancelledError("the coordinator died");
    return owner_.journal_.Compact(records);
  }
  bool wants_compaction() const override { return owner_.journal_.wants_compaction(); }

 private:
  SimCoordinator& owner_;
};

SimCoordinator::SimCoordinator(World& world, uint32_t id, CoordinatorOptions options)
    : world_(world),
      process_(world.queue(), id, "coordinator"),
      clock_(world.queue()),
      journal_(world.random(), Mix(world.scenario().seed)),
      options_(std::move(options)),
      disk_(std::make_unique<Disk>(*this)) {}

SimCoordinator::~SimCoordinator() = default;

void SimCoordinator::Start() {
  world_.trace().Note([] { return "coordinator starts"; });
  process_.Start();
  doomed_ = false;
  // Its journal is synced before another process hears of what is in it: it makes no difference what has died.
  const absl::StatusOr<std::vector<CoordinatorRecord>> records = journal_.Reopen(world_.random().Chance(0.5));
  if (!records.ok()) return DoNotStart(records.status());
  std::vector<ShardEndpoint> endpoints;
  for (const std::unique_ptr<SimShard>& shard : world_.shards()) {
    endpoints.push_back(
        {.address = shard->process().name(), .control = std::make_unique<SimControl>(world_, *this, *shard)});
  }
  core_ =
      std::make_unique<Coordinator>(options_, std::move(endpoints), *disk_, clock_, world_.logger(), world_.observer());
  if (const absl::Status restored = core_->Restore(*records); !restored.ok()) return DoNotStart(restored);
  core_->Reconcile();
  Tick();
  // A coordinator that may take layers from a shard must answer the shard.
  if (world_.spec().on_shard_loss == ShardLossPolicy::kDegrade) Probe();
}

void SimCoordinator::DoNotStart(const absl::Status& why) {
  if (!journal_.failing()) return world_.Fail("the coordinator does not start: " + why.ToString());
  // A server that cannot use its disk does not start.
  world_.trace().Note([&] { return "coordinator does not start: " + why.ToString(); });
  process_.Kill();
  world_.queue().After(kRestartMicros, [this] {
    if (!process_.up()) Start();
  });
}

void SimCoordinator::Tick() {
  process_.After(kReconcileMicros, [this] {
    core_->Reconcile();
    Tick();
  });
}

void SimCoordinator::Probe() {
  process_.After(kProbeMicros, [this] {
    for (size_t s = 0; s < world_.shards().size(); ++s) core_->ProbeShard(s);
    Probe();
  });
}

void SimCoordinator::DieAfter(uint64_t actions, int64_t patience_us) {
  doomed_ = true;
  actions_left_ = actions;
  process_.After(patience_us, [this] { actions_left_ = 0, (void)MayAct(); });
}

bool SimCoordinator::MayAct() {
  if (!process_.up()) return false;
  if (!doomed_ || actions_left_ > 0) {
    if (doomed_) --actions_left_;
    return true;
  }
  world_.trace().Note([] { return "coordinator dies"; });
  process_.Kill();
  return false;
}

}  // namespace precondor::sim
