// SPDX-License-Identifier: Apache-2.0
#include "server/store/snapshot_store.h"

#include <algorithm>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"

#include "kernels/base/byte_codec.h"
#include "kernels/base/status_macros.h"
#include "server/store/crc32c.h"

namespace precondor::store {
namespace {

constexpr absl::string_view kFileMagic = "PCONDSNP";
constexpr absl::string_view kManifestMagic = "PCONDMAN";
constexpr uint32_t kSnapshotVersion = 1;
constexpr size_t kChecksumBytes = 4;

absl::Status OtherFormat(uint32_t version) {
  return absl::FailedPreconditionError(absl::StrCat("has format ", version,
                                                    version > kSnapshotVersion ? ", of a newer version" : "",
                                                    "; this program reads format ", kSnapshotVersion));
}

constexpr absl::string_view kUnfinishedSuffix = ".tmp";
constexpr absl::string_view kManifestName = "MANIFEST";
constexpr size_t kMaxKeyBytes = 128;
constexpr size_t kPartBytes = size_t{256} << 10;  // small enough for a core's cache
constexpr size_t kMaxUnsyncedFiles = 64;          // each has an open descriptor

std::string IdName(uint64_t id) { return absl::StrCat(absl::Dec(id, absl::kZeroPad20)); }
std::string FileName(absl::string_view key) { return absl::StrCat(key, ".snap"); }

bool IsKey(absl::string_view key) {
  return !key.empty() && key.size() <= kMaxKeyBytes && key[0] != '.' && std::all_of(key.begin(), key.end(), [](char c) {
    return absl::ascii_isalnum(static_cast<unsigned char>(c)) || c == '.' || c == '_' || c == '-';
  });
}

absl::Status At(absl::string_view path, const absl::Status& error) {
  return absl::Status(error.code(), absl::StrCat(path, ": ", error.message()));
}

absl::Status RemoveTree(FileSystem& fs, const std::string& dir) {
  PRECONDOR_ASSIGN_OR_RETURN(const std::vector<std::string> names, fs.List(dir));
  for (const std::string& name : names) PRECONDOR_RETURN_IF_ERROR(fs.RemoveFile(JoinPath(dir, name)));
  return fs.RemoveDir(dir);
}

}  // namespace

std::string EncodeSnapshotFileHeader(uint64_t id, absl::string_view key) {
  std::string header(kFileMagic);
  PutU32(header, kSnapshotVersion);
  PutU64(header, id);
  PutBytes(header, key);
  return header;
}

absl::Status CheckSnapshotFile(absl::string_view file, uint64_t id, absl::string_view key,
                               const SnapshotFile& expected) {
  if (file.size() != expected.file_bytes) {
    return absl::DataLossError(absl::StrCat("has ", file.size(), " bytes, the manifest says ", expected.file_bytes));
  }
  const uint32_t checksum = Crc32c(file);
  if (checksum != expected.checksum) {
    return absl::DataLossError(absl::StrCat("has checksum ", absl::Hex(checksum, absl::kZeroPad8),
                                            ", the manifest says ", absl::Hex(expected.checksum, absl::kZeroPad8)));
  }
  Decoder decoder(file);
  const absl::string_view magic = decoder.Take(kFileMagic.size());
  if (const uint32_t version = decoder.U32(); decoder.ok() && magic == kFileMagic && version != kSnapshotVersion) {
    return OtherFormat(version);
  }
  const uint64_t found_id = decoder.U64();
  const absl::string_view found_key = decoder.Bytes();
  if (!decoder.ok() || magic != kFileMagic || found_id != id || found_key != key) {
    return absl::DataLossError(absl::StrCat("is not the file \"", key, "\" of snapshot ", id));
  }
  return absl::OkStatus();
}

std::string EncodeManifest(const SnapshotManifest& manifest) {
  std::string bytes(kManifestMagic);
  PutU32(bytes, kSnapshotVersion);
  PutU64(bytes, manifest.id);
  PutBytes(bytes, manifest.metadata);
  PutU64(bytes, manifest.files.size());
  for (const auto& [key, file] : manifest.files) {
    PutBytes(bytes, key);
    PutU64(bytes, file.file_bytes);
    PutU32(bytes, file.checksum);
  }
  PutU32(bytes, Crc32c(bytes));
  return bytes;
}

absl::StatusOr<SnapshotManifest> DecodeManifest(absl::string_view bytes, uint64_t id) {
  if (bytes.size() < kManifestMagic.size() + kChecksumBytes) {
    return absl::DataLossError(absl::StrCat("has ", bytes.size(), " bytes, too few for a manifest"));
  }
  const absl::string_view checked = bytes.substr(0, bytes.size() - kChecksumBytes);
  if (Decoder(bytes.substr(checked.size())).U32() != Crc32c(checked)) return absl::DataLossError("is damaged");
  Decoder decoder(checked);
  const absl::string_view magic = decoder.Take(kManifestMagic.size());
  const uint32_t version = decoder.U32();
  if (magic != kManifestMagic) return absl::DataLossError("is no manifest");
  if (version != kSnapshotVersion) return OtherFormat(version);
  SnapshotManifest manifest;
  manifest.id = decoder.U64();
  manifest.metadata = std::string(decoder.Bytes());
  for (uint64_t left = decoder.U64(); left > 0 && decoder.ok(); --left) {
    std::string key(decoder.Bytes());
    SnapshotFile file;
    file.file_bytes = decoder.U64();
    file.checksum = decoder.U32();
    manifest.files.emplace(std::move(key), file);
  }
  if (!decoder.done()) return absl::DataLossError("does not parse as a manifest");
  if (manifest.id != id) {
    return absl::DataLossError(absl::StrCat("is that of snapshot ", manifest.id, ", expected ", id));
  }
  return manifest;
}

SnapshotWriter::SnapshotWriter(FileSystem& fs, const std::string& dir, uint64_t id)
    : fs_(fs), dir_(dir), id_(id), unfinished_(JoinPath(dir, absl::StrCat(IdName(id), kUnfinishedSuffix))) {}

SnapshotWriter::~SnapshotWriter() {
  MutexLock lock(mu_);
  // If this fails, the next Open removes the directory.
  if (!committed_) RemoveTree(fs_, unfinished_).IgnoreError();
}

absl::StatusOr<SnapshotFile> SnapshotWriter::WriteFile(absl::string_view key,
                                                       absl::Span<const absl::string_view> bytes) {
  const std::string header = EncodeSnapshotFileHeader(id_, key);
  PRECONDOR_ASSIGN_OR_RETURN(std::unique_ptr<WritableFile> file, fs_.Create(JoinPath(unfinished_, FileName(key))));
  std::vector<absl::string_view> pieces = {header};
  pieces.insert(pieces.end(), bytes.begin(), bytes.end());
  SnapshotFile written;
  for (absl::string_view piece : pieces) {
    // Small parts, so that the bytes are still in the cache for the file's copy after the checksum.
    for (; !piece.empty(); piece.remove_prefix(std::min(piece.size(), kPartBytes))) {
      const absl::string_view part = piece.substr(0, kPartBytes);
      written.file_bytes += part.size();
      written.checksum = ExtendCrc32c(written.checksum, part);
      PRECONDOR_RETURN_IF_ERROR(file->Append(part));
    }
  }
  file->BeginWriteBack();
  Files many;
  {
    MutexLock lock(mu_);
    unsynced_.emplace_back(std::move(file), written.file_bytes);
    if (unsynced_.size() >= kMaxUnsyncedFiles) many.swap(unsynced_);
  }
  PRECONDOR_RETURN_IF_ERROR(SyncAndClose(many));
  return written;
}

absl::Status SnapshotWriter::SyncAndClose(const Files& files) {
  for (const auto& [file, bytes] : files) {
    PRECONDOR_RETURN_IF_ERROR(file->Sync());
    file->DropCached(bytes);  // a snapshot is read after a restart alone
    PRECONDOR_RETURN_IF_ERROR(file->Close());
  }
  return absl::OkStatus();
}

absl::Status SnapshotWriter::AddPieces(absl::string_view key, absl::Span<const absl::string_view> bytes) {
  if (!IsKey(key)) {
    return absl::InvalidArgumentError(
        absl::StrCat(unfinished_, ": key \"", key, "\", expected [A-Za-z0-9_-][A-Za-z0-9._-]{0,127}"));
  }
  {
    MutexLock lock(mu_);
    if (!files_.emplace(key, SnapshotFile{}).second) {
      return absl::AlreadyExistsError(absl::StrCat(unfinished_, ": key \"", key, "\" was added before"));
    }
  }
  const absl::StatusOr<SnapshotFile> written = WriteFile(key, bytes);
  MutexLock lock(mu_);
  if (!written.ok()) {
    if (failure_.ok()) failure_ = written.status();
    return written.status();
  }
  files_[std::string(key)] = *written;
  return absl::OkStatus();
}

absl::Status SnapshotWriter::WriteManifest(absl::string_view bytes) {
  PRECONDOR_ASSIGN_OR_RETURN(const std::unique_ptr<WritableFile> file,
                             fs_.Create(JoinPath(unfinished_, kManifestName)));
  PRECONDOR_RETURN_IF_ERROR(file->Append(bytes));
  PRECONDOR_RETURN_IF_ERROR(file->Sync());
  return file->Close();
}

absl::Status SnapshotWriter::Commit(absl::string_view metadata) {
  MutexLock lock(mu_);
  if (committed_) return absl::FailedPreconditionError(absl::StrCat(unfinished_, ": committed before"));
  if (!failure_.ok()) {
    return absl::FailedPreconditionError(absl::StrCat(unfinished_, ": lacks a file: ", failure_.message()));
  }
  absl::Status status = SyncAndClose(unsynced_);
  unsynced_.clear();
  if (status.ok()) status = WriteManifest(EncodeManifest({id_, std::string(metadata), files_}));
  // The directory's entries are synced before it is renamed, so that a directory under its final name is complete.
  if (status.ok()) status = fs_.SyncDir(unfinished_);
  if (status.ok()) status = fs_.Rename(unfinished_, JoinPath(dir_, IdName(id_)));
  if (!status.ok()) {
    failure_ = status;
    return status;
  }
  committed_ = true;
  return fs_.SyncDir(dir_);
}

std::unique_ptr<SnapshotStore> SnapshotStore::OpenForReading(FileSystem& fs, std::string dir) {
  return std::unique_ptr<SnapshotStore>(new SnapshotStore(fs, std::move(dir)));
}

absl::StatusOr<std::unique_ptr<SnapshotStore>> SnapshotStore::Open(FileSystem& fs, std::string dir) {
  PRECONDOR_RETURN_IF_ERROR(MakeDirDurably(fs, dir));
  std::unique_ptr<SnapshotStore> store(new SnapshotStore(fs, std::move(dir)));
  PRECONDOR_ASSIGN_OR_RETURN(store->lock_, fs.Lock(JoinPath(store->dir_, "LOCK")));
  PRECONDOR_ASSIGN_OR_RETURN(const std::vector<std::string> names, fs.List(store->dir_));
  for (const std::string& name : names) {
    if (absl::EndsWith(name, kUnfinishedSuffix)) {
      PRECONDOR_RETURN_IF_ERROR(RemoveTree(fs, JoinPath(store->dir_, name)));
    }
  }
  return store;
}

std::string SnapshotStore::SnapshotPath(uint64_t id) const { return JoinPath(dir_, IdName(id)); }

absl::StatusOr<std::unique_ptr<SnapshotWriter>> SnapshotStore::Begin(uint64_t id) {
  PRECONDOR_ASSIGN_OR_RETURN(const std::vector<std::string> names, fs_.List(dir_));
  const std::string name = IdName(id), unfinished = absl::StrCat(name, kUnfinishedSuffix);
  for (const std::string& taken : {name, unfinished}) {
    if (std::binary_search(names.begin(), names.end(), taken)) {
      return absl::AlreadyExistsError(absl::StrCat(JoinPath(dir_, taken), ": is there"));
    }
  }
  PRECONDOR_RETURN_IF_ERROR(fs_.MakeDir(JoinPath(dir_, unfinished)));
  return std::unique_ptr<SnapshotWriter>(new SnapshotWriter(fs_, dir_, id));
}

absl::StatusOr<std::vector<uint64_t>> SnapshotStore::List() const {
  PRECONDOR_ASSIGN_OR_RETURN(const std::vector<std::string> names, fs_.List(dir_));
  std::vector<uint64_t> ids;
  for (const std::string& name : names) {
    uint64_t id = 0;
    if (absl::SimpleAtoi(name, &id) && IdName(id) == name) ids.push_back(id);
  }
  return ids;  // names are sorted and of equal length
}

absl::StatusOr<SnapshotManifest> SnapshotStore::ReadManifest(uint64_t id) const {
  PRECONDOR_RETURN_IF_ERROR(fs_.List(SnapshotPath(id)).status());
  const std::string path = JoinPath(SnapshotPath(id), kManifestName);
  absl::StatusOr<std::string> bytes = fs_.ReadFile(path);
  if (absl::IsNotFound(bytes.status())) return absl::DataLossError(bytes.status().message());
  if (!bytes.ok()) return bytes.status();
  absl::StatusOr<SnapshotManifest> manifest = DecodeManifest(*bytes, id);
  if (!manifest.ok()) return At(path, manifest.status());
  return manifest;
}

absl::StatusOr<std::string> SnapshotStore::Read(const SnapshotManifest& manifest, absl::string_view key) const {
  const std::string path = JoinPath(SnapshotPath(manifest.id), FileName(key));
  const auto expected = manifest.files.find(std::string(key));
  if (expected == manifest.files.end()) {
    return absl::NotFoundError(absl::StrCat(path, ": the manifest has no key \"", key, "\""));
  }
  absl::StatusOr<std::string> bytes = fs_.ReadFile(path);
  if (absl::IsNotFound(bytes.status())) return absl::DataLossError(bytes.status().message());
  if (!bytes.ok()) return bytes.status();
  if (const absl::Status good = CheckSnapshotFile(*bytes, manifest.id, key, expected->second); !good.ok()) {
    return At(path, good);
  }
  bytes->erase(0, EncodeSnapshotFileHeader(manifest.id, key).size());
  return bytes;
}

absl::StatusOr<SnapshotManifest> SnapshotStore::Verify(uint64_t id) const {
  PRECONDOR_ASSIGN_OR_RETURN(SnapshotManifest manifest, ReadManifest(id));
  for (const auto& [key, file] : manifest.files) PRECONDOR_RETURN_IF_ERROR(Read(manifest, key).status());
  return manifest;
}

absl::StatusOr<FoundSnapshot> SnapshotStore::LatestValid() const {
  PRECONDOR_ASSIGN_OR_RETURN(const std::vector<uint64_t> ids, List());
  FoundSnapshot found;
  for (auto id = ids.rbegin(); id != ids.rend(); ++id) {
    absl::StatusOr<SnapshotManifest> manifest = Verify(*id);
    if (manifest.ok()) {
      found.manifest = *std::move(manifest);
      return found;
    }
    // Whole, but unreadable here: an older one would be the state of an earlier step.
    if (absl::IsFailedPrecondition(manifest.status())) return manifest.status();
    found.skipped.push_back(manifest.status());
  }
  return absl::NotFoundError(absl::StrCat(
      dir_, ": no valid snapshot", found.skipped.empty() ? "" : "; ",
      absl::StrJoin(found.skipped, "; ",
                    [](std::string* out, const absl::Status& status) { absl::StrAppend(out, status.message()); })));
}

absl::Status SnapshotStore::Remove(uint64_t id) {
  const std::string removed = absl::StrCat(SnapshotPath(id), kUnfinishedSuffix);
  const absl::Status renamed = fs_.Rename(SnapshotPath(id), removed);
  if (absl::IsNotFound(renamed)) return absl::OkStatus();
  PRECONDOR_RETURN_IF_ERROR(renamed);
  // Without this, a crash could leave half a snapshot under its final name.
  PRECONDOR_RETURN_IF_ERROR(fs_.SyncDir(dir_));
  return RemoveTree(fs_, removed);
}

}  // namespace precondor::store
