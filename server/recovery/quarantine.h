// SPDX-License-Identifier: Apache-2.0
// What a shard's disk has of sessions that no coordinator knew, apart from the log that goes on. Bytes in
// docs/storage.md.
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
#include "server/core/shard/shard_control.h"
#include "server/store/log_reader.h"

namespace precondor::recovery {

// One directory a session, `<dir>/<session_id>`: its records of the shard's log, and a file that says how it stands.
// The session's snapshots and released factors stay where they are.
//
// A session that has come back keeps its directory until two snapshots have been taken since: its records are those
// here, and then those of the log from the sequence on at which it came back.
// Thread-safe. Whatever changes files does so in turn.
class Quarantine {
 public:
  // References outlive it.
  Quarantine(store::FileSystem& fs, std::string dir, const Clock& clock)
      : fs_(fs), dir_(std::move(dir)), clock_(clock) {}

  // Before anything else, and by one process at a time. Removes what a crash left unfinished. DataLoss: a damaged file;
  // those of the disk.
  absl::Status Open();

  // In quarantine now.
  std::vector<QuarantinedSession> List() const;
  bool Holds(uint64_t session_id) const;
  // There, or come back from there with records that are still needed.
  bool Knows(uint64_t session_id) const { return Find(session_id).has_value(); }
  // Of sessions that have come back.
  std::vector<uint64_t> Returned() const;
  // Whether a record of the shard's log is here, or of no use any more.
  bool Skips(uint64_t session_id, uint64_t sequence) const;

  // Hands the records of a log to the callback, and returns the sequence after them.
  using ReadLog = absl::FunctionRef<absl::StatusOr<uint64_t>(const store::LogReplay&)>;
  // Copies the session's records of the log from `needed_from` on to here. Durable when it returns OK; otherwise
  // nothing has changed.
  absl::Status Put(QuarantinedSession session, uint64_t needed_from, ReadLog read);
  // The session's records that are here.
  absl::Status Replay(uint64_t session_id, const store::LogReplay& replay) const;
  // The session's next records are those of the log from `sequence` on. Durable when it returns OK.
  absl::Status Return(uint64_t session_id, uint64_t sequence);
  // The log is needed from `sequence` on: removes what is here of a session that came back before.
  absl::Status OnSnapshot(uint64_t session_id, uint64_t sequence);
  // OK when there is none.
  absl::Status Remove(uint64_t session_id);

  // Adds the time since the last call to the ages of the sessions that are here; returns those as old as `most`. Only
  // the monotonic clock of a shard that runs counts, so that no wall clock that is wrong makes a session old.
  std::vector<uint64_t> Age(absl::Duration most);

 private:
  struct Entry {
    QuarantinedSession session;
    bool returned = false;
    uint64_t part = 0;  // number of the folder with records; 0: none
    uint64_t from = 0;  // records of the log below this sequence are here, or of no use any more
    absl::Duration age = absl::ZeroDuration();
    absl::Duration written_age = absl::ZeroDuration();
  };
  std::string DirOf(uint64_t session_id) const;
  std::string PartOf(uint64_t session_id, uint64_t part) const;
  std::optional<Entry> Find(uint64_t session_id) const;
  absl::Status Write(Entry entry) ABSL_EXCLUSIVE_LOCKS_REQUIRED(files_mu_);
  absl::StatusOr<Entry> Read(uint64_t session_id) const;
  absl::Status RemoveLocked(uint64_t session_id) ABSL_EXCLUSIVE_LOCKS_REQUIRED(files_mu_);
  absl::Status RemoveParts(uint64_t session_id, const std::set<uint64_t>& but) const;
  absl::StatusOr<uint64_t> CopyRecords(const std::string& part, uint64_t session_id, uint64_t needed_from,
                                       ReadLog read) const;

  store::FileSystem& fs_;
  const std::string dir_;
  const Clock& clock_;

  Mutex files_mu_;  // from the look at an entry until it is written; before mu_
  mutable Mutex mu_;
  std::map<uint64_t, Entry> entries_ ABSL_GUARDED_BY(mu_);
  std::optional<absl::Time> aged_at_ ABSL_GUARDED_BY(mu_);
};

}  // namespace precondor::recovery
