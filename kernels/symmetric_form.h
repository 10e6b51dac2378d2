// SPDX-License-Identifier: Apache-2.0
// A symmetric matrix as Backend's dense products take it: either explicit, a full matrix, or implicit, a formula of a
// tiled matrix. A backend expands an implicit form where, and in the precision in which, its product needs it.
#pragma once

#include <cstdint>

#include "absl/status/statusor.h"
#include "absl/types/span.h"

#include "kernels/base/matrix_view.h"
#include "kernels/base/symmetric_tiles.h"
#include "kernels/device_matrix.h"

namespace precondor {

// Refers to memory that others own. The form is explicit if is_explicit(); otherwise it is implicit.
struct SymmetricForm {
  SymmetricForm() = default;
  SymmetricForm(ConstMatrixView full) : matrix(full) {}  // NOLINT(google-explicit-constructor): an explicit form
  SymmetricForm(MatrixView full) : matrix(full) {}       // NOLINT(google-explicit-constructor): an explicit form
  // An implicit form: scale m + shift I + sum_i weights[i] rows_i rows_i'.
  SymmetricForm(double scale, double shift, absl::Span<const double> weights, ConstMatrixView rows,
                const SymmetricMatrix& m)
      : SymmetricForm(scale, shift, weights, rows) {
    raw = m.raw();
    n = m.n();
    storage = m.storage();
  }
  // An implicit form without access to m, for operations that do not read m.
  SymmetricForm(double scale, double shift, absl::Span<const double> weights, ConstMatrixView rows)
      : scale(scale), shift(shift), weights(weights), rows(rows) {}

  bool is_explicit() const { return raw.data == nullptr; }

  ConstMatrixView matrix;  // the full matrix of an explicit form; the other fields are those of an implicit one
  ConstMatrixView raw;
  int64_t n = 0;
  SymmetricStorage storage = SymmetricStorage::kF32;
  double scale = 1.0;
  double shift = 0.0;
  absl::Span<const double> weights;
  ConstMatrixView rows;
};

// Returns the full matrix of `form`. If the form is implicit, it is expanded into memory that `made` then owns.
// Scratch: n^2 elements, and SymmetricExpand's.
absl::StatusOr<ConstMatrixView> Expanded(Backend& backend, const SymmetricForm& form, DeviceMatrix& made);
// y = scale y + shift v + sum_i weights[i] (v rows_i') rows_i for an implicit form. If y was v m and `scale` is the
// form's scale, y becomes v times the form's matrix. Scratch: v.rows rows.rows elements.
absl::Status ApplyImplicitTerms(Backend& backend, const SymmetricForm& form, double scale, ConstMatrixView v,
                                MatrixView y);

}  // namespace precondor
