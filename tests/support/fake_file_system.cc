// SPDX-License-Identifier: Apache-2.0
#include "tests/support/fake_file_system.h"

#include <algorithm>
#include <limits>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"

#include "kernels/base/random.h"
#include "kernels/base/status_macros.h"

namespace precondor {
namespace {

std::string BaseName(const std::string& path) { return path.substr(path.rfind('/') + 1); }

absl::Status Dead(const std::string& path) {
  return absl::FailedPreconditionError(absl::StrCat(path, ": opened before the crash"));
}

}  // namespace

class FakeFileSystem::File final : public store::WritableFile {
 public:
  File(FakeFileSystem& fs, std::string path, NodePtr node)
      : fs_(fs), path_(std::move(path)), node_(std::move(node)), boot_(fs.boot_) {}

  absl::Status Append(absl::string_view bytes) override {
    if (!open()) return Dead(path_);
    absl::Status status = fs_.Before(Operation::kAppend, path_, bytes.size());
    const uint64_t count = fs_.Take(bytes.size(), status);
    node_->bytes.append(bytes.data(), count);
    return status;
  }

  absl::Status Sync() override {
    if (!open()) return Dead(path_);
    return fs_.SyncNode(path_, *node_);
  }

  absl::Status Close() override {
    if (!open()) return Dead(path_);
    const absl::Status status = fs_.Before(Operation::kClose, path_);
    closed_ = true;
    return status;
  }

 private:
  bool open() const { return !closed_ && boot_ == fs_.boot_; }

  FakeFileSystem& fs_;
  const std::string path_;
  const NodePtr node_;
  const uint64_t boot_;
  bool closed_ = false;
};

class FakeFileSystem::HeldLock final : public store::FileLock {
 public:
  HeldLock(FakeFileSystem& fs, std::string path) : fs_(fs), path_(std::move(path)), boot_(fs.boot_) {}
  ~HeldLock() override {
    if (boot_ == fs_.boot_) fs_.locks_.erase(path_);
  }

