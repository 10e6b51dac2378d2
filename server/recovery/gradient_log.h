// SPDX-License-Identifier: Apache-2.0
// The averaged gradients of sessions whose methods learn from them, for a bitwise restart (docs/develop/adr/0030).
// Gradients are as large as the layers, so they have a log of their own, and no step waits for its disk.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <thread>

#include "absl/container/flat_hash_map.h"
#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/time/time.h"

#include "kernels/base/clock.h"
#include "kernels/base/log.h"
#include "kernels/base/mutex.h"
#include "server/core/api/observer.h"
#include "server/core/api/shard_journal.h"
#include "server/store/log_reader.h"
#include "server/store/record_log.h"

namespace precondor::recovery {

struct GradientLogOptions {
  // A snapshot is due when a session's gradients since the last one exceed this, and `state_multiple` times the state
  // that the snapshot wrote. 0: no gradients are written.
  uint64_t snapshot_bytes = uint64_t{256} << 20;
  uint64_t state_multiple = 4;
  // The disk cannot keep up when it has yet to write more than this.
  uint64_t backlog_bytes = uint64_t{256} << 20;
  uint64_t segment_bytes = uint64_t{128} << 20;
  absl::Duration sync_interval = absl::Milliseconds(50);
  absl::Duration reopen_interval = absl::Seconds(5);  // pause before a log that has failed is opened again
  bool background = true;                             // false: no thread; the owner calls Work (tests/sim)
};

// Writes gradients to a record log. A session's gradients are given up until its next snapshot if the disk fails or
// cannot keep up; a restart then brings the session back with an older state. The observer and one log line report each
// change. Thread-safe. mu_ is taken before RecordLog's lock and no other one.
class GradientLog {
 public:
  // Lifetime: all references outlive this object.
  GradientLog(store::FileSystem& fs, std::string dir, const GradientLogOptions& options, const Clock& clock,
              Logger& logger, StoreObserver& observer);
  // Ends the background thread, if any, after a last sync.
  ~GradientLog();

  // Opens the log and passes every gradient to `replay`, in order. `log_sequence` is the one that Append got. Call it
  // once, before the other functions. Returns the errors of RecordLog::Open, and DATA_LOSS for a damaged record.
  using Replay = absl::FunctionRef<void(GradientRecord record, uint64_t log_sequence)>;
  absl::Status Open(Replay replay);

  // Writes a gradient, or drops it. `session` is the session's name. `log_sequence` is the sequence of the next record
  // of the shard's log, by which a restart knows whether the session was removed afterwards; 0 if that log cannot be
  // written, and the gradient is dropped. Returns true if a snapshot of the session is due.
  bool Append(const std::string& session, const GradientRecord& record, uint64_t log_sequence);
  // Passes all records that Append has written and that the log still has to `replay`, in order, if some are of the
  // session. Returns their end, or UNAVAILABLE while the log cannot be written.
  absl::StatusOr<uint64_t> Read(uint64_t session_id, const store::LogReplay& replay);
  // Returns since when gradients of the session are missing, on the monotonic clock, or nullopt if none are. With
  // `snapshot_bytes` 0 that is since the first gradient after the last snapshot.
  std::optional<absl::Time> LacksSince(uint64_t session_id) const;
  // A place in the log. A snapshot of the session that begins there does not need:
  struct Mark {
    uint64_t sequence = 0;  // records below this
    uint64_t dropped = 0;   // the first so many gradients of the session that were dropped
  };
  Mark MarkOf(uint64_t session_id) const;
  // Call it when a snapshot of the session, whose first image was taken at `mark`, is durable with `state_bytes`. Ends
  // the session's gap if no gradient was dropped since. The session needs the log from the snapshot before this one on.
  void OnSnapshot(uint64_t session_id, const Mark& mark, uint64_t state_bytes);
  void Forget(uint64_t session_id);
  // Does one round of background work: syncs, begins a new segment, reopens the log after a failure. Returns the pause
  // until the next round. Calls must not overlap.
  absl::Duration Work();

 private:
  struct Session {
    std::string name;
    uint64_t bytes = 0;          // written since the last snapshot
    uint64_t due_at = 0;         // a snapshot is due when `bytes` exceeds it
    uint64_t state_bytes = 0;    // of the last snapshot
    uint64_t last_sequence = 0;  // after the session's last record
    uint64_t needed_from = 0;    // sequence of the first record that the session needs
    uint64_t last_snapshot = 0;  // see OnSnapshot
    std::optional<absl::Time> lacks_since;
    bool writes = false;   // false before the first gradient, and in a gap until the disk has caught up
    uint64_t dropped = 0;  // number of gradients
  };

  // Returns why the log cannot take a record now; OK if it can.
  absl::Status CheckRoom() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // Drops a gradient of the session, and the next ones. Returns false.
  bool GiveUp(Session& session, const absl::Status& why) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // Stops using a log that has failed: it may lack records of any session. Work reopens it.
  void Abandon(const std::shared_ptr<store::RecordLog>& log, const absl::Status& why)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  uint64_t Bound(const Session& session) const;
  void DropUnneeded() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void SyncLoop();

  store::FileSystem& fs_;
  const std::string dir_;
  const GradientLogOptions options_;
  const Clock& clock_;
  Logger& logger_;
  StoreObserver& observer_;

  mutable Mutex mu_;
  CondVar changed_;
  std::shared_ptr<store::RecordLog> log_ ABSL_GUARDED_BY(mu_);  // null while the log cannot be written
  absl::Status broken_ ABSL_GUARDED_BY(mu_);                    // why log_ is null
  uint64_t next_sequence_ ABSL_GUARDED_BY(mu_) = 1;             // of the log before log_
  uint64_t backlog_ ABSL_GUARDED_BY(mu_) = 0;                   // bytes that no sync has covered
  absl::flat_hash_map<uint64_t, Session> sessions_ ABSL_GUARDED_BY(mu_);
  bool stopping_ ABSL_GUARDED_BY(mu_) = false;
  std::thread syncer_;
};

}  // namespace precondor::recovery
