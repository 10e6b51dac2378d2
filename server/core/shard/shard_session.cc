// SPDX-License-Identifier: Apache-2.0
#include "server/core/shard/shard_session.h"

#include <algorithm>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"

#include "kernels/base/error_reason.h"
#include "kernels/base/status_macros.h"

namespace precondor {
namespace {

using absl::StatusCode;

std::shared_ptr<RankHolders> MakeHolders(const SessionInstall& install) {
  auto holders = std::make_shared<RankHolders>();
  holders->epoch = install.epoch;
  holders->rollback_epoch = install.rollback_epoch;
  holders->incarnations.assign(install.spec.world_size, 0);
  for (const Member& member : install.members) {
    if (holders->incarnations[member.rank] == 0) ++holders->joined;
    holders->incarnations[member.rank] = member.incarnation;
  }
  return holders;
}

std::vector<Member> Replaced(const std::vector<uint64_t>& incarnations, const std::vector<Member>& members) {
  std::vector<Member> replaced;
  for (const Member& member : members) {
    if (incarnations[member.rank] != member.incarnation) replaced.push_back(member);
  }
  return replaced;
}

}  // namespace

SessionHolders::SessionHolders(const SessionSpec& spec, const SessionInstall& install)
    : spec_(spec), holders_(MakeHolders(install)) {}

std::shared_ptr<const RankHolders> SessionHolders::current() const {
  MutexLock lock(mu_);
  return holders_;
}

absl::Status SessionHolders::StaleEpoch(uint64_t got) const {
  return ReasonedStatus(
      StatusCode::kFailedPrecondition, ErrorReason::kStaleEpoch,
      absl::StrCat("session \"", spec_.name, "\": expected epoch ", holders_->epoch, " or later, got ", got));
}

bool SessionHolders::IsNews(const SessionInstall& install) const {
  const std::shared_ptr<const RankHolders> known = current();
  if (install.epoch != known->epoch || known->fenced) return install.epoch >= known->epoch;
  return install.rollback_epoch > known->rollback_epoch ||
         std::any_of(install.members.begin(), install.members.end(),
                     [&](const Member& member) { return known->incarnations[member.rank] == 0; });
}

absl::StatusOr<std::optional<std::vector<Member>>> SessionHolders::Install(const SessionInstall& install) {
  std::shared_ptr<RankHolders> next = MakeHolders(install);
  std::optional<std::vector<Member>> replaced;
  MutexLock lock(mu_);
  if (install.epoch < holders_->epoch) return StaleEpoch(install.epoch);
  // The coordinator may decide on a rollback in an epoch that this shard has, while another shard does not have it.
  const bool rolls_back = install.rollback_epoch > holders_->rollback_epoch;
  if (install.epoch > holders_->epoch || holders_->fenced || rolls_back) {
    replaced = Replaced(holders_->incarnations, install.members);
  }
  for (size_t rank = 0; rank < next->incarnations.size() && !replaced.has_value(); ++rank) {
    const uint64_t have = holders_->incarnations[rank];
    uint64_t& got = next->incarnations[rank];
    if (have == 0 || have == got) continue;
    if (got != 0) {
      return ReasonedStatus(StatusCode::kFailedPrecondition, ErrorReason::kStaleIncarnation,
                            absl::StrCat("session \"", spec_.name, "\" epoch ", install.epoch, " rank ", rank,
                                         ": held by incarnation ", have, ", got ", got));
    }
    got = have;
    ++next->joined;
  }
  holders_ = std::move(next);
  return replaced;
}

absl::StatusOr<std::optional<std::vector<Member>>> SessionHolders::Fence(const EpochFence& fence) {
  MutexLock lock(mu_);
  if (fence.epoch < holders_->epoch) return StaleEpoch(fence.epoch);
  if (fence.epoch == holders_->epoch && !holders_->fenced) return std::nullopt;
  for (const Member& member : fence.members) {
    if (member.rank < holders_->incarnations.size()) continue;
    return ReasonedStatus(StatusCode::kInvalidArgument, ErrorReason::kUnknownRank,
                          absl::StrCat("session \"", spec_.name, "\": members: expected ranks below ",
                                       holders_->incarnations.size(), ", got ", member.rank));
  }
  auto fenced = std::make_shared<RankHolders>(*holders_);
  fenced->epoch = fence.epoch;
  fenced->fenced = true;
  holders_ = std::move(fenced);
  return Replaced(holders_->incarnations, fence.members);
}

using absl::StatusCode;

absl::StatusOr<std::shared_ptr<ShardSession>> ShardSession::Create(std::shared_ptr<SessionContext> context,
                                                                   const SessionInstall& install,
                                                                   int64_t reserved_bytes) {
  // Later installs name this rollback too.
  context->begun_steps.RollBack(install.rollback_epoch, install.rollback_step);
  std::vector<std::shared_ptr<LayerDriver>> layers(install.spec.layers.size());
  for (uint32_t layer : install.layers) {
    PRECONDOR_ASSIGN_OR_RETURN(layers[layer], LayerDriver::Create(context, layer, install));
  }
  return std::shared_ptr<ShardSession>(
      new ShardSession(std::move(context), install.layers, std::move(layers), install, reserved_bytes));
}

ShardSession::ShardSession(std::shared_ptr<SessionContext> context, std::vector<uint32_t> owned,
                           std::vector<std::shared_ptr<LayerDriver>> layers, const SessionInstall& install,
                           int64_t reserved_bytes)
    : context_(std::move(context)),
      owned_(std::move(owned)),
      layers_(std::move(layers)),
      reserved_bytes_(reserved_bytes),
      holders_(context_->spec, install) {}

absl::Status ShardSession::CheckSpec(const SessionInstall& install) const {
  std::string difference = DescribeDifference(spec(), install.spec);
  if (difference.empty() && install.layers != owned_) {
    difference = absl::StrCat("owns ", owned_.size(), " layers, got another set of ", install.layers.size());
  }
  if (difference.empty()) return absl::OkStatus();
  return ReasonedStatus(StatusCode::kFailedPrecondition, ErrorReason::kSpecMismatch,
                        absl::StrCat("session \"", spec().name, "\": ", difference));
}

absl::Status ShardSession::Reinstall(const SessionInstall& install) {
  PRECONDOR_RETURN_IF_ERROR(CheckSpec(install));
  PRECONDOR_ASSIGN_OR_RETURN(const std::optional<std::vector<Member>> replaced, holders_.Install(install));
  // Frames of the new epoch that arrive before their layer has begun it are told to retry.
  if (!replaced.has_value()) return absl::OkStatus();
  // Before any layer begins the epoch: its contributions count from then on.
  context_->begun_steps.RollBack(install.rollback_epoch, install.rollback_step);
  for (const uint32_t layer : owned_) BeginEpoch(layer, install, *replaced);
  return absl::OkStatus();
}

void ShardSession::BeginEpoch(uint32_t layer, const SessionInstall& install,
                              const std::vector<Member>& replaced) const {
  layers_[layer]->EndEpoch(install.epoch, EpochHasBegun(install.epoch));
  layers_[layer]->BeginEpoch({.epoch = install.epoch,
                              .rollback_epoch = install.rollback_epoch,
                              .rollback_step = install.rollback_step,
                              .replaced = replaced});
}

absl::Status ShardSession::EpochHasBegun(uint64_t epoch) const {
  return ReasonedStatus(StatusCode::kAborted, ErrorReason::kStaleEpoch,
                        absl::StrCat("session \"", spec().name, "\": epoch ", epoch, " has begun, join again"));
}

absl::StatusOr<std::optional<uint64_t>> ShardSession::Fence(const EpochFence& fence) {
  PRECONDOR_ASSIGN_OR_RETURN(const std::optional<std::vector<Member>> replaced, holders_.Fence(fence));
  if (!replaced.has_value()) return std::nullopt;
  uint64_t floor = 0;
  for (uint32_t layer : owned_) {
    floor = std::max(floor, layers_[layer]->EndEpoch(fence.epoch, EpochHasBegun(fence.epoch)));
  }
  std::optional<uint64_t> gone;
  for (const Member& member : *replaced) {
    if (member.first_step < floor) gone = std::min(gone.value_or(member.first_step), member.first_step);
  }
  return gone;
}

void ShardSession::Close(const absl::Status& why) {
  for (uint32_t layer : owned_) layers_[layer]->Close(why);
}

void ShardSession::FinishReplay() {
  for (const uint32_t layer : owned_) layers_[layer]->FinishReplay();
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
    context_->shard->logger.Log(Severity::kInfo, "no straggler is left", {{"session", spec().name}});
    return;
  }
  context_->shard->logger.Log(Severity::kWarning, "workers hold all others up",
                              {{"session", spec().name}, {"step", now.step}, {"ranks", absl::StrJoin(now.ranks, ",")}});
}

ShardSessionSummary ShardSession::summary() const {
  const std::shared_ptr<const RankHolders> members = holders_.current();
  const BegunSteps::Last last = context_->begun_steps.last();
  const ShardJournal* const journal = context_->shard->options.journal;
  std::vector<uint32_t> lagging_ranks;
  {
    MutexLock lock(mu_);
    lagging_ranks.assign(stragglers_.begin(), stragglers_.end());
  }
  return {.session_id = id(),
          .spec = spec(),
          .epoch = members->epoch,
          .joined = members->joined,
          .last_step = last.step,
          .mode = last.mode,
          .reserved_bytes = reserved_bytes_,
          .updates_lost = context_->updates_lost.load(std::memory_order_relaxed),
          .lacks_gradients_since = journal == nullptr ? std::nullopt : journal->LacksGradientsSince(id()),
          .layers = owned_,
          .lagging_ranks = std::move(lagging_ranks)};
}

}  // namespace precondor
