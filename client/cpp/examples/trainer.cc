// SPDX-License-Identifier: Apache-2.0
#include "client/cpp/examples/trainer.h"

#include <memory>
#include <utility>

#include "absl/time/time.h"
#include "absl/types/span.h"

#include "client/cpp/examples/mlp.h"
#include "kernels/base/clock.h"
#include "kernels/base/status_macros.h"
#include "precondor/optimizer.h"

namespace precondor::digits {
namespace {

CurvePoint EvaluateAfter(int64_t step, const Run& run, const DigitsData& data, Mlp& model) {
  const Evaluation held_out = model.Evaluate(data.held_out);
  CurvePoint point{step, held_out.loss, held_out.accuracy, 0};
  if (run.task.criterion == Criterion::kTrainingLoss) point.training_loss = model.Evaluate(data.train).loss;
  return point;
}

std::vector<Parameter> ParametersOf(Mlp& model) {
  std::vector<Parameter> parameters;
  for (int64_t l = 0; l < model.num_layers(); ++l) {
    parameters.push_back(Parameter{model.weights()[static_cast<size_t>(l)].view(), model.gradient(l), true});
  }
  return parameters;
}

absl::Status CheckWeights(const std::vector<HostMatrix>& given, const std::vector<HostMatrix>& expected) {
  bool same = given.size() == expected.size();
  for (size_t l = 0; same && l < given.size(); ++l) {
    same = given[l].rows() == expected[l].rows() && given[l].cols() == expected[l].cols();
  }
  return same ? absl::OkStatus() : absl::InvalidArgumentError("resumed from the weights of another model");
}

}  // namespace

absl::StatusOr<TrainResult> Train(const Run& run, const DigitsData& data, GradientExchange& exchange,
                                  const TrainOptions& options) {
  PRECONDOR_ASSIGN_OR_RETURN(const OptimizerConfig config, FindOptimizer(run.optimizer));
  PRECONDOR_ASSIGN_OR_RETURN(const std::unique_ptr<Optimizer> optimizer, MakeOptimizer(config));
  Mlp model(run.task.model, run.seed);
  Mlp evaluated(run.task.model, run.seed);  // keeps the buffers of the two row counts apart
  const std::vector<Parameter> parameters = ParametersOf(model);
  const RowRange range = exchange.Rows(kBatchSize);
  TrainState state;
  TrainResult& result = state.so_far;
  if (options.resume != nullptr) {
    state = *options.resume;
    PRECONDOR_RETURN_IF_ERROR(CheckWeights(result.weights, model.weights()));
    model.weights() = result.weights;
    if (state.step > 0) PRECONDOR_RETURN_IF_ERROR(optimizer->LoadState(state.optimizer));
  }
  for (int64_t& step = state.step; step < run.task.steps; ++step) {
    if (options.checkpoint) {
      state.optimizer = optimizer->SaveState();
      result.weights = model.weights();
      PRECONDOR_RETURN_IF_ERROR(options.checkpoint(state));
    }
    const auto step_id = static_cast<uint64_t>(step);
    if (options.before_step) options.before_step(step_id, result.seconds);
    const absl::Time begin = MonotonicNow();
    const std::vector<int32_t> rows = BatchRows(data.train.size(), kBatchSize, run.seed, step_id);
    const Examples batch = Select(data.train, absl::MakeConstSpan(rows).subspan(static_cast<size_t>(range.begin),
                                                                                static_cast<size_t>(range.count)));
    double loss = 0;
    PRECONDOR_RETURN_IF_ERROR(
        model.Backward(batch, &loss, [&](const LayerTap& tap) { return exchange.LayerReady(step_id, tap); }));
    const double learning_rate =
        run.learning_rate * (1.0 - static_cast<double>(step) / static_cast<double>(run.task.steps));
    PRECONDOR_ASSIGN_OR_RETURN(const bool apply, exchange.Finish(step_id, loss, learning_rate));
    if (apply) {
      PRECONDOR_RETURN_IF_ERROR(optimizer->Step(parameters, learning_rate));
    } else {
      ++result.skipped_steps;
    }
    result.seconds += absl::ToDoubleSeconds(MonotonicNow() - begin);
    const int64_t done = step + 1;
    if (!options.evaluate || (done % kEvaluateEvery != 0 && done != run.task.steps)) continue;
    evaluated.weights() = model.weights();
    result.curve.push_back(EvaluateAfter(done, run, data, evaluated));
    if (options.progress) options.progress(result.curve.back());
  }
  result.weights = std::move(model.weights());
  return std::move(result);
}

}  // namespace precondor::digits
