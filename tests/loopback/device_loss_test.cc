// SPDX-License-Identifier: Apache-2.0
// A server's reports on a CUDA device that is lost, with the CUDA backend as the host runs it.
#include <cstdlib>
#include <filesystem>
#include <fstream>

#include "gmock/gmock.h"

#include "tests/loopback/generic_call.h"
#include "tests/loopback/raw_client.h"
#include "tests/support/temp_dir.h"
#include "tests/support/wait_until.h"

namespace precondor {
namespace {

using ::testing::HasSubstr;

TEST(DeviceLossTest, HealthTellsOfALostDevice) {
  const TempDir folder;
  const std::string file = folder.path() + "/lost";
  // Before the backend is loaded, which looks for them.
  setenv("CUDA_HOST_LOST_DEVICE", file.c_str(), 1);
  ServerConfig config;
  config.backend = "cuda";
  RawServer server(config);
  const auto health = [&server] {
    return std::pair(CheckHealth(server.channel(), ""), CheckHealth(server.channel(), "liveness"));
  };
  constexpr int kServing = 1, kNotServing = 2;
  const v1::JoinSessionResponse job = server.OpenAndJoin("job");
  const auto step = [&](uint64_t step) {
    std::vector<v1::Decision> decisions;
    for (int layer = 0; layer < 2; ++layer) {
      v1::ExchangeResponse response;
      const grpc::Status status = server.Precondition(RawRequest(job, step, layer), &response);
      EXPECT_TRUE(status.ok()) << status.error_message();
      decisions.push_back(response.outcome().decision());
    }
    return decisions;
  };
  using ::testing::UnorderedElementsAre;
  EXPECT_THAT(step(0), UnorderedElementsAre(v1::DECISION_PRECONDITIONED, v1::DECISION_PRECONDITIONED));
  EXPECT_EQ(health(), std::pair(kServing, kServing));
  EXPECT_EQ(Metric(server, "precondor_device_status{device=\"cuda:0\"}"), 1);

  std::ofstream(file + ".new") << "0\n";
  std::filesystem::rename(file + ".new", file);
  EXPECT_THAT(step(1), UnorderedElementsAre(v1::DECISION_IDENTITY, v1::DECISION_IDENTITY));
  EXPECT_TRUE(WaitUntil([&] { return health() == std::pair(kNotServing, kNotServing); }));
  EXPECT_EQ(Metric(server, "precondor_device_status{device=\"cuda:0\"}"), 0);
  EXPECT_THAT(server.Info().devices(0).fault(), HasSubstr("CUDA device 0 is lost since this fault"));
  // A process that is told to end is not to be killed for it.
  server.app().RequestDrain(absl::Seconds(30));
  EXPECT_EQ(health(), std::pair(kNotServing, kServing));
}

}  // namespace
}  // namespace precondor
