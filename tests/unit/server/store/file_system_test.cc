// SPDX-License-Identifier: Apache-2.0
// One suite over the real disk and the fake one.
#include "server/store/file_system.h"

#include <algorithm>
#include <functional>
#include <memory>
#include <string>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

#include "server/store/posix_file_system.h"
#include "tests/support/fake_file_system.h"
#include "tests/support/temp_dir.h"

namespace precondor::store {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

struct Disk {
  std::string name;
  std::function<std::unique_ptr<FileSystem>()> make;
};

class FileSystemTest : public ::testing::TestWithParam<Disk> {
 protected:
  std::string Path(absl::string_view name) const { return JoinPath(root_, name); }
  void Put(absl::string_view name, absl::string_view bytes) {
    auto file = fs_->Create(Path(name));
    ASSERT_TRUE(file.ok()) << file.status();
    ASSERT_TRUE((*file)->Append(bytes).ok());
    ASSERT_TRUE((*file)->Sync().ok());
    ASSERT_TRUE((*file)->Close().ok());
  }

  void SetUp() override { ASSERT_TRUE(MakeDirDurably(*fs_, root_).ok()); }

  const TempDir temp_;
  const std::unique_ptr<FileSystem> fs_ = GetParam().make();
  // The fake has no temporary directory, but a root.
  const std::string root_ = GetParam().name == "Fake" ? "/root" : JoinPath(temp_.path(), "root");
};

INSTANTIATE_TEST_SUITE_P(Disks, FileSystemTest,
                         ::testing::Values(Disk{"Posix", [] { return std::make_unique<PosixFileSystem>(); }},
                                           Disk{"Fake", [] { return std::make_unique<FakeFileSystem>(1); }}),
                         [](const auto& info) { return info.param.name; });

TEST(PosixFileSystemTest, SyncTellsThatTheFileWasRemoved) {
  const TempDir folder;
  PosixFileSystem fs;
  const std::string path = JoinPath(folder.path(), "a");
  auto file = fs.Create(path);
  ASSERT_TRUE(file.ok() && (*file)->Append("one").ok() && (*file)->Sync().ok());
  ASSERT_TRUE(fs.RemoveFile(path).ok());
  EXPECT_TRUE(absl::IsNotFound((*file)->Sync()));
}

TEST_P(FileSystemTest, ReadsWhatWasAppended) {
  auto file = fs_->Create(Path("a"));
  ASSERT_TRUE(file.ok()) << file.status();
  ASSERT_TRUE((*file)->Append("one ").ok());
  ASSERT_TRUE((*file)->Append(std::string("t\0o", 3)).ok());
  EXPECT_EQ(*fs_->ReadFile(Path("a")), std::string("one t\0o", 7));  // before any sync too
  EXPECT_EQ(*fs_->FileSize(Path("a")), 7u);
  EXPECT_EQ(*fs_->ReadRange(Path("a"), 4, 2), std::string("t\0", 2));
  EXPECT_EQ(*fs_->ReadRange(Path("a"), 5, 100), std::string("\0o", 2));
  EXPECT_EQ(*fs_->ReadRange(Path("a"), 7, 1), "");
  EXPECT_EQ(*fs_->ReadRange(Path("a"), 100, 1), "");
}

TEST_P(FileSystemTest, CreateRefusesAFileThatIsThere) {
  Put("a", "x");
  EXPECT_EQ(fs_->Create(Path("a")).status().code(), absl::StatusCode::kAlreadyExists);
  EXPECT_EQ(*fs_->ReadFile(Path("a")), "x");
}

TEST_P(FileSystemTest, NamesWhatIsMissing) {
  for (const absl::Status& status :
       {fs_->ReadFile(Path("no")).status(), fs_->ReadRange(Path("no"), 0, 1).status(),
        fs_->FileSize(Path("no")).status(), fs_->RemoveFile(Path("no")), fs_->Rename(Path("no"), Path("yes")),
        fs_->List(Path("no")).status(), fs_->RemoveDir(Path("no")), fs_->SyncDir(Path("no")),
        fs_->Create(Path("no/a")).status(), fs_->MakeDir(Path("no/a"))}) {
    EXPECT_EQ(status.code(), absl::StatusCode::kNotFound) << status;
    EXPECT_THAT(std::string(status.message()), HasSubstr(Path("no")));
  }
}

TEST_P(FileSystemTest, RenameReplaces) {
  Put("a", "new");
  Put("b", "old");
  ASSERT_TRUE(fs_->Rename(Path("a"), Path("b")).ok());
  EXPECT_THAT(*fs_->List(root_), ElementsAre("b"));
  EXPECT_EQ(*fs_->ReadFile(Path("b")), "new");
}

TEST_P(FileSystemTest, ListsSortedAndRemoves) {
  Put("b", "");
  Put("a", "");
  ASSERT_TRUE(fs_->MakeDir(Path("c")).ok());
  EXPECT_TRUE(fs_->MakeDir(Path("c")).ok());  // again
  EXPECT_FALSE(fs_->MakeDir(Path("a")).ok());
  Put("c/d", "");
  EXPECT_THAT(*fs_->List(root_), ElementsAre("a", "b", "c"));
  EXPECT_FALSE(fs_->RemoveDir(Path("c")).ok());
  EXPECT_TRUE(fs_->RemoveFile(Path("c/d")).ok());
  EXPECT_TRUE(fs_->RemoveDir(Path("c")).ok());
  EXPECT_TRUE(fs_->RemoveFile(Path("a")).ok());
  EXPECT_TRUE(fs_->RemoveFile(Path("b")).ok());
  EXPECT_THAT(*fs_->List(root_), IsEmpty());
  EXPECT_TRUE(fs_->SyncDir(root_).ok());
}

TEST_P(FileSystemTest, LockHasOneHolder) {
  auto lock = fs_->Lock(Path("LOCK"));
  ASSERT_TRUE(lock.ok()) << lock.status();
  const auto second = fs_->Lock(Path("LOCK"));
  EXPECT_EQ(second.status().code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(second.status().message()), HasSubstr(Path("LOCK")));
  lock->reset();
  EXPECT_TRUE(fs_->Lock(Path("LOCK")).ok());
}

TEST_P(FileSystemTest, SaysHowMuchIsFree) { EXPECT_GT(*fs_->FreeSpace(root_), 0u); }

TEST(PathTest, JoinsAndTakesApart) {
  EXPECT_EQ(JoinPath("a/b", "c"), "a/b/c");
  EXPECT_EQ(JoinPath("/", "c"), "/c");
  EXPECT_EQ(ParentDir("a/b/c"), "a/b");
  EXPECT_EQ(ParentDir("a/b/"), "a");
  EXPECT_EQ(ParentDir("a"), ".");
  EXPECT_EQ(ParentDir("/a"), "/");
}

}  // namespace
}  // namespace precondor::store
