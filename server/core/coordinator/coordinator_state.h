// SPDX-License-Identifier: Apache-2.0
// The coordinator's state as a value: the sessions that it knows, and how far each has come. It has no lock and does no
// I/O; reconcile.h says what shards must do because of it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <set>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "absl/types/span.h"

#include "server/core/api/coordinator_journal.h"
#include "server/core/coordinator/coordinator_options.h"

namespace precondor {

class CoordinatorSession;

// A session whose ClosingRecord is durable. Every shard must remove it.
struct EndingSession {
  std::shared_ptr<CoordinatorSession> session;
  std::vector<bool> removed;  // by shard: it has confirmed the removal, and has not reported the session since
};

// A session is opened, open, ending and abandoned, in this order. Not thread-safe.
struct CoordinatorState {
  // Begins to open a session. Returns its id, which is greater than all earlier ones. It comes from the wall clock, so
  // that a coordinator that has lost its journal does not reuse ids.
  uint64_t BeginOpening(TenantSession tenants, absl::Time wall);
  // The session's record is durable.
  void Open(std::shared_ptr<CoordinatorSession> session);
  // The open session's ClosingRecord is durable.
  void BeginEnding(uint64_t session_id, size_t shards);
  // The session was not opened after all, or every shard has removed it. A shard that installs it later, from a delayed
  // call, is told to remove it. Only the greatest 1,000 ids are remembered.
  void Abandon(uint64_t session_id);

  // Returns whether the session is opening, open or ending.
  bool Knows(uint64_t session_id) const { return counted.contains(session_id) || ending.contains(session_id); }
  // Return the open session, or null.
  std::shared_ptr<CoordinatorSession> Find(uint64_t session_id) const;
  std::shared_ptr<CoordinatorSession> FindByName(absl::string_view name) const;
  // Returns whether the session ends and the shard has not confirmed that it has removed it.
  bool MustRemove(uint64_t session_id, size_t shard) const;
  // Returns the ending sessions that every shard has removed, ascending.
  std::vector<uint64_t> RemovedEverywhere() const;
  // Returns the records from which RestoreState makes an equal state.
  std::vector<CoordinatorRecord> Records() const;

  // All maps are by id, so that a simulation is a function of its seed.
  std::map<uint64_t, std::shared_ptr<CoordinatorSession>> open;
  // Shares of their tenants' limits: of open sessions, and of those that are being opened, which shards may know.
  std::map<uint64_t, TenantSession> counted;
  std::map<uint64_t, EndingSession> ending;
  std::set<uint64_t> abandoned;
  uint64_t last_id = 0;
  bool leads = false;
  bool draining = false;
};

// Returns the state that a journal's records describe, in their order. `shards` has an entry without layers for each
// shard, with the address of a shard in this process. Counts no `bytes`. Returns FAILED_PRECONDITION if an open session
// has layers on a shard that is not among `shards`.
absl::StatusOr<CoordinatorState> RestoreState(absl::Span<const CoordinatorRecord> records,
                                              const std::vector<PlacedLayers>& shards, uint64_t lease_steps);

}  // namespace precondor
