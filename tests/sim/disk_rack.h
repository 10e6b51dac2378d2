// SPDX-License-Identifier: Apache-2.0
// The disks of all shards, those of lost ones too, as another shard reaches them: each under a name of its own.
#pragma once

#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "tests/support/fake_file_system.h"

namespace precondor::sim {

// For reading; everything else is Unimplemented.
class DiskRack final : public store::FileSystem {
 public:
  static constexpr char kRoot[] = "/disks";

  // What is in it by then, `kRoot`/NAME/...
  void Add(const std::string& name, std::shared_ptr<FakeFileSystem> disk) { disks_[name] = std::move(disk); }
  void Remove(const std::string& name) { disks_.erase(name); }

  absl::StatusOr<std::vector<std::string>> List(const std::string& dir) override;
  absl::StatusOr<std::string> ReadFile(const std::string& path) override;
  absl::StatusOr<std::string> ReadRange(const std::string& path, uint64_t offset, uint64_t length) override;
  absl::StatusOr<uint64_t> FileSize(const std::string& path) override;

  absl::StatusOr<std::unique_ptr<store::WritableFile>> Create(const std::string& path) override;
  absl::StatusOr<std::unique_ptr<store::BlockFile>> CreateBlocks(const std::string& path) override;
  absl::StatusOr<std::unique_ptr<store::MappedFile>> CreateMapped(const std::string& path, uint64_t bytes) override;
  absl::Status Rename(const std::string& from, const std::string& to) override;
  absl::Status RemoveFile(const std::string& path) override;
  absl::Status RemoveDir(const std::string& path) override;
  absl::Status MakeDir(const std::string& path) override;
  absl::Status SyncDir(const std::string& dir) override;
  absl::StatusOr<uint64_t> FreeSpace(const std::string& dir) override;
  absl::StatusOr<std::unique_ptr<store::FileLock>> Lock(const std::string& path) override;

 private:
  // The disk that a path is on, and the path there.
  absl::StatusOr<std::pair<FakeFileSystem*, std::string>> Find(const std::string& path) const;

  std::map<std::string, std::shared_ptr<FakeFileSystem>> disks_;
};

}  // namespace precondor::sim
