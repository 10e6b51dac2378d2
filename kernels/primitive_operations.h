// SPDX-License-Identifier: Apache-2.0
// The primitives among Backend's operations (kernels/operation.h).
#pragma once

#include <cstdint>
#include <tuple>

#include "absl/types/span.h"

#include "kernels/base/matrix_view.h"
#include "kernels/base/operation_kinds.h"

namespace precondor {

enum class Transpose : bool { kNo = false, kYes = true };
// The side on which a triangular matrix stands in a product.
enum class From : bool { kLeft = false, kRight = true };

enum class Awaited : uint8_t {
  kNothing,
  // The caller needs numbers on the host, or the status because the operation can be impossible. In a batch, it needs
  // them when the batch ends.
  kOutcome,
  // The caller needs numbers on the host when the call returns.
  kReturn,
};

namespace operation {

// --- Element-wise operations -----------------------------------------------------------------------------------------

struct Elementwise {
  ElementwiseKind kind = ElementwiseKind::kAxpby;
  double alpha = 0;
  double beta = 0;
  absl::Span<const double> scales = {};
  absl::Span<const double> column_scales = {};        // for kDivideByOuter
  absl::Span<const int64_t> rows = {}, columns = {};  // for kGather
  int64_t row = 0;                                    // for kPackRow
  ConstMatrixView x = {};
  ConstMatrixView v = {};  // for kAxpby with a beta, kMultiply and kDivideByRoot
  MatrixView y = {};

  static auto Takes(auto& self) { return std::tie(self.scales, self.column_scales, self.rows, self.columns); }
  static auto Reads(auto& self) { return std::tie(self.x, self.v); }
  static auto Writes(auto& self) { return std::tie(self.y); }
};
// --- Numbers for the host, written to `out` --------------------------------------------------------------------------

struct Dot {
  ConstMatrixView x;
  ConstMatrixView y;
  double* out = nullptr;
  Awaited when = Awaited::kReturn;

  static auto Reads(auto& self) { return std::tie(self.x, self.y); }
  Awaited awaited() const { return when; }
};
struct AbsoluteSum {
  ConstMatrixView x;
  double* out = nullptr;

  static auto Reads(auto& self) { return std::tie(self.x); }
  Awaited awaited() const { return Awaited::kReturn; }
};
struct AbsoluteMaximum {
  ConstMatrixView x;
  double* out = nullptr;

  static auto Reads(auto& self) { return std::tie(self.x); }
  Awaited awaited() const { return Awaited::kReturn; }
};
struct Diagonal {
  ConstMatrixView a;
  absl::Span<double> out;

  static auto Reads(auto& self) { return std::tie(self.a); }
  Awaited awaited() const { return Awaited::kReturn; }
};
struct RowSquaredNorms {
  ConstMatrixView x;
  absl::Span<double> out;

  static auto Reads(auto& self) { return std::tie(self.x); }
  Awaited awaited() const { return Awaited::kOutcome; }
};
struct ColumnSquaredNorms {
  ConstMatrixView x;
  absl::Span<double> out;

  static auto Reads(auto& self) { return std::tie(self.x); }
  Awaited awaited() const { return Awaited::kOutcome; }
};

// --- Products and decompositions -------------------------------------------------------------------------------------

struct Gemm {
  double alpha = 1;
  ConstMatrixView a;
  Transpose transpose_a = Transpose::kNo;
  ConstMatrixView b;
  Transpose transpose_b = Transpose::kNo;
  double beta = 0;
  MatrixView c;
  ProductPrecision precision = ProductPrecision::kF32;
  bool symmetric = false;  // the result is, and c if beta is not 0: one triangle may be computed and mirrored

  static auto Reads(auto& self) { return std::tie(self.a, self.b); }
  static auto Writes(auto& self) { return std::tie(self.c); }
};
struct TriangularMultiply {
  From side = From::kLeft;
  ConstMatrixView a;
  Transpose transpose = Transpose::kNo;
  MatrixView x;

  static auto Reads(auto& self) { return std::tie(self.a); }
  static auto Writes(auto& self) { return std::tie(self.x); }
};
struct TriangularSolve {
  From side = From::kLeft;
  ConstMatrixView a;
  Transpose transpose = Transpose::kNo;
  MatrixView x;

  static auto Reads(auto& self) { return std::tie(self.a); }
  static auto Writes(auto& self) { return std::tie(self.x); }
};
struct SpdInverse {
  ConstMatrixView a;
  MatrixView x;

  static auto Reads(auto& self) { return std::tie(self.a); }
  static auto Writes(auto& self) { return std::tie(self.x); }
  Awaited awaited() const { return Awaited::kOutcome; }
};
struct SymmetricEigen {
  ConstMatrixView a;
  absl::Span<double> values;
  MatrixView q;

  static auto Reads(auto& self) { return std::tie(self.a); }
  static auto Writes(auto& self) { return std::tie(self.q); }
  Awaited awaited() const { return Awaited::kOutcome; }
};
struct OrthonormalizeRows {
  ConstMatrixView a;
  MatrixView q;

  static auto Reads(auto& self) { return std::tie(self.a); }
  static auto Writes(auto& self) { return std::tie(self.q); }
  Awaited awaited() const { return Awaited::kOutcome; }
};

}  // namespace operation
}  // namespace precondor
