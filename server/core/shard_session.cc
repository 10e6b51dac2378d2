// SPDX-License-Identifier: Apache-2.0
#include "server/core/shard_session.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"

#include "kernels/base/error_reason.h"
#include "kernels/base/status_macros.h"
#include "server/core/payload.h"

namespace precondor {
namespace {

using absl::StatusCode;

absl::Status Refusal(StatusCode code, ErrorReason reason, const SessionSpec& spec, const ContributionKey& key,
                     const absl::AlphaNum& what) {
  return ReasonedStatus(code, reason, absl::StrCat(DescribeKey(spec, key), ": ", what));
}

// The members of ranks that had another holder, or none.
std::vector<Member> Replaced(const std::vector<uint64_t>& holders, const std::vector<Member>& members) {
  std::vector<Member> replaced;
  for (const Member& member : members) {
    if (holders[member.rank] != member.incarnation) replaced.push_back(member);
  }
  return replaced;
}

}  // namespace

absl::StatusOr<std::shared_ptr<ShardSession>> ShardSession::Create(std::shared_ptr<SessionContext> context,
                                                                   const SessionInstall& install,
                                                                   const SessionFactors::Sizes& sizes) {
  std::vector<std::shared_ptr<LayerDriver>> layers(install.spec.layers.size());
  std::vector<std::shared_ptr<LayerDriver>> owned;
  for (uint32_t layer : install.layers) {
    PRECONDOR_ASSIGN_OR_RETURN(layers[layer], LayerDriver::Create(context, layer, install, !install.factors_released));
    owned.push_back(layers[layer]);
  }
  auto factors = std::make_shared<SessionFactors>(context, std::move(owned), sizes,
                                                  SessionFactors::FactorState{.held = !install.factors_released});
  return std::shared_ptr<ShardSession>(new ShardSession(std::move(context), install.layers, std::move(layers),
                                                        std::move(factors), MakeHolders(install)));
}

ShardSession::ShardSession(std::shared_ptr<SessionContext> context, std::vector<uint32_t> owned,
                           std::vector<std::shared_ptr<LayerDriver>> layers, std::shared_ptr<SessionFactors> factors,
                           std::shared_ptr<const RankHolders> holders)
    : context_(std::move(context)),
      owned_(std::move(owned)),
      layers_(std::move(layers)),
      factors_(std::move(factors)),
      holders_(std::move(holders)) {}

std::shared_ptr<RankHolders> ShardSession::MakeHolders(const SessionInstall& install) {
  auto members = std::make_shared<RankHolders>();
  members->epoch = install.epoch;
  members->incarnations.assign(install.spec.world_size, 0);
  for (const Member& member : install.members) {
    if (members->incarnations[member.rank] == 0) ++members->joined;
    members->incarnations[member.rank] = member.incarnation;
  }
  return members;
}

std::shared_ptr<const RankHolders> ShardSession::holders() const {
  MutexLock lock(mu_);
  return holders_;
}

absl::Status ShardSession::Reinstall(const SessionInstall& install) {
  if (const std::string difference = DescribeDifference(spec(), install.spec); !difference.empty()) {
    return ReasonedStatus(StatusCode::kFailedPrecondition, ErrorReason::kSpecMismatch,
                          absl::StrCat("session \"", spec().name, "\": ", difference));
  }
  auto next = MakeHolders(install);
  bool restart = false;
  std::vector<Member> replaced;
  {
    MutexLock lock(mu_);
    if (install.epoch < holders_->epoch) {
      return ReasonedStatus(StatusCode::kFailedPrecondition, ErrorReason::kStaleEpoch,
                            absl::StrCat("session \"", spec().name, "\": expected epoch ", holders_->epoch,
                                         " or later, got ", install.epoch));
    }
    restart = install.epoch > holders_->epoch || holders_->fenced;
    if (restart) replaced = Replaced(holders_->incarnations, install.members);
    for (size_t rank = 0; rank < next->incarnations.size() && !restart; ++rank) {
      const uint64_t have = holders_->incarnations[rank];
      uint64_t& got = next->incarnations[rank];
      if (have == 0 || have == got) continue;
      if (got != 0) {
        return ReasonedStatus(StatusCode::kFailedPrecondition, ErrorReason::kStaleIncarnation,
                              absl::StrCat("session \"", spec().name, "\" epoch ", install.epoch, " rank ", rank,
                                           ": held by incarnation ", have, ", got ", got));
      }
      got = have;
      ++next->joined;
    }
    holders_ = std::move(next);
  }
  if (!restart) return absl::OkStatus();
  // Frames of the new epoch that come before their layer's turn here are told to retry.
  for (uint32_t layer : owned_) {
    layers_[layer]->EndEpoch(install.epoch, EpochHasBegun(install.epoch));
    layers_[layer]->BeginEpoch(install.epoch, install.rollback_step, replaced);
  }
  return absl::OkStatus();
}

bool ShardSession::IsNews(const SessionInstall& install) const {
  const std::shared_ptr<const RankHolders> known = holders();
  if (install.epoch != known->epoch || known->fenced) return install.epoch >= known->epoch;
  return std::any_of(install.members.begin(), install.members.end(),
                     [&](const Member& member) { return known->incarnations[member.rank] == 0; });
}

absl::StatusOr<bool> ShardSession::ChangesLayers(const SessionInstall& install) const {
  if (install.layers == owned_) return false;
  if (const std::string difference = DescribeDifference(spec(), install.spec); !difference.empty()) {
    return ReasonedStatus(StatusCode::kFailedPrecondition, ErrorReason::kSpecMismatch,
                          absl::StrCat("session \"", spec().name, "\": ", difference));
  }
  const std::shared_ptr<const RankHolders> members = holders();
  if (install.epoch > members->epoch || (install.epoch == members->epoch && members->fenced)) return true;
  return ReasonedStatus(
      StatusCode::kFailedPrecondition, ErrorReason::kStaleEpoch,
      absl::StrCat("session \"", spec().name, "\": owns ", owned_.size(), " layers, which may not change in epoch ",
                   members->epoch, "; got another set of ", install.layers.size(), " in epoch ", install.epoch));
}

absl::StatusOr<std::shared_ptr<ShardSession>> ShardSession::WithLayers(const SessionInstall& install,
                                                                       const SessionFactors::FactorState& state,
                                                                       const SessionFactors::Sizes& sizes) const {
  std::vector<std::shared_ptr<LayerDriver>> layers(layers_.size());
  std::vector<std::shared_ptr<LayerDriver>> owned;
  for (uint32_t layer : install.layers) {
    layers[layer] = layers_[layer];
    if (layers[layer] == nullptr) {
      PRECONDOR_ASSIGN_OR_RETURN(layers[layer], LayerDriver::Create(context_, layer, install, state.held));
    }
    owned.push_back(layers[layer]);
  }
  auto factors = std::make_shared<SessionFactors>(context_, std::move(owned), sizes, state);
  return std::shared_ptr<ShardSession>(
      new ShardSession(context_, install.layers, std::move(layers), std::move(factors), MakeHolders(install)));
}

void ShardSession::Succeed(const ShardSession& previous, const SessionInstall& install) {
  const std::vector<Member> replaced = Replaced(previous.holders()->incarnations, install.members);
  for (uint32_t layer : previous.owned_) {
    if (layers_[layer] == nullptr) {
      previous.layers_[layer]->Close(EpochHasBegun(install.epoch));
      continue;
    }
    layers_[layer]->EndEpoch(install.epoch, EpochHasBegun(install.epoch));
    layers_[layer]->BeginEpoch(install.epoch, install.rollback_step, replaced);
  }
}

absl::Status ShardSession::EpochHasBegun(uint64_t epoch) const {
  return ReasonedStatus(StatusCode::kAborted, ErrorReason::kStaleEpoch,
                        absl::StrCat("session \"", spec().name, "\": epoch ", epoch, " has begun, join again"));
}

absl::StatusOr<std::optional<uint64_t>> ShardSession::Fence(const EpochFence& fence) {
  std::vector<Member> replaced;
  {
    MutexLock lock(mu_);
    if (fence.epoch < holders_->epoch) {
      return ReasonedStatus(StatusCode::kFailedPrecondition, ErrorReason::kStaleEpoch,
                            absl::StrCat("session \"", spec().name, "\": expected epoch ", holders_->epoch,
                                         " or later, got ", fence.epoch));
    }
    if (fence.epoch == holders_->epoch && !holders_->fenced) return std::nullopt;
    for (const Member& member : fence.members) {
      if (member.rank < holders_->incarnations.size()) continue;
      return ReasonedStatus(StatusCode::kInvalidArgument, ErrorReason::kUnknownRank,
                            absl::StrCat("session \"", spec().name, "\": members: expected ranks below ",
                                         holders_->incarnations.size(), ", got ", member.rank));
    }
    auto fenced = std::make_shared<RankHolders>(*holders_);
    fenced->epoch = fence.epoch;
    fenced->fenced = true;
    holders_ = std::move(fenced);
    replaced = Replaced(holders_->incarnations, fence.members);
  }
  uint64_t floor = 0;
  for (uint32_t layer : owned_) {
    floor = std::max(floor, layers_[layer]->EndEpoch(fence.epoch, EpochHasBegun(fence.epoch)));
  }
  std::optional<uint64_t> gone;
  for (const Member& member : replaced) {
    if (member.first_step < floor) gone = std::min(gone.value_or(member.first_step), member.first_step);
  }
  return gone;
}

absl::Status ShardSession::CheckLayer(const ContributionKey& key) const {
  if (key.layer >= layers_.size()) {
    return Refusal(StatusCode::kNotFound, ErrorReason::kUnknownLayer, spec(), key,
                   absl::StrCat("expected a layer below ", layers_.size()));
  }
  if (layers_[key.layer] == nullptr) {
    return Refusal(StatusCode::kFailedPrecondition, ErrorReason::kNotOwner, spec(), key,
                   "another shard owns the layer");
  }
  return absl::OkStatus();
}

absl::Status ShardSession::CheckKey(const ContributionKey& key) const {
  PRECONDOR_RETURN_IF_ERROR(CheckSender(spec(), *holders(), key));
  return CheckLayer(key);
}

absl::StatusOr<AdmittedContribution> ShardSession::Admit(ContributionHeader& header, uint64_t payload_bytes) const {
  PRECONDOR_RETURN_IF_ERROR(CheckKey(header.key));
  PRECONDOR_RETURN_IF_ERROR(CheckRole(spec(), context_->methods.of(header.key.layer), header));
  PRECONDOR_RETURN_IF_ERROR(CheckTensors(spec(), header, payload_bytes));
  PRECONDOR_RETURN_IF_ERROR(layers_[header.key.layer]->Check(header));
  return AdmittedContribution(std::move(header), payload_bytes, context_);
}

absl::StatusOr<AdmittedAverage> ShardSession::Admit(ReducedGradient gradient) const {
  const std::shared_ptr<const RankHolders> known = holders();
  ContributionKey key = KeyOf(gradient);
  key.incarnation = known->incarnations[0];  // another holder of a rank would be another epoch
  PRECONDOR_RETURN_IF_ERROR(CheckSender(spec(), *known, key));
  PRECONDOR_RETURN_IF_ERROR(CheckLayer(key));
  PRECONDOR_RETURN_IF_ERROR(CheckAverage(spec(), gradient));
  return AdmittedAverage(std::move(gradient));
}

absl::Status ShardSession::Resume(const ContributionKey& key, uint64_t factor_version) {
  PRECONDOR_RETURN_IF_ERROR(CheckKey(key));
  return layers_[key.layer]->Resume(key, factor_version);
}

void ShardSession::Fetch(const ContributionKey& key, ResultFn result) {
  absl::Status status = CheckKey(key);
  if (status.ok() && !WorkersPrecondition(spec())) {
    status = Refusal(StatusCode::kInvalidArgument, ErrorReason::kMalformed, spec(), key,
                     absl::StrCat("FETCH: expected exchange REPLAY or PULL_FACTORS, the session's is ",
                                  ExchangeModeName(spec().exchange)));
  }
  if (!status.ok()) return result(std::move(status));
  layers_[key.layer]->Fetch(key, std::move(result));
}

void ShardSession::Close(const absl::Status& why) {
  for (uint32_t layer : owned_) layers_[layer]->Close(why);
}

absl::Status ShardSession::RequestSnapshot(uint64_t step) {
  const uint64_t last_step = context_->last_step.load(std::memory_order_relaxed);
  if (step <= last_step) {
    return absl::InvalidArgumentError(absl::StrCat("session \"", spec().name, "\": snapshot: expected a step after ",
                                                   last_step, ", which has begun; got ", step));
  }
  context_->snapshot_at.store(step, std::memory_order_relaxed);
  return absl::OkStatus();
}

void ShardSession::FinishReplay() {
  for (uint32_t layer : owned_) layers_[layer]->FinishReplay();
  factors_->FinishReplay();
}

void ShardSession::SealOverdue(absl::Time now) {
  for (uint32_t layer : owned_) layers_[layer]->SealOverdue(now);
}

void ShardSession::ReportStragglers(absl::Time since) {
  Stragglers now;
  for (uint32_t layer : owned_) layers_[layer]->AddStragglers(since, now);
  {
    MutexLock lock(mu_);
    if (now.ranks == stragglers_) return;
    stragglers_ = now.ranks;
  }
  context_->shard->observer.OnStragglers(spec().name, {now.ranks.begin(), now.ranks.end()});
  if (now.ranks.empty()) {
    context_->shard->logger.Log(Severity::kInfo, "no worker holds the others up any more", {{"session", spec().name}});
    return;
  }
  context_->shard->logger.Log(Severity::kWarning, "workers hold all others up",
                              {{"session", spec().name}, {"step", now.step}, {"ranks", absl::StrJoin(now.ranks, ",")}});
}

ShardSessionSummary ShardSession::summary() const {
  const std::shared_ptr<const RankHolders> members = holders();
  const uint64_t last_step = context_->last_step.load(std::memory_order_relaxed);
  return {.session_id = id(),
          .spec = spec(),
          .epoch = members->epoch,
          .joined = members->joined,
          .last_step = last_step,
          // Written after last_step: a reader may be a step behind, never ahead.
          .mode = context_->after_last_first_order.load(std::memory_order_relaxed) > last_step ? Mode::kFirstOrder
                                                                                               : Mode::kSecondOrder,
          .reserved_bytes = factors_->reserved_bytes(),
          .factors_released = !factors_->held()};
}

std::vector<LayerStats> ShardSession::layer_stats() const {
  std::vector<LayerStats> stats;
  stats.reserve(owned_.size());
  for (uint32_t layer : owned_) stats.push_back(layers_[layer]->stats());
  return stats;
}

}  // namespace precondor
