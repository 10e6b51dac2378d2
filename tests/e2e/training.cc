// SPDX-License-Identifier: Apache-2.0
#include "tests/e2e/training.h"

#include <cmath>
#include <cstdint>
#include <map>
#include <memory>
#include <thread>
#include <unistd.h>
#include <utility>

#include "absl/status/status.h"
#include "absl/types/span.h"

#include "kernels/base/check.h"
#include "kernels/base/dtype.h"
#include "kernels/base/status_macros.h"
#include "kernels/cpu/cpu_backend.h"
#include "kernels/methods/registry.h"
#include "precondor/client.h"
#include "precondor/statistics.h"
#include "tests/e2e/trainer/model.h"
#include "tests/e2e/trainer/trainer.h"

namespace precondor::e2e {
namespace {

using digits::GradientExchange;
using digits::HostMatrix;
using digits::LayerTap;
using digits::RankReducer;
using digits::RowRange;

// Makes a vector block what it is after the wire: encoded in `dtype` with one scale, and decoded.
void RoundTo(DType dtype, HostMatrix& block) {
  const absl::Span<float> values = absl::MakeSpan(block.data());
  const float scale = dtype == DType::kF16 ? F16Scale(values) : 1.0f;
  std::vector<uint8_t> encoded(values.size() * ByteSize(dtype));
  EncodeElements(dtype, values, scale, encoded.data());
  DecodeElements(dtype, encoded.data(), scale, values);
}

// The statistics of one side of a sealed statistic step, from the rows of the whole batch: each rank's vectors [k, d]
// of its own rows, rounded to the session's dtype as on the wire, then merged as a shard does. MEAN: the mean
// weighted by row counts, k = 1. Otherwise all of them in rank order, rank i's scaled by sqrt(W n_i / N), so that
// (1/k) sum v v' weighs every row alike. COVARIANCE: as one rank of the whole batch would send it. `key.rank` is
// ignored; row_scale as in ComputeStatistics.
absl::StatusOr<HostMatrix> MergedStatistics(const SessionSpec& spec, SketchKey key, ConstMatrixView rows,
                                            double row_scale) {
  if (StatisticsOf(spec, key.layer) == StatisticsKind::kCovariance) {
    // The mean of the ranks' moments, each weighted by its rows, is the batch's.
    const StatisticsShape shape = ShapeOfStatistics(spec, key.layer, rows.cols, rows.rows);
    HostMatrix moment(shape.rows, shape.cols);
    PRECONDOR_RETURN_IF_ERROR(ComputeStatistics(spec, key, rows, row_scale, moment.view()));
    RoundTo(spec.statistics_dtype, moment);
    return moment;
  }
  const int64_t workers = spec.world_size;
  const int64_t each = VectorsPerWorker(spec, key.layer);
  const bool mean = StatisticsOf(spec, key.layer) == StatisticsKind::kMean;
  HostMatrix merged(VectorsPerStep(spec, key.layer), rows.cols);
  std::vector<double> sum(mean ? static_cast<size_t>(rows.cols) : 0);
  for (int64_t rank = 0; rank < workers; ++rank) {
    const RowRange range = digits::RowsOfRank(rows.rows, workers, rank);
    HostMatrix block(each, rows.cols);
    key.rank = static_cast<uint32_t>(rank);
    PRECONDOR_RETURN_IF_ERROR(
        ComputeStatistics(spec, key, rows.RowRange(range.begin, range.count), row_scale, block.view()));
    RoundTo(spec.statistics_dtype, block);
    const double share = static_cast<double>(range.count) / static_cast<double>(rows.rows);
    for (int64_t i = 0; i < each; ++i) {
      for (int64_t j = 0; j < rows.cols; ++j) {
        const double value = block.view().at(i, j);
        if (mean) {
          sum[static_cast<size_t>(j)] += share * value;
        } else {
          const double scale = std::sqrt(static_cast<double>(workers) * share);
          merged.view().at(rank * each + i, j) = static_cast<float>(scale * value);
        }
      }
    }
  }
  for (size_t j = 0; j < sum.size(); ++j) merged.data()[j] = static_cast<float>(sum[j]);
  return merged;
}

// Preconditions in this process. `spec` and `backend` outlive it.
class InProcessExchange final : public GradientExchange {
 public:
  InProcessExchange(const SessionSpec& spec, Backend& backend) : spec_(spec), backend_(backend) {}

