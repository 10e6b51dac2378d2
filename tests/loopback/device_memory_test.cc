// SPDX-License-Identifier: Apache-2.0
// A server's behaviour where a CUDA device has little memory, or none left in the middle of a session, with the CUDA
// backend as the host runs it.
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

#include "gmock/gmock.h"

#include "tests/loopback/raw_client.h"
#include "tests/support/temp_dir.h"

namespace precondor {
namespace {

using ::testing::AnyOf;
using ::testing::Each;
using ::testing::HasSubstr;

constexpr int64_t kGiB = int64_t{1} << 30, kReserveBytes = kGiB;  // docs/operate/cuda.md

class DeviceMemoryTest : public testing::Test {
 protected:
  // Before the backend is loaded, which looks for it.
  DeviceMemoryTest() { setenv("CUDA_HOST_MEMORY", file().c_str(), 1); }
  void SetDeviceMemory(int64_t bytes) {
    std::ofstream(file() + ".new") << bytes << "\n";
    std::filesystem::rename(file() + ".new", file());
  }
  static ServerConfig Config() {
    ServerConfig config;
    config.backend = "cuda";
    return config;
  }
  // One dense factor of 512 MiB, one of 4 bytes.
  static v1::SessionSpec LargeSpec() {
    v1::SessionSpec spec = RawServer::Spec("large");
    spec.mutable_method()->mutable_mkor()->set_representation("DENSE");
    spec.mutable_method()->mutable_mkor()->clear_rank();
    spec.mutable_layers(0)->set_d_in(16384);
    spec.mutable_layers(0)->set_d_out(1);
    return spec;
  }

 private:
  // One for all tests of the process: the backend reads the variable once.
  static const std::string& file() {
    static const auto& folder = *new TempDir;
    static const auto& path = *new std::string(folder.path() + "/memory");
    return path;
  }
};

// The first launch of a kernel finds no memory for its code. This test is the first: the process has loaded no kernel.
TEST_F(DeviceMemoryTest, AFirstStepWithoutAnyMemoryIsARefusalOrIdentity) {
  SetDeviceMemory(8 * kGiB);
  RawServer server(Config());
  v1::SessionSpec spec = RawServer::Spec("job");
  spec.mutable_method()->mutable_mkor()->set_representation("DENSE");
  spec.mutable_method()->mutable_mkor()->clear_rank();
  const v1::JoinSessionResponse job = server.OpenAndJoin(spec);
  const auto decision = [&](uint64_t step, int layer) {
    v1::ExchangeResponse response;
    const grpc::Status status = server.Precondition(RawRequest(job, step, layer), &response);
    EXPECT_TRUE(status.ok()) << status.error_message();
    return response.outcome().decision();
  };
  SetDeviceMemory(0);
  for (uint64_t step = 0; step < 2; ++step) {
    for (const int layer : {0, 1}) EXPECT_EQ(decision(step, layer), v1::DECISION_IDENTITY) << step;
  }
  EXPECT_EQ(server.Info().devices(0).fault(), "");
  SetDeviceMemory(8 * kGiB);
  for (const int layer : {0, 1}) EXPECT_EQ(decision(2, layer), v1::DECISION_PRECONDITIONED);
}

TEST_F(DeviceMemoryTest, SessionsMayReserveNoMoreThanTheDeviceHas) {
  SetDeviceMemory(2 * kGiB);
  RawServer server(Config());
  const auto capacity = static_cast<int64_t>(server.Info().devices(0).capacity_bytes());
  EXPECT_LT(capacity, 2 * kGiB - kReserveBytes);
  EXPECT_GT(capacity, kGiB / 2);
  v1::SessionSpec large = LargeSpec();
  large.mutable_layers(1)->set_d_in(16384);
  const grpc::Status refused = server.Open(large);
  EXPECT_EQ(refused.error_code(), grpc::StatusCode::RESOURCE_EXHAUSTED);
  EXPECT_THAT(refused.error_message(), HasSubstr(std::to_string(capacity)));
  server.OpenAndJoin("small");
}

// As when another process takes what the device had free, the reserve included.
TEST_F(DeviceMemoryTest, RunningOutInTheMiddleOfASessionIsARefusalOrIdentity) {
  SetDeviceMemory(8 * kGiB);
  RawServer server(Config());
  const v1::JoinSessionResponse job = server.OpenAndJoin("job");
  const auto step = [&](uint64_t step) {
    std::vector<v1::Decision> decisions;
    for (int layer = 0; layer < 2; ++layer) {
      v1::ExchangeResponse response;
      const grpc::Status status = server.Precondition(RawRequest(job, step, layer), &response);
      EXPECT_THAT(status.error_code(), AnyOf(grpc::StatusCode::OK, grpc::StatusCode::RESOURCE_EXHAUSTED))
          << status.error_message();
      decisions.push_back(status.ok() ? response.outcome().decision() : v1::DECISION_IDENTITY);
    }
    return decisions;
  };
  EXPECT_THAT(step(0), Each(v1::DECISION_PRECONDITIONED));

  SetDeviceMemory(0);
  // Installing it needs memory; the server goes on.
  const grpc::Status refused = server.Open(LargeSpec());
  EXPECT_EQ(refused.error_code(), grpc::StatusCode::RESOURCE_EXHAUSTED) << refused.error_message();
  EXPECT_THAT(step(1), Each(AnyOf(v1::DECISION_PRECONDITIONED, v1::DECISION_IDENTITY)));
  EXPECT_EQ(server.Info().devices(0).fault(), "");

  SetDeviceMemory(8 * kGiB);
  EXPECT_THAT(step(2), Each(v1::DECISION_PRECONDITIONED));
  const grpc::Status opened = server.Open(LargeSpec());
  EXPECT_TRUE(opened.ok()) << opened.error_message();
}

}  // namespace
}  // namespace precondor
