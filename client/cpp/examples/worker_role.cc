// SPDX-License-Identifier: Apache-2.0
#include "client/cpp/examples/worker_role.h"

#include <iostream>
#include <iterator>
#include <memory>
#include <signal.h>
#include <string>
#include <sys/prctl.h>
#include <utility>

#include "absl/strings/str_cat.h"

#include "client/cpp/examples/checkpoint.h"
#include "client/cpp/examples/digits_data.h"
#include "client/cpp/examples/service_exchange.h"
#include "kernels/base/status_macros.h"
#include "precondor/client.h"

namespace precondor::digits {
namespace {

// Divides a run at every change of mode. All answers of a step are in before the next one begins, so that a stretch has
// the bytes of its steps.
class ModeMeter {
 public:
  explicit ModeMeter(const Worker& worker) : worker_(worker), before_(worker.traffic()) {}

  void BeginStep(uint64_t step, double seconds) {
    const Mode mode = worker_.ModeOf(step);
    if (stretches_.empty() || stretches_.back().mode != mode) {
      End(seconds);
      stretches_.push_back(Stretch{.first_step = step, .mode = mode});
    }
    ++stretches_.back().steps;
  }
  std::vector<Stretch> Finish(double seconds) {
    End(seconds);
    return std::move(stretches_);
  }

 private:
  void End(double seconds) {
    const Traffic now = worker_.traffic();
    if (!stretches_.empty()) {
      stretches_.back().seconds = seconds - seconds_before_;
      stretches_.back().statistics_bytes = now.statistics_bytes - before_.statistics_bytes;
      stretches_.back().gradient_bytes =
          now.gradient_bytes - before_.gradient_bytes + now.result_bytes - before_.result_bytes;
    }
    before_ = now;
    seconds_before_ = seconds;
  }

  const Worker& worker_;
  Traffic before_;
  double seconds_before_ = 0;
  std::vector<Stretch> stretches_;
};

absl::StatusOr<RunResult> TrainOnce(const Run& run, const DigitsData& data, Worker& worker, SharedReducer& reducer,
                                    TrainOptions options) {
  PRECONDOR_ASSIGN_OR_RETURN(const std::unique_ptr<ServiceExchange> exchange, ServiceExchange::Make(worker, &reducer));
  const Traffic before = worker.traffic();
  ModeMeter meter(worker);
  options.before_step = [&](uint64_t step, double seconds) { meter.BeginStep(step, seconds); };
  PRECONDOR_ASSIGN_OR_RETURN(TrainResult trained, Train(run, data, *exchange, options));
  const Traffic after = worker.traffic();
  RunResult result;
  result.curve = std::move(trained.curve);
  result.seconds = trained.seconds;
  result.steps = run.task.steps;
  result.skipped_steps = trained.skipped_steps;
  result.statistics_bytes = after.statistics_bytes - before.statistics_bytes;
  result.gradient_bytes = after.gradient_bytes - before.gradient_bytes + after.result_bytes - before.result_bytes;
  result.weights_hash = HashWeights(trained.weights);
  result.stretches = meter.Finish(trained.seconds);
  return result;
}

}  // namespace

absl::Status WorkThrough(const Job& job, int32_t rank, SharedReducer& reducer,
                         const std::function<void(const WorkerReport&)>& report) {
  PRECONDOR_ASSIGN_OR_RETURN(const DigitsData data, LoadDigits(job.data_path));
  ClientOptions client_options;
  client_options.coordinator = job.coordinator;
  PRECONDOR_ASSIGN_OR_RETURN(const std::unique_ptr<Client> client, Client::Connect(client_options));
  // Of the process that held this rank before and was killed in a run; its checkpoint says that all were in it.
  std::string checkpoint_path;
  std::optional<Checkpoint> predecessor;
  if (!job.checkpoint_dir.empty()) {
    checkpoint_path = absl::StrCat(job.checkpoint_dir, "/", job.session_prefix, "-rank", rank);
    PRECONDOR_ASSIGN_OR_RETURN(predecessor, ReadCheckpoint(checkpoint_path));
  }
  for (size_t i = 0; i < job.runs.size(); ++i) {
    const Run& run = job.runs[i];
    const auto index = static_cast<int64_t>(i);
    if (predecessor.has_value() && predecessor->run > index) continue;
    const bool resumes = predecessor.has_value() && predecessor->run == index;
    const SessionSpec spec = MakeSessionSpec(run, absl::StrCat(job.session_prefix, "-", i));
    if (!resumes) {
      if (rank == 0) PRECONDOR_RETURN_IF_ERROR(client->OpenSession(spec).status());
      PRECONDOR_RETURN_IF_ERROR(reducer.Barrier());
    }
    WorkerOptions worker_options;
    worker_options.rank = static_cast<uint32_t>(rank);
    if (resumes) worker_options.first_step = static_cast<uint64_t>(predecessor->state.step);
    PRECONDOR_ASSIGN_OR_RETURN(const std::unique_ptr<Worker> worker, client->Join(spec.name, worker_options));
    TrainOptions options;
    options.evaluate = rank == 0;
    if (resumes) options.resume = &predecessor->state;
    if (!checkpoint_path.empty()) {
      options.checkpoint = [&](const TrainState& state) -> absl::Status {
        PRECONDOR_RETURN_IF_ERROR(worker->Flush());
        return WriteCheckpoint(checkpoint_path, Checkpoint{.run = index, .state = state});
      };
    }
    options.progress = [&](const CurvePoint& point) { report(WorkerReport{index, false, point, RunResult()}); };
    PRECONDOR_ASSIGN_OR_RETURN(RunResult result, TrainOnce(run, data, *worker, reducer, std::move(options)));
    report(WorkerReport{index, true, CurvePoint(), std::move(result)});
    // The last answers are in everywhere before the session goes.
    PRECONDOR_RETURN_IF_ERROR(reducer.Barrier());
    if (rank == 0) PRECONDOR_RETURN_IF_ERROR(client->CloseSession(spec.name).status());
  }
  return absl::OkStatus();
}

int WorkerMain(int32_t rank, int reducer_fd) {
  prctl(PR_SET_PDEATHSIG, SIGTERM);  // no worker outlives its parent
  UseSingleThreadedBlas();
  const std::string text((std::istreambuf_iterator<char>(std::cin)), std::istreambuf_iterator<char>());
  const absl::Status status = [&]() -> absl::Status {
    PRECONDOR_ASSIGN_OR_RETURN(const Job job, DecodeJob(text));
    PRECONDOR_ASSIGN_OR_RETURN(
        const std::unique_ptr<SharedReducer> reducer,
        SharedReducer::Attach(reducer_fd, SharedReducer::Shape{job.workers, job.reducer_elements}, kReducerTimeout));
    return WorkThrough(job, rank, *reducer,
                       [](const WorkerReport& report) { std::cout << EncodeReport(report) << std::endl; });
  }();
  if (status.ok()) return 0;
  std::cerr << "precondor-digits: worker " << rank << ": " << status.ToString() << "\n";
  return 1;
}

}  // namespace precondor::digits
