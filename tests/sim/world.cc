// SPDX-License-Identifier: Apache-2.0
#include "tests/sim/world.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "kernels/base/check.h"
#include "kernels/base/error_reason.h"
#include "kernels/cpu/cpu_backend.h"

namespace precondor::sim {
namespace {

constexpr uint64_t kMaxEvents = 300'000;

std::string KeyText(const ContributionKey& key) {
  return "epoch " + std::to_string(key.epoch) + " step " + std::to_string(key.step) + " layer " +
         std::to_string(key.layer) + " rank " + std::to_string(key.rank);
}

Payload Encode(const std::vector<float>& values) {
  Payload bytes(values.size() * sizeof(float));
  if (!values.empty()) std::memcpy(bytes.data(), values.data(), bytes.size());
  return bytes;
}

}  // namespace

Scenario MakeScenario(uint64_t seed) {
  Random random(seed ^ 0x5ce0a210);
  Scenario scenario;
  scenario.seed = seed;
  SessionSpec& spec = scenario.spec;
  spec.name = "sim";
  spec.world_size = 1 + static_cast<int32_t>(random.Below(5));
  spec.exchange = random.Chance(0.5) ? ExchangeMode::kDirect : ExchangeMode::kDelegate;
  spec.sketches = 1 + static_cast<int32_t>(random.Below(2));
  spec.inv_freq = 1 + static_cast<int32_t>(random.Below(4));
  spec.warmup_steps = static_cast<int32_t>(random.Below(4));
  spec.staleness_steps = static_cast<int32_t>(random.Below(2));
  spec.statistics_dtype = DType::kF32;
  spec.method.name = "fake";
  const uint64_t layers = 1 + random.Below(4);
  for (uint64_t i = 0; i < layers; ++i) {
    spec.layers.push_back({.name = "layer" + std::to_string(i),
                           .d_out = 1 + static_cast<int64_t>(random.Below(4)),
                           .d_in = 1 + static_cast<int64_t>(random.Below(4)),
                           .has_bias = false});
  }
  scenario.shards = 1 + static_cast<int>(random.Below(3));
  scenario.steps = 6 + random.Below(10);
  // A quarter of the runs are quiet: there the answers are known to the last bit, versions included.
  if (!random.Chance(0.25)) {
    scenario.faults.drop = 0.01 * static_cast<double>(random.Below(20));
    scenario.faults.duplicate = 0.01 * static_cast<double>(random.Below(30));
    scenario.faults.straggle = 0.01 * static_cast<double>(random.Below(10));
    scenario.control_faults = random.Chance(0.5) ? 0.2 : 0;
    scenario.restarts = static_cast<int>(random.Below(3));
  }
  scenario.faults.max_delay_us = 1 + static_cast<int64_t>(random.Below(2000));
  scenario.trouble = random.Chance(0.5) ? 0.05 : 0;
  return scenario;
}

// A coordinator's way to a shard: a call may be lost on the way there or on the way back.
class World::FlakyControl final : public ShardControl {
 public:
  FlakyControl(World& world, Shard& shard) : world_(world), shard_(shard) {}
  absl::StatusOr<ShardDescription> Describe() override {
    if (Lost()) return absl::UnavailableError("lost on the way there");
    return shard_.Describe();
  }
  absl::StatusOr<int64_t> Install(const SessionInstall& install) override {
    if (Lost()) return absl::UnavailableError("lost on the way there");
    absl::StatusOr<int64_t> reserved = shard_.Install(install);
    if (Lost()) return absl::UnavailableError("lost on the way back");
    return reserved;
  }
  absl::StatusOr<std::optional<uint64_t>> Fence(const EpochFence& fence) override {
    if (Lost()) return absl::UnavailableError("lost on the way there");
    absl::StatusOr<std::optional<uint64_t>> gone = shard_.Fence(fence);
    if (Lost()) return absl::UnavailableError("lost on the way back");
    return gone;
  }
  absl::Status HoldFactors(const FactorHold& hold) override {
    if (Lost()) return absl::UnavailableError("lost on the way there");
    const absl::Status status = shard_.HoldFactors(hold);
    if (Lost()) return absl::UnavailableError("lost on the way back");
    return status;
  }
  absl::StatusOr<bool> Remove(uint64_t session_id) override {
    if (Lost()) return absl::UnavailableError("lost on the way there");
    absl::StatusOr<bool> existed = shard_.Remove(session_id);
    if (Lost()) return absl::UnavailableError("lost on the way back");
    return existed;
  }

