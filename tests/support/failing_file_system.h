// SPDX-License-Identifier: Apache-2.0
// This machine's disk, which refuses to write while it is told to. Thread-safe.
#pragma once

#include <atomic>
#include <memory>
#include <string>
#include <utility>

#include "server/store/posix_file_system.h"

namespace precondor {

class FailingFileSystem final : public store::PosixFileSystem {
 public:
  void set_full(bool full) { full_ = full; }

  absl::StatusOr<std::unique_ptr<store::WritableFile>> Create(const std::string& path) override {
    if (full_) return Full();
    absl::StatusOr<std::unique_ptr<store::WritableFile>> made = PosixFileSystem::Create(path);
    if (!made.ok()) return made.status();
    return std::make_unique<File>(*this, *std::move(made));
  }

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

  std::atomic<bool> full_ = false;
};

}  // namespace precondor
