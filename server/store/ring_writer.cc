// SPDX-License-Identifier: Apache-2.0
#include "server/store/ring_writer.h"

#include <algorithm>
#include <cstring>

#include "absl/strings/str_cat.h"

#include "kernels/base/status_macros.h"
#include "server/store/log_reader.h"
#include "server/store/record_log_format.h"

namespace precondor::store {
namespace {

// Space for a sync mark, and for the zeros and the header with which a segment begins.
constexpr uint64_t kReserveBytes = kRecordHeaderBytes + kBlockBytes + kSegmentHeaderBytes;

// Writes bytes of any length and alignment to a block file.
class BlockAppender {
 public:
  // `offset`: of a block boundary. `rest`: the bytes that the block already has.
  BlockAppender(BlockFile& file, uint64_t offset, absl::string_view rest)
      : file_(file), offset_(offset), filled_(rest.size()), buffer_(AllocateBlocks(DirectFile::kBufferBytes)) {
    std::memcpy(buffer_.get(), rest.data(), rest.size());
  }
  absl::Status Append(absl::string_view bytes) {
    while (!bytes.empty()) {
      const size_t count = std::min(bytes.size(), DirectFile::kBufferBytes - filled_);
      std::memcpy(buffer_.get() + filled_, bytes.data(), count);
      bytes.remove_prefix(count);
      filled_ += count;
      if (filled_ < DirectFile::kBufferBytes) break;
      PRECONDOR_RETURN_IF_ERROR(file_.WriteAt(offset_, {buffer_.get(), filled_}));
      offset_ += filled_;
      filled_ = 0;
    }
    return absl::OkStatus();
  }
  // Writes the remaining bytes, padded with zeros.
  absl::Status Finish() {
    std::memset(buffer_.get() + filled_, 0, NextBlock(filled_) - filled_);
    return file_.WriteAt(offset_, {buffer_.get(), NextBlock(filled_)});
  }
  // Bytes of the last block, valid until this object is destroyed.
  absl::string_view rest() const { return {buffer_.get() + WholeBlocks(filled_), filled_ - WholeBlocks(filled_)}; }

 private:
  BlockFile& file_;
  uint64_t offset_;
  size_t filled_;
  const BlockMemory buffer_;
};

}  // namespace

absl::StatusOr<std::unique_ptr<RingWriter>> RingWriter::Begin(FileSystem& fs, const std::string& dir,
                                                              uint64_t ring_bytes, uint64_t first_sequence,
                                                              absl::string_view contents, uint64_t sequence) {
  std::unique_ptr<RingWriter> writer(new RingWriter(fs, dir));
  PRECONDOR_ASSIGN_OR_RETURN(writer->ring_, LogRing::Make(fs, dir, ring_bytes));
  const uint64_t end = contents.size();
  PRECONDOR_RETURN_IF_ERROR(writer->OpenSegment({first_sequence, 0, end}));
  BlockAppender appender(*writer->file_, 0, "");
  PRECONDOR_RETURN_IF_ERROR(appender.Append(contents));
  PRECONDOR_RETURN_IF_ERROR(appender.Finish());
  PRECONDOR_RETURN_IF_ERROR(writer->SyncSegment());
  // The segment now has the records of the earlier ring.
  PRECONDOR_RETURN_IF_ERROR(writer->ring_->Begin(end, sequence, appender.rest()));
  writer->written_ = end;
  writer->parts_.push_back({first_sequence, 0, end});
  return writer;
}

// In addition to the record, the ring may hold the floor's block and the mark of the sync that raised the floor.
bool RingWriter::CanHold(uint64_t bytes) const {
  return bytes + kReserveBytes + kBlockBytes + kRecordHeaderBytes <= ring_->bytes();
}

bool RingWriter::HasRoom(uint64_t bytes) const { return bytes + kReserveBytes <= ring_->room(); }

void RingWriter::Put(absl::Span<const absl::string_view> pieces) {
  for (const absl::string_view piece : pieces) ring_->Put(piece);
}

void RingWriter::BeginSegment(uint64_t first_sequence, absl::string_view header) {
  parts_.back().end = ring_->end();
  ring_->PutZeros(NextBlock(ring_->end()) - ring_->end());
  parts_.push_back({first_sequence, ring_->end(), 0});
  ring_->Put(header);
}

RingWriter::Plan RingWriter::MakePlan(uint64_t sequence) const {
  Plan plan{.parts = parts_, .sequence = sequence};
  plan.parts.back().end = ring_->end();
  return plan;
}

absl::Status RingWriter::OpenSegment(const Part& part) {
  path_ = LogSegmentPath(dir_, part.first_sequence);
  unfinished_ = absl::StrCat(path_, kLogUnfinishedSuffix);
  PRECONDOR_ASSIGN_OR_RETURN(file_, fs_.CreateBlocks(unfinished_));
  begin_ = written_ = part.begin;
  return absl::OkStatus();
}

absl::Status RingWriter::WriteUpTo(uint64_t end) {
  uint64_t position = WholeBlocks(written_);
  while (position < WholeBlocks(end)) {
    const absl::string_view blocks = ring_->At(position, WholeBlocks(end));
    PRECONDOR_RETURN_IF_ERROR(file_->WriteAt(position - begin_, blocks));
    position += blocks.size();
  }
  if (position < end) {
    // A copy, because records may be appended behind these bytes meanwhile.
    const absl::string_view rest = ring_->At(position, end);
    std::memcpy(block_.get(), rest.data(), rest.size());
    std::memset(block_.get() + rest.size(), 0, kBlockBytes - rest.size());
    PRECONDOR_RETURN_IF_ERROR(file_->WriteAt(position - begin_, {block_.get(), kBlockBytes}));
  }
  written_ = end;
  return absl::OkStatus();
}

absl::Status RingWriter::SyncSegment() {
  PRECONDOR_RETURN_IF_ERROR(file_->Sync());
  if (unfinished_.empty()) return absl::OkStatus();
  PRECONDOR_RETURN_IF_ERROR(fs_.Rename(unfinished_, path_));
  unfinished_.clear();
  return fs_.SyncDir(dir_);
}

absl::Status RingWriter::WriteOut(const Plan& plan) {
  for (const Part& part : plan.parts) {
    if (part.begin != begin_) {
      PRECONDOR_RETURN_IF_ERROR(file_->Close());
      PRECONDOR_RETURN_IF_ERROR(OpenSegment(part));
    }
    PRECONDOR_RETURN_IF_ERROR(WriteUpTo(part.end));
    PRECONDOR_RETURN_IF_ERROR(SyncSegment());
  }
  return absl::OkStatus();
}

void RingWriter::Free(const Plan& plan) {
  parts_.erase(parts_.begin(), parts_.begin() + static_cast<int64_t>(plan.parts.size()) - 1);
  ring_->SetFloor(plan.parts.back().end, plan.sequence);
}

absl::Status RingWriter::WriteThrough(absl::Span<const absl::string_view> pieces, uint64_t next_sequence) {
  const uint64_t end = ring_->end(), block = WholeBlocks(end);
  BlockAppender appender(*file_, block - begin_, end == block ? "" : ring_->At(block, end));
  uint64_t position = end;
  for (const absl::string_view piece : pieces) {
    PRECONDOR_RETURN_IF_ERROR(appender.Append(piece));
    position += piece.size();
  }
  PRECONDOR_RETURN_IF_ERROR(appender.Finish());
  PRECONDOR_RETURN_IF_ERROR(file_->Sync());
  ring_->Skip(position, next_sequence, appender.rest());
  written_ = position;
  return absl::OkStatus();
}

}  // namespace precondor::store
