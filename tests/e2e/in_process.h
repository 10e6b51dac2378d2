// SPDX-License-Identifier: Apache-2.0
// The whole job in one process: one pass over the whole batch, statistics formed as `world_size` workers would have
// sent them, and the method called directly. What training through the service is compared with.
#pragma once

#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

#include "kernels/backend.h"
#include "kernels/base/session_spec.h"
#include "kernels/methods/method.h"
#include "tests/e2e/trainer/digits_data.h"
#include "tests/e2e/trainer/mlp.h"
#include "tests/e2e/trainer/options.h"
#include "tests/e2e/trainer/trainer.h"

namespace precondor::e2e {

class InProcessExchange final : public digits::GradientExchange {
 public:
  // `backend` outlives the exchange.
  static absl::StatusOr<std::unique_ptr<InProcessExchange>> Make(SessionSpec spec, Backend& backend);

  digits::RowRange Rows(int64_t batch_size) const override { return digits::RowRange{0, batch_size}; }
  absl::Status LayerReady(uint64_t step, const digits::LayerTap& tap) override;
  absl::StatusOr<bool> Finish(uint64_t step, double loss, double learning_rate) override { return true; }

 private:
  InProcessExchange(SessionSpec spec, Backend& backend) : spec_(std::move(spec)), backend_(backend) {}

  const SessionSpec spec_;
  Backend& backend_;
  std::vector<std::unique_ptr<LayerState>> states_;
};

// Trains `run` in this process: the course that training through the service takes, but for rounding.
absl::StatusOr<digits::Mlp> TrainInProcess(const digits::Run& run, const digits::DigitsData& data);

}  // namespace precondor::e2e
