// SPDX-License-Identifier: Apache-2.0
// Snapshots: each a set of named files that are there together or not at all; bytes in docs/storage.md.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"

#include "kernels/base/mutex.h"
#include "server/store/file_system.h"

namespace precondor::store {

struct SnapshotFile {
  uint64_t file_bytes = 0;  // header included
  uint32_t checksum = 0;    // CRC-32C of the whole file
  bool operator==(const SnapshotFile&) const = default;
};

struct SnapshotManifest {
  uint64_t id = 0;
  std::string metadata;                       // the caller's
  std::map<std::string, SnapshotFile> files;  // by key
};

// One snapshot on its way to the disk, under a name that no reader looks for. Destroyed before Commit it removes what
// it wrote. Threads: calls may overlap, so that layers are written side by side; none may overlap Commit.
class SnapshotWriter {
 public:
  ~SnapshotWriter();
  SnapshotWriter(const SnapshotWriter&) = delete;
  SnapshotWriter& operator=(const SnapshotWriter&) = delete;

  // Writes one file, which Commit syncs, or a later Add when many wait for it. Each costs a flush of the disk, so that
  // few large ones are cheaper than many small ones. After an error Commit refuses.
  // `key`: [A-Za-z0-9_-][A-Za-z0-9._-]{0,127}.
  // Errors: InvalidArgument a key of another form; AlreadyExists a key that was added; those of FileSystem.
  absl::Status Add(absl::string_view key, absl::string_view bytes) { return AddPieces(key, {&bytes, 1}); }
  // The bytes are the pieces one after the other; they are written from where they are.
  absl::Status AddPieces(absl::string_view key, absl::Span<const absl::string_view> bytes);
  // After OK the snapshot survives a crash. FailedPrecondition when an Add failed or it was called before.
  absl::Status Commit(absl::string_view metadata);

 private:
  friend class SnapshotStore;
  SnapshotWriter(FileSystem& fs, const std::string& dir, uint64_t id);
  using Files = std::vector<std::unique_ptr<WritableFile>>;
  absl::StatusOr<SnapshotFile> WriteFile(absl::string_view key, absl::Span<const absl::string_view> bytes);
  absl::Status WriteManifest(absl::string_view bytes);
  static absl::Status SyncAndClose(const Files& files);

  FileSystem& fs_;
  const std::string dir_;  // of the store
  const uint64_t id_;
  const std::string unfinished_;  // path of the directory that is written
  Mutex mu_;
  std::map<std::string, SnapshotFile> files_ ABSL_GUARDED_BY(mu_);
  Files unsynced_ ABSL_GUARDED_BY(mu_);
  absl::Status failure_ ABSL_GUARDED_BY(mu_);
  bool committed_ ABSL_GUARDED_BY(mu_) = false;
};

struct FoundSnapshot {
  SnapshotManifest manifest;
  std::vector<absl::Status> skipped;  // newer ones that are damaged, newest first; messages name the file
};

// The snapshots of one directory, told apart by ids that ascend with age.
// Owner: one component; a lock file keeps others out. Threads: calls may overlap, but for Remove and Keep with readers
// of what they remove. `fs` must outlive the store, the store its writers.
class SnapshotStore {
 public:
  // Makes `dir` (its parent must exist), takes its lock and removes what a crash left unfinished.
  // Errors: FailedPrecondition directory in use; those of FileSystem.
  static absl::StatusOr<std::unique_ptr<SnapshotStore>> Open(FileSystem& fs, std::string dir);

  // The same of a directory that may be another process's, to read from alone: neither made nor locked nor tidied.
  static std::unique_ptr<SnapshotStore> OpenForReading(FileSystem& fs, std::string dir);

  // AlreadyExists: there is a snapshot `id`, or one is being written.
  absl::StatusOr<std::unique_ptr<SnapshotWriter>> Begin(uint64_t id);

  absl::StatusOr<std::vector<uint64_t>> List() const;  // ascending, damaged ones included
  // DataLoss naming the file, what was expected and what came; FailedPrecondition newer format; NotFound no such id.
  absl::StatusOr<SnapshotManifest> ReadManifest(uint64_t id) const;
  // What Add was given. NotFound: the manifest has no such key. Errors as above.
  absl::StatusOr<std::string> Read(const SnapshotManifest& manifest, absl::string_view key) const;
  // Reads every file.
  absl::StatusOr<SnapshotManifest> Verify(uint64_t id) const;
  // The newest one that Verify passes. NotFound, naming those that were skipped, when there is none.
  absl::StatusOr<FoundSnapshot> LatestValid() const;

  absl::Status Remove(uint64_t id);  // OK when there is none
  // Removes all but the `count` newest, oldest first; at least 1 stays.
  absl::Status Keep(uint64_t count);

 private:
  SnapshotStore(FileSystem& fs, std::string dir) : fs_(fs), dir_(std::move(dir)) {}
  std::string SnapshotPath(uint64_t id) const;

  FileSystem& fs_;
  const std::string dir_;
  std::unique_ptr<FileLock> lock_;
};

}  // namespace precondor::store
