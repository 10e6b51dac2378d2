// SPDX-License-Identifier: Apache-2.0
#include "tests/sim/sim_shard.h"

#include <algorithm>
#include <utility>

#include "kernels/base/error_reason.h"
#include "tests/sim/world.h"
#include "tests/support/submit.h"

namespace precondor::sim {
namespace {

constexpr int64_t kShardTickMicros = 7000;
constexpr int64_t kRestartMicros = 5000;

std::string MembersText(const std::vector<Member>& members) {
  std::string text;
  for (const Member& member : members) {
    text += " " + std::to_string(member.rank) + ":" + std::to_string(member.incarnation) + "@" +
            std::to_string(member.first_step);
  }
  return text;
}

std::string LayersText(const std::vector<uint32_t>& layers) {
  std::string text = " layers";
  for (const uint32_t layer : layers) text += " " + std::to_string(layer);
  return text;
}

}  // namespace

SimShard::SimShard(World& world, uint32_t id, ShardOptions options, Backend& backend)
    : world_(world),
      process_(world.queue(), id, "shard" + std::to_string(id)),
      clock_(world.queue()),
      backend_(backend),
      options_(std::move(options)),
      disk_(world, process_, clock_, world.scenario().seed ^ Mix(id)) {
  events_.doubles_updates = world.scenario().bug == PlantedBug::kUpdate;
  events_.updated = [this](const std::string& layer, const Stacked& update, const MethodState& after) {
    world_.trace().Note([&] { return process_.name() + " updates " + layer + " to " + std::to_string(after.version); });
    if (!process_.up()) return witness(layer).Unseen(after);
    world_.Fail(witness(layer).Updated(update, after));
  };
  events_.made = [this](const std::string& layer) {
    world_.trace().Note([&] { return process_.name() + " makes factors for " + layer; });
    world_.Fail(witness(layer).Made());
  };
  events_.loaded = [this](const std::string& layer, const MethodState& state) {
    world_.trace().Note([&] { return process_.name() + " loads " + layer + " at " + std::to_string(state.version); });
    world_.Fail(witness(layer).Loaded(state));
  };
  options_.make_method = [this](const MethodConfig&) -> absl::StatusOr<std::unique_ptr<Method>> {
    return std::make_unique<SimMethod>(events_, world_.scenario().learns);
  };
}

SimShard::~SimShard() = default;

void SimShard::ForEachWitness(const std::function<void(LayerWitness&)>& visit) {
  if (!world_.opened()) return;
  for (const uint32_t layer : owned_) visit(witness(layer));
}

LayerWitness& SimShard::witness(const std::string& layer) {
  const std::vector<LayerSpec>& layers = world_.spec().layers;
  const auto found =
      std::find_if(layers.begin(), layers.end(), [&](const LayerSpec& spec) { return spec.name == layer; });
  return witness(static_cast<uint32_t>(found - layers.begin()));
}

bool SimShard::Had(const std::string& layer, const MethodState& state) const {
  return std::any_of(witnesses_.begin(), witnesses_.end(), [&](const auto& witness) {
    return world_.spec().layers[witness.first].name == layer && witness.second->Had(state);
  });
}

void SimShard::MakeWitnesses(const SessionInstall& install) {
  // A rank may begin after a step whose statistics were lost with the shard.
  const bool patient = !world_.scenario().meets;
  for (const uint32_t layer : install.layers) {
    if (owned_.contains(layer)) continue;
    witnesses_[layer] =
        std::make_unique<LayerWitness>(world_.oracle(), world_.spec(), layer, world_.scenario().learns, patient,
                                       /*late=*/world_.opened(), install.rollback_epoch);
  }
}

void SimShard::Forget(int64_t down_us) {
  if (!process_.up()) return;
  Die(Loss::kProcess, /*losing=*/true, down_us);
  disk_.Replace();
  fences_may_be_lost_ = true;
}

void SimShard::End() {
  shard_.reset();
  executor_.reset();
}

void SimShard::Kill(Loss loss, int64_t down_us) {
  if (!process_.up()) return;
  // Records that the disk would not take are lost with the process.
  Die(loss, loss != Loss::kProcess || (world_.opened() && disk_.stale(world_.session_id())), down_us);
}

void SimShard::KillAfterWrites(uint64_t writes, int64_t down_us) {
  if (!process_.up()) return;
  disk_.DieAfter(writes, [this, down_us](bool lacks) {
    world_.trace().Note([&] { return process_.name() + " is killed after a write"; });
    process_.Kill();
    dying_ = true;
    world_.queue().After(0, [this, lacks, down_us] { Die(Loss::kProcess, lacks, down_us); });
  });
}

void SimShard::Drain(int64_t patience_us, int64_t down_us) {
  if (!process_.running()) return;
  if (shard_->in_flight() > 0 && patience_us > 0) {
    constexpr int64_t kLookMicros = 500;
    return process_.After(kLookMicros, [=, this] { Drain(patience_us - kLookMicros, down_us); });
  }
  world_.trace().Note([&] { return process_.name() + " writes its factors and ends"; });
  shard_->BeginDrain();
  executor_->RunAll();
  disk_.WriteSnapshots();
  const auto left = shard_->upkeep().GiveFinalImages();
  executor_->RunAll();
  PRECONDOR_CHECK(*left == 0);
  disk_.WriteSnapshots();
  if (process_.up() && !disk_.has_failed() && !shard_->upkeep().FindIncomplete().empty()) {
    world_.Fail("I5: " + process_.name() + " ends, and its disk lacks what it has taken in");
  }
  Kill(Loss::kProcess, down_us);
}

void SimShard::Die(Loss loss, bool losing, int64_t down_us) {
  dying_ = false;
  const bool machine = loss != Loss::kProcess;
  fences_may_be_lost_ = disk_.has_failed();
  world_.trace().Note([&] {
    return process_.name() + (machine ? "'s machine crashes" : losing ? " is killed, its log stale" : " is killed");
  });
  process_.Kill();
  End();
  disk_.Lose(loss);
  fenced_ = installed_;
  if (losing) world_.BeInexact();
  ForEachWitness([losing](LayerWitness& witness) { witness.Lost(losing); });
  world_.queue().After(down_us, [this] {
    if (!process_.up()) Start();
  });
}

absl::Status SimShard::Restore() {
  End();
  executor_ = std::make_unique<SimExecutor>(process_, world_.random());
  options_.journal = disk_.Open();
  shard_ = std::make_unique<Shard>(options_, backend_, *executor_, clock_, world_.logger(), world_.observer());
  return disk_.Restore(*shard_);
}

void SimShard::Start() {
  if (dying_) return;
  world_.trace().Note([&] { return process_.name() + " starts"; });
  process_.Start();
  absl::Status restored = Restore();
  if (!restored.ok() && disk_.damaged()) {
    // The shard noticed the damage. The operator gives it an empty disk.
    disk_.Replace();
    ForEachWitness([](LayerWitness& witness) { witness.Lost(true); });
    restored = Restore();
  }
  if (!restored.ok() && disk_.failing()) {
    // A server that cannot use its disk does not start.
    world_.trace().Note([&] { return process_.name() + " does not start: " + restored.ToString(); });
    return Kill(Loss::kProcess, kRestartMicros);
  }
  if (!restored.ok()) world_.Fail("I5: " + restored.ToString());
  if (disk_.damaged() || fences_may_be_lost_) LoseFences();
  ForEachWitness([this](LayerWitness& witness) { world_.Fail(witness.Restored()); });
  Tick();
}

// A disk that fails may have taken none; or one is damaged and no sync mark behind it is on the disk: it reads as a
// torn end.
void SimShard::LoseFences() {
  uint64_t known = 0;
  for (const ShardSessionSummary& session : shard_->ListSessions()) known = std::max(known, session.epoch);
  fenced_ = std::min(fenced_, known);
  installed_ = std::min(installed_, known);
}

void SimShard::Tick() {
  process_.After(kShardTickMicros, [this] {
    shard_->upkeep().CompleteQuarantine();
    Tick();
  });
}

// --- the coordinator's calls ----------------------------------------------------------------------------------------

absl::StatusOr<int64_t> SimShard::Install(const SessionInstall& install) {
  MakeWitnesses(install);
  absl::StatusOr<int64_t> reserved = shard_->Install(install);
  world_.trace().Note([&] {
    return process_.name() + " install epoch " + std::to_string(install.epoch) +
           (install.rollback_epoch == install.epoch ? " back to " + std::to_string(install.rollback_step) : "") +
           MembersText(install.members) + LayersText(install.layers) + ": " + reserved.status().ToString();
  });
  if (!reserved.ok() || !process_.up()) return reserved;
  owned_ = {install.layers.begin(), install.layers.end()};
  for (const Member& member : install.members) holders_[member.rank] = member.incarnation;
  installed_ = std::max(installed_, install.epoch);
  fenced_ = std::max(fenced_, install.epoch);
  for (const uint32_t layer : install.layers) {
    LayerWitness& its = witness(layer);
    if (its.generation() < install.rollback_epoch) its.RolledBack(install.rollback_epoch);
  }
  return reserved;
}

absl::StatusOr<std::optional<uint64_t>> SimShard::Fence(const EpochFence& fence) {
  absl::StatusOr<std::optional<uint64_t>> gone = shard_->Fence(fence);
  world_.trace().Note([&] {
    return process_.name() + " fence epoch " + std::to_string(fence.epoch) + MembersText(fence.members) + ": " +
           gone.status().ToString() + (gone.ok() && gone->has_value() ? " lacks " + std::to_string(**gone) : "");
  });
  if (gone.ok() && process_.up()) fenced_ = std::max(fenced_, fence.epoch);
  return gone;
}

absl::StatusOr<bool> SimShard::Remove(uint64_t session_id) {
  world_.trace().Note([&] { return process_.name() + " remove"; });
  absl::StatusOr<bool> existed = shard_->Remove(session_id);
  if (existed.ok() && *existed && process_.up() && world_.session_id() == session_id) {
    world_.OnRemoved(*this);
    owned_.clear();
  }
  return existed;
}

absl::StatusOr<bool> SimShard::Quarantine(uint64_t session_id) {
  world_.trace().Note([&] { return process_.name() + " quarantine"; });
  if (world_.session_id() == session_id) world_.OnQuarantined(*this);
  return shard_->Quarantine(session_id);
}

// --- the workers' frames --------------------------------------------------------------------------------------------

std::string SimShard::CheckCounted(const ContributionHeader& header, const absl::StatusOr<bool>& taken) {
  const ErrorReason reason = GetErrorReason(taken.status());
  const bool refused = reason == ErrorReason::kNonFinite;
  if (!refused && (!taken.ok() || *taken)) return "";
  const ContributionKey& key = header.key;
  if (key.epoch < fenced_) {
    return "I1: rank " + std::to_string(key.rank) + " counted at step " + std::to_string(key.step) + " in epoch " +
           std::to_string(key.epoch) + " after epoch " + std::to_string(fenced_) + " had begun";
  }
  if (std::string wrong = world_.NoteMode(key.step, header.mode); !wrong.empty()) return wrong;
  return witness(key.layer).Counted(header, refused);
}

ContributionHeader SimShard::Renewed(const ContributionHeader& header) const {
  ContributionHeader renewed = header;
  const auto holder = holders_.find(header.key.rank);
  if (header.key.epoch >= installed_ || holder == holders_.end()) return renewed;
  renewed.key.epoch = installed_;
  renewed.key.incarnation = holder->second;
  return renewed;
}

void SimShard::Forge(const ContributionHeader& header) {
  ContributionHeader forged = header;
  forged.key.rank = (header.key.rank + 1) % world_.ranks();
  const auto holder = holders_.find(forged.key.rank);
  if (world_.ranks() < 2 || header.kind == ContributionKind::kPull || holder == holders_.end()) return;
  forged.key.incarnation = holder->second;
  forged.abstain = true;
  forged.tensors.clear();
  const AckFn ignore = [](const absl::StatusOr<bool>&) {};
  SubmitTo(*shard_, forged, {}, ignore, [](const absl::StatusOr<GradientResult>&) {});
}

void SimShard::Deliver(const ContributionHeader& header, Payload payload, const AckFn& ack, const ResultFn& result) {
  const ContributionKey key = header.key;
  const PlantedBug bug = world_.scenario().bug;
  const AckFn watched_ack = [this, header, ack, bug](absl::StatusOr<bool> taken) {
    if (bug == PlantedBug::kRepetition && taken.ok()) taken = false;
    world_.trace().Note([&] {
      return process_.name() + " ack " + KeyText(header) + ": " +
             (taken.ok() ? *taken ? "repetition" : "taken" : taken.status().ToString());
    });
    world_.Fail(CheckCounted(header, taken));
    ack(std::move(taken));
  };
  const ContributionHeader arrives = bug == PlantedBug::kFence ? Renewed(header) : header;
  if (bug == PlantedBug::kSeal) Forge(header);
  SubmitTo(*shard_, arrives, std::move(payload), watched_ack,
           [this, key, mode = header.mode, result](absl::StatusOr<GradientResult> answer) {
             // No rank hears the answers of a shard that is going down.
             if (answer.ok() && process_.up()) world_.Fail(witness(key.layer).Answered(key, mode, *answer));
             result(std::move(answer));
           });
}

void SimShard::DeliverFetch(const ContributionKey& key, const ResultFn& result) {
  shard_->data_plane().Fetch(key, [this, key, result](absl::StatusOr<GradientResult> answer) {
    world_.trace().Note([&] {
      return process_.name() + " gives rank " + std::to_string(key.rank) + " layer " + std::to_string(key.layer) +
             ": " + (answer.ok() ? std::to_string(answer->factor_version) : answer.status().ToString());
    });
    if (answer.ok() && process_.up()) world_.Fail(witness(key.layer).Fetched(*answer));
    result(std::move(answer));
  });
}

absl::StatusOr<uint64_t> SimShard::DeliverResume(const RankResume& resume) {
  absl::StatusOr<uint64_t> taken = shard_->data_plane().Resume(resume);
  world_.trace().Note([&] {
    return process_.name() + std::string(resume.begins ? " begin layer " : " resume layer ") +
           std::to_string(resume.key.layer) + " rank " + std::to_string(resume.key.rank) + " step " +
           std::to_string(resume.key.step) + " lacks " + std::to_string(resume.next_step) + " version " +
           std::to_string(resume.factor_version) + ": " +
           (taken.ok() ? "lost " + std::to_string(*taken) : taken.status().ToString());
  });
  if (taken.ok()) world_.Fail(witness(resume.key.layer).Resumed(resume, *taken));
  return taken;
}

// --- at the end -----------------------------------------------------------------------------------------------------

std::string SimShard::Leftovers() const {
  if (!process_.up()) return "";
  if (shard_->memory()->reserved() != 0) return "I6: " + process_.name() + " has bytes reserved after the end";
  if (shard_->in_flight() != 0) return "I6: " + process_.name() + " has something in flight after the end";
  if (!shard_->ListSessions().empty()) return "I6: " + process_.name() + " has a session after the end";
  return "";
}

}  // namespace precondor::sim
