// SPDX-License-Identifier: Apache-2.0
// The log of a shard. When Append returns, the record survives the end of the process; a background sync brings it to
// the disk soon after. A crash of the machine can lose the last records; the coordinator and the workers detect such a
// loss.
#pragma once

#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
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
#include "server/recovery/record_codec.h"
#include "server/store/record_log.h"

namespace precondor::recovery {

struct ShardLogOptions {
  store::RecordLogOptions log = {.drop_cached = true};
  absl::Duration sync_interval = absl::Milliseconds(50);  // pause between syncs; one sync serves all appends before it
  absl::Duration reopen_interval = absl::Seconds(5);      // pause between attempts to reopen after the disk has failed
  absl::Duration progress_interval = absl::Seconds(5);    // time between two log lines about a long replay
  bool background = true;                                 // false: no thread; the owner calls Work (tests/sim)
};

// Writes the records of all sessions of a shard to one log, and knows which records each session still needs. If the
// disk fails, the shard goes on serving: the sessions with missing records are *stale* until a snapshot holds what the
// log lacks. A restart cannot recover a stale session. The observer and one log line report each change. Thread-safe.
class ShardLog {
 public:
  // Lifetime: all references outlive this object.
  ShardLog(store::FileSystem& fs, std::string dir, ShardLogOptions options, const Clock& clock, Logger& logger,
           StoreObserver& observer);
  // Ends the background thread, if any, after a last sync.
  ~ShardLog();

  // Adds a session whose install the log may not have. Call it before Open for a session of a snapshot, and later for a
  // session that returns from quarantine. The session needs the records from `needed_from` on.
  void Know(const InstallRecord& install, uint64_t needed_from = 1);
  // Drops a session whose records are no longer needed.
  void Forget(uint64_t session_id);
  // Decides which records Open omits: those for which it returns true.
  static bool SkipNone(uint64_t, uint64_t) { return false; }
  using Skip = absl::FunctionRef<bool(uint64_t session_id, uint64_t sequence)>;
  // Opens the log and passes every record to `replay`, in order, except those for which `skip` returns true. Call it
  // once, before Read, Append and AppendDurably. Returns the errors of RecordLog::Open and of DecodeRecord.
  absl::Status Open(absl::FunctionRef<void(ShardRecord)> replay, Skip skip = &SkipNone);
  // Passes the encoded records that Open will read to `replay`; none if no log exists. Call it before Open. Returns the
  // errors of store::ReadLog.
  absl::Status Scan(const store::LogReplay& replay) const;
  // Syncs the log and passes its encoded records to `replay`. Returns the sequence after the last record that was
  // appended before the call. Returns UNAVAILABLE while the log cannot be written, or the errors of store::ReadLog.
  absl::StatusOr<uint64_t> Read(const store::LogReplay& replay);

  // Appends a record; see ShardJournal::Append. Omits an install that equals the session's last one.
  void Append(const ShardRecord& record);
  // Appends and syncs a record, and returns its sequence. Returns UNAVAILABLE if that fails: the record may be durable
  // nevertheless.
  absl::StatusOr<uint64_t> AppendDurably(const ShardRecord& record);
  // Returns the sequence of the next record, or 0 while the log cannot be written.
  uint64_t next_sequence() const;
  // Returns the session's last install, or nullopt if the session is not known.
  std::optional<InstallRecord> InstallOf(uint64_t session_id) const;
  // Returns the session's name, or "" if the session is not known.
  std::string NameOf(uint64_t session_id) const;
  // Returns the sequence of the first record that the session needs, or 0 if the session is not known.
  uint64_t NeededFrom(uint64_t session_id) const;

  // Call it when a snapshot of the session is durable. The session then needs the log from `needed_from` on.
  // `begun_at` was next_sequence() when the first image was made; `snapshot_steps` has the step of each layer's image.
  // Ends the session's staleness if the images hold all missing records.
  void OnSnapshot(uint64_t session_id, uint64_t needed_from, uint64_t begun_at,
                  const std::map<uint32_t, LayerStep>& snapshot_steps);

  bool stale(uint64_t session_id) const;
  bool writable() const;
  // Syncs all records appended before the call. Returns no error: if the disk fails, the log is reopened later.
  void Sync();
  // Does one round of background work: syncs, or reopens the log if the disk has failed. Returns the pause until the
  // next round. Calls must not overlap.
  absl::Duration Work();

 private:
  struct Session {
    std::string name;
    std::string install;  // payload of the last install record
    uint64_t epoch = 0;
    uint64_t needed_from = 0;              // sequence of the first record that the session needs
    std::map<uint32_t, LayerStep> missed;  // by layer, the last step of which the log may lack a record
    uint64_t lost_before = 0;              // records below this may be lost
    bool stale = false;
  };

  // Appends an install or remove record.
  void AppendOfSession(const ShardRecord& record, const EncodedRecord& encoded) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  absl::StatusOr<uint64_t> Write(store::RecordLog& log, const EncodedRecord& encoded);
  // Updates sessions_ for an install or remove record. `payload` is the record's encoding.
  void Adopt(const ShardRecord& record, absl::string_view payload, uint64_t sequence)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // Marks the session of a record that was not written as stale.
  void Miss(const ShardRecord& record, const absl::Status& why) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void MarkStale(Session& session, absl::string_view why) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // Removes the segments that no session needs.
  void DropUnneeded() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void SyncLoop();
  absl::Status SyncLog(const std::shared_ptr<store::RecordLog>& log);
  // Stops using a log whose sync has failed. Work reopens it.
  void Abandon(const std::shared_ptr<store::RecordLog>& log);
  // Makes all sessions stale after records were lost. A log whose files were removed goes on with their sequences.
  void LoseRecords(absl::string_view why) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void Reopen();

  store::FileSystem& fs_;
  const std::string dir_;
  const ShardLogOptions options_;
  const Clock& clock_;
  Logger& logger_;
  StoreObserver& observer_;

  mutable Mutex mu_;
  CondVar changed_;                                             // wakes the syncer when it has work
  CondVar stopped_;                                             // ends the syncer's pause; appends rarely signal it
  std::atomic<bool> idle_ = false;                              // the syncer waits for changed_
  std::shared_ptr<store::RecordLog> log_ ABSL_GUARDED_BY(mu_);  // null while the log cannot be written
  absl::Status broken_ ABSL_GUARDED_BY(mu_);                    // why log_ is null
  // These are the sequences of the log that was abandoned last.
  uint64_t first_sequence_ ABSL_GUARDED_BY(mu_) = 1;
  uint64_t next_sequence_ ABSL_GUARDED_BY(mu_) = 1;
  absl::flat_hash_map<uint64_t, Session> sessions_ ABSL_GUARDED_BY(mu_);
  bool stopping_ ABSL_GUARDED_BY(mu_) = false;
  std::thread syncer_;
};

}  // namespace precondor::recovery
