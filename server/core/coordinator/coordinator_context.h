// SPDX-License-Identifier: Apache-2.0
// Shared by the operations of a coordinator: its state under a lock, its journal and its shards.
#pragma once

#include <atomic>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"

#include "kernels/base/clock.h"
#include "kernels/base/log.h"
#include "kernels/base/mutex.h"
#include "server/core/api/coordinator_journal.h"
#include "server/core/api/observer.h"
#include "server/core/coordinator/coordinator_options.h"
#include "server/core/coordinator/coordinator_session.h"
#include "server/core/coordinator/coordinator_state.h"
#include "server/core/coordinator/journal_writer.h"
#include "server/core/coordinator/shard_watch.h"

namespace precondor {

// One per coordinator. Thread-safe. Lock order: the journal's lock, mu.
struct CoordinatorContext {
  // See Coordinator.
  CoordinatorContext(CoordinatorOptions options, std::vector<ShardEndpoint> shards, CoordinatorJournal& journal,
                     const Clock& clock, Logger& logger, Observer& observer);

  // Returns UNAVAILABLE unless this coordinator leads.
  absl::Status CheckLeads() const;
  // Returns the open session, or null.
  std::shared_ptr<CoordinatorSession> Find(uint64_t session_id) const;
  // Writes a MembershipRecord, LeaseRecord or SnapshotsRecord, and makes the session adopt it. No other record is
  // written in between.
  absl::Status Write(CoordinatorSession& session, const CoordinatorRecord& record);
  // Reports the number of open sessions to the observer.
  void PublishCount();

  const CoordinatorOptions options;
  std::atomic<bool> replaced = false;  // by another coordinator, as a shard has reported
  const std::vector<ShardEndpoint> shards;
  const Clock& clock;
  Logger& logger;
  Observer& observer;
  JournalWriter journal;
  mutable Mutex mu;
  CondVar name_freed;
  std::set<std::string, std::less<>> busy_names ABSL_GUARDED_BY(mu);  // of SessionLocks
  CoordinatorState state ABSL_GUARDED_BY(mu);
  ShardWatch watch ABSL_GUARDED_BY(mu);

 private:
  // Stops leading, because a shard has refused a call: another coordinator leads.
  void StepDown(const absl::Status& why);
  std::vector<ShardEndpoint> Watched(std::vector<ShardEndpoint> endpoints);
};

// Exclusive access of one operation to the session of a name. Other operations that change the session wait. So shards
// receive changes in order, although no mutex is held during calls.
class SessionLock {
 public:
  // Waits for the name. If no session has it and it is not `opens`, locks nothing.
  SessionLock(CoordinatorContext& c, absl::string_view name, bool opens = false);
  ~SessionLock();
  SessionLock(const SessionLock&) = delete;
  SessionLock& operator=(const SessionLock&) = delete;

  // Returns the session that had the name at the beginning, or null.
  const std::shared_ptr<CoordinatorSession>& session() const { return session_; }

 private:
  CoordinatorContext& c_;
  const std::string name_;
  std::shared_ptr<CoordinatorSession> session_;
  bool locks_ = false;
};

}  // namespace precondor
