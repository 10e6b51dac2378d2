// SPDX-License-Identifier: Apache-2.0
// A disk in memory that loses, tears, fills and rots as a seed says. One thread, no clock: a run is a function of its
// seed and of the calls.
//
// Names and bytes live twice: as programs see them (the page cache) and as the disk holds them. A crash of the machine
// brings back what the disk holds, to which chance adds parts of what was not yet synced:
//   bytes   any prefix, of which whole pages may be missing (zeros) and the last sector may be garbage
//   names   a prefix, or any subset, of the creations, renames and removals since the directory was synced
// A sync that fails does what Linux does: the bytes it should have written stay readable, but count as written, so that
// no later sync of that file writes them.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "server/store/file_system.h"

namespace precondor {

class FakeFileSystem final : public store::FileSystem {
 public:
  enum class Operation : uint8_t {
    kCreate,
    kAppend,
    kSync,
    kClose,
    kRead,
    kList,
    kRename,
    kRemove,
    kMakeDir,
    kSyncDir
  };
  // Called before each operation with its path and its bytes. Returning an error makes the operation fail with it,
  // without effect but that of a failed sync, and of an append of any prefix. Also the place to let a virtual clock
  // run: a slow disk.
  using Hook = std::function<absl::Status(Operation, const std::string& path, uint64_t bytes)>;

  static constexpr uint64_t kSectorBytes = 512;
  static constexpr uint64_t kPageBytes = 4096;

  explicit FakeFileSystem(uint64_t seed) : random_state_(seed) {}

  void set_hook(Hook hook) { hook_ = std::move(hook); }
  // The limit of all files; an append beyond it writes what fits. Nullopt: no limit.
  void set_capacity(std::optional<uint64_t> bytes) { capacity_ = bytes; }
  uint64_t used_bytes() const;

  void CrashProcess();  // what programs see stays; their files and locks are gone: using them fails from now on
  void Crash();         // of the machine

  std::vector<std::string> files() const;  // paths of all files, sorted
  // Inverts one bit of what programs and disk hold; 0 is the lowest bit of the first byte. False: no such byte.
  bool FlipBit(const std::string& path, uint64_t bit);

  absl::StatusOr<std::unique_ptr<store::WritableFile>> Create(const std::string& path) override;
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
  absl::StatusOr<std::unique_ptr<store::FileLock>> Lock(const std::string& path) override;

 private:
  struct Node;
  using NodePtr = std::shared_ptr<Node>;
  using Names = std::map<std::string, NodePtr>;
  // One change of names: `removed` goes, then `added` names `node`.
  struct Change {
    std::string removed;
    std::string added;
    NodePtr node;
  };
  struct Node {
    bool is_dir = false;
    // A file has these.
    std::string bytes;
    uint64_t clean = 0;                                  // bytes that the next sync will not write
    std::vector<std::pair<uint64_t, uint64_t>> dropped;  // of those, [begin, end) that never reached the disk
    // A directory has these.
    Names names;
    Names durable_names;
    std::vector<Change> changes;  // since it was synced
  };
  class File;
  class HeldLock;

  absl::Status Before(Operation operation, const std::string& path, uint64_t bytes = 0);
  absl::StatusOr<NodePtr> Make(const std::string& path);
  // As much of an append as there is room for, or as chance has it before an error.
  uint64_t Take(uint64_t count, absl::Status& status);
  absl::Status SyncNode(const std::string& path, Node& node);
  NodePtr Find(const std::string& path) const;
  absl::StatusOr<NodePtr> FindFile(absl::string_view operation, const std::string& path) const;
  absl::StatusOr<NodePtr> FindParent(absl::string_view operation, const std::string& path) const;
  static void Apply(Names& names, const Change& change);
  void CrashDir(Node& dir);
  void CrashFile(Node& file);
  void Walk(const Node& dir, const std::string& path, std::vector<std::string>& out) const;
  uint64_t Random(uint64_t bound);  // 0 ... bound - 1

  uint64_t random_state_;
  Hook hook_;
  std::optional<uint64_t> capacity_;
  uint64_t boot_ = 0;  // files and locks of an earlier one are dead
  std::set<std::string> locks_;
  NodePtr root_ = std::make_shared<Node>(
      Node{.is_dir = true, .bytes = {}, .dropped = {}, .names = {}, .durable_names = {}, .changes = {}});
};

}  // namespace precondor
