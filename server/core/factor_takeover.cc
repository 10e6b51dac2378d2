// SPDX-License-Identifier: Apache-2.0
#include "server/core/factor_takeover.h"

#include <algorithm>
#include <optional>

#include "absl/strings/str_cat.h"

#include "server/core/aside_updates.h"
#include "server/core/peer_replay.h"
#include "server/core/reservation.h"
#include "server/core/shard_journal.h"

namespace precondor {
namespace {

constexpr int kAttempts = 5;

}  // namespace

FactorTakeover::FactorTakeover(std::shared_ptr<SessionContext> session, std::vector<Heir> heirs)
    : session_(std::move(session)), peers_(session_->shard->options.peers), began_(session_->shard->clock.Now()) {
  for (Heir& heir : heirs) {
    const uint32_t layer = heir.layer->index();
    heirs_.emplace(layer, std::move(heir));
  }
}

FactorTakeover::~FactorTakeover() {
  if (!extra_bytes_.none()) session_->shard->memory.Release(extra_bytes_);
}

DeviceBytes FactorTakeover::ExtraBytes() const {
  const SessionSpec& spec = session_->spec;
  const int ranks = session_->shard->ranks();
  const size_t devices = session_->devices.size();
  DeviceBytes extra{std::vector<int64_t>(devices)};
  std::vector<int64_t> state(devices);
  ReservationSums sums(spec, session_->methods, session_->shard->options.window_steps, std::vector<int>(devices, 1),
                       ranks);
  for (const auto& [layer, heir] : heirs_) {
    const size_t primary = session_->DeviceOf(layer).place;
    sums.Include(primary, layer);
    extra.of[primary] += static_cast<int64_t>(AsideUpdates::Most(spec, layer)) * StatisticsBytes(spec, layer);
    const Method::SplitBytes bytes = StateBytes(session_->methods.of(layer), spec.layers[layer], ranks);
    for (size_t device = 0; device < devices; ++device) {
      state[device] = std::max(state[device], device == primary ? bytes.primary : bytes.other);
    }
  }
  for (size_t device = 0; device < devices; ++device) {
    extra.of[device] += state[device] + sums.reservation(device).scratch;
  }
  return extra;
}

void FactorTakeover::Start(std::shared_ptr<SessionContext> session, std::vector<Heir> heirs) {
  if (heirs.empty()) return;
  const std::shared_ptr<FactorTakeover> self(new FactorTakeover(std::move(session), std::move(heirs)));
  absl::Status possible = absl::OkStatus();
  if (self->peers_ == nullptr) possible = absl::NotFoundError("no data directories of other shards are known");
  const DeviceBytes extra = self->ExtraBytes();
  if (possible.ok()) possible = self->session_->shard->memory.Reserve(self->session_->spec.name, extra);
  if (possible.ok()) {
    self->extra_bytes_ = extra;
    return self->peers_->Post([self] { self->Find(); });
  }
  const TakeoverOutcome outcome = self->peers_ == nullptr ? TakeoverOutcome::kNone : TakeoverOutcome::kRefused;
  self->GiveUp(self->left(), outcome, possible);
}

std::set<uint32_t> FactorTakeover::left() const {
  std::set<uint32_t> layers;
  for (const auto& [layer, heir] : heirs_) layers.insert(layer);
  return layers;
}

bool FactorTakeover::wanted() const {
  if (peers_->stopping()) return false;
  return std::any_of(heirs_.begin(), heirs_.end(),
                     [](const auto& entry) { return entry.second.layer->Wants(entry.second.ticket); });
}

void FactorTakeover::Find() {
  if (!wanted()) return;
  journals_ = peers_->Find(session_->session_id, left());
  ReadNext();
}

void FactorTakeover::ReadNext() {
  while (built_.empty()) {
    if (!wanted()) return;
    if (next_journal_ == journals_.size()) break;
    PeerJournal& journal = *journals_[next_journal_++];
    const std::set<uint32_t> layers = left();
    PeerReplay replay(
        session_, layers, [&journal](uint64_t release, uint32_t layer) { return journal.ReadFactors(release, layer); },
        [this] { return wanted(); });
    const absl::Status read = journal.Read(replay);
    if (!wanted()) return;
    // Its owner, which is alive, has removed what was being read, and left what takes its place.
    if (absl::IsAborted(read) && ++attempts_ < kAttempts) {
      --next_journal_;
      continue;
    }
    for (const uint32_t layer : layers) {
      absl::StatusOr<PeerFactorState> factors =
          read.ok() ? replay.Finish(layer) : absl::StatusOr<PeerFactorState>(read);
      if (factors.ok()) {
        built_.emplace_back(layer, *std::move(factors));
      } else if (!absl::IsNotFound(factors.status())) {
        damaged_[layer] =
            absl::Status(factors.status().code(), absl::StrCat(journal.name(), ": ", factors.status().message()));
      }
    }
  }
  if (!built_.empty()) return KeepNext();
  std::set<uint32_t> damaged;
  for (const auto& [layer, why] : damaged_) {
    if (heirs_.contains(layer)) damaged.insert(layer);
  }
  if (!damaged.empty()) GiveUp(damaged, TakeoverOutcome::kDamaged, damaged_.at(*damaged.begin()));
  GiveUp(left(), TakeoverOutcome::kNone, absl::NotFoundError("no data directory of another shard has any"));
}

void FactorTakeover::KeepNext() {
  if (built_.empty()) {
    NoteAdopted();
    return ReadNext();
  }
  auto [layer, found] = std::move(built_.back());
  built_.pop_back();
  ShardJournal* const journal = session_->shard->options.journal;
  if (journal == nullptr) {
    Adopt(layer, std::move(found), 0);
    return peers_->Post([self = shared_from_this()] { self->KeepNext(); });
  }
  const uint64_t release = session_->last_release.fetch_add(1) + 1;
  absl::StatusOr<std::string> bytes = found.state->Save();
  // Tasks have to be copyable.
  auto kept = std::make_shared<PeerFactorState>(std::move(found));
  const auto done = [self = shared_from_this(), kept, layer = layer, release](absl::Status status) {
    self->peers_->Post([self, kept, layer, release, status = std::move(status)] {
      if (!self->wanted()) return;
      if (status.ok()) {
        self->Adopt(layer, std::move(*kept), release);
      } else {
        kept->state.reset();
        self->GiveUp({layer}, TakeoverOutcome::kRefused, status);
      }
      self->KeepNext();
    });
  };
  if (!bytes.ok()) return done(bytes.status());
  ReleasedFactors factors{.session_id = session_->session_id, .release = release, .states = {}};
  factors.states.emplace(layer, *std::move(bytes));
  journal->AdoptFactors(std::move(factors), done);
}

void FactorTakeover::Adopt(uint32_t layer, PeerFactorState factors, uint64_t release) {
  const auto heir = heirs_.extract(layer);
  ++adopted_;
  heir.mapped().layer->TakeOver(heir.mapped().ticket, std::move(factors), release);
}

void FactorTakeover::NoteAdopted() {
  if (adopted_ == 0) return;
  const ShardContext& shard = *session_->shard;
  shard.observer.OnLayersTakenOver(session_->spec.name, TakeoverOutcome::kAdopted, adopted_);
  shard.logger.Log(Severity::kInfo, "factors of a lost shard taken over",
                   {{"session", session_->spec.name},
                    {"from", journals_[next_journal_ - 1]->name()},
                    {"layers", adopted_},
                    {"took_ms", absl::ToInt64Milliseconds(shard.clock.Now() - began_)}});
  adopted_ = 0;
}

void FactorTakeover::GiveUp(const std::set<uint32_t>& layers, TakeoverOutcome outcome, const absl::Status& why) {
  if (layers.empty()) return;
  const ShardContext& shard = *session_->shard;
  for (const uint32_t layer : layers) {
    const auto heir = heirs_.extract(layer);
    LayerPipeline& pipeline = *heir.mapped().layer;
    absl::StatusOr<std::unique_ptr<LayerState>> fresh = session_->MakeState(layer);
    // Without any the layer goes on answering with averages.
    if (fresh.ok()) pipeline.TakeOver(heir.mapped().ticket, {.state = *std::move(fresh)}, 0);
  }
  shard.observer.OnLayersTakenOver(session_->spec.name, outcome, static_cast<int64_t>(layers.size()));
  shard.logger.Log(Severity::kWarning, "no factors taken over; layers of a lost shard begin with fresh ones",
                   {{"session", session_->spec.name},
                    {"layers", static_cast<uint64_t>(layers.size())},
                    {"first", session_->spec.layers[*layers.begin()].name},
                    {"reason", absl::string_view(why.message())}});
}

}  // namespace precondor
