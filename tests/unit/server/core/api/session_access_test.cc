// SPDX-License-Identifier: Apache-2.0
// Which callers get a session's secret, and which calls are refused without it.
#include "server/core/api/session_access.h"

#include "tests/unit/server/core/coordinator/coordinator_fixture.h"

namespace precondor {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

SessionCaller Of(const std::string& tenant, const std::string& secret = "") {
  return {.outside = true, .secret = secret, .tenants = std::vector<std::string>{tenant}};
}

TEST(SessionAccessTest, EverySecretIsAnotherAndOnlyItIsShown) {
  const SessionAccess access = SessionAccess::Make({});
  EXPECT_EQ(access.secret.size(), 16u);
  EXPECT_NE(access.secret, SessionAccess::Make({}).secret);
  EXPECT_TRUE(access.IsShownBy(SessionCaller::Showing(access.secret)));
  EXPECT_TRUE(access.IsShownBy({})) << "the process itself";
  for (size_t i = 0; i < access.secret.size(); ++i) {
    std::string wrong = access.secret;
    wrong[i] = static_cast<char>(wrong[i] ^ 0x10);
    EXPECT_FALSE(access.IsShownBy(SessionCaller::Showing(wrong))) << i;
  }
  EXPECT_FALSE(access.IsShownBy(SessionCaller::Showing(access.secret.substr(1))));
  EXPECT_FALSE(access.IsShownBy(SessionCaller::Showing(access.secret + "x")));
  EXPECT_FALSE(access.IsShownBy(SessionCaller::Showing("")));
  EXPECT_TRUE(SessionAccess().IsShownBy(SessionCaller::Showing("")) && SessionAccess().IsShownBy(Of("a", "any")))
      << "of an earlier release";
}

TEST(SessionAccessTest, ACallerOfTheTenantMayBeGivenTheSecret) {
  const SessionAccess access = SessionAccess::Make(Of("a"));
  EXPECT_TRUE(access.Admits(Of("a")));
  EXPECT_FALSE(access.Admits(Of("b")));
  EXPECT_FALSE(access.Admits(Of("a", "a wrong one"))) << "a wrong secret is no missing one";
  EXPECT_TRUE(access.Admits(Of("b", access.secret)));
  EXPECT_TRUE(access.Admits(SessionCaller::Showing(""))) << "no access control";
  EXPECT_FALSE(access.Admits({.outside = true, .tenants = std::vector<std::string>()})) << "no tenant at all";
  EXPECT_TRUE(SessionAccess::Make({}).Admits(Of("b"))) << "opened by the process: for every worker";
}

class SessionSecretTest : public CoordinatorFixture {};

TEST_F(SessionSecretTest, CallsWithoutItAreRefusedAndTellNothing) {
  const auto opened = coordinator->OpenSession(spec, Of("a"));
  ASSERT_TRUE(opened.ok()) << opened.status();
  const auto joined = coordinator->JoinSession("job", 0, 1234567, 0, Of("a"));
  ASSERT_TRUE(joined.ok()) << joined.status();
  EXPECT_EQ(joined->secret, opened->secret);
  EXPECT_EQ(coordinator->OpenSession(spec, Of("a"))->secret, opened->secret);
  ASSERT_TRUE(coordinator->JoinSession("job", 1, 1234567, 0, Of("b", opened->secret)).ok());

  StepReport report = Report(opened->session_id, 1, 0, 0, 1.0);
  report.incarnation = 1234567;
  SessionSpec other = spec;
  other.seed += 1;
  for (const SessionCaller& stranger : {Of("b"), Of("b", "fedcba9876543210")}) {
    for (const absl::Status& status :
         {coordinator->OpenSession(spec, stranger).status(), coordinator->OpenSession(other, stranger).status(),
          coordinator->JoinSession("job", 0, 7654321, 0, stranger).status(),
          coordinator->ReportStep(report, stranger).status(),
          coordinator->LeaveSession(opened->session_id, 0, 1234567, stranger),
          coordinator->CloseSession("job", stranger).status()}) {
      EXPECT_EQ(status.code(), absl::StatusCode::kPermissionDenied) << status;
      EXPECT_THAT(std::string(status.message()),
                  AllOf(HasSubstr("expected the session's secret"), Not(HasSubstr("1234567")), Not(HasSubstr("seed"))));
    }
  }
  EXPECT_EQ(coordinator->ReportStep(report, Of("a")).status().code(), absl::StatusCode::kPermissionDenied)
      << "by id the secret alone counts";
  EXPECT_TRUE(coordinator->ReportStep(report, SessionCaller::Showing(opened->secret)).ok());
  EXPECT_EQ(coordinator->ListSessions()[0].joined, 2u);
  SessionCaller an_operator = Of("c");
  an_operator.is_operator = true;
  EXPECT_TRUE(*coordinator->CloseSession("job", an_operator));
}

TEST_F(SessionSecretTest, ShardsAreToldItAndARestartKeepsIt) {
  const auto opened = coordinator->OpenSession(spec, Of("a"));
  ASSERT_TRUE(opened.ok()) << opened.status();
  EXPECT_EQ(shards[0]->installed.at(opened->session_id).access.secret, opened->secret);
  for (uint64_t restart = 0; restart < 2; ++restart) {
    MakeCoordinator();
    ASSERT_TRUE(coordinator->Restore(journal.records).ok());
    EXPECT_EQ(coordinator->JoinSession("job", 0, 5 + restart, 0, Of("b")).status().code(),
              absl::StatusCode::kPermissionDenied);
    const auto joined = coordinator->JoinSession("job", 0, 5 + restart, 0, SessionCaller::Showing(opened->secret));
    ASSERT_TRUE(joined.ok()) << joined.status();
    EXPECT_EQ(joined->secret, opened->secret);
    journal.compact_above = 0;  // the next record is of a compaction
  }
  EXPECT_GT(journal.compactions, 0);
}

}  // namespace
}  // namespace precondor
