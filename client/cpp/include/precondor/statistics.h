// SPDX-License-Identifier: Apache-2.0
// What a worker computes from a layer's rows before it sends anything: means or random-sign sketches, or
// second moments.
// Source: docs/math/statistics.md. All functions are pure and thread-safe.
#pragma once

#include <cstdint>

#include "absl/status/status.h"
#include "absl/types/span.h"

#include "kernels/base/matrix_view.h"
#include "kernels/base/session_spec.h"

namespace precondor {

enum class Side : uint8_t { kInput = 0, kOutput = 1 };

// Names the vectors of one (session, step, layer, side, rank); the signs are a function of it and the row alone.
struct SketchKey {
  uint64_t seed = 0;
  uint64_t step = 0;
  uint32_t layer = 0;
  Side side = Side::kInput;
  uint32_t rank = 0;
};

// Extents of one side's statistics of a layer whose side has dimension d, from `rows` rows: [VectorsPerWorker, d]; for
// COVARIANCE [rows, d] where that is smaller than the packed lower triangle [1, d (d + 1) / 2], and that otherwise.
struct StatisticsShape {
  int64_t rows = 0;
  int64_t cols = 0;
};
StatisticsShape ShapeOfStatistics(const SessionSpec& spec, int64_t layer, int64_t d, int64_t rows);

// SIGNED's signs of rows first_row, first_row + 1 ...: out [q, n], +1 or -1, for who makes the sketches where the rows
// are, such as on a device, or a part of the rows at a time.
void SketchSigns(const SketchKey& key, uint64_t first_row, MatrixView out);

// SIGNED's sums alone, for who has a part of the rows at a time: out_j = sum_i s_ij x_i over `rows` [n, d], which are
// first_row, first_row + 1 ...; out [q, d], or [q, d + 1] where each row ends in the 1 of a bias that it does not have
// yet. InvalidArgument for shapes.
absl::Status SketchSums(const SketchKey& key, uint64_t first_row, ConstMatrixView rows, MatrixView out);

// `out`, of ShapeOfStatistics, from this worker's rows [n, d], n >= 1:
//   MEAN, PER_WORKER_MEAN: row_scale * mean of the rows;
//   SIGNED: v_j = row_scale / sqrt(n) * sum_i s_ij x_i;
//   COVARIANCE: row_scale * rows, or row_scale^2 / n * sum_i x_i x_i', its lower triangle row after row.
// row_scale: 1 for the input side (append the bias' 1 to the rows first); the number of rows for gradients with respect
// to the output of a loss that is a mean over rows. InvalidArgument for shapes.
absl::Status ComputeStatistics(const SessionSpec& spec, const SketchKey& key, ConstMatrixView rows, double row_scale,
                               MatrixView out);

// The factor by which KL_CLIP scales all U of a step: min(1, sqrt(clip / (lr^2 |sum_l <D_l, U_l>|))); 1 when the sum is
// zero, 0 when it is not a number.
double KlClipScale(absl::Span<const double> inner_products, double learning_rate, double clip);

}  // namespace precondor
