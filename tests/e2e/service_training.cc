// SPDX-License-Identifier: Apache-2.0
#include "tests/e2e/service_training.h"

#include <algorithm>
#include <cmath>
#include <memory>
#include <thread>
#include <unistd.h>
#include <utility>

#include "absl/status/status.h"

#include "client/cpp/examples/options.h"
#include "client/cpp/examples/rank_reducer.h"
#include "client/cpp/examples/seeded_random.h"
#include "client/cpp/examples/service_exchange.h"
#include "client/cpp/examples/trainer.h"
#include "kernels/base/check.h"
#include "kernels/base/status_macros.h"
#include "precondor/client.h"

namespace precondor::e2e {
namespace {

using digits::GradientExchange;
using digits::HostMatrix;
using digits::LayerTap;
using digits::RankReducer;

// Hands layers over in an order drawn for each (seed, rank, step).
class ShuffledExchange final : public GradientExchange {
 public:
  ShuffledExchange(GradientExchange& inner, uint64_t seed, uint32_t rank) : inner_(inner), seed_(seed), rank_(rank) {}
  digits::RowRange Rows(int64_t batch_size) const override { return inner_.Rows(batch_size); }
  absl::Status LayerReady(uint64_t step, const LayerTap& tap) override {
    taps_.push_back(tap);
    return absl::OkStatus();
  }
  absl::StatusOr<bool> Finish(uint64_t step, double loss, double learning_rate) override {
    digits::SeededRandom random(seed_, rank_, step);
    for (const int32_t i : random.Permutation(static_cast<int64_t>(taps_.size()))) {
      PRECONDOR_RETURN_IF_ERROR(inner_.LayerReady(step, taps_[static_cast<size_t>(i)]));
    }
    taps_.clear();
    return inner_.Finish(step, loss, learning_rate);
  }

 private:
  GradientExchange& inner_;
  const uint64_t seed_;
  const uint32_t rank_;
  std::vector<LayerTap> taps_;
};

absl::StatusOr<std::vector<HostMatrix>> TrainRank(const ServiceRun& job, const digits::DigitsData& data, Client& client,
                                                  RankReducer& reducer, uint32_t rank) {
  WorkerOptions options;
  options.rank = rank;
  PRECONDOR_ASSIGN_OR_RETURN(const std::unique_ptr<Worker> worker, client.Join(job.session, options));
  PRECONDOR_ASSIGN_OR_RETURN(const std::unique_ptr<digits::ServiceExchange> exchange,
                             digits::ServiceExchange::Make(*worker, &reducer));
  ShuffledExchange shuffled(*exchange, job.shuffle_seed, rank);
  GradientExchange& used = job.shuffle_seed == 0 ? static_cast<GradientExchange&>(*exchange) : shuffled;
  digits::TrainOptions train_options;
  train_options.evaluate = false;
  PRECONDOR_ASSIGN_OR_RETURN(digits::TrainResult result, digits::Train(job.run, data, used, train_options));
  if (result.skipped_steps != 0) return absl::InternalError("a step was skipped");
  return std::move(result.weights);
}

SessionSpec SpecOf(const digits::Run& run, const std::string& name, DType statistics_dtype) {
  SessionSpec spec = digits::MakeSessionSpec(run, name);
  spec.statistics_dtype = statistics_dtype;
  return spec;
}

}  // namespace

absl::StatusOr<std::vector<std::vector<HostMatrix>>> TrainThroughService(const ServiceRun& job,
                                                                         const digits::DigitsData& data) {
  ClientOptions options;
  options.coordinator = job.coordinator;
  PRECONDOR_ASSIGN_OR_RETURN(const std::unique_ptr<Client> client, Client::Connect(options));
  const SessionSpec spec = SpecOf(job.run, job.session, job.statistics_dtype);
  PRECONDOR_RETURN_IF_ERROR(client->OpenSession(spec).status());
  RankReducer reducer(job.run.workers);
  std::vector<absl::StatusOr<std::vector<HostMatrix>>> outcomes(static_cast<size_t>(job.run.workers));
  std::vector<std::thread> workers;
  for (size_t rank = 0; rank < outcomes.size(); ++rank) {
    workers.emplace_back(
        [&, rank] { outcomes[rank] = TrainRank(job, data, *client, reducer, static_cast<uint32_t>(rank)); });
  }
  for (std::thread& worker : workers) worker.join();
  PRECONDOR_RETURN_IF_ERROR(client->CloseSession(job.session).status());
  std::vector<std::vector<HostMatrix>> weights;
  for (auto& outcome : outcomes) {
    PRECONDOR_RETURN_IF_ERROR(outcome.status());
    weights.push_back(*std::move(outcome));
  }
  return weights;
}

digits::Run RunOfRow(absl::string_view row, absl::string_view task, int64_t steps) {
  struct Row {
    absl::string_view name, method;
    StatisticsKind statistics;
    std::vector<absl::string_view> options;
  };
  const std::vector<Row> rows = {
      {"none", "identity", StatisticsKind::kSigned, {}},
      {"reference", "mkor", StatisticsKind::kMean, {"rule=REFERENCE", "representation=DENSE"}},
      {"blend", "mkor", StatisticsKind::kSigned, {"rule=BLEND", "representation=DENSE"}},
      {"mean", "mkor", StatisticsKind::kMean, {"representation=DENSE"}},
      {"mean-lowrank", "mkor", StatisticsKind::kMean, {"representation=LOW_RANK", "rank=16"}},
      {"signed", "mkor", StatisticsKind::kSigned, {"representation=DENSE"}},
      {"signed-lowrank", "mkor", StatisticsKind::kSigned, {"representation=LOW_RANK", "rank=16"}},
      {"kron", "kron", StatisticsKind::kSigned, {}},
      {"soap", "soap", StatisticsKind::kSigned, {}},
      {"muon", "muon", StatisticsKind::kSigned, {}},
      {"eva", "eva", StatisticsKind::kMean, {"scaling=NORM_RESCALE"}},
      {"kfac", "kfac", StatisticsKind::kSigned, {}},
      {"kfac-covariance", "kfac", StatisticsKind::kCovariance, {}},
  };
  const auto found = std::find_if(rows.begin(), rows.end(), [&](const Row& one) { return one.name == row; });
  PRECONDOR_CHECK(found != rows.end());
  digits::Run run;
  run.task = digits::FindTask(task).value();
  run.task.steps = steps;
  run.statistics = found->statistics;
  run.method.name = std::string(found->method);
  std::vector<absl::string_view> options = found->options;
  if (found->method == "kfac") {
    options = {"scaling=NORM_RESCALE", "factor_decay=piecewise(0, 1: 0.95)", "pi_split=true", "damping=0.00003"};
  }
  for (const absl::string_view option : options) PRECONDOR_CHECK(digits::AddMethodOption(option, run.method).ok());
  return run;
}

double RelativeDifference(const std::vector<HostMatrix>& x, const std::vector<HostMatrix>& y) {
  double difference = 0;
  double norm = 0;
  for (size_t l = 0; l < y.size(); ++l) {
    for (size_t i = 0; i < y[l].data().size(); ++i) {
      const double yi = y[l].data()[i];
      const double delta = x[l].data()[i] - yi;
      difference += delta * delta;
      norm += yi * yi;
    }
  }
  return std::sqrt(difference / norm);
}

}  // namespace precondor::e2e
