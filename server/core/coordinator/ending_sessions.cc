// SPDX-License-Identifier: Apache-2.0
#include "server/core/coordinator/ending_sessions.h"

#include <utility>

#include "absl/algorithm/container.h"

#include "server/core/coordinator/coordinator_session.h"

namespace precondor {

void EndingSessions::Add(std::shared_ptr<CoordinatorSession> session) {
  const uint64_t id = session->id();
  sessions_.emplace(id, Ending{.session = std::move(session), .removed = std::vector<bool>(shards_, false)});
}

std::shared_ptr<CoordinatorSession> EndingSessions::FindByName(absl::string_view name) const {
  std::shared_ptr<CoordinatorSession> last;
  for (const auto& [id, ending] : sessions_) {
    if (ending.session->spec().name == name) last = ending.session;
  }
  return last;
}

std::vector<uint64_t> EndingSessions::Ids() const {
  std::vector<uint64_t> ids;
  for (const auto& [id, ending] : sessions_) ids.push_back(id);
  return ids;
}

bool EndingSessions::MustRemove(uint64_t session_id, size_t shard) const {
  const auto found = sessions_.find(session_id);
  return found != sessions_.end() && !found->second.removed[shard];
}

void EndingSessions::NoteRemoved(uint64_t session_id, size_t shard, bool removed) {
  const auto found = sessions_.find(session_id);
  if (found != sessions_.end()) found->second.removed[shard] = removed;
}

std::vector<uint64_t> EndingSessions::RemovedEverywhere() const {
  std::vector<uint64_t> ids;
  for (const auto& [id, ending] : sessions_) {
    if (!absl::c_linear_search(ending.removed, false)) ids.push_back(id);
  }
  return ids;
}

void EndingSessions::AddRecords(std::vector<CoordinatorRecord>& records) const {
  for (const auto& [id, ending] : sessions_) {
    records.emplace_back(ending.session->record());
    records.emplace_back(ClosingRecord{.session_id = id});
  }
}

}  // namespace precondor
