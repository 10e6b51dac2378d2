// SPDX-License-Identifier: Apache-2.0
// Operations of a Backend as data, for several callers' to run together (Backend::RunTogether). Operands are as
// Backend's operations of the same names take them, shapes checked; matrices belong to whoever made the operation, and
// none is without elements.
#pragma once

#include <cstddef>
#include <cstdint>
#include <variant>
#include <vector>

#include "absl/types/span.h"

#include "kernels/backend.h"
#include "kernels/base/elementwise_kind.h"

namespace precondor {

namespace operation {

using Numbers = std::vector<double>;

inline SymmetricForm WithWeights(SymmetricForm form, const Numbers& weights) {
  form.weights = weights;
  return form;
}

struct Elementwise {
  ElementwiseKind kind = ElementwiseKind::kAxpby;
  double alpha = 0;
  double beta = 0;
  Numbers scales = {};
  int64_t row = 0;  // kPackRow
  ConstMatrixView x = {};
  MatrixView y = {};
};
struct Gemm {
  double alpha = 1;
  ConstMatrixView a;
  Transpose transpose_a = Transpose::kNo;
  ConstMatrixView b;
  Transpose transpose_b = Transpose::kNo;
  double beta = 0;
  MatrixView c;
};
struct SymmetricUpdateMultiply {
  double scale = 1;
  double shift = 0;
  Numbers weights;
  ConstMatrixView rows;
  MatrixView raw;  // m's, which may move
  int64_t n = 0;
  SymmetricStorage storage = SymmetricStorage::kF32;
  ConstMatrixView v;
  MatrixView y;
};
// These have results for the host, where `out` points to, or can turn out impossible.
struct RowSquaredNorms {
  ConstMatrixView x;
  absl::Span<double> out;
};
struct Dot {
  ConstMatrixView x;
  ConstMatrixView y;
  double* out = nullptr;
};
struct SpdInverse {
  ConstMatrixView a;
  MatrixView x;
};
struct ColumnSquaredNorms {
  ConstMatrixView x;
  absl::Span<double> out;
};
struct SymmetricEigen {
  ConstMatrixView a;
  absl::Span<double> values;
  MatrixView q;
};
struct LowRankCore {
  Numbers roots;
  ConstMatrixView gram;
  MatrixView core;
  MatrixView packed = {};
};
struct LowRankAppend {
  Numbers scales;
  ConstMatrixView rows;
  std::vector<int64_t> slots;
  MatrixView vectors;
  MatrixView gram;
};
struct LowRankPrecondition {
  LowRankInverse out_side;
  LowRankInverse in_side;
  ConstMatrixView d;
  MatrixView u;
  ProductPrecision precision = ProductPrecision::kF32;
  absl::Span<double> squares = {};  // |d|^2 and |u|^2, for the host; empty where it does not ask
};

struct ShermanMorrisonTerms {
  // What a device may take in one operation of its own; of more vectors, or rows of h, it makes several.
  static constexpr int64_t kMostVectors = 16, kMostRows = 32;

  SymmetricForm h;  // whose weights are those below
  Numbers weights;
  double factor = 1;
  ConstMatrixView v;
  MatrixView y;
  MatrixView terms;
  absl::Span<double> squares = {};

  SymmetricForm form() const { return WithWeights(h, weights); }
};
struct DensePrecondition {
  SymmetricForm l;  // whose weights are those below
  SymmetricForm r;
  Numbers l_weights;
  Numbers r_weights;
  ConstMatrixView d;
  MatrixView u;
  ProductPrecision precision = ProductPrecision::kF32;
  absl::Span<double> squares = {};  // as above

  SymmetricForm left() const { return WithWeights(l, l_weights); }
  SymmetricForm right() const { return WithWeights(r, r_weights); }
};

}  // namespace operation

struct Operation {
  using Numbers = operation::Numbers;
  using Elementwise = operation::Elementwise;
  using Gemm = operation::Gemm;
  using SymmetricUpdateMultiply = operation::SymmetricUpdateMultiply;
  using RowSquaredNorms = operation::RowSquaredNorms;
  using Dot = operation::Dot;
  using SpdInverse = operation::SpdInverse;
  using ColumnSquaredNorms = operation::ColumnSquaredNorms;
  using SymmetricEigen = operation::SymmetricEigen;
  using LowRankCore = operation::LowRankCore;
  using LowRankAppend = operation::LowRankAppend;
  using LowRankPrecondition = operation::LowRankPrecondition;
  using DensePrecondition = operation::DensePrecondition;
  using ShermanMorrisonTerms = operation::ShermanMorrisonTerms;

  std::variant<Elementwise, Gemm, SymmetricUpdateMultiply, RowSquaredNorms, Dot, SpdInverse, LowRankCore, LowRankAppend,
               LowRankPrecondition, SymmetricEigen, ColumnSquaredNorms, DensePrecondition, ShermanMorrisonTerms>
      what;

  size_t kind() const { return what.index(); }
  // Whether its caller needs what the host learns from it: numbers, or that it is impossible.
  bool tells_host() const {
    if (const auto* product = std::get_if<LowRankPrecondition>(&what)) return !product->squares.empty();
    if (const auto* product = std::get_if<DensePrecondition>(&what)) return !product->squares.empty();
    return std::holds_alternative<RowSquaredNorms>(what) || std::holds_alternative<Dot>(what) ||
           std::holds_alternative<SpdInverse>(what) || std::holds_alternative<LowRankCore>(what) ||
           std::holds_alternative<SymmetricEigen>(what) || std::holds_alternative<ColumnSquaredNorms>(what) ||
           std::holds_alternative<ShermanMorrisonTerms>(what);
  }
};

}  // namespace precondor
