// SPDX-License-Identifier: Apache-2.0
// Writes a log's bytes from its ring to its segments, past the page cache. Private to RecordLog.
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

// Owns a log's ring and its current segment file. Threads: the log's lock must be held for all calls except WriteOut.
// WriteOut may overlap Put, BeginSegment and the const functions, but no other call.
class RingWriter {
 public:
  // Writes and syncs the first segment, whose contents are `contents`, and then replaces the directory's ring by a new
  // one. `sequence`: that of the next record. `contents` must include the records of the earlier ring. Errors:
  // Unimplemented if the file system cannot support a ring; those of FileSystem.
  static absl::StatusOr<std::unique_ptr<RingWriter>> Begin(FileSystem& fs, const std::string& dir, uint64_t ring_bytes,
                                                           uint64_t first_sequence, absl::string_view contents,
                                                           uint64_t sequence);

  // CanHold returns whether a record of `bytes` can ever go through the ring, HasRoom whether it can now. Both keep
  // space for a sync mark and for the beginning of a segment.
  bool CanHold(uint64_t bytes) const;
  bool HasRoom(uint64_t bytes) const;
  // Returns true if records that wait for the next sync take more than half of the ring.
  bool crowded() const { return ring_->room() < ring_->bytes() / 2; }
  // Appends bytes to the ring. They survive the process when the call returns.
  void Put(absl::Span<const absl::string_view> pieces);
  void BeginSegment(uint64_t first_sequence, absl::string_view header);
  // Returns the first sequence of the segment that is being written. Later segments have no file yet.
  uint64_t file_segment() const { return parts_.front().first_sequence; }

  // The range of the log's stream that a segment contains. The segment's file begins at `begin`.
  struct Part {
    uint64_t first_sequence = 0;
    uint64_t begin = 0;
    uint64_t end = 0;
  };
  // The contents of the ring at one time. `sequence`: that of the next record then.
  struct Plan {
    std::vector<Part> parts;
    uint64_t sequence = 0;
  };
  Plan MakePlan(uint64_t sequence) const;
  // After OK the plan's bytes survive a crash of the machine, and Free releases their space. After an error the log
  // must be opened again.
  absl::Status WriteOut(const Plan& plan);
  void Free(const Plan& plan);
  // Writes a record that the ring cannot hold to the segment and syncs it. Precondition: everything before it was
  // written out and freed.
  absl::Status WriteThrough(absl::Span<const absl::string_view> pieces, uint64_t next_sequence);

 private:
  RingWriter(FileSystem& fs, std::string dir) : fs_(fs), dir_(std::move(dir)), block_(AllocateBlocks(kBlockBytes)) {}
  absl::Status OpenSegment(const Part& part);
  absl::Status WriteUpTo(uint64_t end);
  // Syncs the file. The first sync also gives the file its final name.
  absl::Status SyncSegment();

  FileSystem& fs_;
  const std::string dir_;
  std::unique_ptr<LogRing> ring_;
  std::vector<Part> parts_;  // segments that WriteOut has not completed; the last one ends at the end of the ring

  // Used by the thread that writes out.
  std::unique_ptr<BlockFile> file_;
  std::string path_, unfinished_;  // of the file; unfinished_ is empty once the file has its final name
  uint64_t begin_ = 0;             // position in the stream at which the file begins
  uint64_t written_ = 0;           // position up to which the file is written
  const BlockMemory block_;        // copy of the last block, padded with zeros
};

}  // namespace precondor::store
