// SPDX-License-Identifier: Apache-2.0
// Base optimizers, which update weights from preconditioned gradients. Formulas: docs/use/methods/optimizers.md.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"

#include "kernels/base/matrix_view.h"

namespace precondor {

// Options of MakeOptimizer. A comment lists the optimizers that read the option.
struct OptimizerConfig {
  std::string name = "adamw";  // "sgd", "adamw", "lamb"
  double momentum = 0.9;       // sgd, in [0, 1)
  bool nesterov = false;       // sgd; needs momentum > 0
  double beta1 = 0.9;          // adamw, lamb, in [0, 1)
  double beta2 = 0.999;
  std::optional<double> epsilon;  // nullopt: 1e-8 for adamw, 1e-6 for lamb; positive
  double weight_decay = 0;        // adamw, lamb: decoupled; sgd: added to the gradient
  double max_grad_norm = 1.0;     // lamb: global clip after preconditioning; 0 means none
  bool nvlamb = false;            // lamb: applies the trust ratio also to weights without decay
};

// One parameter: a weight matrix and its gradient (already preconditioned). With has_bias the last column is the bias,
// which gets no weight decay.
struct Parameter {
  MatrixView weight;
  ConstMatrixView gradient;
  bool has_bias = false;
};

// Updates weights in place and keeps the optimizer's state. The state is stored by the parameter's index in the list,
// so the list must have one order in all steps. Not thread-safe.
class Optimizer {
 public:
  virtual ~Optimizer() = default;
  // Updates all weights in place. Returns INVALID_ARGUMENT and changes nothing if a gradient's shape differs from its
  // weight's, shapes differ from the first call's, or the learning rate is negative or not finite.
  virtual absl::Status Step(absl::Span<const Parameter> parameters, double learning_rate) = 0;

  // Returns the optimizer's state for a checkpoint: all that the next step depends on except the weights and the
  // configuration. An optimizer of equal configuration that loads it continues bitwise. The bytes are little-endian and
  // of one version of this library.
  virtual std::string SaveState() const = 0;
  // Returns INVALID_ARGUMENT and changes nothing if the bytes are of another optimizer, damaged or truncated.
  virtual absl::Status LoadState(absl::string_view state) = 0;
};

// Returns INVALID_ARGUMENT, which names the option, if a value is out of range.
absl::StatusOr<std::unique_ptr<Optimizer>> MakeOptimizer(const OptimizerConfig& config);

}  // namespace precondor
