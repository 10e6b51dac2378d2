// SPDX-License-Identifier: Apache-2.0
// The rules REFERENCE and BLEND of docs/use/methods/mkor.md on a dense J, independent of how J is stored: with H =
// gamma J
// + (1-gamma) I, J <- H - sum_i r_i r_i' for a few terms r_i.
#pragma once

#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

#include "kernels/backend.h"
#include "kernels/methods/mkor_config.h"
#include "kernels/methods/state_codec.h"

namespace precondor {

// State of a factor in addition to J's elements.
struct RuleScalars {
  double mass = 0;               // BLEND: 1 - gamma^t
  double mean_square = 0;        // BLEND: EMA of |v|^2
  bool discard_next = false;     // REFERENCE: discard the first vectors
  std::vector<double> diagonal;  // of J; reveals a J that is not positive definite

  // Writes all fields but the diagonal.
  void Write(StateWriter& out) const;
  absl::Status Read(StateReader& in);
};

// Returns FailedPrecondition unless all elements are finite and not negative.
absl::Status CheckDiagonal(const std::vector<double>& diagonal);

// Returns the mean of |v|^2, from `squares` unless that is empty. Returns InvalidArgument if the mean is not finite.
absl::StatusOr<double> MeanSquare(ConstMatrixView vectors, absl::Span<const double> squares, Backend& backend);

// Returns the number by which the rule multiplies each of k vectors of this mean square. For BLEND it also advances the
// averages in `scalars`.
double VectorScale(const MkorConfig& config, int64_t d, int64_t k, double mean_square, RuleScalars& scalars);

}  // namespace precondor
