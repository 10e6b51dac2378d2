// SPDX-License-Identifier: Apache-2.0
// Backend's operations as data: each is described here once, and everything that has to know all of them (backends,
// the grouping of several layers' work, what may change places) goes by these descriptions.
//
// What an operation does, its shapes and its errors: Backend's function of the same name, which makes it once its
// operands are checked. Matrices and numbers belong to whoever made the operation, and its outputs have elements.
//
// An operation says of itself:
//   static void Describe(self, visitor)   visitor.Reads(view...) and visitor.Writes(view...), which may also be read,
//                                         for every matrix on the device; visitor.Takes(span...) for numbers that the
//                                         host gives, kept by whoever runs the operation later than the call
//   Awaited awaited() const               what its caller waits for, where it does wait
//   kIsComposite                          that Backend::RunByPrimitives can make it of other operations
#pragma once

#include <cstddef>
#include <cstdint>
#include <variant>

#include "absl/functional/function_ref.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"

#include "kernels/base/elementwise_kind.h"
#include "kernels/base/matrix_view.h"
#include "kernels/base/product_precision.h"
#include "kernels/base/random.h"
#include "kernels/base/symmetric_tiles.h"
#include "kernels/low_rank_inverse.h"
#include "kernels/symmetric_form.h"

namespace precondor {

enum class Transpose : bool { kNo = false, kYes = true };
// The side of a product that a triangular matrix comes from.
enum class From : bool { kLeft = false, kRight = true };

// The factor by which an answer is scaled, from |d| and the length that it has without; 0 or more.
using LengthRule = absl::FunctionRef<absl::StatusOr<double>(double d_length, double u_length)>;

enum class Awaited : uint8_t {
  kNothing,
  kOutcome,  // numbers for the host, or that it is impossible: in a batch, when that ends
  kReturn,   // numbers for the host, when the call returns
};

namespace operation {

// --- element by element
// -----------------------------------------------------------------------------------------------

struct Elementwise {
  ElementwiseKind kind = ElementwiseKind::kAxpby;
  double alpha = 0;
  double beta = 0;
  absl::Span<const double> scales = {};
  int64_t row = 0;  // kPackRow
  ConstMatrixView x = {};
  MatrixView y = {};

  static void Describe(auto& self, auto& visitor) {
    visitor.Takes(self.scales);
    visitor.Reads(self.x);
    visitor.Writes(self.y);
  }
};
struct MultiplyElements {
  double alpha = 1;
  ConstMatrixView x;
  ConstMatrixView y;
  double beta = 0;
  MatrixView z;

  static void Describe(auto& self, auto& visitor) {
    visitor.Reads(self.x, self.y);
    visitor.Writes(self.z);
  }
};
struct DivideByRoot {
  double alpha = 1;
  ConstMatrixView x;
  ConstMatrixView v;
  double epsilon = 0;
  MatrixView y;

  static void Describe(auto& self, auto& visitor) {
    visitor.Reads(self.x, self.v);
    visitor.Writes(self.y);
  }
};
struct DivideByOuter {
  double alpha = 1;
  absl::Span<const double> rows;
  absl::Span<const double> columns;
  double shift = 0;
  ConstMatrixView x;
  MatrixView y;

  static void Describe(auto& self, auto& visitor) {
    visitor.Takes(self.rows, self.columns);
    visitor.Reads(self.x);
    visitor.Writes(self.y);
  }
};
struct Gather {
  absl::Span<const int64_t> rows;
  absl::Span<const int64_t> columns;
  ConstMatrixView x;
  MatrixView y;

  static void Describe(auto& self, auto& visitor) {
    visitor.Takes(self.rows, self.columns);
    visitor.Reads(self.x);
    visitor.Writes(self.y);
  }
};
struct FillNormal {
  static constexpr bool kIsComposite = true;

  CounterRandom random;
  MatrixView x;

  static void Describe(auto& self, auto& visitor) { visitor.Writes(self.x); }
};

// --- numbers for the host, which are written to where `out` points
// ----------------------------------------------------

struct Dot {
  ConstMatrixView x;
  ConstMatrixView y;
  double* out = nullptr;

  static void Describe(auto& self, auto& visitor) { visitor.Reads(self.x, self.y); }
  Awaited awaited() const { return Awaited::kReturn; }
};
struct AbsoluteSum {
  ConstMatrixView x;
  double* out = nullptr;

