// SPDX-License-Identifier: Apache-2.0
#include "server/core/coordinator/session_members.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"

#include "kernels/base/error_reason.h"
#include "kernels/base/status_macros.h"
#include "kernels/base/wire_bounds.h"

namespace precondor {

using absl::StatusCode;

SessionMembers::SessionMembers(std::string session_name, Membership membership)
    : session_name_(std::move(session_name)), membership_(std::move(membership)) {}

void SessionMembers::NoteShardsTold(const Membership& told) {
  if (told == membership_) shards_told_ = true;
}

Membership SessionMembers::First(const SessionSpec& spec) {
  const size_t ranks = static_cast<size_t>(spec.world_size);
  return {.epoch = 1,
          .rollback_epoch = 0,
          .resume_step = 0,
          .incarnations = std::vector<uint64_t>(ranks, 0),
          .first_steps = std::vector<uint64_t>(ranks, 0),
          .last_holders = std::vector<uint64_t>(ranks, 0)};
}

Membership SessionMembers::RolledBack(Membership membership, uint64_t step) {
  membership.rollback_epoch = membership.epoch;
  membership.resume_step = step;
  // Ranks that continue do so from the step of the rollback.
  for (uint64_t& first_step : membership.first_steps) first_step = std::min(first_step, step);
  return membership;
}

uint32_t SessionMembers::joined() const {
  return static_cast<uint32_t>(std::count_if(membership_.incarnations.begin(), membership_.incarnations.end(),
                                             [](uint64_t x) { return x != 0; }));
}

bool SessionMembers::ever_active() const {
  return std::none_of(membership_.last_holders.begin(), membership_.last_holders.end(),
                      [](uint64_t holder) { return holder == 0; });
}

bool SessionMembers::fresh() const {
  return std::all_of(membership_.last_holders.begin(), membership_.last_holders.end(),
                     [](uint64_t holder) { return holder == 0; });
}

std::vector<Member> SessionMembers::Members() const {
  std::vector<Member> members;
  for (uint32_t rank = 0; rank < membership_.incarnations.size(); ++rank) {
    const uint64_t incarnation = membership_.incarnations[rank];
    if (incarnation == 0) continue;
    members.push_back({.rank = rank, .incarnation = incarnation, .first_step = membership_.first_steps[rank]});
  }
  return members;
}

std::vector<uint32_t> SessionMembers::Missing() const {
  std::vector<uint32_t> missing;
  for (uint32_t rank = 0; rank < membership_.incarnations.size(); ++rank) {
    if (membership_.incarnations[rank] == 0) missing.push_back(rank);
  }
  return missing;
}

std::string SessionMembers::RankText(uint32_t rank) const {
  return absl::StrCat("session \"", session_name_, "\" rank ", rank, ": ");
}

absl::Status SessionMembers::CheckHolder(uint32_t rank, uint64_t incarnation) const {
  if (rank >= membership_.incarnations.size()) {
    return ReasonedStatus(StatusCode::kNotFound, ErrorReason::kUnknownRank,
                          absl::StrCat(RankText(rank), "expected a rank below ", membership_.incarnations.size()));
  }
  if (incarnation < membership_.last_holders[rank]) {
    return ReasonedStatus(
        StatusCode::kFailedPrecondition, ErrorReason::kStaleIncarnation,
        absl::StrCat(RankText(rank), "held by incarnation ", membership_.last_holders[rank], ", got ", incarnation));
  }
  return absl::OkStatus();
}

absl::Status SessionMembers::CheckMember(uint32_t rank, uint64_t incarnation, uint64_t epoch) const {
  PRECONDOR_RETURN_IF_ERROR(CheckHolder(rank, incarnation));
  if (membership_.incarnations[rank] != incarnation) {
    return ReasonedStatus(StatusCode::kNotFound, ErrorReason::kUnknownRank,
                          absl::StrCat(RankText(rank), "incarnation ", incarnation, " has not joined"));
  }
  if (epoch != membership_.epoch) {
    return ReasonedStatus(StatusCode::kFailedPrecondition, ErrorReason::kStaleEpoch,
                          absl::StrCat(RankText(rank), "expected epoch ", membership_.epoch, ", got ", epoch));
  }
  return absl::OkStatus();
}

absl::StatusOr<std::optional<Membership>> SessionMembers::PlanJoin(uint32_t rank, uint64_t incarnation,
                                                                   uint64_t first_step) const {
  if (incarnation == 0 || incarnation > kMaxIncarnation) {
    return ReasonedStatus(
        StatusCode::kInvalidArgument, ErrorReason::kMalformed,
        absl::StrCat(RankText(rank), "incarnation: expected 1 ... ", kMaxIncarnation, ", got ", incarnation));
  }
  if (first_step > kMaxStep) {
    return ReasonedStatus(
        StatusCode::kInvalidArgument, ErrorReason::kMalformed,
        absl::StrCat(RankText(rank), "first_step: expected at most ", kMaxStep, ", got ", first_step));
  }
  PRECONDOR_RETURN_IF_ERROR(CheckHolder(rank, incarnation));
  if (membership_.incarnations[rank] == incarnation) return std::nullopt;
  Membership next = membership_;
  // The first holder of a rank joins the epoch that waits for it; any later one begins a new epoch, so that the
  // process that held the rank before is fenced.
  if (next.last_holders[rank] != 0) ++next.epoch;
  next.first_steps[rank] = first_step;
  next.incarnations[rank] = incarnation;
  next.last_holders[rank] = incarnation;
  return next;
}

absl::StatusOr<std::optional<Membership>> SessionMembers::PlanLeave(uint32_t rank, uint64_t incarnation) const {
  PRECONDOR_RETURN_IF_ERROR(CheckHolder(rank, incarnation));
  if (membership_.incarnations[rank] == incarnation) {
    Membership next = membership_;
    next.incarnations[rank] = 0;
    return next;
  }
  if (incarnation == membership_.last_holders[rank]) return std::nullopt;
  return ReasonedStatus(StatusCode::kNotFound, ErrorReason::kUnknownRank,
                        absl::StrCat(RankText(rank), "incarnation ", incarnation, " has not joined"));
}

void SessionMembers::Adopt(Membership next) {
  const uint32_t before = joined();
  const bool new_epoch = next.epoch != membership_.epoch;
  membership_ = std::move(next);
  // Shards need not know of a rank that leaves: it sends no more frames.
  if (new_epoch || joined() > before) shards_told_ = false;
}

}  // namespace precondor
