// SPDX-License-Identifier: Apache-2.0
#include "server/rpc/access_list.h"

#include <set>
#include <string>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

#include "precondor/v1/admin.pb.h"
#include "precondor/v1/precondition.pb.h"
#include "precondor/v1/session.pb.h"
#include "precondor/v1/shard.pb.h"
#include "precondor/v1/snapshot.pb.h"

namespace precondor::rpc {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Not;
using ::testing::StartsWith;

constexpr char kOpen[] = "/precondor.v1.SessionService/OpenSession";
constexpr char kDrain[] = "/precondor.v1.AdminService/Drain";
constexpr char kInstall[] = "/precondor.v1.ShardService/InstallSession";

AccessList Parsed(const std::string& text) {
  const auto list = AccessList::Parse(text, "file");
  EXPECT_TRUE(list.ok()) << list.status();
  return *list;
}

std::string Refusal(const std::string& text) { return std::string(AccessList::Parse(text, "file").status().message()); }

// A method that is missing here is refused to every caller, and one too many would go unnoticed.
TEST(AccessListTest, TheTableHoldsEachMethodOfEachServiceOnce) {
  std::multiset<std::string> want = {"/grpc.health.v1.Health/Check", "/grpc.health.v1.Health/Watch",
                                     "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"};
  for (const auto* file : {v1::DrainRequest::descriptor()->file(), v1::ExchangeRequest::descriptor()->file(),
                           v1::OpenSessionRequest::descriptor()->file(), v1::DescribeShardRequest::descriptor()->file(),
                           v1::CreateSnapshotRequest::descriptor()->file()}) {
    for (int s = 0; s < file->service_count(); ++s) {
      for (int m = 0; m < file->service(s)->method_count(); ++m) {
        want.insert("/" + file->service(s)->full_name() + "/" + file->service(s)->method(m)->name());
      }
    }
  }
  std::multiset<std::string> have;
  for (const MethodRoles& row : MethodTable()) {
    have.insert(std::string(row.method));
    const bool open = row.method.find("/grpc.health.") == 0;
    EXPECT_EQ(row.roles == 0, open) << row.method << ": a method is open to all";
  }
  EXPECT_EQ(have, want);
}

TEST(AccessListTest, ACallerHasTheRolesOfItsTokenAndOfItsNames) {
  const AccessList list = Parsed(
      "# who may what\n\nworker token worker-token-16-letters\n"
      "operator,coordinator\ttoken   both-token-16-letters  \r\nworker name a.test\noperator name a.test\n");
  EXPECT_TRUE(list.Check(kOpen, {"worker-token-16-letters", {}}).ok());
  EXPECT_TRUE(list.Check(kDrain, {"both-token-16-letters", {}}).ok());
  EXPECT_TRUE(list.Check(kInstall, {"both-token-16-letters", {}}).ok());
  EXPECT_TRUE(list.Check(kOpen, {std::nullopt, {"b.test", "a.test"}}).ok());
  EXPECT_TRUE(list.Check(kDrain, {std::nullopt, {"a.test"}}).ok());
  EXPECT_TRUE(list.Check(kDrain, {"worker-token-16-letters", {"a.test"}}).ok()) << "the sum of both";
  EXPECT_EQ(
      list.Check(kInstall, {std::nullopt, {"a.test"}}).message(),
      "/precondor.v1.ShardService/InstallSession: expected a caller with the role coordinator, got worker, operator");
  EXPECT_EQ(list.Check(kOpen, {"both-token-16-letters", {}}).code(), absl::StatusCode::kPermissionDenied);
}

TEST(AccessListTest, ACallerWithoutAListedTokenOrNameIsUnauthenticated) {
  const AccessList list = Parsed("worker token worker-token-16-letters\nworker name a.test\n");
  EXPECT_EQ(list.Check(kOpen, {}).code(), absl::StatusCode::kUnauthenticated);
  EXPECT_THAT(std::string(list.Check(kOpen, {}).message()), HasSubstr("got no token and no certificate"));
  EXPECT_EQ(list.Check(kOpen, {std::nullopt, {"b.test"}}).code(), absl::StatusCode::kUnauthenticated);
  // A wrong token is an error beside a listed name, too, and no message repeats it.
  for (const char* token :
       {"", "worker-token-16-letter", "worker-token-16-letters2", "Bearer worker-token-16-letters"}) {
    const absl::Status status = list.Check(kOpen, {token, {"a.test"}});
    EXPECT_EQ(status.code(), absl::StatusCode::kUnauthenticated) << token;
    EXPECT_THAT(std::string(status.message()), Not(HasSubstr("16-letter")));
  }
}

TEST(AccessListTest, AMethodThatIsNotInTheTableIsRefusedToAll) {
  const AccessList list = Parsed("worker,operator,coordinator name a.test\n");
  for (const char* method : {"", "/", "/precondor.v1.AdminService/Drai", "/precondor.v1.AdminService/DrainX"}) {
    EXPECT_EQ(list.Check(method, {std::nullopt, {"a.test"}}).code(), absl::StatusCode::kPermissionDenied) << method;
  }
  EXPECT_TRUE(list.Check("/grpc.health.v1.Health/Check", {}).ok());
}

TEST(AccessListTest, ACallerSpeaksForTheTenantsOfItsLinesOrForItself) {
  const AccessList list = Parsed(
      "worker@job-a token first-token-16-letters\nworker@job-a token second-token-16-letters\n"
      "worker name b.test\nworker@job-c name b.test\nworker token third-token-16-letters\n");
  EXPECT_THAT(list.RightsOf({"first-token-16-letters", {}}).tenants, ElementsAre("tenant job-a"));
  EXPECT_THAT(list.RightsOf({"second-token-16-letters", {}}).tenants, ElementsAre("tenant job-a"));
  EXPECT_THAT(list.RightsOf({std::nullopt, {"b.test"}}).tenants, ElementsAre("name b.test", "tenant job-c"));
  EXPECT_THAT(list.RightsOf({"third-token-16-letters", {"x.test"}}).tenants,
              ElementsAre(AllOf(StartsWith("token "), Not(HasSubstr("16-letters")))));
  EXPECT_TRUE(list.RightsOf({}).tenants.empty());
  EXPECT_THAT(Refusal("worker@ name a.test"), HasSubstr("@TENANT"));
}

TEST(AccessListTest, ErrorsNameTheLineAndNoToken) {
  for (const char* line : {"boss token worker-token-16-letters", "worker tokn worker-token-16-letters", "worker token",
                           "worker token worker-token-16-letters x", "worker, operator token worker-token-16-letters",
                           "token worker-token-16-letters"}) {
    EXPECT_THAT(Refusal(std::string("worker name a\n") + line), HasSubstr("file line 2: expected ROLES token TOKEN"));
    EXPECT_THAT(Refusal(line), Not(HasSubstr("16-letters")));
  }
  EXPECT_EQ(Refusal("worker token fifteen-letters"), "file line 1: expected a token of at least 16 characters, got 15");
  EXPECT_EQ(Refusal("# none\n"), "file: expected at least one caller, got none");
}

}  // namespace
}  // namespace precondor::rpc
