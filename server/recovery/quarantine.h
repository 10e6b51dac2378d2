// SPDX-License-Identifier: Apache-2.0
// Stores the log records of sessions that no coordinator knew, apart from the shard's log. The formats are in
// docs/operate/storage.md.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"

#include "kernels/base/clock.h"
#include "kernels/base/mutex.h"
#include "server/core/api/shard_control.h"
#include "server/store/log_reader.h"

namespace precondor::recovery {

// The quarantine on a shard's disk. Each session has a directory `<dir>/<session_id>` with copies of its records from
// the shard's log and from the log of gradients, and a state file. The session's snapshots stay where they are.
//
// A session that has returned keeps its directory until two later snapshots are durable. Until then its records are the
// ones in the directory, followed by those of the shard's log from the sequence of its return on.
//
// Thread-safe. Calls that change files run one at a time.
class Quarantine {
 public:
  // Lifetime: the references outlive this object.
  Quarantine(store::FileSystem& fs, std::string dir, const Clock& clock)
      : fs_(fs), dir_(std::move(dir)), clock_(clock) {}

  // Reads the directories and removes what a crash left unfinished. Returns DATA_LOSS if a state file is damaged,
  // FAILED_PRECONDITION if it has another format, or the disk's errors. Call it before all others. Precondition: no
  // other process uses `dir`.
  absl::Status Open();

  // List and Holds: the sessions that are in quarantine now.
  std::vector<QuarantinedSession> List() const;
  bool Holds(uint64_t session_id) const;
  // Returns whether the session has a directory: it is in quarantine, or it has returned and its records are still
  // needed.
  bool Knows(uint64_t session_id) const { return Find(session_id).has_value(); }
  // Returns the sessions that have returned and still have a directory.
  std::vector<uint64_t> Returned() const;
  // Returns whether this record of the shard's log is copied here or is no longer needed.
  bool Skips(uint64_t session_id, uint64_t sequence) const;

  // Passes the records of a log to the callback and returns the sequence after the last one.
  using ReadLog = absl::FunctionRef<absl::StatusOr<uint64_t>(const store::LogReplay&)>;
  // Puts a session in quarantine: copies its records of the log from `needed_from` on, and its gradients since then.
  // The result is durable if this returns OK; otherwise the session's entry is unchanged.
  absl::Status Put(QuarantinedSession session, uint64_t needed_from, ReadLog read, ReadLog read_gradients);
  // Pass the session's records in its directory, or those of its gradients, to `replay`. Return NOT_FOUND if the
  // session has no directory.
  absl::Status Replay(uint64_t session_id, const store::LogReplay& replay) const;
  absl::Status ReplayGradients(uint64_t session_id, const store::LogReplay& replay) const;
  // Marks the session as returned: its later records are those of the log from `sequence` on. The result is durable if
  // this returns OK. Returns NOT_FOUND if the session has no directory.
  absl::Status Return(uint64_t session_id, uint64_t sequence);
  // Call it when recovery of the session needs the log only from `sequence` on. Removes the session's directory if the
  // session has returned at or before `sequence`.
  absl::Status OnSnapshot(uint64_t session_id, uint64_t sequence);
  // Removes the session's directory. Returns OK if there is none.
  absl::Status Remove(uint64_t session_id);

  // Adds the time since the last call to the ages of the sessions in quarantine. Returns the sessions whose age is at
  // least `most`. Ages count only the monotonic time while the shard runs: a wrong wall clock does not change them.
  std::vector<uint64_t> Age(absl::Duration most);

 private:
  struct Entry {
    QuarantinedSession session;
    bool returned = false;
    uint64_t part = 0;  // number of the folder with the records; 0 means none
    uint64_t from = 0;  // records of the shard's log below this sequence are copied here or no longer needed
    absl::Duration age = absl::ZeroDuration();
    absl::Duration written_age = absl::ZeroDuration();  // the age in the state file
  };
  std::string DirOf(uint64_t session_id) const;
  std::string PartOf(uint64_t session_id, uint64_t part) const;
  std::string GradientsOf(uint64_t session_id, uint64_t part) const;
  std::optional<Entry> Find(uint64_t session_id) const;
  absl::Status Write(Entry entry) ABSL_EXCLUSIVE_LOCKS_REQUIRED(files_mu_);
  absl::StatusOr<Entry> Read(uint64_t session_id) const;
  absl::Status RemoveLocked(uint64_t session_id) ABSL_EXCLUSIVE_LOCKS_REQUIRED(files_mu_);
  absl::Status RemoveParts(uint64_t session_id, const std::set<uint64_t>& but) const;
  absl::StatusOr<uint64_t> CopyRecords(uint64_t session_id, uint64_t part, uint64_t needed_from, ReadLog read,
                                       ReadLog read_gradients) const;

  store::FileSystem& fs_;
  const std::string dir_;
  const Clock& clock_;

  Mutex files_mu_;  // held from the check of an entry until its change is on the disk; taken before mu_
  mutable Mutex mu_;
  std::map<uint64_t, Entry> entries_ ABSL_GUARDED_BY(mu_);
  std::optional<absl::Time> aged_at_ ABSL_GUARDED_BY(mu_);
};

}  // namespace precondor::recovery
