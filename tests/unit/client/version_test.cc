// SPDX-License-Identifier: Apache-2.0
#include <string>

#include "absl/status/status.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

#include "client/cpp/src/control.h"

namespace precondor {
namespace {

using ::testing::HasSubstr;

constexpr char kAddress[] = "localhost:7070";

TEST(VersionTest, MajorsGoTogetherAndBeforeTheFirstMinors) {
  for (const auto& [client, server] : {std::pair("0.1.0", "0.1.0"), std::pair("0.1.0", "0.1.7"),
                                       std::pair("1.4.2", "1.0.0"), std::pair("2.0.0", "2.11.1")}) {
    EXPECT_TRUE(CheckVersions(client, kAddress, server).ok()) << client << " and " << server;
  }
  for (const auto& [client, server] : {std::pair("0.1.0", "0.2.0"), std::pair("0.1.0", "1.1.0"),
                                       std::pair("1.1.0", "0.1.0"), std::pair("2.0.0", "1.0.0")}) {
    EXPECT_EQ(CheckVersions(client, kAddress, server).code(), absl::StatusCode::kFailedPrecondition)
        << client << ", " << server;
  }
}

TEST(VersionTest, NamesBothAndWhatToDo) {
  const std::string message(CheckVersions("0.1.0", kAddress, "0.2.0").message());
  EXPECT_THAT(message, HasSubstr(kAddress));
  EXPECT_THAT(message, HasSubstr("client is Precondor 0.1.0"));
  EXPECT_THAT(message, HasSubstr("server is Precondor 0.2.0"));
  EXPECT_THAT(message, HasSubstr("install the same release"));
}

TEST(VersionTest, TakesNoVersionThatItCannotRead) {
  for (const char* server : {"", "0.1", "0.1.x", "dev", "0.1.0-rc1"}) {
    EXPECT_EQ(CheckVersions("0.1.0", kAddress, server).code(), absl::StatusCode::kFailedPrecondition) << server;
  }
  EXPECT_THAT(std::string(CheckVersions("0.1.0", kAddress, "").message()), HasSubstr("does not say its version"));
}

}  // namespace
}  // namespace precondor
