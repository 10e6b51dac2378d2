// SPDX-License-Identifier: Apache-2.0
#include "server/core/coordinator/coordinator_state.h"

#include <algorithm>
#include <optional>
#include <utility>
#include <variant>

#include "absl/algorithm/container.h"
#include "absl/strings/str_cat.h"

#include "kernels/base/session_memory.h"
#include "server/core/coordinator/coordinator_session.h"

namespace precondor {
namespace {

// Number of ids that are remembered. If a shard installs an abandoned session with an older id, it goes to quarantine.
constexpr size_t kAbandoned = 1000;

// The state that a journal's records describe.
struct Journalled {
  std::map<uint64_t, SessionRecord> open;
  std::map<uint64_t, SessionRecord> ending;  // a ClosingRecord was written
  std::map<uint64_t, std::vector<SnapshotEntry>> snapshots;
};

Journalled ReadRecords(absl::Span<const CoordinatorRecord> records) {
  Journalled read;
  for (const CoordinatorRecord& record : records) {
    if (const auto* opened = std::get_if<SessionRecord>(&record)) {
      // An open session of that name was never announced: the write of its record failed, or seemed to.
      std::erase_if(read.open, [&](const auto& entry) { return entry.second.spec.name == opened->spec.name; });
      read.open.insert_or_assign(opened->session_id, *opened);
    } else if (const auto* membership = std::get_if<MembershipRecord>(&record)) {
      if (auto found = read.open.find(membership->session_id); found != read.open.end()) {
        found->second.membership = membership->membership;
      }
    } else if (const auto* lease = std::get_if<LeaseRecord>(&record)) {
      if (auto found = read.open.find(lease->session_id); found != read.open.end()) found->second.lease = lease->lease;
    } else if (const auto* taken = std::get_if<SnapshotsRecord>(&record)) {
      read.snapshots[taken->session_id] = taken->snapshots;
    } else if (const auto* closing = std::get_if<ClosingRecord>(&record)) {
      auto found = read.open.find(closing->session_id);
      if (found != read.open.end()) read.ending.insert(read.open.extract(found));
    } else if (const auto* closed = std::get_if<CloseRecord>(&record)) {
      read.open.erase(closed->session_id);
      read.ending.erase(closed->session_id);
    }
  }
  return read;
}

// Puts the record's layers in the order of the coordinator's shards. Returns layers whose shard is not among these.
std::optional<PlacedLayers> PlaceOn(const std::vector<PlacedLayers>& shards, SessionRecord& record) {
  std::optional<PlacedLayers> lost;
  for (PlacedLayers& placed : std::exchange(record.placement, shards)) {
    if (placed.layers.empty()) continue;
    const auto place =
        absl::c_find_if(record.placement, [&](const PlacedLayers& shard) { return shard.shard == placed.shard; });
    if (place == record.placement.end()) {
      if (!lost.has_value()) lost = std::move(placed);
      continue;
    }
    place->layers = std::move(placed.layers);
    if (place->address.empty()) place->address = std::move(placed.address);
  }
  return lost;
}

}  // namespace

uint64_t CoordinatorState::BeginOpening(TenantSession tenants, absl::Time wall) {
  last_id = std::max(last_id + 1, static_cast<uint64_t>(std::max<int64_t>(absl::ToUnixNanos(wall), 1)));
  counted.emplace(last_id, std::move(tenants));
  return last_id;
}

void CoordinatorState::Open(std::shared_ptr<CoordinatorSession> session) { open.emplace(session->id, session); }

void CoordinatorState::BeginEnding(uint64_t session_id, size_t shards) {
  ending.emplace(session_id, EndingSession{.session = std::move(open.extract(session_id).mapped()),
                                           .removed = std::vector<bool>(shards, false)});
  counted.erase(session_id);
}

void CoordinatorState::Abandon(uint64_t session_id) {
  counted.erase(session_id);
  ending.erase(session_id);
  abandoned.insert(session_id);
  if (abandoned.size() > kAbandoned) abandoned.erase(abandoned.begin());
}

std::shared_ptr<CoordinatorSession> CoordinatorState::Find(uint64_t session_id) const {
  const auto found = open.find(session_id);
  return found == open.end() ? nullptr : found->second;
}

std::shared_ptr<CoordinatorSession> CoordinatorState::FindByName(absl::string_view name) const {
  const auto found = absl::c_find_if(open, [&](const auto& one) { return one.second->spec.name == name; });
  return found == open.end() ? nullptr : found->second;
}

bool CoordinatorState::MustRemove(uint64_t session_id, size_t shard) const {
  const auto found = ending.find(session_id);
  return found != ending.end() && !found->second.removed[shard];
}

std::vector<uint64_t> CoordinatorState::RemovedEverywhere() const {
  std::vector<uint64_t> ids;
  for (const auto& [id, one] : ending) {
    if (!absl::c_linear_search(one.removed, false)) ids.push_back(id);
  }
  return ids;
}

std::vector<CoordinatorRecord> CoordinatorState::Records() const {
  std::vector<CoordinatorRecord> records;
  for (const auto& [id, session] : open) {
    records.emplace_back(MakeRecord(*session));
    const std::vector<SnapshotEntry>& snapshots = session->snapshots().list();
    if (!snapshots.empty()) records.emplace_back(SnapshotsRecord{.session_id = id, .snapshots = snapshots});
  }
  for (const auto& [id, one] : ending) {
    records.emplace_back(MakeRecord(*one.session));
    records.emplace_back(ClosingRecord{.session_id = id});
  }
  return records;
}

absl::StatusOr<CoordinatorState> RestoreState(absl::Span<const CoordinatorRecord> records,
                                              const std::vector<PlacedLayers>& shards, uint64_t lease_steps) {
  Journalled read = ReadRecords(records);
  CoordinatorState state;
  for (auto& [id, record] : read.ending) {
    PlaceOn(shards, record);
    state.Open(std::make_shared<CoordinatorSession>(std::move(record), lease_steps));
    state.BeginEnding(id, shards.size());
    state.last_id = std::max(state.last_id, id);
  }
  for (auto& [id, record] : read.open) {
    if (const std::optional<PlacedLayers> lost = PlaceOn(shards, record); lost.has_value()) {
      return absl::FailedPreconditionError(absl::StrCat("session \"", record.spec.name, "\" has ", lost->layers.size(),
                                                        " layers on shard ", lost->shard,
                                                        ", which is not among this coordinator's shards"));
    }
    auto session = std::make_shared<CoordinatorSession>(std::move(record), lease_steps);
    session->Adopt(SnapshotsRecord{.session_id = id, .snapshots = std::move(read.snapshots[id])});
    state.counted[id] = {.tenants = session->access.tenants, .table_bytes = SessionTableBytes(session->spec)};
    state.Open(std::move(session));
    state.last_id = std::max(state.last_id, id);
  }
  return state;
}

}  // namespace precondor
