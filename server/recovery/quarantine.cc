// SPDX-License-Identifier: Apache-2.0
#include "server/recovery/quarantine.h"

#include <algorithm>
#include <limits>
#include <memory>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"

#include "kernels/base/byte_codec.h"
#include "kernels/base/status_macros.h"
#include "server/recovery/record_codec.h"
#include "server/store/crc32c.h"
#include "server/store/record_log.h"

namespace precondor::recovery {
namespace {

constexpr absl::string_view kStateFile = "STATE";
constexpr absl::string_view kMagic = "PCONQUAR";
constexpr uint32_t kFormat = 1;
constexpr absl::string_view kPartPrefix = "log-";
constexpr absl::string_view kGradientsSuffix = "-gradients";  // an earlier release removes such a folder
constexpr absl::Duration kAgeStep = absl::Hours(1);  // a session's age is written when it has grown by this much

// Returns whether Put copies a record: not those of a session's removal or of its moves to and from the quarantine.
bool OfLife(const store::Record& record) {
  const auto type = static_cast<RecordType>(record.type);
  return type != RecordType::kRemove && type != RecordType::kQuarantine;
}

absl::Status RemoveFlatDir(store::FileSystem& fs, const std::string& dir) {
  PRECONDOR_ASSIGN_OR_RETURN(const std::vector<std::string> names, fs.List(dir));
  for (const std::string& name : names) PRECONDOR_RETURN_IF_ERROR(fs.RemoveFile(store::JoinPath(dir, name)));
  return fs.RemoveDir(dir);
}

}  // namespace

std::string Quarantine::DirOf(uint64_t session_id) const { return store::JoinPath(dir_, absl::StrCat(session_id)); }

std::string Quarantine::PartOf(uint64_t session_id, uint64_t part) const {
  return store::JoinPath(DirOf(session_id), absl::StrCat(kPartPrefix, part));
}

std::string Quarantine::GradientsOf(uint64_t session_id, uint64_t part) const {
  return absl::StrCat(PartOf(session_id, part), kGradientsSuffix);
}

absl::Status Quarantine::RemoveParts(uint64_t session_id, const std::set<uint64_t>& but) const {
  PRECONDOR_ASSIGN_OR_RETURN(const std::vector<std::string> names, fs_.List(DirOf(session_id)));
  for (const std::string& name : names) {
    uint64_t part = 0;
    absl::string_view number = name;
    if (!absl::ConsumePrefix(&number, kPartPrefix)) continue;
    absl::ConsumeSuffix(&number, kGradientsSuffix);
    if (absl::SimpleAtoi(number, &part) && but.contains(part)) continue;
    PRECONDOR_RETURN_IF_ERROR(RemoveFlatDir(fs_, store::JoinPath(DirOf(session_id), name)));
  }
  return absl::OkStatus();
}

absl::Status Quarantine::Open() {
  MutexLock files(files_mu_);
  PRECONDOR_RETURN_IF_ERROR(store::MakeDirDurably(fs_, dir_));
  PRECONDOR_ASSIGN_OR_RETURN(const std::vector<std::string> names, fs_.List(dir_));
  for (const std::string& name : names) {
    uint64_t session_id = 0;
    if (!absl::SimpleAtoi(name, &session_id)) continue;
    absl::StatusOr<Entry> entry = Read(session_id);
    if (absl::IsNotFound(entry.status())) {
      PRECONDOR_RETURN_IF_ERROR(RemoveLocked(session_id));  // a crash interrupted Put or Remove
      continue;
    }
    PRECONDOR_RETURN_IF_ERROR(entry.status());
    PRECONDOR_RETURN_IF_ERROR(RemoveParts(session_id, {entry->part}));
    MutexLock lock(mu_);
    entries_.insert_or_assign(session_id, *std::move(entry));
  }
  return absl::OkStatus();
}

absl::StatusOr<Quarantine::Entry> Quarantine::Read(uint64_t session_id) const {
  const std::string path = store::JoinPath(DirOf(session_id), kStateFile);
  PRECONDOR_ASSIGN_OR_RETURN(const std::string bytes, fs_.ReadFile(path));
  const size_t sum_at = bytes.size() < sizeof(uint32_t) ? 0 : bytes.size() - sizeof(uint32_t);
  Decoder sum(absl::string_view(bytes).substr(sum_at));
  Decoder in(absl::string_view(bytes).substr(0, sum_at));
  if (in.Take(kMagic.size()) != kMagic || sum.U32() != store::Crc32c(absl::string_view(bytes).substr(0, sum_at))) {
    return absl::DataLossError(absl::StrCat(path, ": damaged; expected what was written with its checksum"));
  }
  if (const uint32_t format = in.U32(); format != kFormat) {
    return absl::FailedPreconditionError(absl::StrCat(path, ": format: expected ", kFormat, ", got ", format));
  }
  Entry entry;
  entry.returned = in.U8() != 0;
  in.U64();  // was the wall-clock time of Put
  entry.age = entry.written_age = absl::Nanoseconds(static_cast<int64_t>(in.U64()));
  entry.session.last_step = in.U64();
  entry.part = in.U64();
  entry.from = in.U64();
  PRECONDOR_ASSIGN_OR_RETURN(ShardRecord record, DecodeRecord(static_cast<uint8_t>(RecordType::kInstall), in.Bytes()));
  if (!in.done()) return absl::DataLossError(absl::StrCat(path, ": the bytes are not what was written"));
  entry.session.install = std::get<InstallRecord>(std::move(record)).install;
  return entry;
}

absl::Status Quarantine::Write(Entry entry) {
  PRECONDOR_ASSIGN_OR_RETURN(const std::string install, EncodeInstall(InstallRecord{entry.session.install}));
  const uint64_t session_id = entry.session.install.session_id;
  std::string out(kMagic);
  PutU32(out, kFormat);
  PutFixed(out, entry.returned ? 1 : 0, 1);
  PutU64(out, 0);  // was the wall-clock time of Put
  PutU64(out, static_cast<uint64_t>(absl::ToInt64Nanoseconds(entry.age)));
  PutU64(out, entry.session.last_step);
  PutU64(out, entry.part);
  PutU64(out, entry.from);
  PutBytes(out, install);
  PutU32(out, store::Crc32c(out));
  PRECONDOR_RETURN_IF_ERROR(store::WriteFileDurably(fs_, store::JoinPath(DirOf(session_id), kStateFile), out));
  entry.written_age = entry.age;
  MutexLock lock(mu_);
  entries_.insert_or_assign(session_id, std::move(entry));
  return absl::OkStatus();
}

std::optional<Quarantine::Entry> Quarantine::Find(uint64_t session_id) const {
  MutexLock lock(mu_);
  const auto found = entries_.find(session_id);
  return found == entries_.end() ? std::nullopt : std::make_optional(found->second);
}

std::vector<QuarantinedSession> Quarantine::List() const {
  std::vector<QuarantinedSession> listed;
  MutexLock lock(mu_);
  for (const auto& [id, entry] : entries_) {
    if (!entry.returned) listed.push_back(entry.session);
  }
  return listed;
}

bool Quarantine::Holds(uint64_t session_id) const {
  const std::optional<Entry> entry = Find(session_id);
  return entry.has_value() && !entry->returned;
}

std::vector<uint64_t> Quarantine::Returned() const {
  std::vector<uint64_t> ids;
  MutexLock lock(mu_);
  for (const auto& [id, entry] : entries_) {
    if (entry.returned) ids.push_back(id);
  }
  return ids;
}

bool Quarantine::Skips(uint64_t session_id, uint64_t sequence) const {
  const std::optional<Entry> entry = Find(session_id);
  return entry.has_value() && sequence < entry->from;
}

absl::StatusOr<uint64_t> Quarantine::CopyRecords(uint64_t session_id, uint64_t part, uint64_t needed_from, ReadLog read,
                                                 ReadLog read_gradients) const {
  PRECONDOR_ASSIGN_OR_RETURN(const std::unique_ptr<store::RecordLog> log,
                             store::RecordLog::Open(fs_, PartOf(session_id, part), {}, nullptr));
  std::unique_ptr<store::RecordLog> gradients;
  const auto copy_gradient = [&](const store::Record& record) -> absl::Status {
    if (gradients == nullptr) {
      const store::RecordLogOptions options{.max_record_bytes = std::numeric_limits<uint32_t>::max()};
      PRECONDOR_ASSIGN_OR_RETURN(gradients,
                                 store::RecordLog::Open(fs_, GradientsOf(session_id, part), options, nullptr));
    }
    return gradients->Append(record.type, record.payload).status();
  };
  const auto copy = [&](const store::Record& record) { return log->Append(record.type, record.payload).status(); };
  if (const std::optional<Entry> before = Find(session_id); before.has_value()) {
    // The session has been here before. Its earlier records are needed unless two snapshots were taken after its
    // return.
    if (needed_from <= before->from) {
      PRECONDOR_RETURN_IF_ERROR(Replay(session_id, copy));
      PRECONDOR_RETURN_IF_ERROR(ReplayGradients(session_id, copy_gradient));
    }
    needed_from = std::max(needed_from, before->from);
  }
  const auto take = [&](const store::Record& record) -> absl::Status {
    if (record.sequence < needed_from || !OfLife(record)) return absl::OkStatus();
    PRECONDOR_ASSIGN_OR_RETURN(const ShardRecord decoded, DecodeRecord(record.type, record.payload));
    return SessionOf(decoded) == session_id ? copy(record) : absl::OkStatus();
  };
  PRECONDOR_ASSIGN_OR_RETURN(const uint64_t end, read(take));
  const auto take_gradient = [&](const store::Record& record) -> absl::Status {
    PRECONDOR_ASSIGN_OR_RETURN(const StoredGradient decoded, DecodeGradient(record.type, record.payload));
    const bool needed = decoded.record.at.session_id == session_id && decoded.log_sequence >= needed_from;
    return needed ? copy_gradient(record) : absl::OkStatus();
  };
  PRECONDOR_RETURN_IF_ERROR(read_gradients(take_gradient).status());
  PRECONDOR_RETURN_IF_ERROR(log->Sync());
  if (gradients != nullptr) PRECONDOR_RETURN_IF_ERROR(gradients->Sync());
  return end;
}

absl::Status Quarantine::Put(QuarantinedSession session, uint64_t needed_from, ReadLog read, ReadLog read_gradients) {
  MutexLock files(files_mu_);
  const uint64_t session_id = session.install.session_id;
  Entry entry{.session = std::move(session)};
  // The folders that a state file may refer to after a crash: that of the entry, and that of the file on the disk,
  // which differs if an earlier write of the state file returned an error.
  std::set<uint64_t> counted;
  if (const std::optional<Entry> before = Find(session_id); before.has_value()) counted.insert(before->part);
  if (const absl::StatusOr<Entry> written = Read(session_id); written.ok()) counted.insert(written->part);
  entry.part = counted.empty() ? 1 : *counted.rbegin() + 1;
  PRECONDOR_RETURN_IF_ERROR(store::MakeDirDurably(fs_, DirOf(session_id)));
  PRECONDOR_RETURN_IF_ERROR(RemoveParts(session_id, counted));
  PRECONDOR_ASSIGN_OR_RETURN(entry.from, CopyRecords(session_id, entry.part, needed_from, read, read_gradients));
  PRECONDOR_RETURN_IF_ERROR(fs_.SyncDir(DirOf(session_id)));
  PRECONDOR_RETURN_IF_ERROR(Write(entry));
  // The next Open removes what remains if this fails.
  RemoveParts(session_id, {entry.part}).IgnoreError();
  return absl::OkStatus();
}

absl::Status Quarantine::Replay(uint64_t session_id, const store::LogReplay& replay) const {
  const std::optional<Entry> entry = Find(session_id);
  if (!entry.has_value()) return absl::NotFoundError(absl::StrCat("session_id ", session_id, ": not in quarantine"));
  return store::ReadLog(fs_, PartOf(session_id, entry->part), replay).status();
}

absl::Status Quarantine::ReplayGradients(uint64_t session_id, const store::LogReplay& replay) const {
  const std::optional<Entry> entry = Find(session_id);
  if (!entry.has_value()) return absl::NotFoundError(absl::StrCat("session_id ", session_id, ": not in quarantine"));
  const absl::Status read = store::ReadLog(fs_, GradientsOf(session_id, entry->part), replay).status();
  return absl::IsNotFound(read) ? absl::OkStatus() : read;
}

absl::Status Quarantine::Return(uint64_t session_id, uint64_t sequence) {
  MutexLock files(files_mu_);
  std::optional<Entry> entry = Find(session_id);
  if (!entry.has_value()) return absl::NotFoundError(absl::StrCat("session_id ", session_id, ": not in quarantine"));
  entry->returned = true;
  entry->from = sequence;
  return Write(*std::move(entry));
}

absl::Status Quarantine::OnSnapshot(uint64_t session_id, uint64_t sequence) {
  MutexLock files(files_mu_);
  const std::optional<Entry> entry = Find(session_id);
  return entry.has_value() && entry->returned && sequence >= entry->from ? RemoveLocked(session_id) : absl::OkStatus();
}

absl::Status Quarantine::Remove(uint64_t session_id) {
  MutexLock files(files_mu_);
  return RemoveLocked(session_id);
}

absl::Status Quarantine::RemoveLocked(uint64_t session_id) {
  const std::string dir = DirOf(session_id);
  const absl::StatusOr<std::vector<std::string>> names = fs_.List(dir);
  if (absl::IsNotFound(names.status())) return absl::OkStatus();
  // The state file first: a directory without it is removed by the next Open.
  const absl::Status removed = fs_.RemoveFile(store::JoinPath(dir, kStateFile));
  if (!removed.ok() && !absl::IsNotFound(removed)) return removed;
  PRECONDOR_RETURN_IF_ERROR(fs_.SyncDir(dir));
  {
    MutexLock lock(mu_);
    entries_.erase(session_id);
  }
  PRECONDOR_RETURN_IF_ERROR(RemoveParts(session_id, {}));
  return RemoveFlatDir(fs_, dir);
}

std::vector<uint64_t> Quarantine::Age(absl::Duration most) {
  std::vector<uint64_t> old;
  std::vector<Entry> to_write;
  MutexLock files(files_mu_);
  {
    MutexLock lock(mu_);
    const absl::Time now = clock_.Now();
    const absl::Duration passed = aged_at_.has_value() ? now - *aged_at_ : absl::ZeroDuration();
    aged_at_ = now;
    for (auto& [id, entry] : entries_) {
      if (entry.returned) continue;
      entry.age += passed;
      if (entry.age >= most) {
        old.push_back(id);
      } else if (entry.age >= entry.written_age + kAgeStep) {
        entry.written_age = entry.age;  // if the write fails, the next one is due after another kAgeStep
        to_write.push_back(entry);
      }
    }
  }
  for (Entry& entry : to_write) Write(std::move(entry)).IgnoreError();
  return old;
}

}  // namespace precondor::recovery
