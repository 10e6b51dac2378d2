// SPDX-License-Identifier: Apache-2.0
#include "kernels/base/unix_address.h"

#include <filesystem>

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace precondor {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

TEST(UnixAddressTest, PathIsWhatFollowsTheScheme) {
  EXPECT_EQ(UnixPath("unix:/run/a.sock"), "/run/a.sock");
  EXPECT_EQ(UnixPath("unix:///run/a.sock"), "/run/a.sock");
  EXPECT_EQ(UnixPath("unix:run/a.sock"), "run/a.sock");
  EXPECT_EQ(UnixPath("unix:"), "");
  for (const char* other : {"unix-abstract:a", "127.0.0.1:7070", "host:7070", "unix", ""}) {
    EXPECT_EQ(UnixPath(other), std::nullopt) << other;
  }
}

TEST(UnixAddressTest, PathHasToFitASocketsAddress) {
  EXPECT_TRUE(CheckUnixAddress("host:7070").ok());
  EXPECT_TRUE(CheckUnixAddress("unix:a").ok());
  EXPECT_TRUE(CheckUnixAddress(absl::StrCat("unix:/", std::string(106, 'a'))).ok());
  const absl::Status late = CheckUnixAddress(absl::StrCat("unix:/", std::string(107, 'a')));
  EXPECT_EQ(late.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(late.message()), AllOf(HasSubstr("1 ... 107 bytes, got 108"), HasSubstr("\"unix:/aaa")));
  EXPECT_THAT(std::string(CheckUnixAddress("unix:").message()), HasSubstr("got 0 bytes"));
  EXPECT_FALSE(CheckUnixAddress(absl::string_view("unix:/a\0b", 9)).ok()) << "the socket would be another";
}

TEST(UnixAddressTest, ClientsDialHostAndPortOrASocket) {
  for (const char* good : {"host:7070", "127.0.0.1:1", "[::1]:65535", "a-b.c_d:7070", "unix:a", "dns:///host:7070"}) {
    EXPECT_TRUE(CheckServerAddress(good).ok()) << good;
  }
  for (const char* bad : {"", "host", "127.0.0.1", "host:", ":7070", "host:0", "host:65536", "host:port", "::1:7070",
                          "a:b:1", "a b:1", "unix:"}) {
    EXPECT_EQ(CheckServerAddress(bad).code(), absl::StatusCode::kInvalidArgument) << bad;
  }
  EXPECT_THAT(std::string(CheckServerAddress("host").message()),
              HasSubstr("expected host:port or unix:/path/to/socket, got \"host\""));
}

TEST(UnixAddressTest, OthersDialAnAbsolutePath) {
  EXPECT_EQ(AbsoluteUnixAddress("unix:/run/a"), "unix:/run/a");
  EXPECT_EQ(AbsoluteUnixAddress("unix:///run/a"), "unix:/run/a");
  EXPECT_EQ(AbsoluteUnixAddress("unix:b/a"), absl::StrCat("unix:", std::filesystem::current_path().string(), "/b/a"));
  EXPECT_EQ(AbsoluteUnixAddress("host:7070"), "host:7070");
}

TEST(UnixAddressTest, TargetIsAUri) {
  EXPECT_EQ(DialTarget("unix:/run/a-b_c.1~/s"), "unix:/run/a-b_c.1~/s");
  EXPECT_EQ(DialTarget("unix:///run/a"), "unix:/run/a");
  EXPECT_EQ(DialTarget("unix:/a b%?#\xc3\xa9"), "unix:/a%20b%25%3F%23%C3%A9");
  EXPECT_EQ(DialTarget("[::1]:7070"), "[::1]:7070");
}

}  // namespace
}  // namespace precondor
