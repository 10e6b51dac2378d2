// SPDX-License-Identifier: Apache-2.0
#include "tests/bench/service_jobs.h"

#include <atomic>
#include <memory>
#include <string>
#include <thread>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"

#include "kernels/base/clock.h"
#include "kernels/base/status_macros.h"
#include "precondor/client.h"

namespace precondor {
namespace {

constexpr double kTarget = 2;                              // greatest ratio of p99 beside the large job to p99 alone
constexpr int kTurns = 4;                                  // turns alone, and turns beside the large job
constexpr absl::Duration kPause = absl::Milliseconds(10);  // between two steps of the small job

// A job of one rank, with layers of one shape. Its method is muon, which has no statistics and much arithmetic for each
// byte.
class Job {
 public:
  static absl::StatusOr<std::unique_ptr<Job>> Begin(const PerfServer& server, const std::string& name, int layers,
                                                    int64_t side) {
    auto job = std::unique_ptr<Job>(new Job(side));
    SessionSpec spec;
    spec.name = absl::StrCat("perf-jobs-", name);
    spec.method.name = "muon";
    for (int layer = 0; layer < layers; ++layer) spec.layers.push_back({absl::StrCat("l", layer), side, side, false});
    ClientOptions options;
    options.coordinator = server.address();
    PRECONDOR_ASSIGN_OR_RETURN(job->client_, Client::Connect(options));
    PRECONDOR_RETURN_IF_ERROR(job->client_->OpenSession(spec).status());
    PRECONDOR_ASSIGN_OR_RETURN(job->worker_, job->client_->Join(spec.name, {0, 0}));
    job->gradients_.resize(layers);
    for (size_t layer = 0; layer < job->gradients_.size(); ++layer) {
      std::vector<float>& gradient = job->gradients_[layer];
      gradient.resize(side * side);
      for (size_t i = 0; i < gradient.size(); ++i) gradient[i] = static_cast<float>((i * 37 + layer) % 64) / 32 - 1;
    }
    job->answers_ = job->gradients_;
    return job;
  }

  // Runs a step. Returns the milliseconds until all layers are answered.
  absl::StatusOr<double> Step() {
    const absl::Time start = MonotonicNow();
    std::vector<PreconditionFuture> futures;
    for (size_t layer = 0; layer < gradients_.size(); ++layer) {
      futures.push_back(worker_->Precondition(
          step_, static_cast<int64_t>(layer),
          {ConstMatrixView(gradients_[layer].data(), side_, side_), MatrixView(answers_[layer].data(), side_, side_)},
          1));
    }
    for (const PreconditionFuture& future : futures) PRECONDOR_RETURN_IF_ERROR(future.Wait().status());
    const double milliseconds = absl::ToDoubleMilliseconds(MonotonicNow() - start);
    PRECONDOR_RETURN_IF_ERROR(worker_->ReportStep(step_++, 1, 1, true, 0.1).Wait().status());
    return milliseconds;
  }

  absl::Status End() {
    const std::string name = worker_->session().spec.name;
    worker_.reset();
    return client_->CloseSession(name).status();
  }

 private:
  explicit Job(int64_t side) : side_(side) {}

  const int64_t side_;
  std::vector<std::vector<float>> gradients_, answers_;  // must outlive worker_
  std::unique_ptr<Client> client_;
  std::unique_ptr<Worker> worker_;
  uint64_t step_ = 0;
};

// Runs `steps` steps and appends their milliseconds.
absl::Status AddSteps(Job& job, int64_t steps, std::vector<double>& milliseconds) {
  for (int64_t step = 0; step < steps; ++step) {
    PRECONDOR_ASSIGN_OR_RETURN(milliseconds.emplace_back(), job.Step());
    absl::SleepFor(kPause);
  }
  return absl::OkStatus();
}

// Like AddSteps, while `other` makes steps. Adds the number of its steps to `others`.
absl::Status AddStepsBeside(Job& job, Job& other, int64_t steps, std::vector<double>& milliseconds, int64_t& others) {
  std::atomic<bool> stop = false;
  absl::Status of_other;
  std::thread thread([&] {
    for (; !stop && of_other.ok(); ++others) of_other = other.Step().status();
  });
  const absl::Status status = AddSteps(job, steps, milliseconds);
  stop = true;
  thread.join();
  return status.ok() ? of_other : status;
}

}  // namespace

absl::StatusOr<std::vector<PerfRow>> MeasureJobs(const PerfOptions& options, const PerfServer& server) {
  PRECONDOR_ASSIGN_OR_RETURN(const std::unique_ptr<Job> small, Job::Begin(server, "small", 4, 64));
  PRECONDOR_ASSIGN_OR_RETURN(const std::unique_ptr<Job> large, Job::Begin(server, "large", 16, 384));
  std::vector<double> first, alone, beside;
  PRECONDOR_RETURN_IF_ERROR(AddSteps(*small, options.warmup, first));
  PRECONDOR_RETURN_IF_ERROR(large->Step().status());
  int64_t of_large = 0;
  for (int turn = 0; turn < kTurns; ++turn) {
    PRECONDOR_RETURN_IF_ERROR(AddSteps(*small, options.steps, alone));
    PRECONDOR_RETURN_IF_ERROR(AddStepsBeside(*small, *large, options.steps, beside, of_large));
  }
  PRECONDOR_RETURN_IF_ERROR(small->End());
  PRECONDOR_RETURN_IF_ERROR(large->End());
  std::vector<PerfRow> rows;
  for (const auto& [name, fraction] : {std::pair("p50", 0.5), std::pair("p99", 0.99)}) {
    const double limit = Percentile(alone, fraction), value = Percentile(beside, fraction);
    PerfRow row{absl::StrCat("jobs/small_beside_large_", name), value, "ms", limit, value / limit};
    if (fraction > 0.5) {
      row.target = kTarget * limit;
      row.pass = value <= *row.target;
    }
    rows.push_back(row);
  }
  rows.push_back({"jobs/large_steps_meanwhile", static_cast<double>(of_large), "steps"});
  return rows;
}

}  // namespace precondor
