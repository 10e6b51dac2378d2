// SPDX-License-Identifier: Apache-2.0
// Base optimizers: what turns preconditioned gradients into a weight update. Formulas: docs/methods/optimizers.md.
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

struct OptimizerConfig {
  std::string name = "adamw";  // "sgd", "adamw", "lamb"
  double momentum = 0.9;       // sgd, in [0, 1)
  bool nesterov = false;       // sgd; needs momentum > 0
  double beta1 = 0.9;          // adamw, lamb, in [0, 1)
  double beta2 = 0.999;
  std::optional<double> epsilon;  // absent: 1e-8 for adamw, 1e-6 for lamb; positive
  double weight_decay = 0;        // adamw, lamb: decoupled; sgd: added to the gradient
  double max_grad_norm = 1.0;     // lamb: global clip after preconditioning; 0 is off
  bool nvlamb = false;            // lamb: trust ratio also where there is no decay
};

// One parameter: a weight matrix and its gradient (already preconditioned). With has_bias the last column is the bias,
// which gets no weight decay.
struct Parameter {
  MatrixView weight;
  ConstMatrixView gradient;
  bool has_bias = false;
};

// State by the parameter's place in the list, which must be the same at every step. One thread at a time.
class Optimizer {
 public:
  virtual ~Optimizer() = default;
  // Updates all weights in place. InvalidArgument, nothing changed, when a gradient's shape is not its weight's, when
  // shapes differ from the first call's, or when the learning rate is negative or not finite.
  virtual absl::Status Step(absl::Span<const Parameter> parameters, double learning_rate) = 0;

  // Everything that the next step depends on but the weights and the configuration, for a checkpoint: an optimizer of
  // the same configuration that loads it goes on bitwise. Bytes of one version of this library, little-endian.
  virtual std::string SaveState() const = 0;
  // InvalidArgument, nothing changed, for bytes of another optimizer, damaged or cut short.
  virtual absl::Status LoadState(absl::string_view state) = 0;
};

// InvalidArgument names the option.
absl::StatusOr<std::unique_ptr<Optimizer>> MakeOptimizer(const OptimizerConfig& config);

}  // namespace precondor
