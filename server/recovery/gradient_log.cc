// SPDX-License-Identifier: Apache-2.0
#include "server/recovery/gradient_log.h"

#include <algorithm>
#include <limits>
#include <utility>

#include "absl/strings/str_cat.h"

#include "kernels/base/mutex.h"
#include "kernels/base/status_macros.h"
#include "server/recovery/record_codec.h"

namespace precondor::recovery {
namespace {

store::RecordLogOptions LogOptions() {
  // Work begins new segments, so that no Append waits for the sync of a full one.
  return {.segment_bytes = std::numeric_limits<uint64_t>::max(),
          .max_record_bytes = std::numeric_limits<uint32_t>::max(),
          .drop_cached = true};
}

}  // namespace

GradientLog::GradientLog(store::FileSystem& fs, std::string dir, const GradientLogOptions& options, const Clock& clock,
                         Logger& logger, StoreObserver& observer)
    : fs_(fs), dir_(std::move(dir)), options_(options), clock_(clock), logger_(logger), observer_(observer) {}

GradientLog::~GradientLog() {
  {
    MutexLock lock(mu_);
    stopping_ = true;
    changed_.notify_all();
  }
  if (syncer_.joinable()) syncer_.join();
}

absl::Status GradientLog::Open(Replay replay) {
  const auto one = [&](const store::Record& record) ABSL_NO_THREAD_SAFETY_ANALYSIS -> absl::Status {
    PRECONDOR_ASSIGN_OR_RETURN(StoredGradient gradient, DecodeGradient(record.type, record.payload));
    const auto [found, is_new] = sessions_.try_emplace(gradient.record.at.session_id);
    Session& session = found->second;
    if (is_new) session.needed_from = record.sequence;
    session.last_sequence = record.sequence + 1;
    session.bytes += record.payload.size();
    replay(std::move(gradient.record), gradient.log_sequence);
    return absl::OkStatus();
  };
  PRECONDOR_ASSIGN_OR_RETURN(std::unique_ptr<store::RecordLog> log,
                             store::RecordLog::Open(fs_, dir_, LogOptions(), one));
  MutexLock lock(mu_);
  log_ = std::move(log);
  if (options_.background) syncer_ = std::thread([this] { SyncLoop(); });
  return absl::OkStatus();
}

uint64_t GradientLog::Bound(const Session& session) const {
  return std::max(options_.snapshot_bytes, options_.state_multiple * session.state_bytes);
}

absl::Status GradientLog::CheckRoom() const {
  if (log_ == nullptr) return broken_;
  if (backlog_ <= options_.backlog_bytes) return absl::OkStatus();
  return absl::ResourceExhaustedError(absl::StrCat("the disk cannot keep up: it has yet to write ", backlog_,
                                                   " bytes of gradients, at most ", options_.backlog_bytes));
}

bool GradientLog::GiveUp(Session& session, const absl::Status& why) {
  session.writes = false;
  ++session.dropped;
  if (session.lacks_since.has_value()) return false;
  session.lacks_since = clock_.Now();
  if (options_.snapshot_bytes == 0) return false;  // as configured
  observer_.OnGradientsMissing(session.name, true);
  logger_.Log(Severity::kError,
              "gradients are not in the journal: a restart brings the session back with an older state until its next "
              "snapshot",
              {{"session", session.name}, {"reason", absl::string_view(why.message())}});
  return false;
}

bool GradientLog::Append(const std::string& name, const GradientRecord& record, uint64_t log_sequence) {
  const EncodedRecord encoded = EncodeGradient(record, log_sequence);
  const std::vector<absl::string_view> pieces = encoded.Pieces();
  uint64_t bytes = 0;
  for (const absl::string_view piece : pieces) bytes += piece.size();
  std::shared_ptr<store::RecordLog> log;
  bool due = false;
  {
    MutexLock lock(mu_);
    Session& session = sessions_[record.at.session_id];
    session.name = name;
    if (options_.snapshot_bytes == 0) return GiveUp(session, absl::OkStatus());
    absl::Status room = CheckRoom();
    if (log_sequence == 0) room.Update(absl::UnavailableError("the shard's log cannot be written"));
    if (!room.ok()) return GiveUp(session, room);
    if (!session.writes) {
      // After a gap writes again once the disk has caught up. A snapshot from here on ends the gap.
      due = session.lacks_since.has_value();
      if (due && backlog_ > 0) return GiveUp(session, absl::OkStatus());
      session.writes = true;
      session.due_at = Bound(session);
    }
    session.bytes += bytes;
    backlog_ += bytes;
    if (session.bytes > session.due_at) {
      session.due_at = session.bytes + Bound(session);
      due = true;
    }
    log = log_;
    if (backlog_ == bytes) changed_.notify_all();
  }
  // Writes without mu_, so that layers wait for each other's writes only as long as RecordLog requires.
  const absl::StatusOr<uint64_t> sequence = log->AppendPieces(static_cast<uint8_t>(encoded.type), pieces);
  observer_.OnLogAppend(sequence.ok() ? static_cast<int64_t>(bytes) : 0, sequence.ok());
  MutexLock lock(mu_);
  if (!sequence.ok()) Abandon(log, sequence.status());
  // A sync that ran meanwhile has taken this record for one that it covers.
  if (sequence.ok() && log_ == log && backlog_ < bytes) {
    backlog_ = bytes;
    changed_.notify_all();
  }
  const auto found = sessions_.find(record.at.session_id);
  if (found == sessions_.end()) return false;
  Session& session = found->second;
  if (!sequence.ok()) return GiveUp(session, sequence.status());
  if (session.needed_from == 0) session.needed_from = *sequence;
  session.last_sequence = std::max(session.last_sequence, *sequence + 1);
  return due;
}

absl::StatusOr<uint64_t> GradientLog::Read(uint64_t session_id, const store::LogReplay& replay) {
  std::shared_ptr<store::RecordLog> log;
  {
    MutexLock lock(mu_);
    if (!sessions_.contains(session_id)) return 0;
    if (log_ == nullptr) return broken_;
    log = log_;
  }
  PRECONDOR_RETURN_IF_ERROR(log->Sync());
  PRECONDOR_RETURN_IF_ERROR(store::ReadLog(fs_, dir_, replay).status());
  return log->next_sequence();
}

void GradientLog::Abandon(const std::shared_ptr<store::RecordLog>& log, const absl::Status& why) {
  if (log_ != log) return;  // another thread has abandoned it already
  broken_ = absl::UnavailableError(absl::StrCat("the log of gradients cannot be written: ", why.message()));
  logger_.Log(Severity::kError, "log cannot be written", {{"log", dir_}, {"reason", absl::string_view(why.message())}});
  next_sequence_ = log_->next_sequence();
  log_ = nullptr;
  backlog_ = 0;
  for (auto& [id, session] : sessions_) {
    if (session.writes) GiveUp(session, broken_);  // it may lack the last ones
  }
  changed_.notify_all();
}

std::optional<absl::Time> GradientLog::LacksSince(uint64_t session_id) const {
  MutexLock lock(mu_);
  const auto found = sessions_.find(session_id);
  return found == sessions_.end() ? std::nullopt : found->second.lacks_since;
}

GradientLog::Mark GradientLog::MarkOf(uint64_t session_id) const {
  MutexLock lock(mu_);
  const auto found = sessions_.find(session_id);
  return {.sequence = log_ == nullptr ? 0 : log_->next_sequence(),
          .dropped = found == sessions_.end() ? 0 : found->second.dropped};
}

void GradientLog::OnSnapshot(uint64_t session_id, const Mark& mark, uint64_t state_bytes) {
  MutexLock lock(mu_);
  const auto found = sessions_.find(session_id);
  if (found == sessions_.end()) return;
  Session& session = found->second;
  session.state_bytes = state_bytes;
  session.bytes = 0;
  session.due_at = Bound(session);
  if (session.lacks_since.has_value() && session.dropped == mark.dropped) {
    session.lacks_since.reset();
    if (options_.snapshot_bytes > 0) {
      observer_.OnGradientsMissing(session.name, false);
      logger_.Log(Severity::kInfo, "the session's snapshot holds the gradients that the journal lacks",
                  {{"session", session.name}});
    }
  }
  session.needed_from = std::max(session.needed_from, std::exchange(session.last_snapshot, mark.sequence));
  DropUnneeded();
}

void GradientLog::Forget(uint64_t session_id) {
  MutexLock lock(mu_);
  const auto found = sessions_.find(session_id);
  if (found == sessions_.end()) return;
  if (found->second.lacks_since.has_value() && options_.snapshot_bytes > 0)
    observer_.OnGradientsMissing(found->second.name, false);
  sessions_.erase(found);
  DropUnneeded();
}

void GradientLog::DropUnneeded() {
  if (log_ == nullptr) return;
  uint64_t needed = log_->next_sequence();
  for (const auto& [id, session] : sessions_) {
    if (session.last_sequence > session.needed_from) needed = std::min(needed, session.needed_from);
  }
  if (const absl::Status status = log_->DropBefore(needed); !status.ok()) {
    logger_.Log(Severity::kWarning, "old segments of the log stay",
                {{"log", dir_}, {"reason", absl::string_view(status.message())}});
  }
}

absl::Duration GradientLog::Work() {
  std::shared_ptr<store::RecordLog> log;
  uint64_t covered = 0, next_sequence = 0;
  {
    MutexLock lock(mu_);
    log = log_;
    covered = backlog_;
    next_sequence = next_sequence_;
  }
  // Works without mu_, so that appends wait neither for a sync nor for a log that is reopened and read.
  if (log == nullptr) {
    // A log whose files were removed goes on with their sequences.
    store::RecordLogOptions options = LogOptions();
    options.first_sequence = next_sequence;
    absl::StatusOr<std::unique_ptr<store::RecordLog>> opened = store::RecordLog::Open(fs_, dir_, options, nullptr);
    MutexLock lock(mu_);
    if (!opened.ok()) return options_.reopen_interval;
    log_ = *std::move(opened);
    logger_.Log(Severity::kInfo, "log can be written again", {{"log", dir_}});
    return options_.sync_interval;
  }
  absl::Status status = log->Sync();
  if (status.ok()) status = log->BeginSegmentAt(options_.segment_bytes);
  MutexLock lock(mu_);
  if (status.ok()) {
    backlog_ -= std::min(covered, backlog_);
  } else {
    Abandon(log, status);
  }
  return options_.sync_interval;
}

void GradientLog::SyncLoop() {
  NameThisThread("gradient-sync");
  for (;;) {
    bool last = false;
    {
      MutexLock lock(mu_);
      changed_.wait(
          mu_, [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) { return stopping_ || log_ == nullptr || backlog_ > 0; });
      last = stopping_;
      if (last && log_ == nullptr) return;
    }
    const absl::Duration pause = Work();
    if (last) return;
    MutexLock lock(mu_);
    changed_.wait_for(mu_, absl::ToChronoNanoseconds(pause),
                      [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) { return stopping_; });
  }
}

}  // namespace precondor::recovery