 private:
  FakeFileSystem& fs_;
  const std::string path_;
  const uint64_t boot_;
};

uint64_t FakeFileSystem::Random(uint64_t bound) {
  const uint64_t key[] = {random_state_};
  random_state_ = CounterRandom(key).Bits(0);
  return random_state_ % bound;
}

absl::Status FakeFileSystem::Before(Operation operation, const std::string& path, uint64_t bytes) {
  return hook_ == nullptr ? absl::OkStatus() : hook_(operation, path, bytes);
}

uint64_t FakeFileSystem::Take(uint64_t count, absl::Status& status) {
  if (!status.ok()) return Random(count + 1);
  if (!capacity_.has_value()) return count;
  const uint64_t room = *capacity_ - std::min(*capacity_, used_bytes());
  if (count <= room) return count;
  status = absl::ResourceExhaustedError("disk full");
  return room;
}

absl::Status FakeFileSystem::SyncNode(const std::string& path, Node& node) {
  const absl::Status status = Before(Operation::kSync, path);
  if (!status.ok() && node.clean < node.bytes.size()) node.dropped.emplace_back(node.clean, node.bytes.size());
  node.clean = node.bytes.size();
  return status;
}

FakeFileSystem::NodePtr FakeFileSystem::Find(const std::string& path) const {
  NodePtr node = root_;
  for (const absl::string_view part : absl::StrSplit(path, '/', absl::SkipEmpty())) {
    if (part == ".") continue;
    const auto found = node->names.find(std::string(part));
    if (found == node->names.end()) return nullptr;
    node = found->second;
  }
  return node;
}

absl::StatusOr<FakeFileSystem::NodePtr> FakeFileSystem::FindFile(absl::string_view operation,
                                                                 const std::string& path) const {
  NodePtr node = Find(path);
  if (node == nullptr) return absl::NotFoundError(absl::StrCat(operation, " ", path, ": no such file"));
  if (node->is_dir) return absl::UnavailableError(absl::StrCat(operation, " ", path, ": is a directory"));
  return node;
}

absl::StatusOr<FakeFileSystem::NodePtr> FakeFileSystem::FindParent(absl::string_view operation,
                                                                   const std::string& path) const {
  NodePtr node = Find(store::ParentDir(path));
  if (node == nullptr || !node->is_dir) {
    return absl::NotFoundError(absl::StrCat(operation, " ", path, ": its directory does not exist"));
  }
  return node;
}

void FakeFileSystem::Apply(Names& names, const Change& change) {
  if (!change.removed.empty()) names.erase(change.removed);
  if (!change.added.empty()) names[change.added] = change.node;
}

absl::StatusOr<FakeFileSystem::NodePtr> FakeFileSystem::Make(const std::string& path) {
  PRECONDOR_RETURN_IF_ERROR(Before(Operation::kCreate, path));
  PRECONDOR_ASSIGN_OR_RETURN(const NodePtr dir, FindParent("open", path));
  if (dir->names.count(BaseName(path)) != 0) return absl::AlreadyExistsError(absl::StrCat("open ", path, ": exists"));
  auto node = std::make_shared<Node>();
  dir->changes.push_back({"", BaseName(path), node});
  Apply(dir->names, dir->changes.back());
  return node;
}

absl::StatusOr<std::unique_ptr<store::WritableFile>> FakeFileSystem::Create(const std::string& path) {
  PRECONDOR_ASSIGN_OR_RETURN(NodePtr node, Make(path));
  return std::make_unique<File>(*this, path, std::move(node));
}

absl::StatusOr<std::string> FakeFileSystem::ReadFile(const std::string& path) {
  return ReadRange(path, 0, std::numeric_limits<uint64_t>::max());
}

absl::StatusOr<std::string> FakeFileSystem::ReadRange(const std::string& path, uint64_t offset, uint64_t length) {
  PRECONDOR_RETURN_IF_ERROR(Before(Operation::kRead, path, length));
  PRECONDOR_ASSIGN_OR_RETURN(const NodePtr node, FindFile("read", path));
  return offset < node->bytes.size() ? node->bytes.substr(offset, length) : std::string();
}

absl::StatusOr<uint64_t> FakeFileSystem::FileSize(const std::string& path) {
  PRECONDOR_ASSIGN_OR_RETURN(const NodePtr node, FindFile("stat", path));
  return node->bytes.size();
}

absl::StatusOr<std::vector<std::string>> FakeFileSystem::List(const std::string& dir) {
  PRECONDOR_RETURN_IF_ERROR(Before(Operation::kList, dir));
  const NodePtr node = Find(dir);
  if (node == nullptr || !node->is_dir)
    return absl::NotFoundError(absl::StrCat("opendir ", dir, ": no such directory"));
  std::vector<std::string> names;
  for (const auto& [name, child] : node->names) names.push_back(name);
  return names;
}

absl::Status FakeFileSystem::Rename(const std::string& from, const std::string& to) {
  PRECONDOR_RETURN_IF_ERROR(Before(Operation::kRename, from));
  PRECONDOR_ASSIGN_OR_RETURN(const NodePtr dir, FindParent("rename", from));
  if (store::ParentDir(to) != store::ParentDir(from)) {
    return absl::UnavailableError(absl::StrCat("rename ", from, " to ", to, ": this disk renames within a directory"));
  }
  const auto found = dir->names.find(BaseName(from));
  if (found == dir->names.end()) return absl::NotFoundError(absl::StrCat("rename ", from, ": no such file"));
  const auto target = dir->names.find(BaseName(to));
  if (target != dir->names.end() && (target->second->is_dir || found->second->is_dir)) {
    return absl::AlreadyExistsError(absl::StrCat("rename ", from, " to ", to, ": exists"));
  }
  dir->changes.push_back({BaseName(from), BaseName(to), found->second});
  Apply(dir->names, dir->changes.back());
  return absl::OkStatus();
}

absl::Status FakeFileSystem::RemoveFile(const std::string& path) {
  PRECONDOR_RETURN_IF_ERROR(Before(Operation::kRemove, path));
  PRECONDOR_RETURN_IF_ERROR(FindFile("unlink", path).status());
  PRECONDOR_ASSIGN_OR_RETURN(const NodePtr dir, FindParent("unlink", path));
  dir->changes.push_back({BaseName(path), "", nullptr});
  Apply(dir->names, dir->changes.back());
  return absl::OkStatus();
}

absl::Status FakeFileSystem::RemoveDir(const std::string& path) {
  PRECONDOR_RETURN_IF_ERROR(Before(Operation::kRemove, path));
  const NodePtr node = Find(path);
  if (node == nullptr) return absl::NotFoundError(absl::StrCat("rmdir ", path, ": no such directory"));
  if (!node->is_dir || !node->names.empty()) {
    return absl::UnavailableError(absl::StrCat("rmdir ", path, ": not an empty directory"));
  }
  PRECONDOR_ASSIGN_OR_RETURN(const NodePtr dir, FindParent("rmdir", path));
  dir->changes.push_back({BaseName(path), "", nullptr});
  Apply(dir->names, dir->changes.back());
  return absl::OkStatus();
}

absl::Status FakeFileSystem::MakeDir(const std::string& path) {
  PRECONDOR_RETURN_IF_ERROR(Before(Operation::kMakeDir, path));
  PRECONDOR_ASSIGN_OR_RETURN(const NodePtr dir, FindParent("mkdir", path));
  const auto found = dir->names.find(BaseName(path));
  if (found != dir->names.end()) {
    if (found->second->is_dir) return absl::OkStatus();
    return absl::AlreadyExistsError(absl::StrCat("mkdir ", path, ": exists and is no directory"));
  }
  auto node = std::make_shared<Node>();
  node->is_dir = true;
  dir->changes.push_back({"", BaseName(path), std::move(node)});
  Apply(dir->names, dir->changes.back());
  return absl::OkStatus();
}

absl::Status FakeFileSystem::SyncDir(const std::string& dir) {
  PRECONDOR_RETURN_IF_ERROR(Before(Operation::kSyncDir, dir));
  const NodePtr node = Find(dir);
  if (node == nullptr || !node->is_dir) return absl::NotFoundError(absl::StrCat("open ", dir, ": no such directory"));
  node->durable_names = node->names;
  node->changes.clear();
  return absl::OkStatus();
}

absl::StatusOr<uint64_t> FakeFileSystem::FreeSpace(const std::string& dir) {
  if (!capacity_.has_value()) return std::numeric_limits<uint64_t>::max();
  return *capacity_ - std::min(*capacity_, used_bytes());
}

absl::StatusOr<std::unique_ptr<store::FileLock>> FakeFileSystem::Lock(const std::string& path) {
  if (Find(path) == nullptr) PRECONDOR_RETURN_IF_ERROR(Create(path).status());
  if (!locks_.insert(path).second) {
    return absl::FailedPreconditionError(absl::StrCat(path, ": another process holds it"));
  }
  return std::make_unique<HeldLock>(*this, path);
}

uint64_t FakeFileSystem::used_bytes() const {
  uint64_t sum = 0;
  for (const std::string& path : files()) sum += Find(path)->bytes.size();
  return sum;
}

void FakeFileSystem::Walk(const Node& dir, const std::string& path, std::vector<std::string>& out) const {
  for (const auto& [name, node] : dir.names) {
    const std::string child = absl::StrCat(path, path.empty() ? "" : "/", name);
    if (node->is_dir) {
      Walk(*node, child, out);
    } else {
      out.push_back(child);
    }
  }
}

std::vector<std::string> FakeFileSystem::files() const {
  std::vector<std::string> out;
  Walk(*root_, "", out);
  return out;
}

bool FakeFileSystem::FlipBit(const std::string& path, uint64_t bit) {
  const NodePtr node = Find(path);
  if (node == nullptr || node->is_dir || bit / 8 >= node->bytes.size()) return false;
  node->bytes[bit / 8] = static_cast<char>(node->bytes[bit / 8] ^ (1 << bit % 8));
  return true;
}

void FakeFileSystem::CrashProcess() {
  ++boot_;
  locks_.clear();
}

void FakeFileSystem::Crash() {
  CrashProcess();
  CrashDir(*root_);
}

void FakeFileSystem::CrashDir(Node& dir) {
  const uint64_t kept = Random(dir.changes.size() + 1);
  const bool prefix = Random(2) == 0;
  for (size_t i = 0; i < dir.changes.size(); ++i) {
    if (prefix ? i < kept : Random(2) == 0) Apply(dir.durable_names, dir.changes[i]);
  }
  dir.changes.clear();
  dir.names = dir.durable_names;
  for (const auto& [name, node] : dir.names) {
    if (node->is_dir) {
      CrashDir(*node);
    } else {
      CrashFile(*node);
    }
  }
}

void FakeFileSystem::CrashFile(Node& file) {
  const auto lose = [&](uint64_t begin, uint64_t end) {
    std::fill(file.bytes.begin() + static_cast<int64_t>(begin), file.bytes.begin() + static_cast<int64_t>(end), '\0');
  };
  for (const auto& [begin, end] : file.dropped) lose(begin, end);
  file.dropped.clear();
  const uint64_t size = file.clean + Random(file.bytes.size() - file.clean + 1);
  file.bytes.resize(size);
  for (uint64_t page = file.clean; Random(2) == 0 && page < size; page = (page / kPageBytes + 1) * kPageBytes) {
    if (Random(2) == 0) lose(page, std::min(size, (page / kPageBytes + 1) * kPageBytes));
  }
  if (size > file.clean && Random(2) == 0) {
    const uint64_t sector = (size - 1) / kSectorBytes * kSectorBytes;
    for (uint64_t i = std::max(file.clean, sector); i < size; ++i) file.bytes[i] = static_cast<char>(Random(256));
  }
  file.clean = size;
}

}  // namespace precondor
