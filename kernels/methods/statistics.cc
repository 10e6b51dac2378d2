// SPDX-License-Identifier: Apache-2.0
#include "kernels/methods/statistics.h"

#include <cmath>

#include "absl/strings/str_cat.h"
#include "absl/types/span.h"

#include "kernels/base/status_macros.h"

namespace precondor {

absl::Status ExpectVectors(const LayerSpec& layer, const LayerStatistics& statistics) {
  const int64_t covariances = statistics.a_covariance.rows + statistics.g_covariance.rows;
  if (statistics.a.rows >= 1 && statistics.g.rows >= 1 && covariances == 0) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat("layer ", layer.name,
                                                 ": statistics: expected at least one vector, got ", statistics.a.rows,
                                                 " and ", statistics.g.rows, ", and ", covariances, " covariances"));
}

absl::Status CheckEitherForm(const LayerSpec& layer, absl::string_view side, ConstMatrixView vectors,
                             ConstMatrixView covariance, int64_t d, Backend& backend) {
  if ((vectors.rows >= 1) == (covariance.rows >= 1)) {
    return absl::InvalidArgumentError(absl::StrCat("layer ", layer.name, ": statistics ", side,
                                                   ": expected vectors or a covariance, got ", vectors.rows,
                                                   " vectors and ", covariance.rows, " covariances"));
  }
  if (vectors.rows >= 1) return FiniteSquaredNorms(layer, side, vectors, d, backend).status();
  if (covariance.rows != 1) {
    return absl::InvalidArgumentError(
        absl::StrCat("layer ", layer.name, ": statistics ", side, ": expected one covariance, got ", covariance.rows));
  }
  return FiniteSquaredNorms(layer, side, covariance, d * (d + 1) / 2, backend).status();
}

absl::StatusOr<PerVector> FiniteSquaredNorms(const LayerSpec& layer, absl::string_view side, ConstMatrixView vectors,
                                             int64_t d, Backend& backend) {
  if (vectors.cols != d) {
    return absl::InvalidArgumentError(absl::StrCat("layer ", layer.name, ": statistics ", side,
                                                   ": expected vectors of ", d, " elements, got ", vectors.cols));
  }
  PerVector squares(vectors.rows);
  PRECONDOR_RETURN_IF_ERROR(backend.RowSquaredNorms(vectors, absl::MakeSpan(squares)));
  for (double square : squares) {
    if (std::isfinite(square)) continue;
    return absl::InvalidArgumentError(
        absl::StrCat("layer ", layer.name, ": statistics ", side, ": expected finite vectors, got NaN or infinity"));
  }
  return squares;
}

}  // namespace precondor
