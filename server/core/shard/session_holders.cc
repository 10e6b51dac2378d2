// SPDX-License-Identifier: Apache-2.0
#include "server/core/shard/session_holders.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"

#include "kernels/base/error_reason.h"

namespace precondor {
namespace {

using absl::StatusCode;

std::shared_ptr<RankHolders> MakeHolders(const SessionInstall& install) {
  auto holders = std::make_shared<RankHolders>();
  holders->epoch = install.epoch;
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
  return std::any_of(install.members.begin(), install.members.end(),
                     [&](const Member& member) { return known->incarnations[member.rank] == 0; });
}

absl::StatusOr<std::optional<std::vector<Member>>> SessionHolders::Install(const SessionInstall& install) {
  std::shared_ptr<RankHolders> next = MakeHolders(install);
  std::optional<std::vector<Member>> replaced;
  MutexLock lock(mu_);
  if (install.epoch < holders_->epoch) return StaleEpoch(install.epoch);
  if (install.epoch > holders_->epoch || holders_->fenced) {
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

}  // namespace precondor
