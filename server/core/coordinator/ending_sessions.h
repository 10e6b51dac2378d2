// SPDX-License-Identifier: Apache-2.0
// Ending sessions: a ClosingRecord has been written, and not every shard has removed them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <vector>

#include "absl/strings/string_view.h"

#include "server/core/api/coordinator_journal.h"

namespace precondor {

class CoordinatorSession;

// Not thread-safe.
class EndingSessions {
 public:
  explicit EndingSessions(size_t shards) : shards_(shards) {}

  // Adds a session that every shard must remove.
  void Add(std::shared_ptr<CoordinatorSession> session);
  bool contains(uint64_t session_id) const { return sessions_.contains(session_id); }
  // Returns the last session that was opened under this name, or null.
  std::shared_ptr<CoordinatorSession> FindByName(absl::string_view name) const;
  // Returns the ids, ascending.
  std::vector<uint64_t> Ids() const;

  // Returns whether the shard has not yet confirmed that it has removed the session.
  bool MustRemove(uint64_t session_id, size_t shard) const;
  // Notes whether the shard has removed the session. `removed` is false if the shard still, or again, holds some of it.
  void NoteRemoved(uint64_t session_id, size_t shard, bool removed);
  // Returns the sessions that every shard has removed, ascending.
  std::vector<uint64_t> RemovedEverywhere() const;
  void Erase(uint64_t session_id) { sessions_.erase(session_id); }

  // Adds a SessionRecord and a ClosingRecord for each session.
  void AddRecords(std::vector<CoordinatorRecord>& records) const;

 private:
  struct Ending {
    std::shared_ptr<CoordinatorSession> session;
    std::vector<bool> removed;  // by shard
  };

  const size_t shards_;
  std::map<uint64_t, Ending> sessions_;  // by id
};

}  // namespace precondor