 private:
  bool Lost() { return world_.random_.Chance(world_.scenario_.control_faults); }
  World& world_;
  Shard& shard_;
};

World::World(Scenario scenario)
    : scenario_(std::move(scenario)),
      oracle_(scenario_.seed, scenario_.spec, scenario_.trouble),
      random_(scenario_.seed),
      network_(queue_, random_, scenario_.faults),
      executor_(queue_, random_) {
  auto backend = MakeCpuBackend({});
  PRECONDOR_CHECK(backend.ok());
  backend_ = *std::move(backend);
  const MethodFactory factory = [log = log_](const MethodConfig&) -> absl::StatusOr<std::unique_ptr<Method>> {
    return std::make_unique<FakeMethod>(log, true);
  };
  ShardOptions options;
  options.make_method = factory;
  std::vector<ShardEndpoint> endpoints;
  for (int s = 0; s < scenario_.shards; ++s) {
    shards_.push_back(std::make_unique<Shard>(options, *backend_, executor_, queue_, logger_, observer_));
    endpoints.push_back({.address = std::to_string(s), .control = std::make_unique<FlakyControl>(*this, *shards_[s])});
  }
  CoordinatorOptions coordinator_options;
  coordinator_options.make_method = factory;
  coordinator_ =
      std::make_unique<Coordinator>(coordinator_options, std::move(endpoints), journal_, queue_, logger_, observer_);
}

World::~World() = default;

void World::Fail(const std::string& what) {
  if (failure_.empty()) failure_ = what;
}

bool World::Alive(uint32_t rank, uint64_t incarnation) const {
  return !closing_ && workers_[rank]->incarnation() == incarnation;
}

std::string World::Run() {
  while (!coordinator_->OpenSession(scenario_.spec).ok()) {
  }
  for (uint32_t rank = 0; rank < static_cast<uint32_t>(spec().world_size); ++rank) {
    workers_.push_back(std::make_unique<SimWorker>(*this, rank, 1, 0, 0));
  }
  for (const std::unique_ptr<SimWorker>& worker : workers_) worker->Start();
  ScheduleRestarts();
  const auto finished = [this] {
    return std::all_of(workers_.begin(), workers_.end(), [](const auto& worker) { return worker->done(); });
  };
  uint64_t events = 0;
  while (failure_.empty() && !finished()) {
    if (!queue_.RunOne()) Fail("nothing left to happen, and the job is not done");
    if (++events > kMaxEvents) Fail("no progress: " + DescribeWorkers());
  }
  CheckUpdates();
  CloseAndCheckLeaks();
  return failure_;
}

std::string World::DescribeWorkers() const {
  std::string text =
      std::string(ExchangeModeName(spec().exchange).data()) + " staleness " + std::to_string(spec().staleness_steps);
  for (const std::unique_ptr<SimWorker>& worker : workers_) text += "; " + worker->Describe();
  return text;
}

void World::ScheduleRestarts() {
  for (int i = 0; i < scenario_.restarts; ++i) {
    const auto rank = static_cast<uint32_t>(random_.Below(spec().world_size));
    queue_.After(static_cast<int64_t>(random_.Below(60'000)), [this, rank] { RestartWorker(rank); });
  }
}

void World::RestartWorker(uint32_t rank) {
  const SimWorker& old = *workers_[rank];
  const uint64_t first_step = old.step() - std::min(old.step(), random_.Below(4));
  auto next = std::make_unique<SimWorker>(*this, rank, old.incarnation() + 1, first_step, old.known_epoch());
  dead_.push_back(std::exchange(workers_[rank], std::move(next)));
  workers_[rank]->Start();
}

// --- at the shard ---------------------------------------------------------------------------------------------------

void World::Deliver(const ContributionHeader& header, const Part& part, AckFn ack, ResultFn result) {
  const ContributionKey key = header.key;
  // Any owner will do: the map never changes, and a wrong shard says so.
  Shard* owner = nullptr;
  for (const std::unique_ptr<Shard>& shard : shards_) {
    const absl::Status status = shard->CheckHeader(header, header.abstain ? 0 : part.values.size() * sizeof(float));
    const ErrorReason reason = GetErrorReason(status);
    if (reason != ErrorReason::kNotOwner && reason != ErrorReason::kUnknownSession) owner = shard.get();
  }
  if (owner == nullptr) return;  // the session has been closed
  const AckFn counted = [this, key, kind = header.kind, ack](absl::StatusOr<bool> taken) {
    const uint64_t generation = generations_.at(key.epoch);
    if (taken.ok() && !*taken && !counted_.insert({generation, key.step, key.layer, key.rank, kind}).second) {
      Fail("counted twice: " + KeyText(key));
    }
    ack(std::move(taken));
  };
  if (header.kind == ContributionKind::kStatistics) {
    owner->SubmitStatistics(header, header.abstain ? Payload() : Encode(part.values), counted);
    return;
  }
  owner->SubmitGradient(header, header.abstain ? Payload() : Encode(part.values), counted,
                        [this, key, result](absl::StatusOr<GradientResult> answer) {
                          if (answer.ok()) CheckPlan(key, *answer);
                          result(std::move(answer));
                        });
}

void World::CheckPlan(const ContributionKey& key, const GradientResult& result) {
  const auto [plan, fresh] = plans_.try_emplace({generations_.at(key.epoch), key.step, key.layer}, result);
  if (fresh) return CheckValues(key, result);
  const GradientResult& first = plan->second;
  const bool same_bytes = first.bytes == result.bytes ||
                          (first.bytes != nullptr && result.bytes != nullptr && *first.bytes == *result.bytes);
  if (first.decision != result.decision || first.factor_version != result.factor_version ||
      first.reason != result.reason || !same_bytes) {
    Fail("two plans: " + KeyText(key));
  }
}

void World::CheckValues(const ContributionKey& key, const GradientResult& result) {
  const std::optional<std::vector<float>> average = oracle_.Average(key.step, key.layer);
  if (average.has_value() == (result.decision == Decision::kSkip)) return Fail("wrong decision: " + KeyText(key));
  // Undisturbed, the version is a function of the step.
  if (scenario_.restarts == 0) {
    const bool own = spec().staleness_steps == 0;
    const uint64_t expected = own ? UpdatesThrough(key.step + 1, key.layer) : UpdatesThrough(key.step, key.layer);
    if (result.factor_version != expected) Fail("wrong factor version: " + KeyText(key));
  }
  if (!average.has_value()) return;
  if ((result.decision == Decision::kPreconditioned) != (result.factor_version > 0)) {
    Fail("decision does not fit the version: " + KeyText(key));
  }
  std::vector<float> expected;
  const double factor =
      result.decision == Decision::kPreconditioned ? static_cast<double>(result.factor_version + 1) : 1.0;
  for (float value : *average) expected.push_back(static_cast<float>(factor * static_cast<double>(value)));
  if (*result.bytes != Encode(expected)) Fail("wrong bytes: " + KeyText(key));
}

bool World::AllReached(uint64_t generation, uint64_t step) const {
  return std::all_of(workers_.begin(), workers_.end(),
                     [&](const auto& worker) { return worker->generation() == generation && worker->step() >= step; });
}

bool World::AllAnswered(uint64_t generation, uint64_t step) const {
  for (uint32_t layer = 0; layer < spec().layers.size(); ++layer) {
    if (!plans_.contains({generation, step, layer})) return false;
  }
  return true;
}

// --- at the end -----------------------------------------------------------------------------------------------------

uint64_t World::UpdatesThrough(uint64_t end, uint32_t layer) const {
  uint64_t updates = 0;
  for (uint64_t step = 0; step < end; ++step) {
    if (IsStatisticStep(spec(), step) && oracle_.Update(step, layer).has_value()) ++updates;
  }
  return updates;
}

void World::CheckUpdates() {
  std::map<std::pair<uint32_t, uint64_t>, uint64_t> times;  // layer, step
  std::set<uint64_t> generations;
  for (const auto& [epoch, generation] : generations_) generations.insert(generation);
  for (const FakeUpdate& update : log_->updates()) {
    const Oracle::Stacked got{.a = update.a, .g = update.g};
    bool known = false;
    for (uint32_t layer = 0; layer < spec().layers.size() && !known; ++layer) {
      for (uint64_t step = 0; step < scenario_.steps && !known; ++step) {
        if (spec().layers[layer].name != update.layer || !IsStatisticStep(spec(), step)) continue;
        known = oracle_.Update(step, layer) == got;
        if (known && ++times[{layer, step}] > generations.size()) Fail("an update was made too often: " + update.layer);
      }
    }
    if (!known) Fail("an update that no step's contributors make: " + update.layer);
  }
}

void World::CloseAndCheckLeaks() {
  while (!coordinator_->CloseSession(spec().name).ok()) {
  }
  closing_ = true;
  // What is still on its way arrives at a session that is gone.
  while (queue_.RunOne() && failure_.empty()) {
  }
  for (const std::unique_ptr<Shard>& shard : shards_) {
    if (shard->reserved_bytes() != 0) Fail("reserved bytes after the end");
    if (shard->in_flight() != 0) Fail("something in flight after the end");
    if (!shard->ListSessions().empty()) Fail("a session after the end");
  }
  if (backend_->allocated_bytes() != 0) Fail("device memory after the end");
}

}  // namespace precondor::sim
