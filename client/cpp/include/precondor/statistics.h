// SPDX-License-Identifier: Apache-2.0
// Computes a layer's statistics from its rows on the worker: means, random-sign sketches or second moments. Source:
// docs/develop/math/statistics.md. All functions are pure and thread-safe.
#pragma once

#include <cstdint>

#include "absl/status/status.h"
#include "absl/types/span.h"

#include "kernels/base/matrix_view.h"
#include "kernels/base/session_spec.h"

namespace precondor {

enum class Side : uint8_t { kInput = 0, kOutput = 1 };

// Identifies the sketches of one (session, step, layer, side, rank). A sign depends only on the key and the row's
// number.
struct SketchKey {
  uint64_t seed = 0;
  uint64_t step = 0;
  uint32_t layer = 0;
  Side side = Side::kInput;
  uint32_t rank = 0;
};

// Shape of one side's statistics for a layer whose side has dimension d, from `rows` rows: [VectorsPerWorker, d].
// COVARIANCE has [rows, d] if that is smaller than the packed lower triangle [1, d (d + 1) / 2], and the triangle
// otherwise.
struct StatisticsShape {
  int64_t rows = 0;
  int64_t cols = 0;
};
StatisticsShape ShapeOfStatistics(const SessionSpec& spec, int64_t layer, int64_t d, int64_t rows);

// Writes the signs of SIGNED for rows first_row, first_row + 1 ... to out [q, n], as +1 or -1. For callers that compute
// the sketches themselves, for example on a device or from a part of the rows at a time.
void SketchSigns(const SketchKey& key, uint64_t first_row, MatrixView out);

// Computes the sums of SIGNED for a part of the rows: out_j = sum_i s_ij x_i over `rows` [n, d], which have the numbers
// first_row, first_row + 1 ... `out` is [q, d], or [q, d + 1] to append the bias' 1 to each row. Returns
// INVALID_ARGUMENT if a shape does not match.
absl::Status SketchSums(const SketchKey& key, uint64_t first_row, ConstMatrixView rows, MatrixView out);

// Computes `out`, of ShapeOfStatistics, from this worker's rows [n, d], n >= 1:
//   MEAN, PER_WORKER_MEAN: row_scale * mean of the rows;
//   SIGNED: v_j = row_scale / sqrt(n) * sum_i s_ij x_i;
//   COVARIANCE: row_scale * rows, or the lower triangle of row_scale^2 / n * sum_i x_i x_i', row after row.
// row_scale is 1 for the input side (append the bias' 1 to the rows first). For gradients with respect to the output of
// a loss that is a mean over rows, it is the number of rows. Returns INVALID_ARGUMENT if a shape does not match.
absl::Status ComputeStatistics(const SessionSpec& spec, const SketchKey& key, ConstMatrixView rows, double row_scale,
                               MatrixView out);

// Returns the factor by which KL_CLIP scales all U of a step: min(1, sqrt(clip / (lr^2 |sum_l <D_l, U_l>|))); 1 if the
// sum is zero, 0 if it is not a number.
double KlClipScale(absl::Span<const double> inner_products, double learning_rate, double clip);

}  // namespace precondor
