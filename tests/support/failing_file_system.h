// SPDX-License-Identifier: Apache-2.0
// This machine's disk, which refuses to write while it is told to. Thread-safe.
#pragma once

#include <atomic>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "server/store/posix_file_system.h"

namespace precondor {

class FailingFileSystem final : public store::FileSystem {
 public:
  void set_full(bool full) { full_ = full; }

  absl::StatusOr<std::unique_ptr<store::WritableFile>> Create(const std::string& path) override {
    if (full_) return Full();
    absl::StatusOr<std::unique_ptr<store::WritableFile>> made = disk_.Create(path);
    if (!made.ok()) return made.status();
    return std::make_unique<File>(*this, *std::move(made));
  }
  absl::StatusOr<std::string> ReadFile(const std::string& path) override { return disk_.ReadFile(path); }
  absl::StatusOr<std::string> ReadRange(const std::string& path, uint64_t offset, uint64_t length) override {
    return disk_.ReadRange(path, offset, length);
  }
  absl::StatusOr<uint64_t> FileSize(const std::string& path) override { return disk_.FileSize(path); }
  absl::StatusOr<std::vector<std::string>> List(const std::string& dir) override { return disk_.List(dir); }
  absl::Status Rename(const std::string& from, const std::string& to) override { return disk_.Rename(from, to); }
  absl::Status RemoveFile(const std::string& path) override { return disk_.RemoveFile(path); }
  absl::Status RemoveDir(const std::string& path) override { return disk_.RemoveDir(path); }
  absl::Status MakeDir(const std::string& path) override { return disk_.MakeDir(path); }
  absl::Status SyncDir(const std::string& dir) override { return disk_.SyncDir(dir); }
  absl::StatusOr<uint64_t> FreeSpace(const std::string& dir) override { return disk_.FreeSpace(dir); }
  absl::StatusOr<std::unique_ptr<store::FileLock>> Lock(const std::string& path) override { return disk_.Lock(path); }

 private:
  class File final : public store::WritableFile {
   public:
    File(FailingFileSystem& fs, std::unique_ptr<store::WritableFile> file) : fs_(fs), file_(std::move(file)) {}
    absl::Status Append(absl::string_view bytes) override { return fs_.full_ ? Full() : file_->Append(bytes); }
    absl::Status Sync() override { return file_->Sync(); }
    absl::Status Close() override { return file_->Close(); }

   private:
    FailingFileSystem& fs_;
    const std::unique_ptr<store::WritableFile> file_;
  };
  static absl::Status Full() { return absl::ResourceExhaustedError("the disk is full"); }

  store::PosixFileSystem disk_;
  std::atomic<bool> full_ = false;
};

}  // namespace precondor
