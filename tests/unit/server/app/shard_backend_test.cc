// SPDX-License-Identifier: Apache-2.0
// Which device a shard takes. Where the toolkit's headers are, the library on LD_LIBRARY_PATH is the host's imitation,
// with two devices.
#include "server/app/shard_backend.h"

#include <string>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

#include "kernels/base/status_macros.h"
#include "kernels/cuda/cuda_module.h"
#include "server/store/posix_file_system.h"
#include "tests/support/temp_dir.h"

namespace precondor {
namespace {

using testing::HasSubstr;

class TextLogger final : public Logger {
 public:
  void Log(Severity, absl::string_view message, std::initializer_list<LogField> fields) override {
    text += std::string(message);
    for (const LogField& field : fields) text += " " + field.name + "=" + field.text;
  }
  std::string text;
};

ServerConfig Config(const std::string& backend, int64_t device = 0) {
  ServerConfig config;
  config.backend = backend;
  config.cuda_device = device;
  return config;
}

TEST(ShardBackendTest, CpuIsTheCpu) {
  TextLogger logger;
  store::PosixFileSystem disk;
  EXPECT_EQ(MakeShardBackend(Config("cpu"), disk, logger).value().backend->name(), "cpu");
  EXPECT_EQ(logger.text, "");
}

TEST(ShardBackendTest, AutoSaysWhatItTookAndWhy) {
  TextLogger logger;
  store::PosixFileSystem disk;
  const DeviceBackend device = MakeShardBackend(Config("auto"), disk, logger).value();
  EXPECT_THAT(logger.text, HasSubstr("backend=" + std::string(device.backend->name())));
  if (FindCudaDriver().ok()) GTEST_SKIP() << "this host has a CUDA driver";
  EXPECT_EQ(device.name, "cpu");
  EXPECT_THAT(logger.text, HasSubstr("reason=no CUDA driver: libcuda.so.1"));
}

TEST(ShardBackendTest, ADataDirectoryKeepsItsBackend) {
  const TempDir directory;
  TextLogger logger;
  store::PosixFileSystem disk;
  ServerConfig config = Config("cpu");
  config.data_dir = directory.path() + "/data";
  ASSERT_TRUE(MakeShardBackend(config, disk, logger).ok());
  config.backend = "auto";
  EXPECT_EQ(MakeShardBackend(config, disk, logger).value().backend->name(), "cpu");
  config.backend = "cuda";
  const absl::Status refused = MakeShardBackend(config, disk, logger).status();
  EXPECT_TRUE(absl::IsFailedPrecondition(refused));
  EXPECT_THAT(std::string(refused.message()), HasSubstr("goes on from backend cpu, got cuda"));
  EXPECT_THAT(std::string(refused.message()), HasSubstr("write cuda into " + config.data_dir + "/BACKEND"));
}

TEST(ShardBackendTest, DataWithoutARecordAreAnError) {
  const TempDir directory;
  TextLogger logger;
  store::PosixFileSystem disk;
  ServerConfig config = Config("cpu");
  config.data_dir = directory.path();
  ASSERT_TRUE(disk.MakeDir(directory.path() + "/shard").ok());
  const absl::Status refused = MakeShardBackend(config, disk, logger).status();
  EXPECT_TRUE(absl::IsFailedPrecondition(refused));
  EXPECT_THAT(std::string(refused.message()), HasSubstr("no file BACKEND"));
}

TEST(ShardBackendTest, ARecordThatSaysNothingIsAnError) {
  const TempDir directory;
  TextLogger logger;
  store::PosixFileSystem disk;
  ASSERT_TRUE(disk.Create(directory.path() + "/BACKEND").ok());
  ServerConfig config = Config("auto");
  config.data_dir = directory.path();
  EXPECT_TRUE(absl::IsDataLoss(MakeShardBackend(config, disk, logger).status()));
}

#ifdef PRECONDOR_CUDA_ON_HOST
TEST(ShardBackendTest, AutoStaysWithTheDeviceOfItsDirectory) {
  const TempDir directory;
  TextLogger logger;
  store::PosixFileSystem disk;
  ServerConfig config = Config("cuda");
  config.data_dir = directory.path();
  ASSERT_TRUE(MakeShardBackend(config, disk, logger).ok());
  config.backend = "auto";
  EXPECT_EQ(MakeShardBackend(config, disk, logger).value().backend->name(), "cuda");
  config.cuda_device = 5;  // which does not exist: an error, and not the CPU
  EXPECT_TRUE(absl::IsUnavailable(MakeShardBackend(config, disk, logger).status()));
}

TEST(ShardBackendTest, CudaComesOutOfItsLibrary) {
  TextLogger logger;
  store::PosixFileSystem disk;
  const DeviceBackend device = MakeShardBackend(Config("cuda"), disk, logger).value();
  EXPECT_EQ(device.name, "cuda:0");
  Backend* const backend = device.backend.get();
  EXPECT_EQ(backend->name(), "cuda");
  DeviceMatrix x = backend->Allocate(2, 2).value();
  EXPECT_TRUE(backend->AddDiagonal(3.0, x.view()).ok());
  EXPECT_EQ(backend->AbsoluteSum(x.view()).value(), 6.0);
}

TEST(ShardBackendTest, LayersAtOnceDoNotDependOnTheCores) {
  TextLogger logger;
  store::PosixFileSystem disk;
  ServerConfig config = Config("cuda", 1);
  const DeviceBackend device = MakeShardBackend(config, disk, logger).value();
  EXPECT_EQ(device.name, "cuda:1");
  config.threads = 0;
  EXPECT_GE(ParallelismOf(config, device).threads, 4);
  EXPECT_EQ(ParallelismOf(config, device).layers, 512);
  config.threads = 3;
  EXPECT_EQ(ParallelismOf(config, device).threads, 3);
  EXPECT_EQ(ParallelismOf(config, device).layers, 3);
}

TEST(ShardBackendTest, ADeviceThatIsNotThereIsAnError) {
  TextLogger logger;
  store::PosixFileSystem disk;
  const absl::Status status = MakeShardBackend(Config("cuda", 5), disk, logger).status();
  EXPECT_TRUE(absl::IsUnavailable(status));
  EXPECT_THAT(std::string(status.message()), HasSubstr("CUDA device: expected 0 ... 1, got 5"));
}
#else
TEST(ShardBackendTest, CudaWithoutItsLibraryIsAnError) {
  TextLogger logger;
  store::PosixFileSystem disk;
  const absl::StatusOr<DeviceBackend> backend = MakeShardBackend(Config("cuda"), disk, logger);
  if (backend.ok()) GTEST_SKIP() << "this build and this host have CUDA";
  EXPECT_TRUE(absl::IsUnavailable(backend.status())) << backend.status();
}
#endif

}  // namespace
}  // namespace precondor
