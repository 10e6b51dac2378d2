// SPDX-License-Identifier: Apache-2.0
#include "server/recovery/shard_log.h"

#include <algorithm>
#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"

#include "kernels/base/mutex.h"
#include "kernels/base/status_macros.h"

namespace precondor::recovery {
namespace {

// Returns the step of the record's layer, or nullopt if the record belongs to no layer.
std::optional<LayerStep> PlaceOf(const ShardRecord& record) {
  return std::visit(
      [](const auto& one) -> std::optional<LayerStep> {
        if constexpr (requires { one.at; }) return one.at;
        return std::nullopt;
      },
      record);
}

// Returns whether an image as of `snapshot_step` includes the effects of `step`.
bool Holds(const LayerStep& snapshot_step, const LayerStep& step) {
  return snapshot_step.rollback_epoch > step.rollback_epoch ||
         (snapshot_step.rollback_epoch == step.rollback_epoch && snapshot_step.step > step.step);
}

absl::Status Unwritable(const absl::Status& why) {
  return absl::UnavailableError(absl::StrCat("the shard's log cannot be written: ", why.message()));
}

bool ChangesSessions(RecordType type) { return type == RecordType::kInstall || type == RecordType::kRemove; }

}  // namespace

ShardLog::ShardLog(store::FileSystem& fs, std::string dir, ShardLogOptions options, const Clock& clock, Logger& logger,
                   StoreObserver& observer)
    : fs_(fs), dir_(std::move(dir)), options_(options), clock_(clock), logger_(logger), observer_(observer) {}

ShardLog::~ShardLog() {
  {
    MutexLock lock(mu_);
    stopping_ = true;
    changed_.notify_all();
    stopped_.notify_all();
  }
  if (syncer_.joinable()) syncer_.join();
}

void ShardLog::Know(const InstallRecord& install, uint64_t needed_from) {
  const absl::StatusOr<std::string> encoded = EncodeInstall(install);
  MutexLock lock(mu_);
  if (encoded.ok()) Adopt(install, *encoded, needed_from);
}

void ShardLog::Forget(uint64_t session_id) {
  MutexLock lock(mu_);
  Adopt(RemoveRecord{session_id}, "", 0);
  DropUnneeded();
}

absl::Status ShardLog::Scan(const store::LogReplay& replay) const {
  const absl::Status read = store::ReadLog(fs_, dir_, replay).status();
  return absl::IsNotFound(read) ? absl::OkStatus() : read;
}

absl::StatusOr<uint64_t> ShardLog::Read(const store::LogReplay& replay) {
  uint64_t end = 0;
  {
    std::shared_ptr<store::RecordLog> log;
    {
      MutexLock lock(mu_);
      log = log_;
    }
    if (log != nullptr) end = log->next_sequence();
    PRECONDOR_RETURN_IF_ERROR(SyncLog(log));
  }
  PRECONDOR_RETURN_IF_ERROR(store::ReadLog(fs_, dir_, replay).status());
  return end;
}

absl::Status ShardLog::Open(absl::FunctionRef<void(ShardRecord)> replay, Skip skip) {
  uint64_t records = 0, bytes = 0;
  absl::Time next_line = clock_.Now() + options_.progress_interval;
  // Does not take mu_: no other thread uses the log yet, and RecordLog calls this under its own lock, which other code
  // takes after mu_.
  const auto one = [&](const store::Record& record) ABSL_NO_THREAD_SAFETY_ANALYSIS -> absl::Status {
    PRECONDOR_ASSIGN_OR_RETURN(ShardRecord decoded, DecodeRecord(record.type, record.payload));
    if (!skip(SessionOf(decoded), record.sequence)) {
      Adopt(decoded, record.payload, record.sequence);
      replay(std::move(decoded));
    }
    ++records;
    bytes += record.payload.size();
    if (clock_.Now() >= next_line) {
      next_line = clock_.Now() + options_.progress_interval;
      logger_.Log(Severity::kInfo, "replaying the log", {{"records", records}, {"bytes", bytes}});
    }
    return absl::OkStatus();
  };
  PRECONDOR_ASSIGN_OR_RETURN(std::unique_ptr<store::RecordLog> log,
                             store::RecordLog::Open(fs_, dir_, options_.log, one));
  if (records > 0 || log->torn_bytes() > 0) {
    logger_.Log(Severity::kInfo, "log replayed",
                {{"records", records}, {"bytes", bytes}, {"torn_bytes", log->torn_bytes()}});
  }
  MutexLock lock(mu_);
  log_ = std::move(log);
  if (options_.background) syncer_ = std::thread([this] { SyncLoop(); });
  return absl::OkStatus();
}

void ShardLog::Adopt(const ShardRecord& record, absl::string_view payload, uint64_t sequence) {
  if (const auto* install = std::get_if<InstallRecord>(&record)) {
    Session& session = sessions_[install->install.session_id];
    if (install->install.epoch < session.epoch) return;  // a snapshot had a newer install
    session.name = install->install.spec.name;
    session.epoch = install->install.epoch;
    session.install = std::string(payload);
    if (session.needed_from == 0) session.needed_from = sequence;
  } else if (const auto* removal = std::get_if<RemoveRecord>(&record)) {
    const auto found = sessions_.find(removal->session_id);
    if (found == sessions_.end()) return;
    if (found->second.stale) observer_.OnLogStale(found->second.name, false);
    sessions_.erase(found);
  }
}

void ShardLog::Append(const ShardRecord& record) {
  const absl::StatusOr<EncodedRecord> encoded = EncodeRecord(record);
  std::shared_ptr<store::RecordLog> log;
  {
    MutexLock lock(mu_);
    if (!encoded.ok()) return Miss(record, encoded.status());
    if (ChangesSessions(encoded->type)) return AppendOfSession(record, *encoded);
    if (log_ == nullptr) return Miss(record, broken_);
    log = log_;
  }
  // Writes without mu_, so that layers wait for each other's writes only as long as RecordLog requires.
  const absl::Status written = Write(*log, *encoded).status();
  if (written.ok() && !idle_.exchange(false)) return;
  MutexLock lock(mu_);
  if (!written.ok()) Miss(record, written);
  changed_.notify_all();
}

absl::StatusOr<uint64_t> ShardLog::AppendDurably(const ShardRecord& record) {
  PRECONDOR_ASSIGN_OR_RETURN(const EncodedRecord encoded, EncodeRecord(record));
  std::shared_ptr<store::RecordLog> log;
  uint64_t sequence = 0;
  {
    MutexLock lock(mu_);
    if (log_ == nullptr) return Unwritable(broken_);
    log = log_;
    const absl::StatusOr<uint64_t> written = Write(*log, encoded);
    changed_.notify_all();
    if (!written.ok()) return Unwritable(written.status());
    sequence = *written;
    Adopt(record, encoded.own, sequence);
  }
  PRECONDOR_RETURN_IF_ERROR(SyncLog(log));
  return sequence;
}

void ShardLog::AppendOfSession(const ShardRecord& record, const EncodedRecord& encoded) {
  if (encoded.type == RecordType::kInstall) {
    const auto known = sessions_.find(SessionOf(record));
    // Coordinators repeat installs; a repetition is not written.
    if (known != sessions_.end() && known->second.install == encoded.own) return;
  }
  if (log_ == nullptr) return Miss(record, broken_);
  const absl::StatusOr<uint64_t> sequence = Write(*log_, encoded);
  if (!sequence.ok()) return Miss(record, sequence.status());
  Adopt(record, encoded.own, *sequence);
  changed_.notify_all();
}

absl::StatusOr<uint64_t> ShardLog::Write(store::RecordLog& log, const EncodedRecord& encoded) {
  const std::vector<absl::string_view> pieces = encoded.Pieces();
  absl::StatusOr<uint64_t> sequence = log.AppendPieces(static_cast<uint8_t>(encoded.type), pieces);
  int64_t bytes = 0;
  for (const absl::string_view piece : pieces) bytes += static_cast<int64_t>(piece.size());
  observer_.OnLogAppend(sequence.ok() ? bytes : 0, sequence.ok());
  return sequence;
}

void ShardLog::Miss(const ShardRecord& record, const absl::Status& why) {
  // The shard has the session although the record was not written, and the session's next snapshot needs the install.
  if (const absl::StatusOr<EncodedRecord> encoded = EncodeRecord(record); encoded.ok()) Adopt(record, encoded->own, 0);
  const auto found = sessions_.find(SessionOf(record));
  changed_.notify_all();
  if (found == sessions_.end()) return;
  Session& session = found->second;
  if (const std::optional<LayerStep> at = PlaceOf(record); at.has_value()) session.missed[at->layer] = *at;
  MarkStale(session, why.message());
}

void ShardLog::MarkStale(Session& session, absl::string_view why) {
  if (std::exchange(session.stale, true)) return;
  observer_.OnLogStale(session.name, true);
  logger_.Log(Severity::kError, "log is stale: the session cannot come back until its next snapshot",
              {{"session", session.name}, {"reason", why}});
}

uint64_t ShardLog::next_sequence() const {
  MutexLock lock(mu_);
  return log_ == nullptr ? 0 : log_->next_sequence();
}

std::optional<InstallRecord> ShardLog::InstallOf(uint64_t session_id) const {
  MutexLock lock(mu_);
  const auto found = sessions_.find(session_id);
  if (found == sessions_.end()) return std::nullopt;
  absl::StatusOr<ShardRecord> decoded = DecodeRecord(static_cast<uint8_t>(RecordType::kInstall), found->second.install);
  if (!decoded.ok()) return std::nullopt;
  return std::get<InstallRecord>(*std::move(decoded));
}

std::string ShardLog::NameOf(uint64_t session_id) const {
  MutexLock lock(mu_);
  const auto found = sessions_.find(session_id);
  return found == sessions_.end() ? "" : found->second.name;
}

uint64_t ShardLog::NeededFrom(uint64_t session_id) const {
  MutexLock lock(mu_);
  const auto found = sessions_.find(session_id);
  return found == sessions_.end() ? 0 : found->second.needed_from;
}

void ShardLog::OnSnapshot(uint64_t session_id, uint64_t needed_from, uint64_t begun_at,
                          const std::map<uint32_t, LayerStep>& snapshot_steps) {
  MutexLock lock(mu_);
  const auto found = sessions_.find(session_id);
  if (found == sessions_.end()) return;
  Session& session = found->second;
  session.needed_from = std::max(session.needed_from, needed_from);
  for (auto missed = session.missed.begin(); missed != session.missed.end();) {
    const auto image = snapshot_steps.find(missed->first);
    const bool held = image != snapshot_steps.end() && Holds(image->second, missed->second);
    missed = held ? session.missed.erase(missed) : std::next(missed);
  }
  const bool holds_all = session.missed.empty() && begun_at >= session.lost_before;
  if (session.stale && holds_all && log_ != nullptr && log_->health().ok()) {
    session.stale = false;
    observer_.OnLogStale(session.name, false);
    logger_.Log(Severity::kInfo, "log is whole again: the session's snapshot holds what it lacked",
                {{"session", session.name}});
  }
  DropUnneeded();
}

void ShardLog::DropUnneeded() {
  if (log_ == nullptr) return;
  uint64_t needed = log_->next_sequence();
  for (const auto& [id, session] : sessions_) needed = std::min(needed, session.needed_from);
  if (const absl::Status status = log_->DropBefore(needed); !status.ok()) {
    logger_.Log(Severity::kWarning, "old segments of the log stay", {{"reason", absl::string_view(status.message())}});
  }
}

bool ShardLog::stale(uint64_t session_id) const {
  MutexLock lock(mu_);
  const auto found = sessions_.find(session_id);
  return found != sessions_.end() && found->second.stale;
}

bool ShardLog::writable() const {
  MutexLock lock(mu_);
  return log_ != nullptr && log_->health().ok();
}

void ShardLog::Sync() {
  std::shared_ptr<store::RecordLog> log;
  {
    MutexLock lock(mu_);
    log = log_;
  }
  SyncLog(log).IgnoreError();
}

absl::Status ShardLog::SyncLog(const std::shared_ptr<store::RecordLog>& log) {
  if (log == nullptr) return Unwritable(absl::UnavailableError("it is opened again"));
  absl::Status synced = log->Sync();
  if (synced.ok()) return synced;
  Abandon(log);
  return Unwritable(synced);
}

absl::Duration ShardLog::Work() {
  std::shared_ptr<store::RecordLog> log;
  {
    MutexLock lock(mu_);
    log = log_;
  }
  // Works without mu_, so that appends wait neither for a sync nor for a log that is reopened and read.
  if (log == nullptr) {
    Reopen();
  } else {
    const absl::Time start = clock_.Now();
    const bool synced = log->Sync().ok();
    observer_.OnLogSync(clock_.Now() - start, static_cast<int64_t>(log->size_bytes()));
    if (!synced) Abandon(log);
  }
  log.reset();
  MutexLock lock(mu_);
  changed_.notify_all();
  return log_ == nullptr ? options_.reopen_interval : options_.sync_interval;
}

void ShardLog::SyncLoop() {
  NameThisThread("log-sync");
  for (;;) {
    bool last = false;
    {
      MutexLock lock(mu_);
      changed_.wait(mu_, [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
        idle_ = true;  // before each check: an append that the check misses sees idle_ and notifies
        return stopping_ || log_ == nullptr || log_->synced_before() < log_->next_sequence() || !log_->health().ok();
      });
      idle_ = false;
      last = stopping_;
      if (last && log_ == nullptr) return;
    }
    const absl::Duration pause = Work();
    if (last) return;
    MutexLock lock(mu_);
    stopped_.wait_for(mu_, absl::ToChronoNanoseconds(pause),
                      [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) { return stopping_; });
  }
}

// The log may lack records of any session: the system can have accepted a record and then have failed to write it.
void ShardLog::Abandon(const std::shared_ptr<store::RecordLog>& log) {
  observer_.OnLogAppend(0, false);
  MutexLock lock(mu_);
  if (log_ != log) return;  // another thread has abandoned it already
  broken_ = log->health();
  logger_.Log(Severity::kError, "log cannot be written",
              {{"log", dir_}, {"reason", absl::string_view(broken_.message())}});
  first_sequence_ = log->first_sequence();
  next_sequence_ = log->next_sequence();
  log_ = nullptr;
  if (absl::IsNotFound(broken_)) LoseRecords("the log's files were removed");
  changed_.notify_all();
}

void ShardLog::LoseRecords(absl::string_view why) {
  for (auto& [id, session] : sessions_) {
    session.lost_before = next_sequence_;
    MarkStale(session, why);
  }
}

void ShardLog::Reopen() {
  store::RecordLogOptions options = options_.log;
  {
    MutexLock lock(mu_);
    options.first_sequence = next_sequence_;
  }
  absl::StatusOr<std::unique_ptr<store::RecordLog>> opened = store::RecordLog::Open(fs_, dir_, options, nullptr);
  MutexLock lock(mu_);
  if (!opened.ok()) {
    broken_ = opened.status();
    return;
  }
  log_ = *std::move(opened);
  logger_.Log(Severity::kInfo, "log can be written again", {{"log", dir_}});
  if (log_->first_sequence() > first_sequence_) {
    LoseRecords("the log's files were removed");
  } else if (log_->next_sequence() < next_sequence_) {
    LoseRecords("the disk has lost records that it had accepted");
  }
}

}  // namespace precondor::recovery
