// SPDX-License-Identifier: Apache-2.0
// Interface to the disk for the log and the snapshots. Tests implement it to lose, tear and refuse writes.
//
// Nothing survives a crash of the machine until it is synced: bytes by WritableFile::Sync, names (created, renamed,
// removed) by SyncDir of their directory. A rename is atomic: after a crash either the old or the new state exists.
// Errors: NotFound no such path; AlreadyExists; ResourceExhausted disk full; Unavailable any other fault of the disk.
//         Messages contain the path and the system's error text.
#pragma once

#include <cstddef>
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
  // any longer.
  virtual absl::Status Sync() = 0;
  // Makes the system begin to write appended bytes, so that a later Sync takes less time. Only a hint.
  virtual void BeginWriteBack() {}
  // Tells the system that it need not cache the first `bytes`, which are synced, because no thread will read them soon.
  // Only a hint.
  virtual void DropCached(uint64_t bytes) {}
  virtual absl::Status Close() = 0;
};

// Alignment of offset, length and memory that a disk may require of a write past the page cache.
inline constexpr size_t kBlockBytes = 4096;

// A file that is written in whole blocks, each any number of times. It must not be read before it is synced or closed,
// and calls must not overlap. The destructor closes it without syncing.
class BlockFile {
 public:
  virtual ~BlockFile() = default;
  // `offset`, length and address are multiples of kBlockBytes. After an error the file may contain any part of
  // `blocks`.
  virtual absl::Status WriteAt(uint64_t offset, absl::string_view blocks) = 0;
  virtual absl::Status Sync() = 0;  // like WritableFile::Sync
  virtual absl::Status Close() = 0;
};

// A memory-mapped file. Stores to its memory survive the process without a system call, and survive a crash of the
// machine after Sync. After such a crash each page has its contents of some time since the last Sync began.
class MappedFile {
 public:
  virtual ~MappedFile() = default;
  virtual absl::Span<char> memory() = 0;  // aligned to kBlockBytes; does not move
  virtual absl::Status Sync() = 0;
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
  // Creates a file that is written from its beginning to its end and not read soon, so that its bytes can bypass the
  // page cache. It must not be read before it is synced or closed, and calls must not overlap.
  virtual absl::StatusOr<std::unique_ptr<WritableFile>> CreateLarge(const std::string& path) { return Create(path); }
  // Creates an empty file. Returns AlreadyExists if `path` exists.
  virtual absl::StatusOr<std::unique_ptr<BlockFile>> CreateBlocks(const std::string& path) = 0;
  // Creates a file of `bytes` zeros, a multiple of kBlockBytes, with all its pages in memory and on the disk. Returns
  // Unimplemented if the file system cannot guarantee that a store to the memory never finds the disk full.
  virtual absl::StatusOr<std::unique_ptr<MappedFile>> CreateMapped(const std::string& path, uint64_t bytes) = 0;
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
