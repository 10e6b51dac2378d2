// SPDX-License-Identifier: Apache-2.0
// Sessions that end: their ClosingRecord is written, and not every shard has removed what it has of them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <vector>

#include "absl/strings/string_view.h"

#include "server/core/coordinator/coordinator_journal.h"

namespace precondor {

class CoordinatorSession;

// Not thread-safe.
class EndingSessions {
 public:
  explicit EndingSessions(size_t shards) : shards_(shards) {}

  // Every shard is to remove what it has of the session.
  void Add(std::shared_ptr<CoordinatorSession> session);
  bool contains(uint64_t session_id) const { return sessions_.contains(session_id); }
  // The last that was opened under this name; null: there is none.
  std::shared_ptr<CoordinatorSession> FindByName(absl::string_view name) const;
  // Ascending.
  std::vector<uint64_t> Ids() const;

  // Whether the shard has yet to say that it holds nothing of the session.
  bool MustRemove(uint64_t session_id, size_t shard) const;
  // `removed`: the shard holds nothing of the session. Not so: it holds something, again or still.
  void NoteRemoved(uint64_t session_id, size_t shard, bool removed);
  // Those that every shard has removed, ascending.
  std::vector<uint64_t> RemovedEverywhere() const;
  void Erase(uint64_t session_id) { sessions_.erase(session_id); }

  // Adds each session's record and its ClosingRecord.
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
