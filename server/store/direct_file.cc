// SPDX-License-Identifier: Apache-2.0
#include "server/store/direct_file.h"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <fcntl.h>
#include <unistd.h>
#include <utility>

#include "kernels/base/status_macros.h"

namespace precondor::store {

BlockMemory AllocateBlocks(size_t bytes) {
  return BlockMemory(static_cast<char*>(::operator new[](bytes, std::align_val_t(kBlockBytes))));
}

// The flag is set after the file is created, because open(2) would create the file and then refuse the flag.
DirectBlocks::DirectBlocks(std::string path, Descriptor fd) : path_(std::move(path)), fd_(std::move(fd)) {
  direct_ = fcntl(fd_.get(), F_SETFL, O_DIRECT) == 0;
}

absl::Status DirectBlocks::WriteAt(uint64_t offset, absl::string_view blocks) {
  while (!blocks.empty()) {
    const ssize_t written =
        Uninterrupted([&] { return pwrite(fd_.get(), blocks.data(), blocks.size(), static_cast<off_t>(offset)); });
    if (written >= 0) {
      blocks.remove_prefix(static_cast<size_t>(written));
      offset += static_cast<uint64_t>(written);
    } else if (errno == EINVAL && direct_) {
      // The disk requires larger blocks, or its file system accepted the flag but does not support it.
      direct_ = false;
      if (fcntl(fd_.get(), F_SETFL, 0) < 0) return IoError("fcntl", path_, errno);
    } else {
      return IoError("pwrite", path_, errno);
    }
  }
  return absl::OkStatus();
}

absl::Status DirectBlocks::Sync() {
  // The blocks may be in the disk's cache only, and the file's length in memory only.
  if (Uninterrupted([&] { return fdatasync(fd_.get()); }) < 0) return IoError("fdatasync", path_, errno);
  return absl::OkStatus();
}

absl::Status DirectBlocks::Close() { return fd_.Close(path_); }

absl::Status DirectBlocks::Truncate(uint64_t bytes) {
  if (Uninterrupted([&] { return ftruncate(fd_.get(), static_cast<off_t>(bytes)); }) < 0) {
    return IoError("ftruncate", path_, errno);
  }
  return absl::OkStatus();
}

void DirectBlocks::BeginWriteBack() {
  // Only a hint: Sync reports errors.
  if (!direct_) static_cast<void>(sync_file_range(fd_.get(), 0, 0, SYNC_FILE_RANGE_WRITE));
}

DirectFile::DirectFile(std::string path, Descriptor fd) : file_(std::move(path), std::move(fd)) {}

absl::Status DirectFile::WriteBlocks(size_t bytes) { return file_.WriteAt(written_, {buffer_.get(), bytes}); }

absl::Status DirectFile::Append(absl::string_view bytes) {
  while (failure_.ok() && !bytes.empty()) {
    if (buffer_ == nullptr) {
      buffer_ = AllocateBlocks(kBufferBytes);
      filled_ = rest_.copy(buffer_.get(), rest_.size());
    }
    const size_t count = std::min(bytes.size(), kBufferBytes - filled_);
    std::memcpy(buffer_.get() + filled_, bytes.data(), count);
    bytes.remove_prefix(count);
    filled_ += count;
    if (filled_ < kBufferBytes) break;
    failure_ = WriteBlocks(kBufferBytes);
    written_ += kBufferBytes;
    filled_ = 0;
  }
  return failure_;
}

absl::Status DirectFile::WriteRest() {
  if (!failure_.ok() || buffer_ == nullptr) return failure_;
  const size_t whole = filled_ / kBlockBytes * kBlockBytes;
  rest_.assign(buffer_.get() + whole, filled_ - whole);
  if (!rest_.empty()) {
    std::memset(buffer_.get() + filled_, 0, whole + kBlockBytes - filled_);
    failure_ = WriteBlocks(whole + kBlockBytes);
    if (failure_.ok()) failure_ = file_.Truncate(written_ + filled_);
  } else {
    failure_ = WriteBlocks(whole);
  }
  written_ += whole;
  buffer_.reset();
  return failure_;
}

void DirectFile::BeginWriteBack() {
  if (WriteRest().ok()) file_.BeginWriteBack();
}

absl::Status DirectFile::Sync() {
  PRECONDOR_RETURN_IF_ERROR(WriteRest());
  return failure_ = file_.Sync();
}

absl::Status DirectFile::Close() {
  const absl::Status rest = WriteRest();
  const absl::Status closed = file_.Close();
  return rest.ok() ? closed : rest;
}

}  // namespace precondor::store
