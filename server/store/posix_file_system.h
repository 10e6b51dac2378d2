// SPDX-License-Identifier: Apache-2.0
// FileSystem of the local machine. Descriptors are close-on-exec. Calls that a signal interrupts are repeated. Sync is
// fdatasync, which also makes the file's length durable.
#pragma once

#include "server/store/file_system.h"

namespace precondor::store {

// Thread-safe; has no state.
class PosixFileSystem : public FileSystem {
 public:
  absl::StatusOr<std::unique_ptr<WritableFile>> Create(const std::string& path) override;
  absl::StatusOr<std::string> ReadFile(const std::string& path) override;
  absl::StatusOr<std::string> ReadRange(const std::string& path, uint64_t offset, uint64_t length) override;
  absl::StatusOr<uint64_t> FileSize(const std::string& path) override;
  absl::StatusOr<std::vector<std::string>> List(const std::string& dir) override;
  absl::Status Rename(const std::string& from, const std::string& to) override;
  absl::Status RemoveFile(const std::string& path) override;
  absl::Status RemoveDir(const std::string& path) override;
  absl::Status MakeDir(const std::string& path) override;
  absl::Status SyncDir(const std::string& dir) override;
  absl::StatusOr<uint64_t> FreeSpace(const std::string& dir) override;
  absl::StatusOr<std::unique_ptr<FileLock>> Lock(const std::string& path) override;
};

}  // namespace precondor::store
