// SPDX-License-Identifier: Apache-2.0
// The disk as the log and the snapshots see it, so that tests can lose, tear and fill it.
//
// Nothing lasts until it is synced: bytes by WritableFile::Sync, names (created, renamed, removed) by SyncDir of the
// directory they are in. A rename is atomic: after a crash there is the old state or the new.
// Errors: NotFound no such path; AlreadyExists; ResourceExhausted disk full; Unavailable any other fault of the disk.
//         Messages name the path and what the system said.
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

// Appends to one file. The destructor closes without syncing. Of overlapping calls one may be Sync, which covers the
// appends that returned before it began, and one another.
class WritableFile {
 public:
  virtual ~WritableFile() = default;
  // After an error any part of `bytes` may be in the file.
  virtual absl::Status Append(absl::string_view bytes) = 0;
  // One piece after the other, in as few calls of the system as it takes.
  virtual absl::Status AppendPieces(absl::Span<const absl::string_view> pieces);
  // After an error the bytes since the last good Sync may be lost although later calls succeed: give the file up.
  virtual absl::Status Sync() = 0;
  // Has the system begin to write out what was appended, so that a later Sync finds less to wait for. Promises nothing.
  virtual void BeginWriteBack() {}
  // The system need not keep the first `bytes`, which were synced, in memory: no thread is about to read them. Promises
  // nothing.
  virtual void DropCached(uint64_t bytes) {}
  virtual absl::Status Close() = 0;
};

// What a disk may ask of place, length and memory of a write that passes by the system's memory.
inline constexpr size_t kBlockBytes = 4096;

// A file that is written in whole blocks, each any number of times. No thread reads it before it is synced or closed,
// and no two calls on it overlap. The destructor closes without syncing.
class BlockFile {
 public:
  virtual ~BlockFile() = default;
  // Offset, length and address are multiples of kBlockBytes. After an error any part may be in the file.
  virtual absl::Status WriteAt(uint64_t offset, absl::string_view blocks) = 0;
  virtual absl::Status Sync() = 0;  // as WritableFile's
  virtual absl::Status Close() = 0;
};

// A file that is memory as well: what is stored there outlives the process without a call of the system, and after Sync
// the machine. After a crash of the machine each page is as it was at some time since the last Sync began.
class MappedFile {
 public:
  virtual ~MappedFile() = default;
  virtual absl::Span<char> memory() = 0;  // begins with a block; the same until it is destroyed
  virtual absl::Status Sync() = 0;
};

// Held until destroyed; the system gives it back when the process dies.
class FileLock {
 public:
  virtual ~FileLock() = default;
};

// Threads: calls may overlap, unless the implementation says otherwise.
class FileSystem {
 public:
  virtual ~FileSystem() = default;
  // A new, empty file; AlreadyExists when there is one.
  virtual absl::StatusOr<std::unique_ptr<WritableFile>> Create(const std::string& path) = 0;
  // Makes a file that is written from its beginning to its end and not read soon: its bytes need not pass
  // through the system's memory. No thread reads it before it is synced or closed, and no two calls on it overlap.
  virtual absl::StatusOr<std::unique_ptr<WritableFile>> CreateLarge(const std::string& path) { return Create(path); }
  // A new, empty file; AlreadyExists when there is one.
  virtual absl::StatusOr<std::unique_ptr<BlockFile>> CreateBlocks(const std::string& path) = 0;
  // A new file of so many zero bytes, a multiple of kBlockBytes, all of it in memory and on the disk.
  // Unimplemented: the disk cannot promise that stores to it will never find it full.
  virtual absl::StatusOr<std::unique_ptr<MappedFile>> CreateMapped(const std::string& path, uint64_t bytes) = 0;
  virtual absl::StatusOr<std::string> ReadFile(const std::string& path) = 0;
  // Fewer bytes than `length` where the file ends.
  virtual absl::StatusOr<std::string> ReadRange(const std::string& path, uint64_t offset, uint64_t length) = 0;
  virtual absl::StatusOr<uint64_t> FileSize(const std::string& path) = 0;
  // Names in the directory, sorted, without "." and "..".
  virtual absl::StatusOr<std::vector<std::string>> List(const std::string& dir) = 0;
  // Replaces a file that has the new name.
  virtual absl::Status Rename(const std::string& from, const std::string& to) = 0;
  virtual absl::Status RemoveFile(const std::string& path) = 0;
  virtual absl::Status RemoveDir(const std::string& path) = 0;  // an empty one
  virtual absl::Status MakeDir(const std::string& path) = 0;    // OK when it is there; its parent must be
  virtual absl::Status SyncDir(const std::string& dir) = 0;
  // Bytes that this process may still write to the disk that holds `dir`.
  virtual absl::StatusOr<uint64_t> FreeSpace(const std::string& dir) = 0;
  // Makes the file if it is missing. FailedPrecondition when this process or another one holds the lock.
  virtual absl::StatusOr<std::unique_ptr<FileLock>> Lock(const std::string& path) = 0;
};

std::string JoinPath(absl::string_view dir, absl::string_view name);
std::string ParentDir(absl::string_view path);  // "." for a bare name, "/" for a name in the root

// Makes `path` and syncs its parent, so that the directory outlives a crash.
absl::Status MakeDirDurably(FileSystem& fs, const std::string& path);

// Makes or replaces a small file as a whole: after a crash it has the old bytes or the new, and after OK the new.
absl::Status WriteFileDurably(FileSystem& fs, const std::string& path, absl::string_view bytes);

}  // namespace precondor::store
