// SPDX-License-Identifier: Apache-2.0
#include <arpa/inet.h>
#include <atomic>
#include <cmath>
#include <future>
#include <limits>
#include <map>
#include <netinet/in.h>
#include <regex>
#include <set>
#include <string>
#include <sys/socket.h>
#include <unistd.h>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"
#include "absl/time/clock.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

#include "kernels/base/sanitizers.h"
#include "server/metrics/catalog.h"
#include "server/metrics/metrics_observer.h"
#include "server/net/acceptor.h"

namespace precondor::metrics {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;
using ::testing::StartsWith;

struct Scrape {
  std::map<std::string, std::string> types, helps;      // by family
  std::map<std::string, std::set<std::string>> labels;  // names, by family; without a histogram's `le`
  std::map<std::string, double> samples;                // by the whole series: name{labels}
  std::set<std::string> families;                       // that have samples
};

std::string FamilyOf(const Scrape& scrape, const std::string& name) {
  for (const absl::string_view suffix : {"_bucket", "_sum", "_count"}) {
    const std::string stem(absl::StripSuffix(name, suffix));
    if (stem != name && scrape.types.count(stem) > 0 && scrape.types.at(stem) != "counter") return stem;
  }
  return name;
}

// The text format 0.0.4: comments first, then the samples of each family.
Scrape Parse(const std::string& text) {
  Scrape scrape;
  const std::regex sample(R"(^([a-z_:A-Z0-9]+)(?:\{(.*)\})? (\S+)$)");
  const std::regex label("([a-zA-Z_][a-zA-Z0-9_]*)=\"((?:[^\"\\\\]|\\\\.)*)\"");
  const std::vector<std::string> lines = absl::StrSplit(text, '\n', absl::SkipEmpty());
  for (const std::string& line : lines) {
    const std::vector<std::string> words = absl::StrSplit(line, absl::MaxSplits(' ', 3));
    if (words[0] == "#") {
      (words[1] == "TYPE" ? scrape.types : scrape.helps)[words[2]] = words[3];
      continue;
    }
    std::smatch match;
    if (!std::regex_match(line, match, sample)) {
      ADD_FAILURE() << "not a sample: " << line;
      continue;
    }
    const std::string family = FamilyOf(scrape, match[1]), inner = match[2];
    for (std::sregex_iterator it(inner.begin(), inner.end(), label), end; it != end; ++it) {
      if ((*it)[1] != "le") scrape.labels[family].insert((*it)[1]);
    }
    double value = 0;
    EXPECT_TRUE(absl::SimpleAtod(match[3].str(), &value)) << line;
    scrape.samples[line.substr(0, line.rfind(' '))] = value;
    scrape.families.insert(family);
  }
  return scrape;
}

double Value(const MetricsObserver& metrics, const std::string& series) {
  const Scrape scrape = Parse(metrics.Render());
  const auto found = scrape.samples.find(series);
  EXPECT_NE(found, scrape.samples.end()) << "no series " << series;
  return found == scrape.samples.end() ? std::numeric_limits<double>::quiet_NaN() : found->second;
}

void Drive(MetricsObserver& metrics) {
  metrics.OnSessionInstalled("job");
  metrics.OnSessionOpened("job");
  for (const ContributionKind kind : {ContributionKind::kStatistics, ContributionKind::kGradient}) {
    metrics.OnContribution("job", kind, kind == ContributionKind::kStatistics ? 100 : 1000);
    metrics.OnContribution("job", kind, 5);
    metrics.OnDuplicate("job", kind);
    metrics.OnRejected("job", kind, ErrorReason::kNonFinite);
    metrics.OnSealed("job", kind, absl::Milliseconds(30));
  }
  metrics.OnReceived(TransferPath::kStream, TransferKind::kGradient, 1000);
  metrics.OnReceived(TransferPath::kStream, TransferKind::kAnswer, 1);  // does not occur
  metrics.OnSent(TransferPath::kRing, TransferKind::kAnswer, 64);
  metrics.OnReceive(absl::Milliseconds(3));
  metrics.OnReply(absl::Milliseconds(7));
  metrics.OnShardStep("job", 43);
  metrics.OnDroppedLogLines(2);
  metrics.OnAcceptFailure();
  metrics.OnMemoryBudget("messages", 77);
  metrics.OnContainerMemory(99);
  metrics.OnCertificateExpiry(1'000'000'000);
  metrics.OnDroppedLogLines(5);
  metrics.OnTraceSpans(7, 2);
  metrics.OnTraceSpans(9, 3);
  metrics.OnAdmission(true);
  metrics.OnAdmission(false);
  metrics.OnSessionMemory("job", 100);
  metrics.OnLogSync(absl::Milliseconds(6), 4096);
  metrics.OnSnapshotWritten("job", absl::Seconds(2), 512);
  metrics.OnLease("job", 106);
  metrics.OnUpdate("job", absl::Milliseconds(2), true);
  metrics.OnUpdate("job", absl::Milliseconds(4), false);
  metrics.OnUpdatesLost("job", 7);
  metrics.OnPrecondition("job", absl::Seconds(20));
  metrics.OnContribution("job", ContributionKind::kPull, 0);
  metrics.OnFetch("job", 300);
  metrics.OnFetch("job", 20);
  metrics.OnPlan(Decision::kIdentity, AnswerCause::kFirstOrder);
  metrics.OnPlan(Decision::kPreconditioned, AnswerCause::kNone);
  metrics.OnResult("job", Decision::kIdentity, 64);
  metrics.OnResult("job", Decision::kPreconditioned, 36);
  metrics.OnReservedBytes(11, 22);
  metrics.OnDevice("cuda:0", true);
  metrics.OnDevice("cuda:1", true);
  metrics.OnDevice("cuda:1", false);
  metrics.OnShardSessions(3);
  metrics.OnQuarantinedSessions(2);
  metrics.OnCoordinatorSessions(4);
  metrics.OnUnreachableShards(2);
  metrics.OnStepReported("job", 41, 1.0, Mode::kSecondOrder);
  metrics.OnStepReported("job", 42, 0.5, Mode::kFirstOrder);
  FallbackDecision decision;
  decision.state.trend.loss = 0.75;
  decision.state.trend.rate = 0.125;
  decision.threshold_rate = 0.25;
  decision.state.second_order_seconds = 1.5;
  metrics.OnDecision("job", decision);
  metrics.OnModeChange("job", Mode::kFirstOrder);
  metrics.OnStragglers("job", {3, 5});
  metrics.OnJournal(true);
  metrics.OnLogAppend(77, true);
  metrics.OnLogAppend(0, false);
  metrics.OnLogStale("job", true);
  metrics.OnSnapshot("job", true);
  metrics.OnSnapshot("job", true);
  metrics.OnSnapshot("job", false);
  for (const bool complete : {true, true, true, false}) metrics.OnSessionSnapshot("job", complete);
  metrics.OnLastSessionSnapshot("job", 40);
  metrics.OnJournal(false);
  metrics.OnEpoch("job", 9, 1, 2);
  metrics.OnRpc("OpenSession", absl::StatusCode::kOk, absl::Milliseconds(1));
  metrics.OnRpc("OpenSession", absl::StatusCode::kResourceExhausted, absl::Milliseconds(1));
  metrics.OnDrain();
}

const char* TypeName(MetricType type) {
  return type == MetricType::kCounter ? "counter" : type == MetricType::kGauge ? "gauge" : "histogram";
}

TEST(MetricsTest, ScrapeHasEveryMetricOfTheCatalogAndNoOther) {
  MetricsObserver metrics("1.2.3", "all");
  Drive(metrics);
  const Scrape scrape = Parse(metrics.Render());
  std::set<std::string> expected;
  for (const MetricInfo& info : kCatalog) {
    SCOPED_TRACE(info.name);
    expected.insert(info.name);
    ASSERT_EQ(scrape.types.count(info.name), 1u);
    EXPECT_EQ(scrape.types.at(info.name), TypeName(info.type));
    EXPECT_EQ(scrape.helps.at(info.name), info.help);
    const std::set<std::string> labels = absl::StrSplit(info.labels, ',', absl::SkipEmpty());
    const auto found = scrape.labels.find(info.name);
    EXPECT_EQ(found == scrape.labels.end() ? std::set<std::string>() : found->second, labels);
  }
  EXPECT_EQ(scrape.families, expected);
}

TEST(MetricsTest, NamesFollowTheRules) {
  const std::set<std::string> forbidden = {"rank", "step", "layer", "peer", "session", "session_id", "job"};
  std::set<std::string> seen;
  for (const MetricInfo& info : kCatalog) {
    SCOPED_TRACE(info.name);
    const std::string name = info.name;
    EXPECT_TRUE(std::regex_match(name, std::regex("precondor(_[a-z]+){2,}"))) << "a noun and a unit";
    EXPECT_EQ(absl::EndsWith(name, "_total"), info.type == MetricType::kCounter);
    EXPECT_TRUE(info.type != MetricType::kHistogram || absl::EndsWith(name, "_seconds"));
    for (const absl::string_view word : absl::StrSplit(name, '_')) {
      EXPECT_THAT((std::vector<absl::string_view>{"ms", "millis", "milliseconds", "us", "minutes", "kb", "mb", "mib",
                                                  "gib", "percent", "count", "sum", "bucket"}),
                  Not(::testing::Contains(word)));
    }
    for (const absl::string_view label : absl::StrSplit(info.labels, ',', absl::SkipEmpty())) {
      EXPECT_EQ(forbidden.count(std::string(label)), 0u) << label;
    }
    EXPECT_TRUE(seen.insert(name).second) << "twice";
  }
}

TEST(MetricsTest, EveryEventIsInItsSeries) {
  MetricsObserver metrics("1.2.3", "all");
  Drive(metrics);
  const Scrape scrape = Parse(metrics.Render());
  const std::map<std::string, double> expected = {
      {R"(precondor_contributions_total{kind="statistics",result="accepted",train_job="job"})", 2},
      {R"(precondor_contributions_total{kind="gradient",result="accepted",train_job="job"})", 2},
      {R"(precondor_contributions_total{kind="gradient",result="duplicate",train_job="job"})", 1},
      {R"(precondor_contributions_total{kind="statistics",result="rejected",train_job="job"})", 1},
      {R"(precondor_contributions_total{kind="pull",result="accepted",train_job="job"})", 1},
      {R"(precondor_contributions_total{kind="pull",result="rejected",train_job="job"})", 0},
      {R"(precondor_fetches_total{train_job="job"})", 2},
      {R"(precondor_fetched_bytes_total{train_job="job"})", 320},
      {R"(precondor_contribution_bytes_total{kind="statistics",train_job="job"})", 105},
      {R"(precondor_contribution_bytes_total{kind="gradient",train_job="job"})", 1005},
      {R"(precondor_rejected_total{reason="non_finite"})", 2},
      {R"(precondor_rejected_total{reason="over_norm"})", 0},
      {R"(precondor_stage_seconds_count{stage="seal_wait"})", 2},
      {R"(precondor_stage_seconds_sum{stage="seal_wait"})", 0.06},
      {R"(precondor_stage_seconds_bucket{stage="seal_wait",le="0.025"})", 0},
      {R"(precondor_stage_seconds_bucket{stage="seal_wait",le="0.05"})", 2},
      {R"(precondor_stage_seconds_sum{stage="receive"})", 0.003},
      {R"(precondor_stage_seconds_sum{stage="reply"})", 0.007},
      {R"(precondor_stage_seconds_sum{stage="update"})", 0.006},
      {R"(precondor_stage_seconds_bucket{stage="precondition",le="10"})", 0},
      {R"(precondor_stage_seconds_bucket{stage="precondition",le="+Inf"})", 1},
      {R"(precondor_job_stages_total{stage="seal_wait",train_job="job"})", 2},
      {R"(precondor_job_stages_total{stage="update",train_job="job"})", 2},
      {R"(precondor_job_stages_total{stage="precondition",train_job="job"})", 1},
      {R"(precondor_job_stage_seconds_total{stage="seal_wait",train_job="job"})", 0.06},
      {R"(precondor_job_stage_seconds_total{stage="update",train_job="job"})", 0.006},
      {R"(precondor_job_stage_seconds_total{stage="precondition",train_job="job"})", 20},
      {R"(precondor_transfer_bytes_total{direction="received",kind="gradient",path="stream"})", 1000},
      {R"(precondor_transfer_bytes_total{direction="received",kind="statistics",path="stream"})", 0},
      {R"(precondor_transfer_bytes_total{direction="sent",kind="answer",path="ring"})", 64},
      {R"(precondor_shard_step_number{train_job="job"})", 43},
      {R"(precondor_dropped_log_lines_total)", 5},
      {R"(precondor_accept_failures_total)", 1},
      {R"(precondor_memory_budget_bytes{part="messages"})", 77},
      {R"(precondor_container_memory_bytes)", 99},
      {R"(precondor_certificate_expiry_timestamp_seconds)", 1e9},
      {"precondor_trace_spans_total", 9},
      {"precondor_dropped_trace_spans_total", 3},
      {R"(precondor_admissions_total{result="admitted"})", 1},
      {R"(precondor_admissions_total{result="refused"})", 1},
      {R"(precondor_job_reserved_bytes{train_job="job"})", 100},
      {"precondor_log_size_bytes", 4096},
      {"precondor_log_sync_seconds_sum", 0.006},
      {"precondor_snapshot_seconds_sum", 2},
      {R"(precondor_last_snapshot_bytes{train_job="job"})", 512},
      {R"(precondor_lease_step_number{train_job="job"})", 106},
      {R"(precondor_mode_step_seconds{mode="second_order",train_job="job"})", 1.5},
      {R"(precondor_mode_step_seconds{mode="first_order",train_job="job"})", 0},
      {R"(precondor_updates_total{train_job="job"})", 2},
      {R"(precondor_update_failures_total{train_job="job"})", 1},
      {R"(precondor_updates_lost_total{train_job="job"})", 7},
      {R"(precondor_plans_total{decision="identity",reason="first_order"})", 1},
      {R"(precondor_plans_total{decision="skip",reason="abstained"})", 0},
      {R"(precondor_plans_total{decision="preconditioned",reason="none"})", 1},
      {R"(precondor_results_total{decision="identity",train_job="job"})", 1},
      {R"(precondor_results_total{decision="preconditioned",train_job="job"})", 1},
      {R"(precondor_results_total{decision="skip",train_job="job"})", 0},
      {R"(precondor_result_bytes_total{train_job="job"})", 100},
      {"precondor_reserved_bytes", 11},
      {"precondor_capacity_bytes", 22},
      {R"(precondor_device_status{device="cuda:0"})", 1},
      {R"(precondor_device_status{device="cuda:1"})", 0},
      {"precondor_shard_sessions", 3},
      {"precondor_quarantined_sessions", 2},
      {"precondor_coordinator_sessions", 4},
      {"precondor_unreachable_shards", 2},
      {R"(precondor_steps_total{train_job="job"})", 2},
      {R"(precondor_last_step_number{train_job="job"})", 42},
      {R"(precondor_training_loss{train_job="job"})", 0.5},
      {R"(precondor_second_order_mode{train_job="job"})", 0},
      {R"(precondor_epoch_number{train_job="job"})", 9},
      {R"(precondor_joined_workers{train_job="job"})", 1},
      {R"(precondor_expected_workers{train_job="job"})", 2},
      {R"(precondor_rpcs_total{code="ok",method="OpenSession"})", 1},
      {R"(precondor_rpcs_total{code="resource_exhausted",method="OpenSession"})", 1},
      {R"(precondor_rpc_seconds_count{method="OpenSession"})", 2},
      {R"(precondor_smoothed_loss{train_job="job"})", 0.75},
      {R"(precondor_loss_rate{train_job="job"})", 0.125},
      {R"(precondor_fallback_threshold_rate{train_job="job"})", 0.25},
      {R"(precondor_mode_changes_total{train_job="job"})", 1},
      {R"(precondor_lagging_workers{train_job="job"})", 2},
      {R"(precondor_lagging_rank_number{train_job="job"})", 3},
      {R"(precondor_log_stale_status{train_job="job"})", 1},
      {R"(precondor_snapshots_total{outcome="durable",train_job="job"})", 2},
      {R"(precondor_snapshots_total{outcome="given_up",train_job="job"})", 1},
      {R"(precondor_session_snapshots_total{outcome="complete",train_job="job"})", 3},
      {R"(precondor_session_snapshots_total{outcome="failed",train_job="job"})", 1},
      {R"(precondor_last_session_snapshot_step_number{train_job="job"})", 40},
      {"precondor_log_bytes_total", 77},
      {"precondor_log_failures_total", 1},
      {"precondor_journal_failures_total", 1},
      {"precondor_journal_failing_status", 1},
      {"precondor_draining_status", 1},
      {R"(precondor_build_info{role="all",version="1.2.3"})", 1},
  };
  for (const auto& [series, value] : expected) {
    ASSERT_EQ(scrape.samples.count(series), 1u) << series;
    EXPECT_NEAR(scrape.samples.at(series), value, 1e-9) << series;
  }
  EXPECT_GT(scrape.samples.at("precondor_resident_memory_bytes"), 1e6);
#if !PRECONDOR_HAS_ASAN && !PRECONDOR_HAS_TSAN
  const std::vector<char> held(size_t{100} << 20);
  EXPECT_NEAR(
      Parse(metrics.Render()).samples.at("precondor_allocated_bytes") - scrape.samples.at("precondor_allocated_bytes"),
      static_cast<double>(held.size()), 10e6);
#endif
  for (const char* time : {R"(precondor_last_snapshot_timestamp_seconds{train_job="job"})",
                           "precondor_last_log_sync_timestamp_seconds", "precondor_start_timestamp_seconds"}) {
    EXPECT_NEAR(scrape.samples.at(time), absl::ToDoubleSeconds(absl::Now() - absl::UnixEpoch()), 3600) << time;
  }
}

// The cost to a Prometheus: a job's own series on a server that is coordinator and shard, and all others, whose number
// follows from the code and not from what runs.
TEST(MetricsTest, AJobCostsAtMost58Series) {
  MetricsObserver metrics("1", "all");
  const size_t without = Parse(metrics.Render()).samples.size();
  Drive(metrics);
  size_t of_job = 0;
  for (const auto& [series, value] : Parse(metrics.Render()).samples) {
    of_job += absl::StrContains(series, "train_job=\"job\"") ? 1 : 0;
  }
  EXPECT_GT(of_job, 40u);
  EXPECT_LE(of_job, 58u);
  EXPECT_LE(without, 200u);
  const size_t with_one = Parse(metrics.Render()).samples.size();
  metrics.OnSessionInstalled("other");
  metrics.OnSessionOpened("other");
  EXPECT_EQ(Parse(metrics.Render()).samples.size() - with_one, of_job);
}

TEST(MetricsTest, TheProbeIsAskedBeforeEachScrape) {
  MetricsObserver metrics("1", "shard");
  uint64_t step = 0;
  metrics.SetProbe([&step](MetricsObserver& probed) { probed.OnShardStep("job", ++step); });
  metrics.OnSessionInstalled("job");
  for (const double expected : {1, 2}) {
    EXPECT_EQ(Value(metrics, R"(precondor_shard_step_number{train_job="job"})"), expected);
  }
}

TEST(MetricsTest, EveryReasonHasASeries) {
  MetricsObserver metrics("1", "shard");
  metrics.OnSessionInstalled("job");
  for (size_t reason = 0; reason < kErrorReasonCount; ++reason) {
    metrics.OnRejected("", ContributionKind::kGradient, static_cast<ErrorReason>(reason));
  }
  int64_t ones = 0;
  for (const auto& [series, value] : Parse(metrics.Render()).samples) {
    if (absl::StartsWith(series, "precondor_rejected_total") && value == 1) ++ones;
  }
  EXPECT_EQ(ones, 27) << "as many as precondor.v1.ErrorReason has";
}

TEST(MetricsTest, LossesThatAreNotFiniteCountTheStepAndKeepTheLoss) {
  MetricsObserver metrics("1", "coordinator");
  metrics.OnSessionOpened("job");
  metrics.OnStepReported("job", 1, 2.5, Mode::kSecondOrder);
  const double infinity = std::numeric_limits<double>::infinity();
  uint64_t step = 2;
  for (const double loss : {std::nan(""), infinity, -infinity}) {
    metrics.OnStepReported("job", step++, loss, Mode::kSecondOrder);
  }
  EXPECT_EQ(Value(metrics, R"(precondor_training_loss{train_job="job"})"), 2.5);
  EXPECT_EQ(Value(metrics, R"(precondor_last_step_number{train_job="job"})"), 4);
  EXPECT_EQ(Value(metrics, R"(precondor_steps_total{train_job="job"})"), 4);
  metrics.OnStepReported("job", step, 2.0, Mode::kSecondOrder);
  EXPECT_EQ(Value(metrics, R"(precondor_training_loss{train_job="job"})"), 2.0);
}

TEST(MetricsTest, AJobHasTheSeriesOfItsSideAtZeroFromTheStart) {
  MetricsObserver shard("1", "shard"), coordinator("1", "coordinator");
  shard.OnSessionInstalled("job");
  coordinator.OnSessionOpened("job");
  const std::set<std::string> decided = {"precondor_steps_total",
                                         "precondor_last_step_number",
                                         "precondor_training_loss",
                                         "precondor_second_order_mode",
                                         "precondor_smoothed_loss",
                                         "precondor_lease_step_number",
                                         "precondor_mode_step_seconds",
                                         "precondor_loss_rate",
                                         "precondor_mode_changes_total",
                                         "precondor_fallback_threshold_rate",
                                         "precondor_epoch_number",
                                         "precondor_joined_workers",
                                         "precondor_expected_workers",
                                         "precondor_session_snapshots_total",
                                         "precondor_last_session_snapshot_step_number"};
  const Scrape of_shard = Parse(shard.Render()), of_coordinator = Parse(coordinator.Render());
  for (const MetricInfo& info : kCatalog) {
    if (!absl::StartsWith(info.labels, "train_job")) continue;
    EXPECT_EQ(of_coordinator.families.count(info.name), decided.count(info.name)) << info.name;
    EXPECT_EQ(of_shard.families.count(info.name), 1 - decided.count(info.name)) << info.name;
  }
  for (const Scrape& scrape : {of_shard, of_coordinator}) {
    for (const auto& [series, value] : scrape.samples) {
      if (!absl::StrContains(series, "train_job=")) continue;
      const bool none = absl::StartsWith(series, "precondor_lagging_rank_number") ||
                        absl::StartsWith(series, "precondor_last_session_snapshot_step_number");
      EXPECT_EQ(value, none ? -1 : absl::StartsWith(series, "precondor_second_order_mode") ? 1 : 0) << series;
    }
  }
}

// Everything that may come late.
void Late(MetricsObserver& metrics) {
  metrics.OnContribution("job", ContributionKind::kGradient, 1);
  metrics.OnDuplicate("job", ContributionKind::kGradient);
  metrics.OnRejected("job", ContributionKind::kGradient, ErrorReason::kUnknownSession);
  metrics.OnSealed("job", ContributionKind::kGradient, absl::Seconds(1));
  metrics.OnUpdate("job", absl::Seconds(1), true);
  metrics.OnPrecondition("job", absl::Seconds(1));
  metrics.OnResult("job", Decision::kIdentity, 1);
  metrics.OnStepReported("job", 99, 1.0, Mode::kSecondOrder);
  metrics.OnDecision("job", {});
  metrics.OnLease("job", 7);
  metrics.OnShardStep("job", 7);
  metrics.OnSessionMemory("job", 7);
  metrics.OnSnapshotWritten("job", absl::Seconds(1), 1);
  metrics.OnModeChange("job", Mode::kFirstOrder);
  metrics.OnStragglers("job", {1});
  metrics.OnSessionSnapshot("job", true);
  metrics.OnLastSessionSnapshot("job", 9);
  metrics.OnEpoch("job", 3, 1, 1);
  metrics.OnSessionRemoved("job");
  metrics.OnSessionClosed("job");
}

TEST(MetricsTest, SeriesOfAClosedJobGoAndNothingLateBringsThemBack) {
  MetricsObserver metrics("1", "all");
  Late(metrics);
  EXPECT_THAT(metrics.Render(), Not(HasSubstr("train_job="))) << "a job that was never there";
  Drive(metrics);
  metrics.OnSessionInstalled("other");
  EXPECT_THAT(metrics.Render(), HasSubstr("train_job=\"job\""));
  metrics.OnSessionRemoved("job");
  EXPECT_THAT(metrics.Render(), Not(HasSubstr(R"(precondor_updates_total{train_job="job"})")));
  EXPECT_EQ(Value(metrics, R"(precondor_last_step_number{train_job="job"})"), 42)
      << "the coordinator's are still there";
  metrics.OnSessionClosed("job");
  EXPECT_THAT(metrics.Render(), Not(HasSubstr("train_job=\"job\"")));
  Late(metrics);
  EXPECT_THAT(metrics.Render(), Not(HasSubstr("train_job=\"job\"")));
  EXPECT_EQ(Value(metrics, R"(precondor_updates_total{train_job="other"})"), 0) << "another job's stay";
  metrics.OnSessionInstalled("job");
  EXPECT_EQ(Value(metrics, R"(precondor_updates_total{train_job="job"})"), 0) << "a session of that name starts anew";
}

TEST(MetricsTest, ASessionOfTheSameNameOutlivesTheLateRemovalOfTheOldSession) {
  MetricsObserver metrics("1", "shard");
  metrics.OnSessionInstalled("job");
  metrics.OnSessionInstalled("job");
  metrics.OnSessionRemoved("job");
  metrics.OnUpdate("job", absl::Seconds(1), true);
  EXPECT_EQ(Value(metrics, R"(precondor_updates_total{train_job="job"})"), 1);
  metrics.OnSessionRemoved("job");
  EXPECT_THAT(metrics.Render(), Not(HasSubstr("train_job=")));
}

TEST(MetricsTest, NamesOfJobsAreEscaped) {
  MetricsObserver metrics("1", "shard");
  metrics.OnSessionInstalled("a\"b\\c\nd");
  EXPECT_EQ(Value(metrics, R"(precondor_updates_total{train_job="a\"b\\c\nd"})"), 0);
}

// A connection to a server on this machine, after `text` was sent.
int Send(int port, const std::string& text) {
  const int fd = socket(AF_INET, SOCK_STREAM, 0);
  const timeval limit = {.tv_sec = 60, .tv_usec = 0};  // a read that waits longer fails
  EXPECT_EQ(setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof(limit)), 0);
  sockaddr_in address = {};
  address.sin_family = AF_INET;
  address.sin_port = htons(static_cast<uint16_t>(port));
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  EXPECT_EQ(connect(fd, reinterpret_cast<const sockaddr*>(&address), sizeof(address)), 0);
  for (size_t sent = 0; sent < text.size();) {
    const ssize_t n = send(fd, text.data() + sent, text.size() - sent, MSG_NOSIGNAL);
    if (n <= 0) break;  // refused before all of it was sent
    sent += static_cast<size_t>(n);
  }
  return fd;
}

// Reads the rest of an answer, headers and all, and closes the connection.
std::string Receive(int fd) {
  std::string answer;
  char part[4096];
  for (ssize_t n = 0; (n = recv(fd, part, sizeof(part), 0)) > 0;) answer.append(part, static_cast<size_t>(n));
  close(fd);
  return answer;
}

// Returns the answer of a server on this machine, headers and all.
std::string Ask(int port, const std::string& request) { return Receive(Send(port, request + " HTTP/1.0\r\n\r\n")); }

std::string BodyOf(const std::string& answer) {
  const size_t body = answer.find("\r\n\r\n");
  return body == std::string::npos ? "no body" : answer.substr(body + 4);
}

// Serves on a free port and returns it.
int Serve(MetricsObserver& metrics, std::map<std::string, Page> pages = {}) {
  const absl::StatusOr<TcpSocket> socket = ListenTcp("127.0.0.1:0");
  EXPECT_TRUE(socket.ok()) << socket.status();
  const absl::Status serves = metrics.Serve(socket->fd, std::move(pages));
  EXPECT_TRUE(serves.ok()) << serves;
  return socket->port;
}

TEST(MetricsTest, ServesTheScrapeOverHttp) {
  MetricsObserver metrics("1", "all");
  const int port = Serve(metrics);
  Drive(metrics);
  const std::string answer = Ask(port, "GET /metrics");
  EXPECT_THAT(answer, HasSubstr(" 200 OK"));
  EXPECT_THAT(answer, HasSubstr("Content-Type: text/plain; version=0.0.4; charset=utf-8\r\n"));
  const Scrape scrape = Parse(BodyOf(answer));
  EXPECT_EQ(scrape.families, Parse(metrics.Render()).families);
  EXPECT_GT(scrape.samples.at("precondor_resident_memory_bytes"), 1e6);
}

TEST(MetricsTest, OtherPagesAreServedAndNothingCanBeWritten) {
  MetricsObserver metrics("1", "all");
  const int port = Serve(metrics, {{"/status", {.content_type = "application/json", .make = [] { return "{}"; }}}});
  const std::string page = Ask(port, "GET /status?session=a%20b%22");
  EXPECT_THAT(page, HasSubstr(" 200 OK"));
  EXPECT_THAT(page, HasSubstr("Content-Type: application/json\r\n"));
  EXPECT_THAT(page, HasSubstr("X-Content-Type-Options: nosniff\r\n"));
  EXPECT_EQ(BodyOf(page), "{}");
  EXPECT_EQ(BodyOf(Ask(port, "HEAD /status")), "");
  for (const char* missing : {"/", "/status/", "/metrics/x", "/../etc/passwd"}) {
    EXPECT_THAT(Ask(port, absl::StrCat("GET ", missing)), HasSubstr(" 404 Not Found")) << missing;
  }
  for (const char* method : {"POST", "PUT", "DELETE", "OPTIONS"}) {
    EXPECT_THAT(Ask(port, absl::StrCat(method, " /metrics")), HasSubstr(" 405 Method Not Allowed")) << method;
  }
  metrics.StopServing();
}

TEST(MetricsTest, IsScrapedWhileOthersWait) {
  MetricsObserver metrics("1", "all");
  std::promise<void> release;
  const std::shared_future<void> released = release.get_future().share();
  const Page waits = {.content_type = "text/plain", .make = [&] {
                        released.wait();
                        return "done";
                      }};
  const int port = Serve(metrics, {{"/waits", waits}});
  std::vector<int> waiting;
  for (int i = 0; i < 20; ++i) waiting.push_back(Send(port, i % 2 == 0 ? "GET /waits HTTP/1.0\r\n\r\n" : "GET"));
  EXPECT_THAT(Ask(port, "GET /metrics"), HasSubstr(" 200 OK"));
  release.set_value();
  for (const int fd : waiting) close(fd);
  metrics.StopServing();  // before the page's promise goes
}

TEST(MetricsTest, AnswersThatAreNotReadTakeNoMoreThanAPagesShare) {
  MetricsObserver metrics("1", "all");
  std::atomic<int> made = 0;
  const Page large = {.content_type = "text/plain", .make = [&] {
                        ++made;
                        return std::string(12 << 20, 'x');  // more than sockets buffer
                      }};
  const int port = Serve(metrics, {{"/large", large}});
  std::vector<int> unread;
  for (int i = 0; i < 20; ++i) unread.push_back(Send(port, "GET /large HTTP/1.0\r\n\r\n"));
  std::vector<int> whole;
  for (const int fd : unread) {
    char status[12];
    ASSERT_EQ(recv(fd, status, sizeof(status), MSG_WAITALL), static_cast<ssize_t>(sizeof(status)));
    if (std::string(status, sizeof(status)) == "HTTP/1.1 200") {
      whole.push_back(fd);
    } else {
      EXPECT_EQ(std::string(status, sizeof(status)), "HTTP/1.1 503");
    }
  }
  ASSERT_EQ(whole.size(), 2u);
  EXPECT_EQ(made, 2);
  EXPECT_THAT(Ask(port, "GET /large"), HasSubstr("clients have not read 25165824 bytes of this page"));
  EXPECT_THAT(Ask(port, "GET /metrics"), HasSubstr(" 200 OK")) << "another page";
  EXPECT_EQ(Receive(whole.front()).size() >> 20, 12u);
  for (const int fd : unread) {
    if (fd != whole.front()) close(fd);
  }
  const absl::Time deadline = absl::Now() + absl::Seconds(60);
  while (absl::StrContains(Ask(port, "GET /large"), " 503 ") && absl::Now() < deadline) {
  }
  EXPECT_GT(made, 2) << "the page is there again once it was read";
}

// Bytes of all sorts, and how the answer begins; empty: the connection closes without one.
TEST(MetricsTest, HostileRequestsAreRefusedAndTheServerGoesOn) {
  MetricsObserver metrics("1", "all");
  const int port = Serve(metrics);
  const std::string host = " HTTP/1.1\r\nHost: a\r\n";
  const std::string upgrade = host + "Connection: Upgrade\r\nUpgrade: websocket\r\n";
  const std::string body = std::string(1 << 20, 'x');
  const std::vector<std::pair<std::string, std::string>> requests = {
      {"GET /" + upgrade + "\r\n", "400"},
      {"GET /metrics" + upgrade + "Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\nSec-WebSocket-Version: 13\r\n\r\n",
       "400"},
      {"GET /metrics" + host + "Connection: Upgrade\r\nUpgrade: WebSocket\r\n\r\n", "400"},
      {"POST /" + upgrade + "\r\n", "405"},
      {"GET /metrics" + host + "Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\n\r\n", "200"},
      {"GET /metrics" + host + "Expect: 100-continue\r\nContent-Length: 5\r\n\r\n", "200"},
      {"GET /metrics" + host + "Range: bytes=0-1,5-99999999999999999999\r\n\r\n", "200"},
      {"GET /metrics" + host + "Authorization: Digest username=\"" + std::string(4000, 'a') + "\"\r\n\r\n", "200"},
      {"GET /metrics" + host + "X: " + std::string(100 << 10, 'a') + "\r\n\r\n", "431"},
      {"GET /" + std::string(100 << 10, 'a') + host + "\r\n", "414"},
      {"PUT /metrics" + host + "Transfer-Encoding: chunked\r\n\r\nffffffffffffffff\r\n" + body, "405"},
      {"POST /metrics" + host + "Content-Length: 99999999999999999999999\r\n\r\n", "4"},
      {"POST /metrics" + host + "Content-Length: -1\r\n\r\n", "4"},
      {"GET /cgi-bin/a.cgi/../../../etc/passwd" + host + "\r\n", "404"},
      {"GET /%00%2e%2e%2f" + host + "\r\n", "404"},
      {"GET http://localhost/metrics" + host + "\r\n", "404"},
      {"GET ?" + host + "\r\n", "4"},
      {std::string("GET /metrics\0 HTTP/1.1\r\n\r\n", 26), ""},
      {"GET /metrics HTTP/9.9\r\n\r\n", ""},
      {"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", ""},
      {"\x16\x03\x01\x02" + body, ""},
      {std::string(1 << 16, '\n'), ""},
      {std::string(1 << 16, '\0'), ""},
      {"GET", ""},
      {"", ""},
  };
  for (const auto& [request, status] : requests) {
    const int fd = Send(port, request);
    shutdown(fd, SHUT_WR);
    const std::string answer = Receive(fd);
    EXPECT_THAT(answer, StartsWith(status.empty() ? "" : "HTTP/1.1 " + status)) << request.substr(0, 200);
    EXPECT_THAT(Ask(port, "GET /metrics"), HasSubstr(" 200 OK")) << "after " << request.substr(0, 200);
  }
}

}  // namespace
}  // namespace precondor::metrics
