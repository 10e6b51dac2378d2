// SPDX-License-Identifier: Apache-2.0
// Which device a shard takes. Where the toolkit's headers are, the library on LD_LIBRARY_PATH is the host's imitation,
// with two devices.
#include "server/app/shard_backend.h"

#include <map>
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/str_split.h"
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
  EXPECT_EQ(MakeShardBackends(Config("cpu"), disk, logger).value().front().backend->name(), "cpu");
  EXPECT_EQ(logger.text, "");
}

TEST(ShardBackendTest, AutoSaysWhatItTookAndWhy) {
  TextLogger logger;
  store::PosixFileSystem disk;
  const std::vector<DeviceBackend> devices = MakeShardBackends(Config("auto"), disk, logger).value();
  EXPECT_THAT(logger.text, HasSubstr("backend=" + std::string(devices.front().backend->name())));
  if (FindCudaDriver().ok()) GTEST_SKIP() << "this host has a CUDA driver";
  EXPECT_EQ(devices.front().name, "cpu");
  EXPECT_THAT(logger.text, HasSubstr("reason=no CUDA driver: libcuda.so.1"));
}

TEST(ShardBackendTest, ADataDirectoryKeepsItsBackend) {
  const TempDir directory;
  TextLogger logger;
  store::PosixFileSystem disk;
  ServerConfig config = Config("cpu");
  config.data_dir = directory.path() + "/data";
  ASSERT_TRUE(MakeShardBackends(config, disk, logger).ok());
  config.backend = "auto";
  EXPECT_EQ(MakeShardBackends(config, disk, logger).value().front().backend->name(), "cpu");
  config.backend = "cuda";
  const absl::Status refused = MakeShardBackends(config, disk, logger).status();
  EXPECT_TRUE(absl::IsFailedPrecondition(refused));
  EXPECT_THAT(std::string(refused.message()), HasSubstr("goes on from backend cpu, got cuda"));
  EXPECT_THAT(std::string(refused.message()), HasSubstr("write cuda into " + config.data_dir + "/BACKEND"));
}

TEST(ShardBackendTest, ADirectoryWithoutARecordIsTheCpus) {
  const TempDir directory;
  TextLogger logger;
  store::PosixFileSystem disk;
  ASSERT_TRUE(disk.MakeDir(directory.path() + "/shard").ok());
  ServerConfig config = Config("cuda");
  config.data_dir = directory.path();
  EXPECT_TRUE(absl::IsFailedPrecondition(MakeShardBackends(config, disk, logger).status()));
  config.backend = "auto";
  EXPECT_EQ(MakeShardBackends(config, disk, logger).value().front().backend->name(), "cpu");
}

TEST(ShardBackendTest, ARecordThatSaysNothingIsAnError) {
  const TempDir directory;
  TextLogger logger;
  store::PosixFileSystem disk;
  ASSERT_TRUE(disk.Create(directory.path() + "/BACKEND").ok());
  ServerConfig config = Config("auto");
  config.data_dir = directory.path();
  EXPECT_TRUE(absl::IsDataLoss(MakeShardBackends(config, disk, logger).status()));
}

#ifdef PRECONDOR_CUDA_ON_HOST
TEST(ShardBackendTest, AutoStaysWithTheDeviceOfItsDirectory) {
  const TempDir directory;
  TextLogger logger;
  store::PosixFileSystem disk;
  ServerConfig config = Config("cuda");
  config.data_dir = directory.path();
  ASSERT_TRUE(MakeShardBackends(config, disk, logger).ok());
  config.backend = "auto";
  EXPECT_EQ(MakeShardBackends(config, disk, logger).value().front().backend->name(), "cuda");
  config.cuda_device = 5;  // which does not exist: an error, and not the CPU
  EXPECT_TRUE(absl::IsUnavailable(MakeShardBackends(config, disk, logger).status()));
}

TEST(ShardBackendTest, CudaComesOutOfItsLibrary) {
  TextLogger logger;
  store::PosixFileSystem disk;
  const std::vector<DeviceBackend> devices = MakeShardBackends(Config("cuda"), disk, logger).value();
  ASSERT_EQ(devices.size(), 1u);
  EXPECT_EQ(devices[0].name, "cuda:0");
  Backend* const backend = devices[0].backend.get();
  EXPECT_EQ(backend->name(), "cuda");
  DeviceMatrix x = backend->Allocate(2, 2).value();
  EXPECT_TRUE(backend->AddDiagonal(3.0, x.view()).ok());
  EXPECT_EQ(backend->AbsoluteSum(x.view()).value(), 6.0);
}

TEST(ShardBackendTest, SeveralDevicesOrAll) {
  TextLogger logger;
  store::PosixFileSystem disk;
  for (const auto& [asked, expected] : std::map<std::string, std::vector<std::string>>{
           {"all", {"cuda:0", "cuda:1"}}, {"1", {"cuda:1"}}, {"1,0", {"cuda:1", "cuda:0"}}}) {
    ServerConfig config = Config("cuda", 7);  // which counts for nothing then
    config.cuda_devices = absl::StrSplit(asked, ',');
    const std::vector<DeviceBackend> devices = MakeShardBackends(config, disk, logger).value();
    std::vector<std::string> names;
    for (const DeviceBackend& device : devices) {
      names.push_back(device.name);
      DeviceMatrix x = device.backend->Allocate(2, 2).value();
      ASSERT_TRUE(device.backend->AddDiagonal(3.0, x.view()).ok());
      EXPECT_EQ(device.backend->AbsoluteSum(x.view()).value(), 6.0);
    }
    EXPECT_EQ(names, expected);
    // Layers at once do not depend on the machine's cores.
    config.threads = 0;
    EXPECT_GE(ParallelismOf(config, devices).threads, 4);
    EXPECT_EQ(ParallelismOf(config, devices).layers, 512);
    config.threads = 3;
    EXPECT_EQ(ParallelismOf(config, devices).threads, 3);
    EXPECT_EQ(ParallelismOf(config, devices).layers, 3);
  }
  ServerConfig config = Config("cuda");
  config.cuda_devices = {"1", "0"};
  const std::vector<DeviceBackend> both = MakeShardBackends(config, disk, logger).value();
  EXPECT_EQ(both[0].cuda_device, 1);
  EXPECT_EQ(both[1].cuda_device, 0);
  config.cuda_devices = {"0", "2"};
  EXPECT_TRUE(absl::IsUnavailable(MakeShardBackends(config, disk, logger).status()));
}

TEST(ShardBackendTest, ADeviceThatIsNotThereIsAnError) {
  TextLogger logger;
  store::PosixFileSystem disk;
  const absl::Status status = MakeShardBackends(Config("cuda", 5), disk, logger).status();
  EXPECT_TRUE(absl::IsUnavailable(status));
  EXPECT_THAT(std::string(status.message()), HasSubstr("CUDA device: expected 0 ... 1, got 5"));
}
#else
TEST(ShardBackendTest, CudaWithoutItsLibraryIsAnError) {
  TextLogger logger;
  store::PosixFileSystem disk;
  const absl::StatusOr<std::vector<DeviceBackend>> backend = MakeShardBackends(Config("cuda"), disk, logger);
  if (backend.ok()) GTEST_SKIP() << "this build and this host have CUDA";
  EXPECT_TRUE(absl::IsUnavailable(backend.status())) << backend.status();
}
#endif

}  // namespace
}  // namespace precondor
