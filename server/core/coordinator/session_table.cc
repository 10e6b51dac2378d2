// SPDX-License-Identifier: Apache-2.0
#include "server/core/coordinator/session_table.h"

#include <utility>

#include "server/core/coordinator/coordinator_session.h"

namespace precondor {

SessionEntry* SessionTable::FindEntry(absl::string_view name) {
  const auto found = entries_.find(name);
  return found == entries_.end() ? nullptr : &found->second;
}

void SessionTable::FreeEntry(absl::string_view name, std::shared_ptr<CoordinatorSession> state) {
  const auto found = entries_.find(name);
  if (state == nullptr) {
    entries_.erase(found);
  } else {
    found->second = {.busy = false, .state = std::move(state)};
  }
}

std::shared_ptr<CoordinatorSession> SessionTable::FindByName(absl::string_view name) const {
  const auto found = entries_.find(name);
  return found == entries_.end() ? nullptr : found->second.state;
}

std::shared_ptr<CoordinatorSession> SessionTable::Find(uint64_t session_id) const {
  const auto found = by_id_.find(session_id);
  return found == by_id_.end() ? nullptr : found->second;
}

void SessionTable::Add(const std::shared_ptr<CoordinatorSession>& session) { by_id_.emplace(session->id(), session); }

}  // namespace precondor
