// SPDX-License-Identifier: Apache-2.0
// The open sessions of a coordinator, by name and by id.
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

// `state` is null while the session is being opened. The entry is busy during an operation that calls shards, and other
// operations wait (SessionLock). So shards receive changes in order, although no mutex is held during calls.
struct SessionEntry {
  bool busy = false;
  std::shared_ptr<CoordinatorSession> state;
};

// A session is found by id once it is durable, and by name once the operation that opens it has ended. Not thread-safe.
class SessionTable {
 public:
  // Returns null if the name has no entry. The pointer is valid until the next call that makes or frees an entry.
  SessionEntry* FindEntry(absl::string_view name);
  SessionEntry& MakeEntry(absl::string_view name) { return entries_[name]; }
  // Ends the operation on a busy entry and sets its session; null removes the entry.
  void FreeEntry(absl::string_view name, std::shared_ptr<CoordinatorSession> state);

  // Returns null if there is no such session or it is being opened.
  std::shared_ptr<CoordinatorSession> FindByName(absl::string_view name) const;
  std::shared_ptr<CoordinatorSession> Find(uint64_t session_id) const;
  void Add(const std::shared_ptr<CoordinatorSession>& session);
  void Remove(uint64_t session_id) { by_id_.erase(session_id); }
  const std::map<uint64_t, std::shared_ptr<CoordinatorSession>>& by_id() const { return by_id_; }

 private:
  absl::flat_hash_map<std::string, SessionEntry> entries_;
  // Ordered, so that a simulation is a function of its seed.
  std::map<uint64_t, std::shared_ptr<CoordinatorSession>> by_id_;
};

}  // namespace precondor
