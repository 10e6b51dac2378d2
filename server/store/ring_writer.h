// SPDX-License-Identifier: Apache-2.0
// Brings a log's bytes from its ring to its segments, past the system's memory. Private to RecordLog.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"

#include "server/store/direct_file.h"
#include "server/store/file_system.h"
#include "server/store/log_ring.h"

namespace precondor::store {

// Threads: the log's lock orders the calls, except that WriteOut runs without it, beside Put, BeginSegment and the
// questions, and beside no other.
class RingWriter {
 public:
  // `contents`: the first segment's, which is written and synced under its name. `sequence`: that the next record gets.
  // What an earlier ring of the directory held must be in it. Errors: Unimplemented this file system cannot hold a
  // ring; those of FileSystem.
  static absl::StatusOr<std::unique_ptr<RingWriter>> Begin(FileSystem& fs, const std::string& dir, uint64_t ring_bytes,
                                                           uint64_t first_sequence, absl::string_view contents,
                                                           uint64_t sequence);

  // Whether a record of so many bytes can ever go through the ring, and whether it can now. Room for a sync mark and
  // for the beginning of a segment is kept free.
  bool CanHold(uint64_t bytes) const;
  bool HasRoom(uint64_t bytes) const;
  // Records wait for the next sync that take more than half of the ring.
  bool crowded() const { return ring_->room() < ring_->bytes() / 2; }
  // They outlive the process when it returns.
  void Put(absl::Span<const absl::string_view> pieces);
  void BeginSegment(uint64_t first_sequence, absl::string_view header);
  // The segment that is written to; later ones have no file yet.
  uint64_t file_segment() const { return parts_.front().first_sequence; }

  // What a segment has of the log's stream; its file begins at `begin`.
  struct Part {
    uint64_t first_sequence = 0;
    uint64_t begin = 0;
    uint64_t end = 0;
  };
  // All that is in the ring. `sequence`: that the next record gets.
  struct Plan {
    std::vector<Part> parts;
    uint64_t sequence = 0;
  };
  Plan MakePlan(uint64_t sequence) const;
  // After OK it survives a crash, and Free gives its room back. After an error the log must be opened again.
  absl::Status WriteOut(const Plan& plan);
  void Free(const Plan& plan);
  // A record that the ring cannot hold: on the disk when this returns. Everything before it was written out and freed.
  absl::Status WriteThrough(absl::Span<const absl::string_view> pieces, uint64_t next_sequence);

 private:
  RingWriter(FileSystem& fs, std::string dir) : fs_(fs), dir_(std::move(dir)), block_(AllocateBlocks(kBlockBytes)) {}
  absl::Status OpenSegment(const Part& part);
  absl::Status WriteUpTo(uint64_t end);
  // The file gets its name when its first bytes are on the disk.
  absl::Status SyncSegment();

  FileSystem& fs_;
  const std::string dir_;
  std::unique_ptr<LogRing> ring_;
  std::vector<Part> parts_;  // those that WriteOut has not brought to an end; the last one's end is the ring's

  // Of the thread that writes out.
  std::unique_ptr<BlockFile> file_;
  std::string path_, unfinished_;  // of the file; the second until it has its name
  uint64_t begin_ = 0;             // the position where it begins
  uint64_t written_ = 0;           // the position up to which it is written
  const BlockMemory block_;        // the last one, filled up with zeros
};

}  // namespace precondor::store