  static void Describe(auto& self, auto& visitor) { visitor.Reads(self.x); }
  Awaited awaited() const { return Awaited::kReturn; }
};
struct AbsoluteMaximum {
  ConstMatrixView x;
  double* out = nullptr;

  static void Describe(auto& self, auto& visitor) { visitor.Reads(self.x); }
  Awaited awaited() const { return Awaited::kReturn; }
};
struct Diagonal {
  ConstMatrixView a;
  absl::Span<double> out;

  static void Describe(auto& self, auto& visitor) { visitor.Reads(self.a); }
  Awaited awaited() const { return Awaited::kReturn; }
};
struct RowSquaredNorms {
  ConstMatrixView x;
  absl::Span<double> out;

  static void Describe(auto& self, auto& visitor) { visitor.Reads(self.x); }
  Awaited awaited() const { return Awaited::kOutcome; }
};
struct ColumnSquaredNorms {
  ConstMatrixView x;
  absl::Span<double> out;

  static void Describe(auto& self, auto& visitor) { visitor.Reads(self.x); }
  Awaited awaited() const { return Awaited::kOutcome; }
};

// --- products and decompositions
// --------------------------------------------------------------------------------------

struct Gemm {
  double alpha = 1;
  ConstMatrixView a;
  Transpose transpose_a = Transpose::kNo;
  ConstMatrixView b;
  Transpose transpose_b = Transpose::kNo;
  double beta = 0;
  MatrixView c;

  static void Describe(auto& self, auto& visitor) {
    visitor.Reads(self.a, self.b);
    visitor.Writes(self.c);
  }
};
struct TriangularMultiply {
  From side = From::kLeft;
  ConstMatrixView a;
  Transpose transpose = Transpose::kNo;
  MatrixView x;

  static void Describe(auto& self, auto& visitor) {
    visitor.Reads(self.a);
    visitor.Writes(self.x);
  }
};
struct TriangularSolve {
  From side = From::kLeft;
  ConstMatrixView a;
  Transpose transpose = Transpose::kNo;
  MatrixView x;

  static void Describe(auto& self, auto& visitor) {
    visitor.Reads(self.a);
    visitor.Writes(self.x);
  }
};
struct SpdInverse {
  ConstMatrixView a;
  MatrixView x;

  static void Describe(auto& self, auto& visitor) {
    visitor.Reads(self.a);
    visitor.Writes(self.x);
  }
  Awaited awaited() const { return Awaited::kOutcome; }
};
struct SymmetricEigen {
  ConstMatrixView a;
  absl::Span<double> values;
  MatrixView q;

  static void Describe(auto& self, auto& visitor) {
    visitor.Reads(self.a);
    visitor.Writes(self.q);
  }
  Awaited awaited() const { return Awaited::kOutcome; }
};
struct OrthonormalizeRows {
  ConstMatrixView a;
  MatrixView q;

  static void Describe(auto& self, auto& visitor) {
    visitor.Reads(self.a);
    visitor.Writes(self.q);
  }
  Awaited awaited() const { return Awaited::kOutcome; }
};

// --- of matrices in tiles
// ---------------------------------------------------------------------------------------------

struct SymmetricUpdateMultiply {
  static constexpr bool kIsComposite = true;

  double scale = 1;
  double shift = 0;
  absl::Span<const double> weights;
  ConstMatrixView rows;
  MatrixView raw;  // m's memory
  int64_t n = 0;
  SymmetricStorage storage = SymmetricStorage::kF32;
  ConstMatrixView v;
  MatrixView y;

  static void Describe(auto& self, auto& visitor) {
    visitor.Takes(self.weights);
    visitor.Reads(self.rows, self.v);
    visitor.Writes(self.raw, self.y);
  }
};
struct SymmetricExpand {
  static constexpr bool kIsComposite = true;

  SymmetricForm form;  // which is not there
  MatrixView x;

  static void Describe(auto& self, auto& visitor) {
    visitor.Takes(self.form.weights);
    visitor.Reads(self.form.raw, self.form.rows);
    visitor.Writes(self.x);
  }
};
struct SymmetricCompress {
  static constexpr bool kIsComposite = true;

  ConstMatrixView x;
  MatrixView raw;  // m's memory
  int64_t n = 0;
  SymmetricStorage storage = SymmetricStorage::kF32;

  static void Describe(auto& self, auto& visitor) {
    visitor.Reads(self.x);
    visitor.Writes(self.raw);
  }
};

// --- whole parts of a step
// --------------------------------------------------------------------------------------------

struct LowRankCore {
  static constexpr bool kIsComposite = true;

