// SPDX-License-Identifier: Apache-2.0
// precondor-digits: trains on real data through the service. Read from here: TrainJob opens a session, TrainRank is one
// worker's whole life, ServiceExchange is what a worker does at each step.
#include <cstdlib>
#include <fstream>
#include <iostream>
#include <memory>
#include <string>
#include <thread>
#include <unistd.h>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"

#include "client/cpp/examples/digits_data.h"
#include "client/cpp/examples/options.h"
#include "client/cpp/examples/rank_reducer.h"
#include "client/cpp/examples/results.h"
#include "client/cpp/examples/service_exchange.h"
#include "kernels/base/blas_core.h"
#include "kernels/base/status_macros.h"
#include "precondor/client.h"

namespace precondor::digits {
namespace {

// Prints how far the training is, a line for each tenth of it.
void ShowProgress(const Run& run, const CurvePoint& point) {
  const int64_t before = (point.step - kEvaluateEvery) * 10 / run.task.steps, now = point.step * 10 / run.task.steps;
  if (before == now) return;
  std::cerr << absl::StrFormat("training: %d %%, %s, %s + %s, seed %d, held-out loss %.4f\n", now * 10, run.task.name,
                               run.method.name, run.optimizer, run.seed, point.held_out_loss);
}

// One worker: joins the session, trains through it, and returns what it took.
absl::StatusOr<RankResult> TrainRank(const Options& options, const std::string& session, const DigitsData& data,
                                     Client& client, RankReducer* reducer, uint32_t rank) {
  TrainState state;
  bool resumes = false;
  TrainOptions train_options;
  if (!options.checkpoint_path.empty()) {
    PRECONDOR_ASSIGN_OR_RETURN(resumes, ReadCheckpoint(options.checkpoint_path, options.run.task.model, state));
    if (resumes) train_options.resume = &state;
  }
  // Waits until all ranks have joined. A process that takes over a rank names the step that it goes on from.
  PRECONDOR_ASSIGN_OR_RETURN(
      const std::unique_ptr<Worker> worker,
      client.Join(session, WorkerOptions{.rank = rank, .first_step = static_cast<uint64_t>(state.step)}));
  PRECONDOR_ASSIGN_OR_RETURN(const std::unique_ptr<ServiceExchange> exchange, ServiceExchange::Make(*worker, reducer));

  RankResult result;
  result.log.first_step = static_cast<uint64_t>(state.step);
  const auto note_usage = [&](double seconds) {
    const Traffic traffic = worker->traffic();
    result.log.seconds.push_back(seconds);
    result.log.statistics_bytes.push_back(traffic.statistics_bytes);
    result.log.gradient_bytes.push_back(traffic.gradient_bytes + traffic.result_bytes);
  };
  train_options.before_step = [&](uint64_t step, double seconds) {
    result.log.modes.push_back(worker->ModeOf(step));
    note_usage(seconds);
  };
  if (!options.checkpoint_path.empty()) {
    train_options.checkpoint = [&](const TrainState& before) -> absl::Status {
      PRECONDOR_RETURN_IF_ERROR(worker->Flush());
      return WriteCheckpoint(options.checkpoint_path, before);
    };
  }
  train_options.evaluate = rank == 0 || options.rank >= 0;
  if (rank == 0) {
    train_options.progress = [&](const CurvePoint& point) { ShowProgress(options.run, point); };
  }
  PRECONDOR_ASSIGN_OR_RETURN(result.trained, Train(options.run, data, *exchange, train_options));
  note_usage(result.trained.seconds);
  PRECONDOR_RETURN_IF_ERROR(worker->Flush());
  return result;
}

// All workers of this process, a thread each. A job cannot go on without one of its ranks: the first one that fails
// ends the process.
absl::StatusOr<std::vector<RankResult>> TrainRanks(const Options& options, const std::string& session,
                                                   const DigitsData& data, Client& client) {
  if (options.rank >= 0) {
    std::vector<RankResult> one(1);
    PRECONDOR_ASSIGN_OR_RETURN(one[0],
                               TrainRank(options, session, data, client, nullptr, static_cast<uint32_t>(options.rank)));
    return one;
  }
  RankReducer reducer(options.run.workers);
  std::vector<RankResult> results(static_cast<size_t>(options.run.workers));
  std::vector<std::thread> workers;
  for (size_t rank = 0; rank < results.size(); ++rank) {
    workers.emplace_back([&, rank] {
      auto result = TrainRank(options, session, data, client, &reducer, static_cast<uint32_t>(rank));
      if (!result.ok()) {
        std::cerr << absl::StrCat("precondor-digits: worker ", rank, ": ", result.status().ToString(), "\n");
        std::_Exit(1);
      }
      results[rank] = *std::move(result);
    });
  }
  for (std::thread& worker : workers) worker.join();
  return results;
}

absl::Status TrainJob(const Options& options) {
  UseSingleThreadedBlas();
  PRECONDOR_ASSIGN_OR_RETURN(const DigitsData data, LoadDigits(options.data_path));
  PRECONDOR_ASSIGN_OR_RETURN(const std::unique_ptr<Client> client,
                             Client::Connect(ClientOptions{.coordinator = options.coordinator}));
  const std::string session = options.session.empty() ? absl::StrCat("digits-", getpid()) : options.session;
  // Every process of a job can open the session: the first one creates it.
  PRECONDOR_RETURN_IF_ERROR(client->OpenSession(MakeSessionSpec(options.run, session)).status());
  PRECONDOR_ASSIGN_OR_RETURN(const std::vector<RankResult> ranks, TrainRanks(options, session, data, *client));
  // With --rank this process does not know when the other workers have their last answers.
  if (options.rank < 0) PRECONDOR_RETURN_IF_ERROR(client->CloseSession(session).status());
  PRECONDOR_RETURN_IF_ERROR(CheckReplicas(ranks));
  const TrainResult& trained = ranks.front().trained;
  std::cout << absl::StrFormat("%s, %s + %s, seed %d: held-out loss %.4f after %d steps, %.1f ms a step\n",
                               options.run.task.name, options.run.method.name, options.run.optimizer, options.run.seed,
                               trained.curve.back().held_out_loss, options.run.task.steps,
                               1e3 * trained.seconds / static_cast<double>(ranks.front().log.modes.size()));
  if (options.json_path.empty()) return absl::OkStatus();
  std::ofstream file(options.json_path, std::ios::trunc);
  file << ResultJson(options.run, ranks);
  file.close();
  return file ? absl::OkStatus() : absl::UnavailableError(absl::StrCat("cannot write ", options.json_path));
}

int Main(int argc, const char* const* argv) {
  absl::StatusOr<Options> options =
      ParseOptions(absl::MakeConstSpan(argv + 1, static_cast<size_t>(argc - 1)), PRECONDOR_DIGITS_DATA);
  if (options.ok() && !options->help && options->coordinator.empty()) {
    options = absl::InvalidArgumentError("expected --coordinator HOST:PORT");
  }
  if (!options.ok()) {
    std::cerr << "precondor-digits: " << options.status().message() << "; see --help\n";
    return 2;
  }
  if (options->help) {
    std::cout << HelpText();
    return 0;
  }
  const absl::Status status = TrainJob(*options);
  if (status.ok()) return 0;
  std::cerr << "precondor-digits: " << status.ToString() << "\n";
  return 1;
}

}  // namespace
}  // namespace precondor::digits

int main(int argc, char** argv) {
  precondor::UseBestBlasCore();
  return precondor::digits::Main(argc, argv);
}
