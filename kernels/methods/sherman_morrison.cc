// SPDX-License-Identifier: Apache-2.0
#include "kernels/methods/sherman_morrison.h"

#include <cmath>
#include <limits>
#include <numeric>

#include "kernels/base/status_macros.h"
#include "kernels/methods/statistics.h"

namespace precondor {

void RuleScalars::Write(StateWriter& out) const {
  out.Number(mass);
  out.Number(mean_square);
  out.Integer(discard_next ? 1 : 0);
}

absl::Status RuleScalars::Read(StateReader& in) {
  PRECONDOR_ASSIGN_OR_RETURN(mass, in.Number("mass"));
  PRECONDOR_ASSIGN_OR_RETURN(mean_square, in.Number("mean square"));
  PRECONDOR_ASSIGN_OR_RETURN(const uint64_t discard, in.Integer("discard next"));
  discard_next = discard != 0;
  return absl::OkStatus();
}

absl::Status CheckDiagonal(const std::vector<double>& diagonal) {
  // A sum of comparisons is vectorised; a branch or a maximum is not.
  int wrong = 0;
  for (const double value : diagonal) wrong += value >= 0 && value <= std::numeric_limits<double>::max() ? 0 : 1;
  if (wrong == 0) return absl::OkStatus();
  return absl::FailedPreconditionError("factor: expected a finite positive diagonal after the update");
}

absl::StatusOr<double> MeanSquare(ConstMatrixView vectors, absl::Span<const double> squares, Backend& backend) {
  PerVector all(squares.begin(), squares.end());
  if (all.empty()) {
    all.resize(vectors.rows);
    PRECONDOR_RETURN_IF_ERROR(backend.RowSquaredNorms(vectors, absl::MakeSpan(all)));
  }
  const double mean = std::accumulate(all.begin(), all.end(), 0.0) / static_cast<double>(vectors.rows);
  if (std::isfinite(mean)) return mean;
  return absl::InvalidArgumentError("statistics: expected finite vectors, got a norm that is not");
}

double VectorScale(const MkorConfig& config, int64_t d, int64_t k, double mean_square, RuleScalars& scalars) {
  const double count = static_cast<double>(k);
  if (config.rule == UpdateRule::kReference) return 1.0 / std::sqrt(count);
  scalars.mass = 1.0 - config.gamma * (1.0 - scalars.mass);
  scalars.mean_square = config.gamma * scalars.mean_square + (1.0 - config.gamma) * mean_square;
  const double variance = config.damping * scalars.mean_square / scalars.mass / static_cast<double>(d);
  return variance > 0 ? 1.0 / std::sqrt(count * variance) : 0.0;
}

}  // namespace precondor
