// SPDX-License-Identifier: Apache-2.0
#include "tests/sim/disk_rack.h"

#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"

#include "kernels/base/status_macros.h"

namespace precondor::sim {
namespace {

absl::Status ReadOnly(const std::string& path) {
  return absl::UnimplementedError(absl::StrCat(path, ": the disks of others are for reading"));
}

}  // namespace

absl::StatusOr<std::pair<FakeFileSystem*, std::string>> DiskRack::Find(const std::string& path) const {
  absl::string_view rest = path;
  absl::ConsumePrefix(&rest, kRoot);
  absl::ConsumePrefix(&rest, "/");
  const auto end = rest.find('/');
  const auto disk = disks_.find(std::string(rest.substr(0, end)));
  if (disk == disks_.end()) return absl::NotFoundError(path);
  return std::make_pair(disk->second.get(), end == rest.npos ? "." : std::string(rest.substr(end + 1)));
}

absl::StatusOr<std::vector<std::string>> DiskRack::List(const std::string& dir) {
  if (dir == kRoot) {
    std::vector<std::string> names;
    for (const auto& [name, disk] : disks_) names.push_back(name);
    return names;
  }
  PRECONDOR_ASSIGN_OR_RETURN(const auto at, Find(dir));
  return at.first->List(at.second);
}

absl::StatusOr<std::string> DiskRack::ReadFile(const std::string& path) {
  PRECONDOR_ASSIGN_OR_RETURN(const auto at, Find(path));
  return at.first->ReadFile(at.second);
}

absl::StatusOr<std::string> DiskRack::ReadRange(const std::string& path, uint64_t offset, uint64_t length) {
  PRECONDOR_ASSIGN_OR_RETURN(const auto at, Find(path));
  return at.first->ReadRange(at.second, offset, length);
}

absl::StatusOr<uint64_t> DiskRack::FileSize(const std::string& path) {
  PRECONDOR_ASSIGN_OR_RETURN(const auto at, Find(path));
  return at.first->FileSize(at.second);
}

absl::StatusOr<std::unique_ptr<store::WritableFile>> DiskRack::Create(const std::string& path) {
  return ReadOnly(path);
}
absl::StatusOr<std::unique_ptr<store::BlockFile>> DiskRack::CreateBlocks(const std::string& path) {
  return ReadOnly(path);
}
absl::StatusOr<std::unique_ptr<store::MappedFile>> DiskRack::CreateMapped(const std::string& path, uint64_t) {
  return ReadOnly(path);
}
absl::Status DiskRack::Rename(const std::string& from, const std::string&) { return ReadOnly(from); }
absl::Status DiskRack::RemoveFile(const std::string& path) { return ReadOnly(path); }
absl::Status DiskRack::RemoveDir(const std::string& path) { return ReadOnly(path); }
absl::Status DiskRack::MakeDir(const std::string& path) { return ReadOnly(path); }
absl::Status DiskRack::SyncDir(const std::string& dir) { return ReadOnly(dir); }
absl::StatusOr<uint64_t> DiskRack::FreeSpace(const std::string& dir) { return ReadOnly(dir); }
absl::StatusOr<std::unique_ptr<store::FileLock>> DiskRack::Lock(const std::string& path) { return ReadOnly(path); }

}  // namespace precondor::sim
