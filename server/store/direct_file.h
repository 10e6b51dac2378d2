// SPDX-License-Identifier: Apache-2.0
// Files that are written with O_DIRECT, past the page cache. This saves a copy and leaves no pages in the cache.
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
// Memory aligned to kBlockBytes; not initialized.
using BlockMemory = std::unique_ptr<char[], FreeBlocks>;
BlockMemory AllocateBlocks(size_t bytes);

// BlockFile for FileSystem::CreateBlocks. If the file system refuses O_DIRECT, the bytes go through the page cache.
class DirectBlocks final : public BlockFile {
 public:
  // Precondition: `fd` is a new file, opened for writing without O_APPEND.
  DirectBlocks(std::string path, Descriptor fd);
  absl::Status WriteAt(uint64_t offset, absl::string_view blocks) override;
  absl::Status Sync() override;
  absl::Status Close() override;
  absl::Status Truncate(uint64_t bytes);
  // Makes the system begin to write bytes that went through the page cache.
  void BeginWriteBack();

 private:
  const std::string path_;
  Descriptor fd_;
  bool direct_ = false;
};

// WritableFile for FileSystem::CreateLarge. Collects bytes into large writes of whole blocks. The last block is padded
// with zeros, and the file is then truncated to its real length.
class DirectFile final : public WritableFile {
 public:
  static constexpr size_t kBufferBytes = size_t{1} << 20;  // size of one write

  // Precondition: `fd` is a new file, opened for writing without O_APPEND.
  DirectFile(std::string path, Descriptor fd);
  absl::Status Append(absl::string_view bytes) override;
  absl::Status Sync() override;
  // Writes the buffered bytes and frees the buffer. Sync and Close report errors of this call.
  void BeginWriteBack() override;
  absl::Status Close() override;

 private:
  // Writes the first `bytes` of the buffer, which are whole blocks, at offset `written_`.
  absl::Status WriteBlocks(size_t bytes);
  absl::Status WriteRest();

  DirectBlocks file_;
  uint64_t written_ = 0;  // length of the part of the file that does not change again, in whole blocks
  BlockMemory buffer_;    // bytes from `written_` on; null if the file has all of them
  size_t filled_ = 0;
  std::string rest_;  // last bytes of the file that do not fill a block; they also start the next buffer
  absl::Status failure_;
};

}  // namespace precondor::store