  absl::Status MakeStates() {
    PRECONDOR_RETURN_IF_ERROR(ValidateSessionSpec(spec_));
    PRECONDOR_ASSIGN_OR_RETURN(const MethodSet methods, MethodSet::Make(spec_));
    for (size_t layer = 0; layer < spec_.layers.size(); ++layer) {
      const Method& method = methods.of(static_cast<int64_t>(layer));
      PRECONDOR_ASSIGN_OR_RETURN(states_.emplace_back(), method.MakeState(spec_.layers[layer], backend_));
    }
    return absl::OkStatus();
  }
  RowRange Rows(int64_t batch_size) const override { return RowRange{0, batch_size}; }
  absl::Status LayerReady(uint64_t step, const LayerTap& tap) override {
    LayerState& state = *states_[static_cast<size_t>(tap.layer)];
    if (TakesStatistics(spec_, tap.layer) && IsStatisticStep(spec_, step)) {
      SketchKey key{spec_.seed, step, static_cast<uint32_t>(tap.layer), Side::kInput, 0};
      PRECONDOR_ASSIGN_OR_RETURN(const HostMatrix a, MergedStatistics(spec_, key, tap.inputs, 1.0));
      key.side = Side::kOutput;
      // The gradients are those of a mean over the rows: undo its division.
      const auto rows = static_cast<double>(tap.output_gradients.rows);
      PRECONDOR_ASSIGN_OR_RETURN(const HostMatrix g, MergedStatistics(spec_, key, tap.output_gradients, rows));
      PRECONDOR_ASSIGN_OR_RETURN(DeviceMatrix device_a, backend_.Allocate(a.rows(), a.cols()));
      PRECONDOR_ASSIGN_OR_RETURN(DeviceMatrix device_g, backend_.Allocate(g.rows(), g.cols()));
      PRECONDOR_RETURN_IF_ERROR(backend_.Upload(a.view(), device_a.view()));
      PRECONDOR_RETURN_IF_ERROR(backend_.Upload(g.view(), device_g.view()));
      const bool a_packed = a.cols() != tap.inputs.cols;
      const bool g_packed = g.cols() != tap.output_gradients.cols;
      LayerStatistics merged;
      (a_packed ? merged.a_covariance : merged.a) = device_a.view();
      (g_packed ? merged.g_covariance : merged.g) = device_g.view();
      PRECONDOR_RETURN_IF_ERROR(state.Update(merged));
    }
    PRECONDOR_ASSIGN_OR_RETURN(DeviceMatrix d, backend_.Allocate(tap.gradient.rows, tap.gradient.cols));
    PRECONDOR_ASSIGN_OR_RETURN(DeviceMatrix u, backend_.Allocate(tap.gradient.rows, tap.gradient.cols));
    PRECONDOR_RETURN_IF_ERROR(backend_.Upload(tap.gradient, d.view()));
    PRECONDOR_RETURN_IF_ERROR(state.Precondition(d.view(), u.view()));
    return backend_.Download(u.view(), tap.gradient);
  }
  absl::StatusOr<bool> Finish(uint64_t step, double loss, double learning_rate) override { return true; }

 private:
  const SessionSpec& spec_;
  Backend& backend_;
  std::vector<std::unique_ptr<LayerState>> states_;
};

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

absl::StatusOr<digits::Mlp> TrainInProcess(const digits::Run& run, const digits::DigitsData& data) {
  SessionSpec spec = run.session;
  spec.name = "in-process";
  PRECONDOR_ASSIGN_OR_RETURN(const std::unique_ptr<Backend> backend, MakeCpuBackend(CpuBackendOptions{}));
  InProcessExchange exchange(spec, *backend);
  PRECONDOR_RETURN_IF_ERROR(exchange.MakeStates());
  PRECONDOR_ASSIGN_OR_RETURN(const std::unique_ptr<digits::Trainer> trainer, digits::Trainer::Make(run, data));
  while (!trainer->done()) PRECONDOR_RETURN_IF_ERROR(trainer->Step(exchange));
  return std::move(trainer->model());
}

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

digits::Run RunOfRow(absl::string_view row, int64_t steps) {
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
  PRECONDOR_CHECK(digits::SetTask("autoencoder", run));
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
