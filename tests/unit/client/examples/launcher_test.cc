// SPDX-License-Identifier: Apache-2.0
// The launcher starts its own program again; in this one a worker plays the part that the job's coordinator field
// names.
#include "client/cpp/examples/launcher.h"

#include <fstream>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <iostream>
#include <iterator>
#include <string>
#include <sys/stat.h>
#include <unistd.h>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/string_view.h"

#include "client/cpp/examples/shared_reducer.h"
#include "client/cpp/examples/worker_role.h"

namespace precondor::digits {
namespace {

using ::testing::HasSubstr;

constexpr int32_t kWorkers = 3;

void Report(const WorkerReport& report) { std::cout << EncodeReport(report) << std::endl; }

WorkerReport EndOf(int64_t run, int32_t rank) {
  WorkerReport report;
  report.run = run;
  report.done = true;
  report.result.seconds = rank;
  report.result.steps = 10;
  report.result.statistics_bytes = 1;
  report.result.gradient_bytes = 100;
  report.result.weights_hash = 42;
  report.result.stretches = {Stretch{0, Mode::kSecondOrder, 7, 1.0 + rank, 1, 100},
                             Stretch{7, Mode::kFirstOrder, 3, 2.0 - rank, 0, 10}};
  if (rank == 0) report.result.curve = {CurvePoint{10, 0.5, 0, 0}};
  return report;
}

int PlayWorker(int32_t rank, int reducer_fd) {
  const std::string text((std::istreambuf_iterator<char>(std::cin)), std::istreambuf_iterator<char>());
  const auto job = DecodeJob(text);
  if (!job.ok()) return 9;
  auto reducer = SharedReducer::Attach(reducer_fd, {job->workers, job->reducer_elements}, kReducerTimeout);
  if (!reducer.ok()) return 8;
  const std::string& part = job->coordinator;
  if (part == "fails" && rank == 1) return 7;
  if (part == "dies" && rank == 2) abort();
  const std::string marker = job->checkpoint_dir + "/died";
  if (part == "dies once" && rank == 2 && access(marker.c_str(), F_OK) != 0) {
    std::ofstream(marker) << "died";
    abort();
  }
  if (part == "babbles" && rank == 0) std::cout << "hello" << std::endl;
  if (part == "stops early") return 0;
  // With a failing or dying rank this waits until the launcher stops the process.
  if (!(*reducer)->Barrier().ok()) return 6;
  if (rank == 0) Report(WorkerReport{0, false, CurvePoint{10, 0.5, 0, 0}, RunResult()});
  for (int64_t run = 0; run < static_cast<int64_t>(job->runs.size()); ++run) {
    WorkerReport end = EndOf(run, rank);
    if (part == "differs" && rank == 1) end.result.weights_hash = 43;
    if (part == "switches alone" && rank == 2) end.result.stretches[1].first_step = 8;
    if (part == "stays alone" && rank == 2) end.result.stretches.pop_back();
    Report(end);
  }
  return 0;
}

Job JobOf(const std::string& part) {
  Run run;
  run.task = *FindTask("classifier");
  run.method = *FindMethod("none");
  return Job{"data", part, "s", kWorkers, 4, 0, "", {run, run}};
}

TEST(LauncherTest, GathersWhatTheWorkersReport) {
  int64_t points = 0;
  const auto results = LaunchWorkers(JobOf("works"), [&](const WorkerReport& report) {
    ++points;
    EXPECT_EQ(report.point.held_out_loss, 0.5);
  });
  ASSERT_TRUE(results.ok()) << results.status();
  EXPECT_EQ(points, 1);
  ASSERT_EQ(results->size(), 2u);
  for (const RunResult& result : *results) {
    EXPECT_EQ(result.seconds, kWorkers - 1);  // of the slowest
    EXPECT_EQ(result.statistics_bytes, kWorkers);
    EXPECT_EQ(result.gradient_bytes, 100 * kWorkers);
    EXPECT_EQ(result.steps, 10);
    EXPECT_EQ(result.curve.size(), 1u);
    ASSERT_EQ(result.stretches.size(), 2u);
    EXPECT_EQ(result.stretches[0].seconds, kWorkers);
    EXPECT_EQ(result.stretches[0].gradient_bytes, 100 * kWorkers);
    EXPECT_EQ(result.stretches[1].seconds, 2.0);
    EXPECT_EQ(result.stretches[1].steps, 3);
  }
}

TEST(LauncherTest, SaysWhichWorkerFailed) {
  EXPECT_THAT(std::string(LaunchWorkers(JobOf("fails"), nullptr).status().message()),
              HasSubstr("worker 1 failed with exit status 7"));
  EXPECT_THAT(std::string(LaunchWorkers(JobOf("dies"), nullptr).status().message()),
              HasSubstr("worker 2 was ended by signal 6"));
}

TEST(LauncherTest, StartsWorkersThatASignalEndedAgain) {
  Job job = JobOf("dies once");
  job.checkpoint_dir = ::testing::TempDir() + "launcher_test_" + std::to_string(getpid());
  ASSERT_EQ(mkdir(job.checkpoint_dir.c_str(), 0700), 0);
  job.worker_restarts = 1;
  const auto results = LaunchWorkers(job, nullptr);
  ASSERT_TRUE(results.ok()) << results.status();
  EXPECT_EQ(results->size(), 2u);
  job.coordinator = "dies";
  EXPECT_THAT(std::string(LaunchWorkers(job, nullptr).status().message()), HasSubstr("worker 2 was ended by signal 6"))
      << "as often as it was told, no more";
}

TEST(LauncherTest, RefusesWhatIsNotAReport) {
  EXPECT_THAT(std::string(LaunchWorkers(JobOf("babbles"), nullptr).status().message()),
              HasSubstr("not a worker report"));
}

TEST(LauncherTest, RefusesReplicasThatDiffer) {
  EXPECT_THAT(std::string(LaunchWorkers(JobOf("differs"), nullptr).status().message()),
              HasSubstr("the replicas differ"));
}

TEST(LauncherTest, RefusesWorkersThatHadOtherModes) {
  for (const char* part : {"switches alone", "stays alone"}) {
    EXPECT_THAT(std::string(LaunchWorkers(JobOf(part), nullptr).status().message()), HasSubstr("the modes differ"));
  }
}

TEST(LauncherTest, MissesRunsThatNobodyEnded) {
  EXPECT_THAT(std::string(LaunchWorkers(JobOf("stops early"), nullptr).status().message()),
              HasSubstr("run 0: 0 of 3 workers reported its end"));
}

// The worker's rank when the command line is that of a worker, else -1.
int32_t RankOf(int argc, char** argv) {
  int32_t rank = -1;
  constexpr absl::string_view kFlag = "--worker-rank=";
  for (int i = 1; i < argc; ++i) {
    const absl::string_view argument = argv[i];
    if (argument.substr(0, kFlag.size()) == kFlag && !absl::SimpleAtoi(argument.substr(kFlag.size()), &rank)) return -1;
  }
  return rank;
}

}  // namespace
}  // namespace precondor::digits

int main(int argc, char** argv) {
  constexpr int kReducerFd = 3;  // as the launcher's --reducer-fd says
  const int32_t rank = precondor::digits::RankOf(argc, argv);
  if (rank >= 0) return precondor::digits::PlayWorker(rank, kReducerFd);
  ::testing::InitGoogleTest(&argc, argv);
  return RUN_ALL_TESTS();
}
