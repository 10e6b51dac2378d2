// SPDX-License-Identifier: Apache-2.0
#include "tests/e2e/trainer/trainer.h"

#include <cstring>
#include <utility>

#include "absl/types/span.h"

#include "kernels/base/status_macros.h"

namespace precondor::digits {

absl::StatusOr<std::unique_ptr<Trainer>> Trainer::Make(const Run& run, const DigitsData& data) {
  PRECONDOR_ASSIGN_OR_RETURN(Optimizer optimizer, Optimizer::Make(run.optimizer));
  return std::unique_ptr<Trainer>(new Trainer(run, data, std::move(optimizer)));
}

Trainer::Trainer(const Run& run, const DigitsData& data, Optimizer optimizer)
    : run_(run), data_(data), optimizer_(std::move(optimizer)), model_(run.model, run.session.seed) {}

absl::Status Trainer::Step(GradientExchange& exchange) {
  const auto step = static_cast<uint64_t>(step_);
  const std::vector<int32_t> rows = BatchRows(data_.train.size(), kBatchSize, run_.session.seed, step);
  const RowRange own = exchange.Rows(kBatchSize);
  const Examples batch = Select(
      data_.train, absl::MakeConstSpan(rows).subspan(static_cast<size_t>(own.begin), static_cast<size_t>(own.count)));
  PRECONDOR_ASSIGN_OR_RETURN(
      const double loss, model_.Backward(batch, [&](const LayerTap& tap) { return exchange.LayerReady(step, tap); }));
  const double learning_rate =
      run_.learning_rate * (1.0 - static_cast<double>(step_) / static_cast<double>(run_.steps));
  PRECONDOR_ASSIGN_OR_RETURN(const bool apply, exchange.Finish(step, loss, learning_rate));
  if (apply) {
    std::vector<Parameter> parameters;
    for (int64_t l = 0; l < model_.num_layers(); ++l) {
      parameters.push_back(Parameter{model_.weights()[static_cast<size_t>(l)].view(), model_.gradient(l)});
    }
    optimizer_.Step(parameters, learning_rate);
  } else {
    ++skipped_steps_;
  }
  ++step_;
  return absl::OkStatus();
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

}  // namespace precondor::digits