  absl::Span<const double> roots;
  ConstMatrixView gram;
  MatrixView core;
  MatrixView packed = {};

  static void Describe(auto& self, auto& visitor) {
    visitor.Takes(self.roots);
    visitor.Reads(self.gram);
    visitor.Writes(self.core, self.packed);
  }
  Awaited awaited() const { return Awaited::kOutcome; }
};
struct LowRankAppend {
  static constexpr bool kIsComposite = true;

  absl::Span<const double> scales;
  ConstMatrixView rows;
  absl::Span<const int64_t> slots;
  MatrixView vectors;
  MatrixView gram;

  static void Describe(auto& self, auto& visitor) {
    visitor.Takes(self.scales, self.slots);
    visitor.Reads(self.rows);
    visitor.Writes(self.vectors, self.gram);
  }
};
struct LowRankPrecondition {
  static constexpr bool kIsComposite = true;

  LowRankInverse out_side;
  LowRankInverse in_side;
  ConstMatrixView d;
  MatrixView u;
  ProductPrecision precision = ProductPrecision::kF32;
  absl::Span<double> squares = {};   // |d|^2 and |u|^2, for the host; empty where it does not ask
  const LengthRule* rule = nullptr;  // only for a backend that applies_length_rules()

  static void Describe(auto& self, auto& visitor) {
    visitor.Takes(self.out_side.roots, self.in_side.roots);
    visitor.Reads(self.d, self.out_side.vectors, self.out_side.core, self.in_side.vectors, self.in_side.core);
    visitor.Writes(self.u);
  }
  Awaited awaited() const { return squares.empty() ? Awaited::kNothing : Awaited::kReturn; }
};
struct DensePrecondition {
  static constexpr bool kIsComposite = true;

  SymmetricForm l;
  SymmetricForm r;
  ConstMatrixView d;
  MatrixView u;
  ProductPrecision precision = ProductPrecision::kF32;
  absl::Span<double> squares = {};  // as above

  static void Describe(auto& self, auto& visitor) {
    visitor.Takes(self.l.weights, self.r.weights);
    visitor.Reads(self.d, self.l.matrix, self.l.raw, self.l.rows, self.r.matrix, self.r.raw, self.r.rows);
    visitor.Writes(self.u);
  }
  Awaited awaited() const { return squares.empty() ? Awaited::kNothing : Awaited::kReturn; }
};
struct ShermanMorrisonTerms {
  static constexpr bool kIsComposite = true;
  // What a device may take in one operation of its own; of more vectors, or rows of h, it makes several.
  static constexpr int64_t kMostVectors = 16, kMostRows = 32;

  SymmetricForm h;
  double factor = 1;
  ConstMatrixView v;
  MatrixView y;
  MatrixView terms;
  absl::Span<double> squares = {};

  static void Describe(auto& self, auto& visitor) {
    visitor.Takes(self.h.weights);
    visitor.Reads(self.h.rows, self.v);
    visitor.Writes(self.y, self.terms);
  }
  Awaited awaited() const { return Awaited::kOutcome; }
};

template <typename Kind>
concept Composite = Kind::kIsComposite;

}  // namespace operation

struct Operation {
  std::variant<operation::Elementwise, operation::MultiplyElements, operation::DivideByRoot, operation::DivideByOuter,
               operation::Gather, operation::FillNormal, operation::Dot, operation::AbsoluteSum,
               operation::AbsoluteMaximum, operation::Diagonal, operation::RowSquaredNorms,
               operation::ColumnSquaredNorms, operation::Gemm, operation::TriangularMultiply,
               operation::TriangularSolve, operation::SpdInverse, operation::SymmetricEigen,
               operation::OrthonormalizeRows, operation::SymmetricUpdateMultiply, operation::SymmetricExpand,
               operation::SymmetricCompress, operation::LowRankCore, operation::LowRankAppend,
               operation::LowRankPrecondition, operation::DensePrecondition, operation::ShermanMorrisonTerms>
      what;

  size_t kind() const { return what.index(); }
  template <typename Kind>
  const Kind* As() const {
    return std::get_if<Kind>(&what);
  }
  Awaited awaited() const {
    return std::visit(
        [](const auto& kind) {
          if constexpr (requires { kind.awaited(); }) return kind.awaited();
          return Awaited::kNothing;
        },
        what);
  }
};

}  // namespace precondor
