// SPDX-License-Identifier: Apache-2.0
// Interface to the disk for the log and the snapshots. Tests implement it to lose, tear and refuse writes.
//
// Nothing survives a crash of the machine until it is synced: bytes by WritableFile::Sync, names (created, renamed,
// removed) by SyncDir of their directory. A rename is atomic: after a crash either the old or the new state exists.
// Errors: NotFound no such path; AlreadyExists; ResourceExhausted disk full; Unavailable any other fault of the disk.
//         Messages contain the path and the system's error text.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"

namespace precondor::store {

// A file that is appended to. The destructor closes it without syncing. Calls must not overlap, with one exception: one
// Sync may overlap other calls. It covers the appends that returned before it began.
class WritableFile {
 public:
  virtual ~WritableFile() = default;
  // After an error the file may contain any part of `bytes`.
  virtual absl::Status Append(absl::string_view bytes) = 0;
  // Appends the pieces in order, with as few system calls as possible.
  virtual absl::Status AppendPieces(absl::Span<const absl::string_view> pieces);
  // After an error, bytes since the last successful Sync may be lost although later calls succeed: do not use the file
  // any longer. Returns NOT_FOUND if the file has been removed.
  virtual absl::Status Sync() = 0;
  // Makes the system begin to write appended bytes, so that a later Sync takes less time. Only a hint.
  virtual void BeginWriteBack() {}
  // Tells the system that it need not cache the first `bytes`, which are synced, because no thread will read them soon.
  // Only a hint.
  virtual void DropCached(uint64_t bytes) {}
  virtual absl::Status Close() = 0;
};

// Holds a lock until it is destroyed. The system releases the lock when the process dies.
class FileLock {
 public:
  virtual ~FileLock() = default;
};

// Creates, reads, renames and removes files. Threads: calls may overlap, unless the implementation says otherwise.
class FileSystem {
 public:
  virtual ~FileSystem() = default;
  // Creates an empty file. Returns AlreadyExists if `path` exists.
  virtual absl::StatusOr<std::unique_ptr<WritableFile>> Create(const std::string& path) = 0;
  virtual absl::StatusOr<std::string> ReadFile(const std::string& path) = 0;
  // Returns fewer than `length` bytes if the file ends before.
  virtual absl::StatusOr<std::string> ReadRange(const std::string& path, uint64_t offset, uint64_t length) = 0;
  virtual absl::StatusOr<uint64_t> FileSize(const std::string& path) = 0;
  // Returns the names in the directory, sorted, without "." and "..".
  virtual absl::StatusOr<std::vector<std::string>> List(const std::string& dir) = 0;
  // Replaces the file that has the name `to`, if any.
  virtual absl::Status Rename(const std::string& from, const std::string& to) = 0;
  virtual absl::Status RemoveFile(const std::string& path) = 0;
  virtual absl::Status RemoveDir(const std::string& path) = 0;  // must be empty
  virtual absl::Status MakeDir(const std::string& path) = 0;    // OK if it exists; its parent must exist
  virtual absl::Status SyncDir(const std::string& dir) = 0;
  // Returns the number of bytes that this process can still write to the disk that contains `dir`.
  virtual absl::StatusOr<uint64_t> FreeSpace(const std::string& dir) = 0;
  // Creates the file if it is missing. Returns FailedPrecondition if this or another process holds the lock.
  virtual absl::StatusOr<std::unique_ptr<FileLock>> Lock(const std::string& path) = 0;
};

std::string JoinPath(absl::string_view dir, absl::string_view name);
std::string ParentDir(absl::string_view path);  // "." for a bare name, "/" for a name in the root

// Creates `path` and syncs its parent, so that the directory survives a crash.
absl::Status MakeDirDurably(FileSystem& fs, const std::string& path);

// Creates or replaces a small file atomically: after a crash it has the old or the new bytes, and after OK the new
// ones.
absl::Status WriteFileDurably(FileSystem& fs, const std::string& path, absl::string_view bytes);

}  // namespace precondor::store
