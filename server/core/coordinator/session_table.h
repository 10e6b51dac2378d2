// SPDX-License-Identifier: Apache-2.0
// The sessions that a coordinator has open, by name and by id.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <string>

#include "absl/container/flat_hash_map.h"
#include "absl/strings/string_view.h"

namespace precondor {

class CoordinatorSession;

// `state` is null while the session is being opened. While an operation that asks shards is under way the entry is busy
// and others like it wait, so that shards hear of changes in order and no mutex is held (SessionLock).
struct SessionEntry {
  bool busy = false;
  std::shared_ptr<CoordinatorSession> state;
};

// A session is found by id once it is durable, and by name once the operation that opens it has ended. Not thread-safe.
class SessionTable {
 public:
  // Null: there is none. Pointers to entries are valid until the next call that makes or frees one.
  SessionEntry* FindEntry(absl::string_view name);
  SessionEntry& MakeEntry(absl::string_view name) { return entries_[name]; }
  // The operation on a busy entry has ended with this state; null: the session is gone.
  void FreeEntry(absl::string_view name, std::shared_ptr<CoordinatorSession> state);

  // Null: there is no such session, or it is being opened.
  std::shared_ptr<CoordinatorSession> FindByName(absl::string_view name) const;
  std::shared_ptr<CoordinatorSession> Find(uint64_t session_id) const;
  void Add(const std::shared_ptr<CoordinatorSession>& session);
  void Remove(uint64_t session_id) { by_id_.erase(session_id); }
  const std::map<uint64_t, std::shared_ptr<CoordinatorSession>>& by_id() const { return by_id_; }

 private:
  absl::flat_hash_map<std::string, SessionEntry> entries_;
  // In order, so that a simulated run is a function of its seed.
  std::map<uint64_t, std::shared_ptr<CoordinatorSession>> by_id_;
};

}  // namespace precondor
