// SPDX-License-Identifier: Apache-2.0
// Matrices in the memory of a backend's device, which Backend makes, and the forms of matrices that it takes.
#pragma once

#include <cstdint>

#include "absl/status/statusor.h"
#include "absl/types/span.h"

#include "kernels/base/matrix_view.h"

namespace precondor {

class Backend;

// Owns device memory for one f32 matrix. Must not outlive its backend.
class DeviceMatrix {
 public:
  DeviceMatrix() = default;
  DeviceMatrix(DeviceMatrix&& other) noexcept;
  DeviceMatrix& operator=(DeviceMatrix&& other) noexcept;
  ~DeviceMatrix();

  bool empty() const { return view_.data == nullptr; }
  int64_t rows() const { return view_.rows; }
  int64_t cols() const { return view_.cols; }
  MatrixView view() { return view_; }
  ConstMatrixView view() const { return view_; }

 private:
  friend class Backend;
  friend class SymmetricMatrix;
  DeviceMatrix(Backend* backend, MatrixView view) : backend_(backend), view_(view) {}
  Backend* backend_ = nullptr;
  MatrixView view_;
};

// A symmetric n x n matrix in device memory, in tiles (kernels/base/matrix_view.h), initially zero.
class SymmetricMatrix {
 public:
  SymmetricMatrix() = default;
  bool empty() const { return tiles_.empty(); }
  int64_t n() const { return n_; }
  SymmetricStorage storage() const { return storage_; }
  // The raw memory as rows of 32 f32, whatever the storage: for copying and saving, not for computing.
  MatrixView raw() { return tiles_.view(); }
  ConstMatrixView raw() const { return tiles_.view(); }
  // Returns a view of another matrix' memory that owns nothing.
  static SymmetricMatrix Showing(MatrixView raw, int64_t n, SymmetricStorage storage) {
    SymmetricMatrix shown;
    shown.tiles_.view_ = raw;
    shown.n_ = n;
    shown.storage_ = storage;
    return shown;
  }

 private:
  friend class Backend;
  DeviceMatrix tiles_;
  int64_t n_ = 0;
  SymmetricStorage storage_ = SymmetricStorage::kF32;
};

// A symmetric matrix as Backend's dense products take it: either explicit, a full matrix, or implicit, a formula of a
// tiled matrix. A backend expands an implicit form where, and in the precision in which, its product needs it. Refers
// to memory that others own. The form is explicit if is_explicit(); otherwise it is implicit.
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

// The low-rank form of an inverse factor, as Backend's operations take it: one side's inverse factor J = c (I - P' S P)
// with P [n, d] (vectors as rows) and S [n, n] symmetric. n == 0 means that J is c I.
struct LowRankInverse {
  double c = 1.0;
  ConstMatrixView vectors;           // P
  ConstMatrixView core;              // S
  absl::Span<const double> roots{};  // s, where S = s (I + s P P' s)^-1 s for a diagonal s >= 0; empty otherwise
};

}  // namespace precondor
