// SPDX-License-Identifier: Apache-2.0
// Kinds of communicator that cannot be had. The program does not find libprecondor-nccl.so, wherever it was built.
#include "server/plane_transports.h"

#include <string>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace precondor {
namespace {

TEST(PlaneTransportsTest, NcclThatIsNotThereIsAnErrorAtTheStart) {
  ServerConfig config;
  config.plane_transport = "nccl";
  const absl::Status status = MakePlaneTransport(config).status();
  EXPECT_TRUE(absl::IsUnavailable(status)) << status;
  EXPECT_THAT(std::string(status.message()), testing::HasSubstr("no NCCL: libprecondor-nccl.so"));
}

}  // namespace
}  // namespace precondor
