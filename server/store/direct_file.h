// SPDX-License-Identifier: Apache-2.0
// A file whose bytes go to the disk past the system's memory (O_DIRECT): a copy less, and no pages to find.
#pragma once

#include <cstdint>
#include <memory>
#include <new>
#include <string>

#include "server/store/file_system.h"
#include "server/store/posix_calls.h"

namespace precondor::store {

struct FreeBlocks {
  void operator()(char* memory) const { ::operator delete[](memory, std::align_val_t(kBlockBytes)); }
};
// Memory that begins with a block; not initialized.
using BlockMemory = std::unique_ptr<char[], FreeBlocks>;
BlockMemory AllocateBlocks(size_t bytes);

// See FileSystem::CreateBlocks. Where a file system refuses to pass by its memory, bytes go the ordinary way.
class DirectBlocks final : public BlockFile {
 public:
  // `fd`: a new file, open for writing, without O_APPEND.
  DirectBlocks(std::string path, Descriptor fd);
  absl::Status WriteAt(uint64_t offset, absl::string_view blocks) override;
  absl::Status Sync() override;
  absl::Status Close() override;
  absl::Status Truncate(uint64_t bytes);
  // Has the system begin to write what went the ordinary way.
  void BeginWriteBack();

 private:
  const std::string path_;
  Descriptor fd_;
  bool direct_ = false;
};

// See FileSystem::CreateLarge. Bytes are gathered into large writes of whole blocks; the last block is filled up with
// zeros, which the file's length then leaves out.
class DirectFile final : public WritableFile {
 public:
  static constexpr size_t kBufferBytes = size_t{1} << 20;  // of a write

  // `fd`: a new file, open for writing, without O_APPEND.
  DirectFile(std::string path, Descriptor fd);
  absl::Status Append(absl::string_view bytes) override;
  absl::Status Sync() override;
  // Writes what is left and gives the memory back; what goes wrong, Sync and Close report.
  void BeginWriteBack() override;
  absl::Status Close() override;

 private:
  // The first bytes of the buffer, in whole blocks, to where `written_` is.
  absl::Status WriteBlocks(size_t bytes);
  absl::Status WriteRest();

  DirectBlocks file_;
  uint64_t written_ = 0;  // whole blocks of the file that are as they stay
  BlockMemory buffer_;    // what follows; null: the file has all of it
  size_t filled_ = 0;
  std::string rest_;  // of a block, which is in the file and begins the next buffer
  absl::Status failure_;
};

}  // namespace precondor::store
