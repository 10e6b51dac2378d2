// SPDX-License-Identifier: Apache-2.0
// The client and its coordinator: leases, modes, and what happens while the coordinator is gone.
#include <atomic>
#include <future>
#include <limits>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/time/time.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

#include "kernels/base/error_reason.h"
#include "precondor/client.h"
#include "tests/loopback/scripted_server.h"
#include "tests/support/status_matchers.h"

namespace precondor {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using Script = ScriptedServer::Script;

SessionSpec Spec(ExchangeMode exchange = ExchangeMode::kDirect) {
  SessionSpec spec;
  spec.name = "step-test";
  spec.exchange = exchange;
  spec.layers.push_back({"only", 2, 3, false});
  return spec;
}

absl::StatusOr<std::unique_ptr<Worker>> TryJoin(const ClientOptions& options, uint64_t first_step) {
  auto client = Client::Connect(options);
  if (!client.ok()) return client.status();
  return (*client)->Join("step-test", {.rank = 0, .incarnation = 7, .first_step = first_step});
}

std::unique_ptr<Worker> Join(const ClientOptions& options, uint64_t first_step = 0) {
  auto worker = TryJoin(options, first_step);
  EXPECT_TRUE(worker.ok()) << worker.status();
  return *std::move(worker);
}

absl::StatusOr<StepDirective> Report(Worker& worker, uint64_t step) {
  return worker.ReportStep(step, 1.0, 1, true, 0.1).Wait();
}

absl::Status Away(const v1::ReportStepRequest&) { return absl::UnavailableError("away"); }

TEST(ClientStepTest, ALostCoordinatorIsWaitedForAtTheEndOfTheLeaseOnly) {
  ScriptedServer server(Spec());
  server.Change([](Script& script) { script.lease_through_step = 3; });
  const auto worker = Join(Options(server));
  server.Change([](Script& script) { script.refuse_report = Away; });
  // Step 3 is the last of the lease: steps 0 ... 2 end without an answer.
  for (uint64_t step = 0; step < 3; ++step) {
    const auto directive = Report(*worker, step);
    ASSERT_TRUE(directive.ok()) << directive.status();
    EXPECT_EQ(directive->lease_through_step, 3u);
  }
  auto waiting = std::async(std::launch::async, [&] { return Report(*worker, 3); });
  EXPECT_TRUE(server.AwaitRefusedReports(4));
  EXPECT_EQ(waiting.wait_for(std::chrono::seconds(0)), std::future_status::timeout);
  EXPECT_TRUE(server.reported().empty());
  server.Change([](Script& script) {
    script.refuse_report = [](const v1::ReportStepRequest&) { return absl::OkStatus(); };
    script.lease_through_step = 10;
  });
  const auto directive = waiting.get();
  ASSERT_TRUE(directive.ok()) << directive.status();
  EXPECT_EQ(directive->lease_through_step, 10u);
  EXPECT_TRUE(server.AwaitReported(4));
  EXPECT_THAT(server.reported(), ElementsAre(0, 1, 2, 3)) << "kept, and sent in order";
}

TEST(ClientStepTest, TheWaitHasAnEndThatNamesCoordinatorAndStep) {
  ScriptedServer server(Spec());
  server.Change([](Script& script) {
    script.lease_through_step = 0;
    script.refuse_report = Away;
  });
  ClientOptions options = Options(server);
  options.lease_timeout = absl::Milliseconds(300);
  options.rpc_timeout = absl::Milliseconds(100);
  const auto worker = Join(options);
  EXPECT_THAT(Report(*worker, 0),
              StatusIs(absl::StatusCode::kDeadlineExceeded,
                       HasSubstr("coordinator " + server.address() + " has granted no step beyond 0 within 300ms")));
  // So does what is sent for the step that waits.
  EXPECT_THAT(worker->AbstainStatistics(1, 0), StatusIs(absl::StatusCode::kDeadlineExceeded, HasSubstr("step 1")));
}

TEST(ClientStepTest, AsksAgainWhereTheCoordinatorPromisesNothingYet) {
  ScriptedServer server(Spec());
  server.Change([](Script& script) { script.lease_through_step = 0; });
  const auto worker = Join(Options(server));
  auto waiting = std::async(std::launch::async, [&] { return Report(*worker, 0); });
  // A second answer shows that the first one was not enough.
  EXPECT_TRUE(server.AwaitReported(2));
  EXPECT_EQ(waiting.wait_for(std::chrono::seconds(0)), std::future_status::timeout);
  server.Change([](Script& script) { script.lease_through_step = 1; });
  EXPECT_EQ(waiting.get()->lease_through_step, 1u);
}

TEST(ClientStepTest, ARefusedReportFailsItsCallAndNoOther) {
  ScriptedServer server(Spec());
  const auto worker = Join(Options(server));
  server.Change([](Script& script) {
    script.refuse_report = [](const v1::ReportStepRequest& report) {
      return report.step() != 4 ? absl::OkStatus()
                                : ReasonedStatus(absl::StatusCode::kFailedPrecondition, ErrorReason::kStepTooFarAhead,
                                                 "never granted");
    };
  });
  EXPECT_TRUE(Report(*worker, 3).ok());
  EXPECT_EQ(GetErrorReason(Report(*worker, 4).status()), ErrorReason::kStepTooFarAhead);
  EXPECT_TRUE(Report(*worker, 5).ok());
}

// Begins reports of `steps` while the server holds the first one's call up, and then waits for the last one.
std::vector<ReportFuture> ReportTogether(ScriptedServer& server, Worker& worker, uint64_t steps) {
  std::promise<void> called, begun;
  std::atomic<bool> is_first = true;
  decltype(Script::refuse_report) before;
  server.Change([&](Script& script) {
    before = script.refuse_report;
    script.refuse_report = [&, refuse = script.refuse_report](const v1::ReportStepRequest& report) {
      if (is_first.exchange(false)) {
        called.set_value();
        begun.get_future().wait();
      }
      return refuse(report);
    };
  });
  std::vector<ReportFuture> reports;
  for (uint64_t step = 0; step < steps; ++step) {
    reports.push_back(worker.ReportStep(step, 1.0, 1, true, 0.1));
    if (step == 0) called.get_future().wait();
  }
  EXPECT_FALSE(reports.back().WaitFor(absl::ZeroDuration()));
  begun.set_value();
  EXPECT_TRUE(reports.back().WaitFor(absl::Seconds(20)));
  server.Change([&](Script& script) { script.refuse_report = before; });
  return reports;
}

TEST(ClientStepTest, StepsThatNobodyWaitsForShareACall) {
  ScriptedServer server(Spec());
  server.Change([](Script& script) { script.report_limit = 4; });
  const auto worker = Join(Options(server));
  for (const ReportFuture& report : ReportTogether(server, *worker, 10)) EXPECT_TRUE(report.Wait().ok());
  EXPECT_THAT(server.reported(), ElementsAre(0, 1, 2, 3, 4, 5, 6, 7, 8, 9));
  EXPECT_THAT(server.report_calls(), ElementsAre(1, 4, 4, 1));
}

TEST(ClientStepTest, ShortStepsShareCallsWhereNoneIsUnderWay) {
  ScriptedServer server(Spec());
  server.Change([](Script& script) { script.report_limit = 64; });
  const auto worker = Join(Options(server));
  ASSERT_TRUE(Report(*worker, 0).ok());  // at once
  std::vector<ReportFuture> reports;
  for (uint64_t step = 1; step < 50; ++step) reports.push_back(worker->ReportStep(step, 1.0, 1, true, 0.1));
  EXPECT_TRUE(reports.back().Wait().ok());
  EXPECT_EQ(server.reported().size(), 50u);
  EXPECT_LT(server.report_calls().size(), 40u) << "more would take a second";
}

TEST(ClientStepTest, ReportsGoBeforeTheLeaseEnds) {
  ScriptedServer server(Spec());
  server.Change([](Script& script) {
    script.report_limit = 64;
    script.lease_through_step = 20;
  });
  const auto worker = Join(Options(server));
  std::vector<ReportFuture> reports;
  for (uint64_t step = 0; step < 10; ++step) reports.push_back(worker->ReportStep(step, 1.0, 1, true, 0.1));
  EXPECT_TRUE(server.AwaitReported(10)) << "no caller waits for them";
}

TEST(ClientStepTest, ARefusedReportFailsNoOtherOfItsCall) {
  ScriptedServer server(Spec());
  server.Change([](Script& script) {
    script.report_limit = 64;
    script.refuse_report = [](const v1::ReportStepRequest& report) {
      const bool has = report.step() == 2 || report.earlier_size() > 1;
      return has ? ReasonedStatus(absl::StatusCode::kFailedPrecondition, ErrorReason::kStepTooFarAhead, "2")
                 : absl::OkStatus();
    };
  });
  const auto worker = Join(Options(server));
  const std::vector<ReportFuture> reports = ReportTogether(server, *worker, 5);
  for (uint64_t step = 0; step < 5; ++step) {
    EXPECT_EQ(GetErrorReason(reports[step].Wait().status()),
              step == 2 ? ErrorReason::kStepTooFarAhead : ErrorReason::kUnspecified);
  }
  EXPECT_THAT(server.reported(), ElementsAre(0, 1, 3, 4));
}

TEST(ClientStepTest, AnOlderCoordinatorThatTakesOverIsToldEachStep) {
  ScriptedServer server(Spec());
  server.Change([](Script& script) { script.report_limit = 64; });
  const auto worker = Join(Options(server));
  server.Change([](Script& script) {
    script.refuse_report = [&script](const v1::ReportStepRequest& report) {
      if (report.earlier_size() > 0) script.report_limit = 1;  // it does not know the field
      return absl::OkStatus();
    };
  });
  for (const ReportFuture& report : ReportTogether(server, *worker, 5)) EXPECT_TRUE(report.Wait().ok());
  EXPECT_THAT(server.reported(), ElementsAre(0, 4, 1, 2, 3, 4));
}

TEST(ClientStepTest, ACoordinatorThatEndsInTheMiddleOfACallIsAskedAgain) {
  ScriptedServer server(Spec());
  const auto worker = Join(Options(server));
  std::atomic<int> asked = 0;
  server.Change([&asked](Script& script) {
    script.refuse_report = [&asked](const v1::ReportStepRequest&) {
      return asked++ == 0 ? absl::CancelledError("what a server that ends makes of its calls") : absl::OkStatus();
    };
  });
  EXPECT_TRUE(Report(*worker, 3).ok());
  EXPECT_EQ(asked, 2);
}

TEST(ClientStepTest, JoinsWithItsFirstStep) {
  ScriptedServer server(Spec());
  const auto worker = Join(Options(server), 42);
  EXPECT_EQ(server.last_first_step(), 42u);
}

TEST(ClientStepTest, TellsTheTrainerOfASnapshot) {
  ScriptedServer server(Spec());
  const auto worker = Join(Options(server), 4);
  EXPECT_EQ(Report(*worker, 4)->snapshot_at, 0u);
  server.Change([](Script& script) {
    script.snapshot_at = 7;
    script.snapshot_id = 3;
  });
  const auto directive = Report(*worker, 5);
  ASSERT_TRUE(directive.ok()) << directive.status();
  EXPECT_EQ(directive->snapshot_at, 7u);
  EXPECT_EQ(directive->snapshot_id, 3u);
}

TEST(ClientStepTest, FailsWhenTheJobHasGoneBackBehindIt) {
  for (const uint64_t resume : {4u, 5u, 6u, 9u}) {
    ScriptedServer server(Spec());
    const auto worker = Join(Options(server), 4);
    ASSERT_TRUE(Report(*worker, 4).ok());
    server.Change([&](Script& script) {
      script.rollback_epoch = 2;
      script.resume_step = resume;
    });
    server.BumpEpoch();
    const auto directive = Report(*worker, 5);
    if (resume >= 6) {
      EXPECT_TRUE(directive.ok()) << directive.status();
      continue;
    }
    EXPECT_EQ(directive.status().code(), absl::StatusCode::kAborted) << directive.status();
    EXPECT_THAT(directive,
                MessageIs(HasSubstr("gone back to step " + std::to_string(resume) + ", rank 0 has answers of step 5")));
    EXPECT_EQ(worker->Flush().code(), absl::StatusCode::kAborted);
    EXPECT_EQ(worker->AbstainGradient(6, 0).Wait().status().code(), absl::StatusCode::kAborted);
    EXPECT_EQ(server.joins(), 2) << "and asks no more";
    // A new process that begins later than the rest is told the same at once.
    EXPECT_EQ(TryJoin(Options(server), resume + 1).status().code(), absl::StatusCode::kAborted);
    EXPECT_TRUE(TryJoin(Options(server), resume).ok());
  }
}

TEST(ClientStepTest, ANewEpochWaitsForACoordinatorThatIsGone) {
  ScriptedServer server(Spec());
  ClientOptions options = Options(server);
  options.rpc_timeout = absl::Milliseconds(50);
  const auto worker = Join(options);
  server.Change([](Script& script) { script.refuse_joins = absl::UnavailableError("away"); });
  server.BumpEpoch();
  std::vector<float> gradient(6, 1.0f);
  const MatrixView view(gradient.data(), 2, 3);
  const PreconditionFuture future = worker->Precondition(20, 0, {view, view}, 1);
  // More than the calls that one of 50 ms makes.
  EXPECT_TRUE(server.AwaitJoins(20));
  EXPECT_FALSE(future.ready());
  server.Change([](Script& script) { script.refuse_joins = absl::OkStatus(); });
  EXPECT_TRUE(future.Wait().ok()) << future.Wait().status();
  EXPECT_EQ(worker->status().epoch, 2u);
}

// The scripted server's steps are in first order from 50 on.
TEST(ClientStepTest, DelegateAnswersFirstOrderItselfAndSendsNothing) {
  ScriptedServer server(Spec(ExchangeMode::kDelegate));
  const auto worker = Join(Options(server));
  std::vector<float> gradient = {1, -2, 3, 4, -5, 6};
  std::vector<float> out(8, 9.0f);
  MatrixView strided(out.data(), 2, 3);
  strided.stride = 4;
  const auto answered = worker->Precondition(50, 0, {MatrixView(gradient.data(), 2, 3), strided}, 1);
  EXPECT_TRUE(answered.ready());
  const auto outcome = answered.Wait();
  ASSERT_TRUE(outcome.ok()) << outcome.status();
  EXPECT_EQ(outcome->decision, Decision::kIdentity);
  EXPECT_EQ(outcome->reason, "first order");
  EXPECT_THAT(out, ElementsAre(1, -2, 3, 9, 4, -5, 6, 9));
  const MatrixView in_place(gradient.data(), 2, 3);
  EXPECT_TRUE(worker->Precondition(50, 0, {in_place, in_place}, 1).Wait().ok());
  EXPECT_THAT(gradient, ElementsAre(1, -2, 3, 4, -5, 6));

  gradient[4] = std::numeric_limits<float>::quiet_NaN();
  EXPECT_EQ(worker->Precondition(51, 0, {in_place, in_place}, 1).Wait()->decision, Decision::kSkip);
  const auto skipped = worker->AbstainGradient(52, 0).Wait();
  EXPECT_EQ(skipped->decision, Decision::kSkip);
  EXPECT_EQ(skipped->reason, "rank 0 abstained");
  ASSERT_TRUE(worker->Flush().ok());
  EXPECT_TRUE(server.stored().empty());
  const Traffic traffic = worker->status().traffic;
  EXPECT_EQ(traffic.gradient_bytes + traffic.result_bytes + traffic.statistics_bytes, 0);
}

TEST(ClientStepTest, DirectSendsItsGradientInFirstOrderToo) {
  ScriptedServer server(Spec());
  const auto worker = Join(Options(server));
  std::vector<float> gradient(6, 1.0f);
  const MatrixView view(gradient.data(), 2, 3);
  ASSERT_TRUE(worker->Precondition(50, 0, {view, view}, 1).Wait().ok());
  EXPECT_EQ(server.stored().at("G50.0").header.mode(), v1::MODE_FIRST_ORDER);
  EXPECT_EQ(worker->status().traffic.gradient_bytes, 24);
}

}  // namespace
}  // namespace precondor
