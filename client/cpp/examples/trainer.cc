// SPDX-License-Identifier: Apache-2.0
#include "client/cpp/examples/trainer.h"

#include <cstdio>
#include <cstring>
#include <fstream>
#include <iterator>
#include <memory>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "absl/types/span.h"

#include "kernels/base/byte_codec.h"
#include "kernels/base/clock.h"
#include "kernels/base/status_macros.h"
#include "precondor/optimizer.h"

namespace precondor::digits {
namespace {

CurvePoint EvaluateAfter(int64_t step, const Run& run, const DigitsData& data, Mlp& model) {
  const Evaluation held_out = model.Evaluate(data.held_out);
  CurvePoint point{step, held_out.loss, held_out.accuracy, 0};
  if (run.task.model.objective == Objective::kClassify) point.training_loss = model.Evaluate(data.train).loss;
  return point;
}

std::vector<Parameter> ParametersOf(Mlp& model) {
  std::vector<Parameter> parameters;
  for (int64_t l = 0; l < model.num_layers(); ++l) {
    parameters.push_back(Parameter{model.weights()[static_cast<size_t>(l)].view(), model.gradient(l), true});
  }
  return parameters;
}

}  // namespace

absl::StatusOr<TrainResult> Train(const Run& run, const DigitsData& data, GradientExchange& exchange,
                                  const TrainOptions& options) {
  PRECONDOR_ASSIGN_OR_RETURN(const OptimizerConfig config, FindOptimizer(run.optimizer));
  PRECONDOR_ASSIGN_OR_RETURN(const std::unique_ptr<Optimizer> optimizer, MakeOptimizer(config));
  Mlp model(run.task.model, run.seed);
  Mlp evaluated(run.task.model, run.seed);  // keeps the buffers of the two row counts apart
  int64_t step = 0;
  if (options.resume != nullptr) {
    step = options.resume->step;
    model.weights() = options.resume->weights;
    if (step > 0) PRECONDOR_RETURN_IF_ERROR(optimizer->LoadState(options.resume->optimizer));
  }
  const std::vector<Parameter> parameters = ParametersOf(model);
  const RowRange range = exchange.Rows(kBatchSize);
  TrainResult result;
  for (; step < run.task.steps; ++step) {
    if (options.checkpoint) {
      PRECONDOR_RETURN_IF_ERROR(options.checkpoint(TrainState{step, optimizer->SaveState(), model.weights()}));
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
  return result;
}

uint64_t HashWeights(const std::vector<HostMatrix>& weights) {
  uint64_t hash = 0xCBF29CE484222325ull;
  for (const HostMatrix& weight : weights) {
    for (const float value : weight.data()) {
      uint32_t bits = 0;
      std::memcpy(&bits, &value, sizeof(bits));
      for (int shift = 0; shift < 32; shift += 8) hash = (hash ^ ((bits >> shift) & 0xFF)) * 0x100000001B3ull;
    }
  }
  return hash;
}

absl::Status WriteCheckpoint(const std::string& path, const TrainState& state) {
  std::string bytes;
  PutU64(bytes, static_cast<uint64_t>(state.step));
  PutBytes(bytes, state.optimizer);
  for (const HostMatrix& weight : state.weights) {
    PutBytes(bytes, absl::string_view(reinterpret_cast<const char*>(weight.data().data()),
                                      weight.data().size() * sizeof(float)));
  }
  const std::string temporary = absl::StrCat(path, ".tmp");
  std::ofstream file(temporary, std::ios::binary | std::ios::trunc);
  file << bytes;
  file.close();
  if (file && std::rename(temporary.c_str(), path.c_str()) == 0) return absl::OkStatus();
  return absl::UnavailableError(absl::StrCat("checkpoint: cannot write ", path));
}

absl::StatusOr<bool> ReadCheckpoint(const std::string& path, const MlpSpec& model, TrainState& state) {
  std::ifstream file(path, std::ios::binary);
  if (!file) return false;
  const std::string bytes((std::istreambuf_iterator<char>(file)), std::istreambuf_iterator<char>());
  Decoder in(bytes);
  state.step = static_cast<int64_t>(in.U64());
  state.optimizer = std::string(in.Bytes());
  state.weights = Mlp(model, 0).weights();
  for (HostMatrix& weight : state.weights) {
    const absl::string_view data = in.Bytes();
    if (data.size() != weight.data().size() * sizeof(float)) in.Fail();
    if (in.ok()) std::memcpy(weight.data().data(), data.data(), data.size());
  }
  if (in.done()) return true;
  return absl::DataLossError(absl::StrCat("checkpoint: ", path, " is damaged, or of another model"));
}

}  // namespace precondor::digits
