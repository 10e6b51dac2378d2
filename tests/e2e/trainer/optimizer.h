// SPDX-License-Identifier: Apache-2.0
// Optimizers of the harness, without weight decay: torch's AdamW and SGD, and LAMB with a trust ratio for every tensor.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"

#include "kernels/base/matrix_view.h"

namespace precondor {

// A weight matrix whose last column is the bias, and its preconditioned gradient. Both are contiguous.
struct Parameter {
  MatrixView weight;
  ConstMatrixView gradient;
};

// The state is stored by the parameter's index in the list, so the list must have one order in all steps.
class Optimizer {
 public:
  // adamw, lamb, sgd, or plain, which is sgd without momentum.
  static absl::StatusOr<Optimizer> Make(absl::string_view name);

  void Step(absl::Span<const Parameter> parameters, double learning_rate);

  // All that the next step depends on except the weights.
  std::string SaveState() const;
  absl::Status LoadState(absl::string_view state);

 private:
  explicit Optimizer(absl::string_view name) : name_(name) {}
  void Lamb(const Parameter& parameter, float divisor, double learning_rate, float* m, float* v);

  std::string name_;
  int64_t step_ = 0;                         // number of the update in progress, from 1
  std::vector<std::vector<float>> moments_;  // of each parameter: the first ones, then the second ones
};

}  // namespace precondor
