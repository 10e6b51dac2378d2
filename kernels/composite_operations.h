// SPDX-License-Identifier: Apache-2.0
// Backend's composite operations (kernels/operation.h): operations on tiled matrices, which every backend has, and
// whole parts of a step. A backend without an implementation of these makes them with Backend::RunByPrimitives.
#pragma once

#include <cstdint>
#include <tuple>

#include "absl/functional/function_ref.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"

#include "kernels/base/matrix_view.h"
#include "kernels/base/operation_kinds.h"
#include "kernels/base/random.h"
#include "kernels/device_matrix.h"
#include "kernels/primitive_operations.h"

namespace precondor {

// Returns the factor, 0 or more, by which an answer is scaled, from |d| and the norm of the unscaled answer.
using LengthRule = absl::FunctionRef<absl::StatusOr<double>(double d_length, double u_length)>;

namespace operation {

template <typename Kind>
concept Composite = Kind::kIsComposite;

struct FillNormal {
  static constexpr bool kIsComposite = true;

  CounterRandom random;
  MatrixView x;

  static auto Writes(auto& self) { return std::tie(self.x); }
};

// --- Operations on tiled matrices ------------------------------------------------------------------------------------

struct SymmetricUpdateMultiply {
  double scale = 1;
  double shift = 0;
  absl::Span<const double> weights;
  ConstMatrixView rows;
  MatrixView raw;  // memory of m
  int64_t n = 0;
  SymmetricStorage storage = SymmetricStorage::kF32;
  ConstMatrixView v;
  MatrixView y;

  static auto Takes(auto& self) { return std::tie(self.weights); }
  static auto Reads(auto& self) { return std::tie(self.rows, self.v); }
  static auto Writes(auto& self) { return std::tie(self.raw, self.y); }
};
struct SymmetricExpand {
  SymmetricForm form;  // an implicit form
  MatrixView x;

  static auto Takes(auto& self) { return std::tie(self.form.weights); }
  static auto Reads(auto& self) { return std::tie(self.form.raw, self.form.rows); }
  static auto Writes(auto& self) { return std::tie(self.x); }
};

// --- Whole parts of a step -------------------------------------------------------------------------------------------

struct LowRankCore {
  static constexpr bool kIsComposite = true;

  absl::Span<const double> roots;
  ConstMatrixView gram;
  MatrixView core;
  MatrixView packed = {};

  static auto Takes(auto& self) { return std::tie(self.roots); }
  static auto Reads(auto& self) { return std::tie(self.gram); }
  static auto Writes(auto& self) { return std::tie(self.core, self.packed); }
  Awaited awaited() const { return Awaited::kOutcome; }
};
struct LowRankAppend {
  static constexpr bool kIsComposite = true;

  absl::Span<const double> scales;
  ConstMatrixView rows;
  absl::Span<const int64_t> slots;
  MatrixView vectors;
  MatrixView gram;

  static auto Takes(auto& self) { return std::tie(self.scales, self.slots); }
  static auto Reads(auto& self) { return std::tie(self.rows); }
  static auto Writes(auto& self) { return std::tie(self.vectors, self.gram); }
};
struct LowRankPrecondition {
  static constexpr bool kIsComposite = true;

  LowRankInverse out_side;
  LowRankInverse in_side;
  ConstMatrixView d;
  MatrixView u;
  ProductPrecision precision = ProductPrecision::kF32;
  absl::Span<double> squares = {};   // receives |d|^2 and |u|^2; empty if not wanted
  const LengthRule* rule = nullptr;  // set only if the backend applies_length_rules()

  static auto Takes(auto& self) { return std::tie(self.out_side.roots, self.in_side.roots); }
  static auto Reads(auto& self) {
    return std::tie(self.d, self.out_side.vectors, self.out_side.core, self.in_side.vectors, self.in_side.core);
  }
  static auto Writes(auto& self) { return std::tie(self.u); }
  Awaited awaited() const { return squares.empty() ? Awaited::kNothing : Awaited::kReturn; }
};
struct DensePrecondition {
  static constexpr bool kIsComposite = true;

  SymmetricForm l;
  SymmetricForm r;
  ConstMatrixView d;
  MatrixView u;
  ProductPrecision precision = ProductPrecision::kF32;
  absl::Span<double> squares = {};  // receives |d|^2 and |u|^2; empty if not wanted

  static auto Takes(auto& self) { return std::tie(self.l.weights, self.r.weights); }
  static auto Reads(auto& self) {
    return std::tie(self.d, self.l.matrix, self.l.raw, self.l.rows, self.r.matrix, self.r.raw, self.r.rows);
  }
  static auto Writes(auto& self) { return std::tie(self.u); }
  Awaited awaited() const { return squares.empty() ? Awaited::kNothing : Awaited::kReturn; }
};
// Coefficients of an iteration: the polynomial's slope at 0 is as large as it can be while singular values end near 1.
inline constexpr double kNewtonSchulzLinear = 3.4445, kNewtonSchulzCubic = -4.7750, kNewtonSchulzQuintic = 2.0315;
// Whether Backend's default for x [m, n] iterates on x x' or x' x alone. If one side is at least twice the other, that
// takes fewer products: of each pair of 2 k^2 max(m, n) operations one instead of `steps`, and of 2 k^3, with symmetric
// results, four instead of one. Rounding leaves eigenvalues a little below 0, and each iteration takes them 12 times as
// far below: after five in f32, their part of the answer is below 1e-3.
constexpr bool OnGram(int64_t m, int64_t n, int64_t steps) { return (m >= 2 * n || n >= 2 * m) && steps <= 5; }
struct NewtonSchulz {
  static constexpr bool kIsComposite = true;

  ConstMatrixView d;
  ConstMatrixView momentum = {};  // has no elements if d is the direction already
  double beta = 0;
  MatrixView next = {};       // the momentum with d
  MatrixView lookahead = {};  // has no elements if `next` is the direction
  int64_t steps = 0;          // iterations
  double epsilon = 0;
  double scale = 1;
  MatrixView u;
  ProductPrecision precision = ProductPrecision::kF32;
  absl::Span<double> squares = {};  // [3]

  static auto Reads(auto& self) { return std::tie(self.d, self.momentum); }
  static auto Writes(auto& self) { return std::tie(self.next, self.lookahead, self.u); }
  Awaited awaited() const { return Awaited::kReturn; }
};
struct OrthogonalIteration {
  static constexpr bool kIsComposite = true;

  ConstMatrixView a;
  ConstMatrixView q;
  MatrixView next;
  absl::Span<int64_t> order;

  static auto Reads(auto& self) { return std::tie(self.a, self.q); }
  static auto Writes(auto& self) { return std::tie(self.next); }
  Awaited awaited() const { return Awaited::kOutcome; }
};
struct ShermanMorrisonTerms {
  static constexpr bool kIsComposite = true;
  // Limits for a device's own implementation. For more vectors, or more rows of h, it uses several operations.
  static constexpr int64_t kMostVectors = 16, kMostRows = 32;

  SymmetricForm h;
  double factor = 1;
  ConstMatrixView v;
  MatrixView y;
  MatrixView terms;
  absl::Span<double> squares = {};

  static auto Takes(auto& self) { return std::tie(self.h.weights); }
  static auto Reads(auto& self) { return std::tie(self.h.rows, self.v); }
  static auto Writes(auto& self) { return std::tie(self.y, self.terms); }
  Awaited awaited() const { return Awaited::kOutcome; }
};

}  // namespace operation
}  // namespace precondor
