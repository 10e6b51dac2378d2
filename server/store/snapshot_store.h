// SPDX-License-Identifier: Apache-2.0
// Stores snapshots. Each is a set of named files that exists as a whole or not at all. docs/operate/storage.md
// describes the format.
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

// --- byte format of a snapshot's files (docs/operate/storage.md). Messages do not contain the file's name.

struct SnapshotFile {
  uint64_t file_bytes = 0;  // including the file's header
  uint32_t checksum = 0;    // CRC-32C of the whole file
  bool operator==(const SnapshotFile&) const = default;
};

struct SnapshotManifest {
  uint64_t id = 0;
  std::string metadata;                       // defined by the caller
  std::map<std::string, SnapshotFile> files;  // by key
};

// Returns the bytes that precede the caller's bytes in a file.
std::string EncodeSnapshotFileHeader(uint64_t id, absl::string_view key);
// Checks that `file` is what the manifest expects for `key`. Returns DataLoss if not, and FailedPrecondition for a
// newer format.
absl::Status CheckSnapshotFile(absl::string_view file, uint64_t id, absl::string_view key,
                               const SnapshotFile& expected);

std::string EncodeManifest(const SnapshotManifest& manifest);
// Returns DataLoss if the bytes are damaged or of a snapshot other than `id`, and FailedPrecondition for a newer
// format.
absl::StatusOr<SnapshotManifest> DecodeManifest(absl::string_view bytes, uint64_t id);

// Writes one snapshot under a temporary name that readers ignore. If destroyed before Commit, it removes what it wrote.
// Threads: calls may overlap, so that layers can be written in parallel, but no call may overlap Commit.
class SnapshotWriter {
 public:
  ~SnapshotWriter();
  SnapshotWriter(const SnapshotWriter&) = delete;
  SnapshotWriter& operator=(const SnapshotWriter&) = delete;

  // Writes one file. Commit syncs it, or a later Add if many files are unsynced. Each file costs a flush of the disk,
  // so a few large files are cheaper than many small ones. After an error Commit fails.
  // `key`: [A-Za-z0-9_-][A-Za-z0-9._-]{0,127}.
  // Errors: InvalidArgument a key of another form; AlreadyExists a key that was added before; those of FileSystem.
  absl::Status Add(absl::string_view key, absl::string_view bytes) { return AddPieces(key, {&bytes, 1}); }
  // Writes a file whose bytes are the concatenation of the pieces, which are not copied together first.
  absl::Status AddPieces(absl::string_view key, absl::Span<const absl::string_view> bytes);
  // After OK the snapshot survives a crash. Returns FailedPrecondition if an Add has failed or Commit was called
  // before.
  absl::Status Commit(absl::string_view metadata);

 private:
  friend class SnapshotStore;
  SnapshotWriter(FileSystem& fs, const std::string& dir, uint64_t id);
  using Files = std::vector<std::pair<std::unique_ptr<WritableFile>, uint64_t>>;  // each with its bytes
  absl::StatusOr<SnapshotFile> WriteFile(absl::string_view key, absl::Span<const absl::string_view> bytes);
  absl::Status WriteManifest(absl::string_view bytes);
  static absl::Status SyncAndClose(const Files& files);

  FileSystem& fs_;
  const std::string dir_;  // directory of the store
  const uint64_t id_;
  const std::string unfinished_;  // path of the temporary directory
  Mutex mu_;
  std::map<std::string, SnapshotFile> files_ ABSL_GUARDED_BY(mu_);
  Files unsynced_ ABSL_GUARDED_BY(mu_);
  absl::Status failure_ ABSL_GUARDED_BY(mu_);
  bool committed_ ABSL_GUARDED_BY(mu_) = false;
};

struct FoundSnapshot {
  SnapshotManifest manifest;
  std::vector<absl::Status>
      skipped;  // newer snapshots that are damaged, newest first; messages contain the file's name
};

// The snapshots in one directory. A greater id means a later snapshot.
// Owned by one component; a lock file keeps others out. Threads: calls may overlap; a read of a snapshot that is
// removed meanwhile fails. `fs` must outlive the store, and the store must outlive its writers.
class SnapshotStore {
 public:
  // Creates `dir` (its parent must exist), takes its lock and removes unfinished snapshots of an earlier process.
  // Errors: FailedPrecondition directory in use; those of FileSystem.
  static absl::StatusOr<std::unique_ptr<SnapshotStore>> Open(FileSystem& fs, std::string dir);

  // Returns a store for reading a directory that may be in use by another process. Does not create, lock or clean it.
  static std::unique_ptr<SnapshotStore> OpenForReading(FileSystem& fs, std::string dir);

  // Starts a snapshot. Returns AlreadyExists if a snapshot `id` exists or is being written.
  absl::StatusOr<std::unique_ptr<SnapshotWriter>> Begin(uint64_t id);

  absl::StatusOr<std::vector<uint64_t>> List() const;  // ascending, including damaged ones
  // Returns DataLoss with the file, the expected and the actual value; FailedPrecondition for a newer format; NotFound
  // if there is no such id.
  absl::StatusOr<SnapshotManifest> ReadManifest(uint64_t id) const;
  // Returns the bytes that Add got. Returns NotFound if the manifest has no such key; otherwise errors as ReadManifest.
  absl::StatusOr<std::string> Read(const SnapshotManifest& manifest, absl::string_view key) const;
  // Reads and checks every file.
  absl::StatusOr<SnapshotManifest> Verify(uint64_t id) const;
  // Returns the newest snapshot that passes Verify. Returns NotFound, with the reasons for the skipped ones, if there
  // is none, and FailedPrecondition if a newer version of the program wrote one that is newer than all valid ones.
  absl::StatusOr<FoundSnapshot> LatestValid() const;

  absl::Status Remove(uint64_t id);  // OK if it does not exist

 private:
  SnapshotStore(FileSystem& fs, std::string dir) : fs_(fs), dir_(std::move(dir)) {}
  std::string SnapshotPath(uint64_t id) const;

  FileSystem& fs_;
  const std::string dir_;
  std::unique_ptr<FileLock> lock_;
};

}  // namespace precondor::store
