// SPDX-License-Identifier: Apache-2.0
// The rules REFERENCE and BLEND of docs/methods/mkor.md on a dense J, whatever holds it: with H = gamma J + (1-gamma)
// I, J <- H - sum_i r_i r_i' for a few terms r_i.
#pragma once

#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

#include "kernels/backend.h"
#include "kernels/methods/mkor_config.h"
#include "kernels/methods/state_codec.h"

namespace precondor {

// What a factor keeps beside J's elements.
struct RuleScalars {
  double mass = 0;               // BLEND: 1 - gamma^t
  double mean_square = 0;        // BLEND: EMA of |v|^2
  bool discard_next = false;     // REFERENCE: the first vectors
  std::vector<double> diagonal;  // of J, by which a J that is none shows

  // All but the diagonal.
  void Write(StateWriter& out) const;
  absl::Status Read(StateReader& in);
};

// FailedPrecondition unless all elements are finite and not below zero.
absl::Status CheckDiagonal(const std::vector<double>& diagonal);

// The mean of |v|^2, which are `squares` unless that is empty; InvalidArgument where it is not finite.
absl::StatusOr<double> MeanSquare(ConstMatrixView vectors, absl::Span<const double> squares, Backend& backend);

// By what the rule multiplies each of k vectors of this mean square; BLEND's averages advance by it.
double VectorScale(const MkorConfig& config, int64_t d, int64_t k, double mean_square, RuleScalars& scalars);

}  // namespace precondor
