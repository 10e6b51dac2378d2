// SPDX-License-Identifier: Apache-2.0
// The log of a shard: every record outlives the process when Append returns, and is on the disk a little later.
// So it outlives the process always, and the machine up to the last few records: of those the coordinator's and the
// workers' side know what was lost.
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
#include "server/core/shard/shard_journal.h"
#include "server/core/shard/store_observer.h"
#include "server/recovery/record_codec.h"
#include "server/store/record_log.h"

namespace precondor::recovery {

struct ShardLogOptions {
  // The ring holds what a model of BERT-Large's size sends in half a second.
  store::RecordLogOptions log = {.drop_cached = true, .ring_bytes = uint64_t{16} << 20};
  absl::Duration sync_interval = absl::Milliseconds(50);  // records of so long share a sync
  absl::Duration reopen_interval = absl::Seconds(5);      // after the disk has failed
  absl::Duration progress_interval = absl::Seconds(5);    // between two lines about a long replay
  bool background = true;  // false: nothing happens by itself, the owner calls Work (tests/sim)
};

// Thread-safe. When the disk fails, serving goes on: the sessions concerned are *stale*, which is told to the observer
// and logged once, until a snapshot holds what the log misses. Until then they cannot come back.
class ShardLog {
 public:
  // All references outlive it.
  ShardLog(store::FileSystem& fs, std::string dir, ShardLogOptions options, const Clock& clock, Logger& logger,
           StoreObserver& observer);
  // Syncs what there is.
  ~ShardLog();

  // Before Open: a snapshot knows of this session; the log may not any more. Later: it comes back, and its records are
  // those from `needed_from` on.
  void Know(const InstallRecord& install, uint64_t needed_from = 1);
  // The session's records are not needed any more.
  void Forget(uint64_t session_id);
  // Before anything else. Hands every record to `replay`, in order. Errors: those of RecordLog::Open; records that
  // cannot be decoded are DataLoss.
  // Not those of which `skip` says that they are not their session's any more.
  static bool SkipNone(uint64_t, uint64_t) { return false; }
  using Skip = absl::FunctionRef<bool(uint64_t session_id, uint64_t sequence)>;
  absl::Status Open(absl::FunctionRef<void(ShardRecord)> replay, Skip skip = &SkipNone);
  // Before Open: what it will hand over. Nothing where there is no log yet. Errors: those of store::ReadLog.
  absl::Status Scan(const store::LogReplay& replay) const;
  // Every record that has been appended so far. Returns the sequence after them, all of which outlive the machine.
  // Errors: Unavailable while the log cannot be written; those of store::ReadLog.
  absl::StatusOr<uint64_t> Read(const store::LogReplay& replay);

  // An install that was the session's last and is appended again is left out.
  void Append(const ShardRecord& record);
  // Its sequence, when it outlives the machine. Unavailable: it is not known whether it does.
  absl::StatusOr<uint64_t> AppendDurably(const ShardRecord& record);
  // The sequence that the next record gets; 0 while the log cannot be written.
  uint64_t next_sequence() const;
  // Nullopt: no such session.
  std::optional<InstallRecord> InstallOf(uint64_t session_id) const;
  // Records below it are of no use to the session.
  uint64_t NeededFrom(uint64_t session_id) const;

  // A snapshot of the session is durable: the log is needed from `sequence` on, and `snapshot_steps` has, by
  // layer, what its images are as of.
  void OnSnapshot(uint64_t session_id, uint64_t sequence, const std::map<uint32_t, LayerStep>& snapshot_steps);

  bool stale(uint64_t session_id) const;
  bool writable() const;
  // Everything appended so far is on the disk, or the disk has failed.
  void Sync();
  // One turn of the background: syncs, or opens the log again after the disk has failed. Returns the pause until the
  // next. One caller at a time.
  absl::Duration Work();

 private:
  struct Session {
    std::string name;
    std::string install;  // as in the log
    uint64_t epoch = 0;
    uint64_t needed_from = 0;              // records below it are of no use to it
    std::map<uint32_t, LayerStep> missed;  // by layer: the last that the log may lack a record of
    bool stale = false;
  };

  // Of a record that changes which sessions there are.
  void AppendOfSession(const ShardRecord& record, const EncodedRecord& encoded) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  absl::StatusOr<uint64_t> Write(store::RecordLog& log, const EncodedRecord& encoded);
  // `payload`: of the record, as in the log.
  void Adopt(const ShardRecord& record, absl::string_view payload, uint64_t sequence)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void Miss(const ShardRecord& record, const absl::Status& why) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void DropUnneeded() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void SayWithoutRing(const store::RecordLog& log);
  void SyncLoop();
  absl::Status SyncLog(const std::shared_ptr<store::RecordLog>& log);
  void Abandon(const std::shared_ptr<store::RecordLog>& log);
  void Reopen();

  store::FileSystem& fs_;
  const std::string dir_;
  const ShardLogOptions options_;
  const Clock& clock_;
  Logger& logger_;
  StoreObserver& observer_;

  mutable Mutex mu_;
  CondVar changed_;                                             // there is something to sync
  CondVar stopped_;                                             // between two syncs, when few appends wake a thread
  std::atomic<bool> idle_ = false;                              // the syncer waits for changed_
  std::atomic<bool> hurry_ = false;                             // and shall not pause: the log's ring fills up
  std::shared_ptr<store::RecordLog> log_ ABSL_GUARDED_BY(mu_);  // null while it is opened again
  absl::Status broken_ ABSL_GUARDED_BY(mu_);
  absl::flat_hash_map<uint64_t, Session> sessions_ ABSL_GUARDED_BY(mu_);
  bool stopping_ ABSL_GUARDED_BY(mu_) = false;
  std::thread syncer_;
};

}  // namespace precondor::recovery
