// SPDX-License-Identifier: Apache-2.0
// The last bytes of a log, in memory that outlives the process; bytes in docs/storage.md.
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

// The log's segments are one stream of bytes, in which each begins with a block; a position in it says where in the
// ring a byte is. Bytes below the *floor* are on the disk in segments, and their room is used again, but for those of
// the floor's own block, which is written once more when it is full. Threads: one at a time, except that At and the
// bytes it gives may be used beside Put.
class LogRing {
 public:
  static constexpr absl::string_view kName = "ring";
  static constexpr uint64_t kLeastBytes = 4 * kBlockBytes;

  // Room for a ring in the log's directory, under a name that does not count. `bytes`: of its contents, at least
  // kLeastBytes, a multiple of kBlockBytes. Errors: those of FileSystem::CreateMapped.
  static absl::StatusOr<std::unique_ptr<LogRing>> Make(FileSystem& fs, const std::string& dir, uint64_t bytes);
  // Takes the place of the directory's ring: an empty one whose floor is at `position`, where the record `sequence`
  // will be; `rest` is what the block has before it. From then on nothing that the other held is found.
  absl::Status Begin(uint64_t position, uint64_t sequence, absl::string_view rest);

  uint64_t end() const { return end_; }  // where the next byte goes
  uint64_t room() const;                 // bytes that Put takes
  uint64_t bytes() const { return bytes_; }
  void Put(absl::string_view bytes);
  void PutZeros(uint64_t count);
  // From `position` on, as many bytes as lie together in memory, up to `end`.
  absl::string_view At(uint64_t position, uint64_t end) const;
  // What is below `position`, where the record `sequence` begins, is on the disk.
  void SetFloor(uint64_t position, uint64_t sequence);
  // The same where `position` is past the end: the bytes between are on the disk and were never here. `rest`: as above.
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
  uint64_t floors_ = 0;  // how many were written
};

constexpr uint64_t WholeBlocks(uint64_t bytes) { return bytes / kBlockBytes * kBlockBytes; }
constexpr uint64_t NextBlock(uint64_t bytes) { return WholeBlocks(bytes + kBlockBytes - 1); }

// What a ring holds from its floor on.
struct LogRingContents {
  uint64_t position = 0;  // of the floor
  uint64_t sequence = 0;  // that a record there has
  std::string bytes;      // as far as the ring goes; which of them count, records say
};
// Nullopt: the directory has no ring. Errors: DataLoss damaged; FailedPrecondition a newer format; those of FileSystem.
absl::StatusOr<std::optional<LogRingContents>> ReadLogRing(FileSystem& fs, const std::string& dir);

}  // namespace precondor::store
