// SPDX-License-Identifier: Apache-2.0
#include "server/store/direct_file.h"

#include <fcntl.h>
#include <memory>
#include <string>
#include <sys/mman.h>
#include <utility>

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

#include "server/store/posix_file_system.h"
#include "tests/support/temp_dir.h"

namespace precondor::store {
namespace {

using ::testing::HasSubstr;

constexpr size_t kBlock = kBlockBytes, kBuffer = DirectFile::kBufferBytes;

// No two blocks of it are alike, nor are a block and itself moved by a few bytes.
std::string Bytes(size_t count, uint32_t seed) {
  std::string bytes(count, '\0');
  uint32_t state = seed * 2654435761u + 1;
  for (char& byte : bytes) {
    state = state * 1664525u + 1013904223u;
    byte = static_cast<char>(state >> 24);
  }
  return bytes;
}

class DirectFileTest : public ::testing::Test {
 protected:
  std::unique_ptr<WritableFile> Make() {
    auto file = fs_.CreateLarge(path_);
    EXPECT_TRUE(file.ok()) << file.status();
    return *std::move(file);
  }

  const TempDir dir_;
  const std::string path_ = JoinPath(dir_.path(), "large");
  PosixFileSystem fs_;
};

TEST_F(DirectFileTest, HoldsWhatWasAppendedWhateverItsLength) {
  for (const size_t length : {size_t{0}, size_t{1}, kBlock - 1, kBlock, kBlock + 1, kBuffer - 1, kBuffer, kBuffer + 1,
                              3 * kBuffer + 5 * kBlock, 2 * kBuffer + 777}) {
    const std::string bytes = Bytes(length, 1);
    const auto file = Make();
    ASSERT_TRUE(file->Append(bytes).ok());
    ASSERT_TRUE(file->Sync().ok());
    EXPECT_EQ(*fs_.ReadFile(path_), bytes) << length;
    ASSERT_TRUE(file->Close().ok());
    EXPECT_EQ(*fs_.ReadFile(path_), bytes) << length;
    ASSERT_TRUE(fs_.RemoveFile(path_).ok());
  }
}

TEST_F(DirectFileTest, GoesOnAfterASyncInTheMiddleOfABlock) {
  const auto file = Make();
  std::string expected;
  const size_t parts[] = {10, kBlock - 10, 100, 2 * kBlock, kBuffer - 1, 1, kBuffer, 3};
  for (const size_t part : parts) {
    const std::string bytes = Bytes(part, static_cast<uint32_t>(expected.size()));
    expected += bytes;
    ASSERT_TRUE(file->Append(bytes).ok());
    file->BeginWriteBack();
    ASSERT_TRUE(file->Sync().ok());
    EXPECT_EQ(*fs_.FileSize(path_), expected.size());
    EXPECT_EQ(*fs_.ReadFile(path_), expected);
  }
}

TEST_F(DirectFileTest, CloseWritesTheRest) {
  const std::string bytes = Bytes(kBuffer + 5, 2);
  const auto file = Make();
  ASSERT_TRUE(file->AppendPieces({absl::string_view(bytes).substr(0, 7), absl::string_view(bytes).substr(7)}).ok());
  ASSERT_TRUE(file->Close().ok());
  EXPECT_EQ(*fs_.ReadFile(path_), bytes);
}

TEST_F(DirectFileTest, RefusesAFileThatIsThere) {
  Make();
  EXPECT_EQ(fs_.CreateLarge(path_).status().code(), absl::StatusCode::kAlreadyExists);
}

TEST(DirectFileFallbackTest, WritesMemoryThatIsNoDisk) {
  const int fd = memfd_create("large", MFD_CLOEXEC);
  ASSERT_GE(fd, 0);
  const std::string bytes = Bytes(kBuffer + 12345, 3);
  DirectFile file("memory", Descriptor(fd));
  ASSERT_TRUE(file.Append(bytes).ok());
  ASSERT_TRUE(file.Sync().ok());
  EXPECT_EQ(*PosixFileSystem().ReadFile(absl::StrCat("/proc/self/fd/", fd)), bytes);
}

TEST(DirectFileFallbackTest, BlocksGoToMemoryThatIsNoDisk) {
  const int fd = memfd_create("blocks", MFD_CLOEXEC);
  ASSERT_GE(fd, 0);
  const BlockMemory memory = AllocateBlocks(kBlock);
  const std::string bytes = Bytes(kBlock, 5);
  bytes.copy(memory.get(), kBlock);
  DirectBlocks file("memory", Descriptor(fd));
  ASSERT_TRUE(file.WriteAt(kBlock, {memory.get(), kBlock}).ok());
  ASSERT_TRUE(file.Sync().ok());
  EXPECT_EQ(*PosixFileSystem().ReadFile(absl::StrCat("/proc/self/fd/", fd)), std::string(kBlock, '\0') + bytes);
}

TEST(DirectFileFallbackTest, AFullDiskIsSaidAndStaysSaid) {
  DirectFile file("/dev/full", Descriptor(open("/dev/full", O_WRONLY | O_CLOEXEC)));
  const absl::Status refused = file.Append(Bytes(kBuffer, 4));
  EXPECT_EQ(refused.code(), absl::StatusCode::kResourceExhausted) << refused;
  EXPECT_THAT(std::string(refused.message()), HasSubstr("/dev/full"));
  EXPECT_EQ(file.Append("x"), refused);
  EXPECT_EQ(file.Sync(), refused);
  EXPECT_EQ(file.Close(), refused);
}

TEST(DirectFileFallbackTest, SyncSaysWhatTheRestMetWith) {
  DirectFile file("/dev/full", Descriptor(open("/dev/full", O_WRONLY | O_CLOEXEC)));
  ASSERT_TRUE(file.Append("few").ok());
  file.BeginWriteBack();
  EXPECT_EQ(file.Sync().code(), absl::StatusCode::kResourceExhausted);
}

}  // namespace
}  // namespace precondor::store
