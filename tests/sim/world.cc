// SPDX-License-Identifier: Apache-2.0
#include "tests/sim/world.h"

#include <algorithm>
#include <utility>

#include "kernels/base/check.h"
#include "kernels/cpu/cpu_backend.h"
#include "tests/sim/fault_kinds.h"

namespace precondor::sim {
namespace {

// Limits of virtual time, once nothing is broken any more (I7).
constexpr int64_t kStepLimitMicros = 400'000;
constexpr int64_t kCloseLimitMicros = 2'000'000;
constexpr int64_t kQuietMicros = 500'000;  // longer than any message takes
constexpr int64_t kOpenLimitMicros = 60'000'000;
constexpr uint64_t kMaxEvents = 3'000'000;

}  // namespace

std::string KeyText(const ContributionHeader& header) {
  const ContributionKey& key = header.key;
  return "layer " + std::to_string(key.layer) + " rank " + std::to_string(key.rank) + " incarnation " +
         std::to_string(key.incarnation) + " step " + std::to_string(key.step) + " epoch " + std::to_string(key.epoch) +
         (header.kind == ContributionKind::kGradient ? " gradient"
          : header.kind == ContributionKind::kPull   ? " pull"
                                                     : " statistics");
}

World::World(Scenario scenario, size_t trace_lines)
    : scenario_(std::move(scenario)),
      oracle_(scenario_.seed, scenario_.spec, scenario_.trouble, scenario_.repeatable),
      random_(scenario_.seed),
      trace_(queue_, trace_lines),
      network_(queue_, random_, scenario_.max_delay_us, scenario_.network) {
  auto backend = MakeCpuBackend({});
  PRECONDOR_CHECK(backend.ok());
  backend_ = *std::move(backend);
  MakeShards();
}

World::~World() {
  // Shards that end tell streams, whose processes are still there; nothing that shards would call is.
  dead_.clear();
  for (Rank& rank : ranks_) rank.worker.reset();
  coordinator_.reset();
  shards_.clear();
}

void World::MakeShards() {
  ShardOptions options;
  options.window_steps = scenario_.window_steps;
  options.snapshot_interval_steps = scenario_.snapshot_interval_steps;
  uint32_t id = 0;
  for (int s = 0; s < scenario_.shards; ++s) {
    shards_.push_back(std::make_unique<SimShard>(*this, id++, options, *backend_));
  }
  CoordinatorOptions coordinator_options;
  coordinator_options.lease_steps = scenario_.lease_steps;
  coordinator_options.make_method = [this](const MethodConfig&) -> absl::StatusOr<std::unique_ptr<Method>> {
    return std::make_unique<SimMethod>(no_events_, scenario_.learns);
  };
  coordinator_ = std::make_unique<SimCoordinator>(*this, id++, std::move(coordinator_options));
  for (uint32_t rank = 0; rank < ranks(); ++rank) {
    ranks_.push_back({.process = std::make_unique<Process>(queue_, id++, "rank" + std::to_string(rank)),
                      .checkpoints = std::make_unique<Checkpoints>(),
                      .worker = nullptr});
  }
}

void World::OnRemoved(const SimShard& shard) {
  if (closing_) return;
  Fail("I5: " + shard.process().name() + " removed a session that no call has closed");
}

void World::OnQuarantined(const SimShard& shard) {
  // An install may be on its way while the session is closed.
  if (!closing_) Fail(shard.process().name() + " quarantines a session that no call has closed");
}

void World::Fail(const std::string& what) {
  if (!failure_.empty() || what.empty()) return;
  failure_ = what;
  trace_.Note([&] { return "FAILED " + what; });
}

SimShard& World::ShardAt(const std::string& address) {
  const auto found = std::find_if(shards_.begin(), shards_.end(),
                                  [&](const auto& shard) { return shard->process().name() == address; });
  PRECONDOR_CHECK(found != shards_.end());
  return **found;
}

std::vector<Process*> World::Processes() {
  std::vector<Process*> all = {&coordinator_->process()};
  for (const std::unique_ptr<SimShard>& shard : shards_) all.push_back(&shard->process());
  for (const Rank& rank : ranks_) all.push_back(rank.process.get());
  return all;
}

// --- the run --------------------------------------------------------------------------------------------------------

std::string World::Run() {
  if (scenario_.meets) job_.MayForget();
  for (const std::unique_ptr<SimShard>& shard : shards_) shard->Start();
  coordinator_->journal().set_failure(scenario_.disk_failure);
  coordinator_->Start();
  Open();
  for (uint32_t rank = 0; rank < ranks() && failure_.empty(); ++rank) StartRank(rank);
  for (const PlannedFault& fault : scenario_.faults) {
    queue_.After(fault.at_us, [this, kind = fault.kind] {
      if (healed_) return;
      trace_.Note([&] { return "fault " + std::string(kind->name); });
      kind->inflict(*this);
    });
  }
  queue_.After(scenario_.horizon_us, [this] { Heal(); });
  const int64_t limit_us = scenario_.horizon_us + static_cast<int64_t>(scenario_.steps + 5) * kStepLimitMicros;
  RunUntil([&] { return healed_ && AllDone(); }, limit_us, "the job is not done");
  if (failure_.empty()) CloseAndCheckLeaks();
  return failure_;
}

void World::Open() {
  const auto opened = [this] { return coordinator_->process().up() && coordinator_->core().OpenSession(spec()).ok(); };
  RunUntil(opened, kOpenLimitMicros, "the session is not open");
  if (!failure_.empty()) return;
  session_id_ = coordinator_->core().GetSession(spec().name)->session_id;
}

void World::RunUntil(const std::function<bool()>& finished, int64_t limit_us, const std::string& what) {
  const int64_t end_us = queue_.now_us() + limit_us;
  while (failure_.empty() && !finished()) {
    if (!queue_.RunOne() || queue_.now_us() > end_us || ++events_ > kMaxEvents) {
      Fail("I7: " + what + " after " + std::to_string(limit_us) + " us:" + DescribeRanks());
    }
  }
}

bool World::KnowsState(const std::string& layer, const MethodState& state) const {
  return std::any_of(shards_.begin(), shards_.end(), [&](const auto& shard) { return shard->Had(layer, state); });
}

bool World::AllDone() const {
  return std::all_of(ranks_.begin(), ranks_.end(),
                     [](const Rank& rank) { return rank.worker != nullptr && rank.worker->done(); });
}

bool World::AllReached(uint64_t generation, uint64_t step) const {
  return std::all_of(ranks_.begin(), ranks_.end(), [&](const Rank& rank) {
    return rank.worker != nullptr && rank.worker->HasReached(generation, step);
  });
}

std::string World::DescribeRanks() const {
  std::string text;
  for (const Rank& rank : ranks_) text += "\n  " + (rank.worker == nullptr ? "down" : rank.worker->Describe());
  return text;
}

void World::CloseAndCheckLeaks() {
  closing_ = true;
  for (const Rank& rank : ranks_) rank.process->Kill();
  const auto closed = [this] {
    return coordinator_->process().up() && coordinator_->core().CloseSession(spec().name).ok();
  };
  RunUntil(closed, kCloseLimitMicros, "the session is not closed");
  // Messages that are still on their way arrive at a session that is gone, and all that they leave behind is removed.
  const int64_t quiet_us = queue_.now_us() + kQuietMicros;
  RunUntil([this, quiet_us] { return queue_.now_us() >= quiet_us; }, 2 * kQuietMicros, "time stands still");
  for (const std::unique_ptr<SimShard>& shard : shards_) Fail(shard->Leftovers());
  if (backend_->allocated_bytes() != 0) Fail("I6: device memory is held after the end");
  if (!coordinator_->core().ListSessions().empty()) Fail("I6: the coordinator has a session after the end");
}

// --- faults ---------------------------------------------------------------------------------------------------------

void World::StartRank(uint32_t rank) {
  Rank& place = ranks_[rank];
  place.process->Start();
  place.worker = std::make_unique<SimWorker>(*this, *place.process, *place.checkpoints, rank, ++place.incarnation);
  trace_.Note([&] {
    return place.process->name() + " starts as incarnation " + std::to_string(place.incarnation) + " from step " +
           std::to_string(place.worker->step());
  });
  place.worker->Start();
}

void World::RestartRank(uint32_t rank, uint64_t back, int64_t down_us) {
  Rank& place = ranks_[rank];
  if (!place.process->up()) return;
  trace_.Note([&] { return place.process->name() + " is killed"; });
  place.process->Kill();
  dead_.push_back(std::move(place.worker));
  const uint64_t last = place.checkpoints->last_step();
  place.checkpoints->GoBackTo(last - std::min(last, back));
  queue_.After(down_us, [this, rank] {
    if (!ranks_[rank].process->up()) StartRank(rank);
  });
}

void World::LoseJob() {
  if (std::exchange(job_lost_, true)) return;
  queue_.After(random_.Between(1, 5000), [this] {
    job_lost_ = false;
    has_begun_again_ = true;
    uint64_t step = std::numeric_limits<uint64_t>::max();
    for (const Rank& rank : ranks_) step = std::min(step, rank.checkpoints->last_step());
    trace_.Note([&] { return "the job begins again with step " + std::to_string(step); });
    job_.GoBackTo(step);
    for (uint32_t rank = 0; rank < ranks(); ++rank) {
      RestartRank(rank, ranks_[rank].checkpoints->last_step() - step, random_.Between(1, 5000));
    }
  });
}

void World::RestartCoordinator() {
  coordinator_->process().Kill();
  coordinator_->Start();
}

void World::AskForMode(std::optional<Mode> mode) {
  coordinator_->process().After(0, [this, mode] {
    trace_.Note([&] { return "mode asked for: " + (mode.has_value() ? std::string(ModeName(*mode)) : "any"); });
    // An operator whose call fails does not insist.
    (void)coordinator_->core().SetMode(spec().name, mode);
  });
}

void World::Heal() {
  healed_ = true;
  trace_.Note([] { return "everything is mended"; });
  network_.Heal();
  coordinator_->journal().set_full(false);
  coordinator_->journal().set_failure(0);
  if (!coordinator_->process().up()) coordinator_->Start();
  for (Process* process : Processes()) process->Resume();
  for (const std::unique_ptr<SimShard>& shard : shards_) {
    shard->disk().Mend();
    if (!shard->process().up()) shard->Start();
  }
  for (uint32_t rank = 0; rank < ranks(); ++rank) {
    if (!ranks_[rank].process->up()) StartRank(rank);
  }
}

}  // namespace precondor::sim
