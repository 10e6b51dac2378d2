// SPDX-License-Identifier: Apache-2.0
#include "tests/e2e/service_training.h"

#include <cmath>
#include <map>
#include <memory>
#include <thread>
#include <unistd.h>
#include <utility>

#include "absl/status/status.h"

#include "kernels/base/check.h"
#include "kernels/base/status_macros.h"
#include "precondor/client.h"
#include "tests/e2e/trainer/options.h"
#include "tests/e2e/trainer/rank_reducer.h"
#include "tests/e2e/trainer/service_exchange.h"
#include "tests/e2e/trainer/trainer.h"

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
    for (const int32_t i : digits::Permutation({seed_, rank_, step}, static_cast<int64_t>(taps_.size()))) {
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
  PRECONDOR_ASSIGN_OR_RETURN(const std::unique_ptr<Worker> worker, client.Join(job.session, {.rank = rank}));
  digits::ServiceExchange exchange(*worker, &reducer);
  ShuffledExchange shuffled(exchange, job.shuffle_seed, rank);
  GradientExchange& used = job.shuffle_seed == 0 ? static_cast<GradientExchange&>(exchange) : shuffled;
  PRECONDOR_ASSIGN_OR_RETURN(const std::unique_ptr<digits::Trainer> trainer, digits::Trainer::Make(job.run, data));
  while (!trainer->done()) PRECONDOR_RETURN_IF_ERROR(trainer->Step(used));
  if (trainer->skipped_steps() != 0) return absl::InternalError("a step was skipped");
  return std::move(trainer->model().weights());
}

}  // namespace

absl::StatusOr<std::vector<std::vector<HostMatrix>>> TrainThroughService(const ServiceRun& job,
                                                                         const digits::DigitsData& data) {
  ClientOptions options;
  options.coordinator = job.coordinator;
  PRECONDOR_ASSIGN_OR_RETURN(const std::unique_ptr<Client> client, Client::Connect(options));
  SessionSpec spec = job.run.session;
  spec.name = job.session;
  PRECONDOR_RETURN_IF_ERROR(client->OpenSession(spec).status());
  RankReducer reducer(spec.world_size);
  std::vector<absl::StatusOr<std::vector<HostMatrix>>> outcomes(static_cast<size_t>(spec.world_size));
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
  const std::string dense = "--option=representation=DENSE";
  const std::vector<std::string> kfac = {"--method=kfac", "--option=scaling=NORM_RESCALE", "--option=pi_split=true",
                                         "--option=factor_decay=piecewise(0, 1: 0.95)", "--option=damping=0.00003"};
  const std::map<absl::string_view, std::vector<std::string>> rows = {
      {"none", {"--method=identity"}},
      {"reference", {"--statistics=mean", "--option=rule=REFERENCE", dense}},
      {"blend", {"--option=rule=BLEND", dense}},
      {"mean", {"--statistics=mean", dense}},
      {"mean-lowrank", {"--statistics=mean", "--option=representation=LOW_RANK", "--option=rank=16"}},
      {"signed", {dense}},
      {"signed-lowrank", {"--option=representation=LOW_RANK", "--option=rank=16"}},
      {"kron", {"--method=kron"}},
      {"soap", {"--method=soap"}},
      {"muon", {"--method=muon"}},
      {"eva", {"--method=eva", "--statistics=mean", "--option=scaling=NORM_RESCALE"}},
      {"kfac", kfac},
      {"kfac-covariance", kfac},
  };
  digits::Run run = digits::ParseOptions(rows.at(row), "").value().run;
  if (row == "kfac-covariance") run.session.statistics = StatisticsKind::kCovariance;
  PRECONDOR_CHECK(digits::SetTask(task, run));
  run.steps = steps;
  run.session.statistics_dtype = DType::kF32;
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
