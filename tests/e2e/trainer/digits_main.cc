// SPDX-License-Identifier: Apache-2.0
// digits_trainer: trains on real data through the service. Read from here: TrainJob opens a session, TrainRank is one
// worker's whole life, ServiceExchange is what a worker does at each step.
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
#include "absl/time/time.h"

#include "kernels/base/clock.h"
#include "kernels/base/process_setup.h"
#include "kernels/base/status_macros.h"
#include "precondor/client.h"
#include "tests/e2e/trainer/model.h"
#include "tests/e2e/trainer/trainer.h"

namespace precondor::digits {
namespace {

constexpr int64_t kEvaluateEvery = 10;
constexpr char kColumns[] =
    "rank,step,mode,seconds,statistics_bytes,gradient_bytes,held_out_loss,held_out_accuracy,training_loss\n";

struct RankResult {
  std::string csv;  // a line of kColumns for each step
  uint64_t weights_hash = 0;
  double held_out_loss = 0;
  double seconds = 0;  // of the steps, without the evaluations
};

// Adds the last three columns, and prints how far the training is at each tenth of it.
void Evaluate(const Run& run, const DigitsData& data, Trainer& trainer, RankResult& result) {
  const Evaluation held_out = trainer.model().Evaluate(data.held_out);
  const bool classifies = run.model.objective == Objective::kClassify;
  const double training = classifies ? trainer.model().Evaluate(data.train).loss : 0;
  absl::StrAppendFormat(&result.csv, ",%.17g,%.17g,%.17g\n", held_out.loss, held_out.accuracy, training);
  result.held_out_loss = held_out.loss;
  const int64_t tenths = trainer.step() * 10 / run.steps;
  if (tenths == (trainer.step() - kEvaluateEvery) * 10 / run.steps) return;
  std::cerr << absl::StrFormat("training: %d %%, held-out loss %.4f\n", tenths * 10, held_out.loss);
}

// One worker: joins the session, trains through it, and returns what it took.
absl::StatusOr<RankResult> TrainRank(const Run& run, int64_t evaluate_every, const DigitsData& data, Client& client,
                                     RankReducer& reducer, uint32_t rank) {
  // Waits until all ranks have joined.
  PRECONDOR_ASSIGN_OR_RETURN(const std::unique_ptr<Worker> worker, client.Join(run.session.name, {.rank = rank}));
  ServiceExchange exchange(*worker, &reducer);
  PRECONDOR_ASSIGN_OR_RETURN(const std::unique_ptr<Trainer> trainer, Trainer::Make(run, data));
  RankResult result;
  Traffic before = worker->status().traffic;
  while (!trainer->done()) {
    const int64_t step = trainer->step();
    const Mode mode = worker->ModeOf(static_cast<uint64_t>(step));
    const absl::Time begin = MonotonicNow();
    PRECONDOR_RETURN_IF_ERROR(trainer->Step(exchange));
    const double seconds = absl::ToDoubleSeconds(MonotonicNow() - begin);
    result.seconds += seconds;
    const Traffic now = worker->status().traffic;
    absl::StrAppendFormat(&result.csv, "%d,%d,%s,%.9f,%d,%d", rank, step, ModeName(mode), seconds,
                          now.statistics_bytes - before.statistics_bytes,
                          now.gradient_bytes + now.result_bytes - before.gradient_bytes - before.result_bytes);
    before = now;
    // Replicas are equal, so one worker evaluates.
    if (rank == 0 && (trainer->step() % evaluate_every == 0 || trainer->done())) {
      Evaluate(run, data, *trainer, result);
    } else {
      result.csv += ",,,\n";
    }
  }
  result.weights_hash = HashWeights(trainer->model().weights());
  // A worker that is destroyed without it gives up what the shards have not acknowledged.
  PRECONDOR_RETURN_IF_ERROR(worker->Flush());
  return result;
}

// All workers, a thread each. A job cannot go on without one of its ranks: the first one that fails ends the process.
std::vector<RankResult> TrainRanks(const Run& run, int64_t evaluate_every, const DigitsData& data, Client& client) {
  RankReducer reducer(run.session.world_size);
  std::vector<RankResult> results(static_cast<size_t>(run.session.world_size));
  std::vector<std::thread> workers;
  for (size_t rank = 0; rank < results.size(); ++rank) {
    workers.emplace_back([&, rank] {
      auto result = TrainRank(run, evaluate_every, data, client, reducer, static_cast<uint32_t>(rank));
      if (!result.ok()) {
        std::cerr << absl::StrCat("digits_trainer: worker ", rank, ": ", result.status().ToString(), "\n");
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
  std::ofstream file;
  if (!options.csv_path.empty()) file.open(options.csv_path, std::ios::trunc);
  if (!file) return absl::UnavailableError(absl::StrCat("cannot write ", options.csv_path));
  PRECONDOR_ASSIGN_OR_RETURN(const std::unique_ptr<Client> client,
                             Client::Connect(ClientOptions{.coordinator = options.coordinator}));
  Run run = options.run;
  run.session.name = absl::StrCat("digits-", getpid());
  PRECONDOR_RETURN_IF_ERROR(client->OpenSession(run.session).status());
  // The way there is of interest to a reader of the file alone.
  const int64_t evaluate_every = options.csv_path.empty() ? run.steps : kEvaluateEvery;
  const std::vector<RankResult> ranks = TrainRanks(run, evaluate_every, data, *client);
  PRECONDOR_RETURN_IF_ERROR(client->CloseSession(run.session.name).status());
  const RankResult& first = ranks.front();
  for (const RankResult& rank : ranks) {
    if (rank.weights_hash == first.weights_hash) continue;
    return absl::InternalError("expected equal replicas, but the final weights of two workers differ");
  }
  std::cout << absl::StrFormat(
      "%s, %s + %s, seed %d: held-out loss %.4f after %d steps, %.1f ms a step, weights %016x\n", run.task,
      run.session.method.name, run.optimizer, run.session.seed, first.held_out_loss, run.steps,
      1e3 * first.seconds / static_cast<double>(run.steps), first.weights_hash);
  if (options.csv_path.empty()) return absl::OkStatus();
  file << kColumns;
  for (const RankResult& rank : ranks) file << rank.csv;
  file.close();
  return file ? absl::OkStatus() : absl::UnavailableError(absl::StrCat("cannot write ", options.csv_path));
}

int Main(const std::vector<std::string>& arguments) {
  absl::StatusOr<Options> options = ParseOptions(arguments, PRECONDOR_DIGITS_DATA);
  if (options.ok() && options->coordinator.empty()) {
    options = absl::InvalidArgumentError("expected --coordinator HOST:PORT");
  }
  if (!options.ok()) {
    std::cerr << "digits_trainer: " << options.status().message() << "\n";
    return 2;
  }
  const absl::Status status = TrainJob(*options);
  if (status.ok()) return 0;
  std::cerr << "digits_trainer: " << status.ToString() << "\n";
  return 1;
}

}  // namespace
}  // namespace precondor::digits

int main(int argc, char** argv) {
  precondor::UseBestBlasCore();
  return precondor::digits::Main({argv + 1, argv + argc});
}
