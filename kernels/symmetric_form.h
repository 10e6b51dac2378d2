// SPDX-License-Identifier: Apache-2.0
// A symmetric matrix as Backend's dense products take it: one that is there, or what SymmetricExpand would make of one
// in tiles, which a backend makes where and in the precision that its product wants.
#pragma once

#include <cstdint>

#include "absl/status/statusor.h"
#include "absl/types/span.h"

#include "kernels/base/matrix_view.h"
#include "kernels/base/symmetric_tiles.h"
#include "kernels/device_matrix.h"

namespace precondor {

// Shows memory of others.
struct SymmetricForm {
  SymmetricForm() = default;
  SymmetricForm(ConstMatrixView full) : matrix(full) {}  // NOLINT(google-explicit-constructor): one that is there
  SymmetricForm(MatrixView full) : matrix(full) {}       // NOLINT(google-explicit-constructor): likewise
  // scale m + shift I + sum_i weights[i] rows_i rows_i'.
  SymmetricForm(double scale, double shift, absl::Span<const double> weights, ConstMatrixView rows,
                const SymmetricMatrix& m)
      : SymmetricForm(scale, shift, weights, rows) {
    raw = m.raw();
    n = m.n();
    storage = m.storage();
  }
  // Of an m that lies elsewhere, for those who do not look at it.
  SymmetricForm(double scale, double shift, absl::Span<const double> weights, ConstMatrixView rows)
      : scale(scale), shift(shift), weights(weights), rows(rows) {}

  bool is_there() const { return raw.data == nullptr; }

  ConstMatrixView matrix;  // when it is there; otherwise, m's memory, and the rest
  ConstMatrixView raw;
  int64_t n = 0;
  SymmetricStorage storage = SymmetricStorage::kF32;
  double scale = 1.0;
  double shift = 0.0;
  absl::Span<const double> weights;
  ConstMatrixView rows;
};

// The form's matrix, in memory that `made` then owns where it is not stored. Scratch: n^2 elements, and
// SymmetricExpand's.
absl::StatusOr<ConstMatrixView> Expanded(Backend& backend, const SymmetricForm& form, DeviceMatrix& made);
// y = scale y + shift v + sum_i weights[i] (v rows_i') rows_i, of a form that is not stored: v times the form, where y
// was v m and `scale` is the form's. Scratch: v.rows rows.rows elements.
absl::Status AddTheRest(Backend& backend, const SymmetricForm& form, double scale, ConstMatrixView v, MatrixView y);

}  // namespace precondor
