// SPDX-License-Identifier: Apache-2.0
// One tenant's sessions take no more than their limits, whatever the others have.
#include "server/core/coordinator/coordinator_options.h"
#include "tests/unit/server/core/coordinator/coordinator_fixture.h"

namespace precondor {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

SessionCaller Of(std::vector<std::string> tenants) { return {.outside = true, .tenants = std::move(tenants)}; }

class TenantLimitsTest : public CoordinatorFixture {
 protected:
  void Limit(TenantLimits limits) {
    options.tenant_limits = limits;
    MakeCoordinator();
  }
  absl::Status Open(const std::string& name, const SessionCaller& caller) {
    spec.name = name;
    return coordinator->OpenSession(spec, caller).status();
  }
  int64_t Bytes() const { return SessionBytes(spec, MethodSet::Make(spec, options.make_method).value()); }
};

TEST_F(TenantLimitsTest, SessionsAreCountedByTenant) {
  Limit({.sessions = 2});
  EXPECT_TRUE(Open("a1", Of({"tenant a"})).ok());
  EXPECT_TRUE(Open("a2", Of({"tenant a"})).ok());
  EXPECT_TRUE(Open("a2", Of({"tenant a"})).ok()) << "it is there";
  EXPECT_THAT(
      Open("a3", Of({"tenant a"})),
      StatusIs(absl::StatusCode::kResourceExhausted, ErrorReason::kCapacity,
               AllOf(HasSubstr("\"a3\""), HasSubstr(": tenant a: expected at most 2 sessions"), HasSubstr("got 2"))));
  EXPECT_TRUE(Open("b1", Of({"b"})).ok()) << "another tenant";
  EXPECT_THAT(Open("both", Of({"tenant b", "tenant a"})),
              MessageIs(AllOf(HasSubstr("tenant a"), Not(HasSubstr("tenant b")))));
  EXPECT_TRUE(Open("c1", Of({"token 0123"})).ok());
  EXPECT_TRUE(Open("c2", Of({"token 0123"})).ok());
  EXPECT_THAT(Open("c3", Of({"token 0123"})),
              MessageIs(AllOf(HasSubstr("the caller's token: expected"), Not(HasSubstr("0123")))));
  ASSERT_TRUE(coordinator->CloseSession("a1", Of({"tenant a"})).ok());
  EXPECT_TRUE(Open("a3", Of({"tenant a"})).ok());
}

TEST_F(TenantLimitsTest, BytesAreThoseOfPlacement) {
  ASSERT_GT(Bytes(), 0);
  Limit({.bytes = 2 * Bytes()});
  EXPECT_TRUE(Open("a1", Of({"tenant a"})).ok());
  EXPECT_TRUE(Open("a2", Of({"tenant a"})).ok());
  EXPECT_THAT(Open("a3", Of({"tenant a"})),
              ReasonIs(ErrorReason::kCapacity,
                       AllOf(HasSubstr(absl::StrCat("at most ", 2 * Bytes(), " bytes")), HasSubstr("in 2 sessions"),
                             HasSubstr(absl::StrCat("and ", Bytes(), " more")))));
}

TEST_F(TenantLimitsTest, WithoutAnAccessFileAllAreOneTenant) {
  Limit({.sessions = 1});
  EXPECT_TRUE(Open("one", {}).ok());
  EXPECT_THAT(std::string(Open("two", {}).message()), HasSubstr("the server: expected at most 1 sessions"));
}

// The second open comes while the first asks its shards.
TEST_F(TenantLimitsTest, SessionsThatAreBeingOpenedCount) {
  Limit({.sessions = 1});
  absl::Status second;
  shards[0]->during_install = [&] {
    shards[0]->during_install = nullptr;
    SessionSpec other = spec;
    other.name = "second";
    second = coordinator->OpenSession(other, Of({"tenant a"})).status();
  };
  EXPECT_TRUE(Open("first", Of({"tenant a"})).ok());
  EXPECT_EQ(GetErrorReason(second), ErrorReason::kCapacity) << second;
}

TEST_F(TenantLimitsTest, WhatFailedToOpenCountsNoMore) {
  Limit({.sessions = 1});
  shards[0]->refuse_installs = true;
  EXPECT_FALSE(Open("first", Of({"tenant a"})).ok());
  shards[0]->refuse_installs = false;
  EXPECT_TRUE(Open("second", Of({"tenant a"})).ok());
}

TEST_F(TenantLimitsTest, SessionsComeBackWhateverTheLimits) {
  EXPECT_TRUE(Open("a1", Of({"tenant a"})).ok());
  EXPECT_TRUE(Open("a2", Of({"tenant a"})).ok());
  Limit({.sessions = 1});
  ASSERT_TRUE(coordinator->Restore(journal.records).ok());
  EXPECT_EQ(coordinator->ListSessions().size(), 2u);
  EXPECT_EQ(GetErrorReason(Open("a3", Of({"tenant a"}))), ErrorReason::kCapacity);
}

}  // namespace
}  // namespace precondor
