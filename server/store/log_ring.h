// SPDX-License-Identifier: Apache-2.0
// Keeps the last bytes of a log in memory that survives the process. docs/storage.md describes the format.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

#include "server/store/file_system.h"

namespace precondor::store {

// A ring buffer in a memory-mapped file. The log's segments form one stream of bytes, in which each segment begins at a
// block boundary. A position in the stream, modulo the ring's size, is the place of a byte in the ring. Bytes below the
// *floor* are on the disk in segments, and their space is used again, except for the block that contains the floor: it
// is written once more when it is full.
// Threads: calls must not overlap, except that At, and reads of its result, may overlap Put.
class LogRing {
 public:
  static constexpr absl::string_view kName = "ring";
  static constexpr uint64_t kLeastBytes = 4 * kBlockBytes;

  // Creates a ring under a temporary name in the log's directory. `bytes`: size of the contents, a multiple of
  // kBlockBytes and at least kLeastBytes. Errors: those of FileSystem::CreateMapped.
  static absl::StatusOr<std::unique_ptr<LogRing>> Make(FileSystem& fs, const std::string& dir, uint64_t bytes);
  // Replaces the directory's ring by this one, which is empty. Its floor is at `position`, where the record `sequence`
  // will be. `rest`: the bytes of the floor's block before `position`. After this the contents of the earlier ring are
  // lost.
  absl::Status Begin(uint64_t position, uint64_t sequence, absl::string_view rest);

  uint64_t end() const { return end_; }  // position of the next byte
  uint64_t room() const;                 // number of bytes that Put can take
  uint64_t bytes() const { return bytes_; }
  void Put(absl::string_view bytes);
  void PutZeros(uint64_t count);
  // Returns the bytes from `position` to `end`, or up to the place where the ring wraps around.
  absl::string_view At(uint64_t position, uint64_t end) const;
  // Raises the floor: the bytes below `position`, where the record `sequence` begins, are on the disk.
  void SetFloor(uint64_t position, uint64_t sequence);
  // Moves the end and the floor to `position`, past the current end: the bytes between went to the disk directly.
  // `sequence` and `rest` as in Begin.
  void Skip(uint64_t position, uint64_t sequence, absl::string_view rest);

 private:
  LogRing(FileSystem& fs, std::string dir, std::unique_ptr<MappedFile> file);
  void WriteFloor(uint64_t position, uint64_t sequence);

  FileSystem& fs_;
  const std::string dir_;
  const std::unique_ptr<MappedFile> file_;
  const uint64_t bytes_;
  char* const data_;
  uint64_t end_ = 0;
  uint64_t floor_ = 0;
  uint64_t floors_ = 0;  // number of floors written
};

constexpr uint64_t WholeBlocks(uint64_t bytes) { return bytes / kBlockBytes * kBlockBytes; }
constexpr uint64_t NextBlock(uint64_t bytes) { return WholeBlocks(bytes + kBlockBytes - 1); }

// Contents of a ring from its floor on.
struct LogRingContents {
  uint64_t position = 0;  // position of the floor
  uint64_t sequence = 0;  // sequence of the record at the floor
  std::string bytes;      // the whole ring, starting at the floor; the records show how much of it is valid
};
// Returns nullopt if the directory has no ring. Errors: DataLoss damaged; FailedPrecondition a newer format; those of
// FileSystem.
absl::StatusOr<std::optional<LogRingContents>> ReadLogRing(FileSystem& fs, const std::string& dir);

}  // namespace precondor::store
