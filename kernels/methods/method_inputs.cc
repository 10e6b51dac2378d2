// SPDX-License-Identifier: Apache-2.0
#include "kernels/methods/method_inputs.h"

#include <cmath>

#include "absl/strings/str_cat.h"
#include "absl/types/span.h"

#include "kernels/base/method_traits.h"
#include "kernels/base/status_macros.h"

namespace precondor {
namespace {

absl::Status ExpectLength(const LayerSpec& layer, absl::string_view side, ConstMatrixView vectors, int64_t d) {
  if (vectors.cols == d) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat("layer ", layer.name, ": statistics ", side, ": expected vectors of ",
                                                 d, " elements, got ", vectors.cols));
}

absl::Status ExpectFinite(const LayerSpec& layer, absl::string_view side, const PerVector& squares) {
  for (double square : squares) {
    if (std::isfinite(square)) continue;
    return absl::InvalidArgumentError(
        absl::StrCat("layer ", layer.name, ": statistics ", side, ": expected finite vectors, got NaN or infinity"));
  }
  return absl::OkStatus();
}

}  // namespace

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
  PRECONDOR_RETURN_IF_ERROR(ExpectLength(layer, side, vectors, d));
  PerVector squares(vectors.rows);
  PRECONDOR_RETURN_IF_ERROR(backend.RowSquaredNorms(vectors, absl::MakeSpan(squares)));
  PRECONDOR_RETURN_IF_ERROR(ExpectFinite(layer, side, squares));
  return squares;
}

absl::StatusOr<SquaredNorms> FiniteSquaredNorms(const LayerSpec& layer, const LayerStatistics& statistics,
                                                Backend& backend) {
  PRECONDOR_RETURN_IF_ERROR(ExpectLength(layer, "a", statistics.a, layer.d_in));
  PRECONDOR_RETURN_IF_ERROR(ExpectLength(layer, "g", statistics.g, layer.d_out));
  SquaredNorms squares{PerVector(statistics.a.rows), PerVector(statistics.g.rows)};
  Backend::Batch both(backend);
  PRECONDOR_RETURN_IF_ERROR(backend.RowSquaredNorms(statistics.a, absl::MakeSpan(squares.a)));
  PRECONDOR_RETURN_IF_ERROR(backend.RowSquaredNorms(statistics.g, absl::MakeSpan(squares.g)));
  PRECONDOR_RETURN_IF_ERROR(both.Finish());
  PRECONDOR_RETURN_IF_ERROR(ExpectFinite(layer, "a", squares.a));
  PRECONDOR_RETURN_IF_ERROR(ExpectFinite(layer, "g", squares.g));
  return squares;
}

absl::Status OfLayer(const LayerSpec& layer, const absl::Status& status) {
  if (status.ok()) return status;
  return absl::Status(status.code(), absl::StrCat("layer ", layer.name, ": ", status.message()));
}

absl::Status ExpectGradient(const LayerSpec& layer, ConstMatrixView d) {
  if (d.rows == layer.d_out && d.cols == layer.d_in) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat("layer ", layer.name, ": gradient: expected [", layer.d_out, ", ",
                                                 layer.d_in, "], got [", d.rows, ", ", d.cols, "]"));
}

absl::Status ExpectLearnableGradient(const LayerSpec& layer, ConstMatrixView d, Backend& backend) {
  PRECONDOR_RETURN_IF_ERROR(ExpectGradient(layer, d));
  PRECONDOR_ASSIGN_OR_RETURN(const double square, backend.Dot(d, d));
  return ExpectLearnableNorm(layer, square);
}

absl::Status ExpectLearnableNorm(const LayerSpec& layer, double square) {
  if (square <= kMaxLearntGradientNorm * kMaxLearntGradientNorm) return absl::OkStatus();
  if (!std::isfinite(square)) {
    return absl::InvalidArgumentError(
        absl::StrCat("layer ", layer.name, ": gradient: expected finite elements, got NaN or infinity"));
  }
  return absl::InvalidArgumentError(absl::StrCat("layer ", layer.name, ": gradient: expected a norm of at most ",
                                                 kMaxLearntGradientNorm, ", got ", std::sqrt(square)));
}

}  // namespace precondor
