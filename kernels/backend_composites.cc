// SPDX-License-Identifier: Apache-2.0
// Backend's operations on symmetric matrices in tiles, and its composites, which it makes from its primitives: products
// with dense symmetric matrices, Sherman-Morrison terms, the low-rank form, NewtonSchulz and OrthogonalIteration.
#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <numeric>
#include <utility>
#include <vector>

#include "absl/container/inlined_vector.h"
#include "absl/strings/str_cat.h"

#include "kernels/backend.h"
#include "kernels/base/status_macros.h"

namespace precondor {
namespace {

absl::Status Check(absl::string_view op, absl::string_view operand, ConstMatrixView x, int64_t rows, int64_t cols) {
  if (x.rows == rows && x.cols == cols && x.stride >= x.cols && (x.data != nullptr || x.size() == 0)) {
    return absl::OkStatus();
  }
  return absl::InvalidArgumentError(absl::StrCat(op, ": ", operand, ": expected [", rows, ", ", cols, "], got [",
                                                 x.rows, ", ", x.cols, "] with stride ", x.stride,
                                                 x.data == nullptr ? " and no data" : ""));
}

absl::Status CheckTerms(absl::string_view op, size_t weights, ConstMatrixView rows, int64_t n) {
  return Check(op, "rows", rows, static_cast<int64_t>(weights), n);
}

absl::Status CheckForm(absl::string_view operand, const SymmetricForm& form, int64_t n) {
  constexpr absl::string_view kOp = "DensePrecondition";
  if (form.is_explicit()) return Check(kOp, operand, form.matrix, n, n);
  PRECONDOR_RETURN_IF_ERROR(CheckTerms(kOp, form.weights.size(), form.rows, form.n));
  if (form.n == n) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat(kOp, ": ", operand, ": expected [", n, ", ", n, "], got [", form.n, ", ", form.n, "]"));
}

absl::Status CheckDensePrecondition(const Backend& backend, const SymmetricForm& l, const SymmetricForm& r,
                                    ConstMatrixView d, ConstMatrixView u, ProductPrecision precision) {
  PRECONDOR_RETURN_IF_ERROR(Check("DensePrecondition", "d", d, d.rows, d.cols));
  PRECONDOR_RETURN_IF_ERROR(CheckForm("l", l, d.rows));
  PRECONDOR_RETURN_IF_ERROR(CheckForm("r", r, d.cols));
  PRECONDOR_RETURN_IF_ERROR(Check("DensePrecondition", "u", u, d.rows, d.cols));
  if (backend.SupportsPrecision(precision)) return absl::OkStatus();
  return absl::UnimplementedError(absl::StrCat("DensePrecondition: precision: expected F32, all that this ",
                                               backend.name(), " backend knows, got BF16"));
}

MatrixView Columns(MatrixView x, int64_t begin, int64_t count) {
  return MatrixView(x.data + begin, x.rows, count, x.stride);
}

LowRankInverse WithShapes(const LowRankInverse& j, int64_t d) {
  if (j.vectors.rows > 0) return j;
  return {j.c, ConstMatrixView(nullptr, 0, d), ConstMatrixView(nullptr, 0, 0), {}};
}

// With X = P D, Y = D Q' and K = P Y,
//   J_out D J_in / (c_out c_in) = (I - P'SP) D (I - Q'TQ) = D - [P'S, Y] [X - K T Q; T Q]
//                                                         = D - [P'S, (Y - P'S K) T] [X; Q],
// so that two products make X and Y and one product of inner size p + q makes u. The form whose small products have the
// shorter side of D is used. Each product has the orientation in which BLAS is fastest: Q D' instead of D Q', for
// example, takes up to twice as long.
absl::Status ProductOfLowRank(Backend& backend, const LowRankInverse& out_side, const LowRankInverse& in_side,
                              ConstMatrixView d, MatrixView u) {
  const double scale = out_side.c * in_side.c;
  // Gives a side without vectors views of the right shape.
  const LowRankInverse out = WithShapes(out_side, d.rows), in = WithShapes(in_side, d.cols);
  const int64_t p = out.vectors.rows, q = in.vectors.rows;
  PRECONDOR_RETURN_IF_ERROR(scale == 1.0 ? backend.Copy(d, u) : backend.Axpby(scale, d, 0.0, u));
  if (p + q == 0) return absl::OkStatus();
  PRECONDOR_ASSIGN_OR_RETURN(DeviceMatrix left, backend.AllocateScratch(d.rows, p + q));
  PRECONDOR_ASSIGN_OR_RETURN(DeviceMatrix right, backend.AllocateScratch(p + q, d.cols));
  PRECONDOR_ASSIGN_OR_RETURN(DeviceMatrix k, backend.AllocateScratch(p, q));
  const MatrixView ps = Columns(left.view(), 0, p), y = Columns(left.view(), p, q);
  const MatrixView x = right.view().RowRange(0, p), rest = right.view().RowRange(p, q);
  PRECONDOR_RETURN_IF_ERROR(backend.Gemm(1.0, out.vectors, Transpose::kNo, d, Transpose::kNo, 0.0, x));
  PRECONDOR_RETURN_IF_ERROR(backend.Gemm(1.0, out.vectors, Transpose::kYes, out.core, Transpose::kNo, 0.0, ps));
  if (d.rows < d.cols) {
    PRECONDOR_ASSIGN_OR_RETURN(DeviceMatrix raw_y, backend.AllocateScratch(d.rows, q));
    PRECONDOR_RETURN_IF_ERROR(backend.Gemm(1.0, d, Transpose::kNo, in.vectors, Transpose::kYes, 0.0, raw_y.view()));
    PRECONDOR_RETURN_IF_ERROR(
        backend.Gemm(1.0, out.vectors, Transpose::kNo, raw_y.view(), Transpose::kNo, 0.0, k.view()));
    PRECONDOR_RETURN_IF_ERROR(backend.Gemm(-1.0, ps, Transpose::kNo, k.view(), Transpose::kNo, 1.0, raw_y.view()));
    PRECONDOR_RETURN_IF_ERROR(backend.Gemm(1.0, raw_y.view(), Transpose::kNo, in.core, Transpose::kNo, 0.0, y));
    PRECONDOR_RETURN_IF_ERROR(backend.Copy(in.vectors, rest));
  } else {
    PRECONDOR_RETURN_IF_ERROR(backend.Gemm(1.0, d, Transpose::kNo, in.vectors, Transpose::kYes, 0.0, y));
    PRECONDOR_RETURN_IF_ERROR(backend.Gemm(1.0, in.core, Transpose::kNo, in.vectors, Transpose::kNo, 0.0, rest));
    PRECONDOR_RETURN_IF_ERROR(backend.Gemm(1.0, x, Transpose::kNo, in.vectors, Transpose::kYes, 0.0, k.view()));
    PRECONDOR_RETURN_IF_ERROR(backend.Gemm(-1.0, k.view(), Transpose::kNo, rest, Transpose::kNo, 1.0, x));
  }
  return backend.Gemm(-scale, left.view(), Transpose::kNo, right.view(), Transpose::kNo, 1.0, u);
}

// p = (linear I + cubic a + quintic a a) for symmetric a.
absl::Status Polynomial(Backend& backend, ConstMatrixView a, MatrixView p) {
  PRECONDOR_RETURN_IF_ERROR(backend.Copy(a, p));
  PRECONDOR_RETURN_IF_ERROR(backend.SymmetricGemm(operation::kNewtonSchulzQuintic, a, Transpose::kNo, a, Transpose::kNo,
                                                  operation::kNewtonSchulzCubic, p));
  return backend.AddDiagonal(operation::kNewtonSchulzLinear, p);
}

// Writes `scale` times the iterations' answer to u, of the rows [k, n] or columns [m, k] of x, which it changes.
absl::Status IterateOnMatrix(Backend& backend, int64_t steps, double scale, MatrixView x, MatrixView u) {
  const bool wide = x.rows <= x.cols;
  const int64_t k = std::min(x.rows, x.cols);
  PRECONDOR_ASSIGN_OR_RETURN(DeviceMatrix gram, backend.AllocateScratch(k, k));
  PRECONDOR_ASSIGN_OR_RETURN(DeviceMatrix polynomial, backend.AllocateScratch(k, k));
  const MatrixView a = gram.view(), p = polynomial.view();
  // x and u alternate as input and output of an iteration, and the last one writes u.
  MatrixView from = x, to = u;
  if (steps % 2 == 0) {
    PRECONDOR_RETURN_IF_ERROR(backend.Copy(x, u));
    std::swap(from, to);
  }
  for (int64_t i = 1; i <= steps; ++i) {
    const double factor = i == steps ? scale : 1.0;
    PRECONDOR_RETURN_IF_ERROR(backend.SymmetricGemm(1.0, from, Transpose(!wide), from, Transpose(wide), 0.0, a));
    PRECONDOR_RETURN_IF_ERROR(Polynomial(backend, a, p));
    PRECONDOR_RETURN_IF_ERROR(wide ? backend.Gemm(factor, p, Transpose::kNo, from, Transpose::kNo, 0.0, to)
                                   : backend.Gemm(factor, from, Transpose::kNo, p, Transpose::kNo, 0.0, to));
    std::swap(from, to);
  }
  return absl::OkStatus();
}

// IterateOnMatrix by a = x x' alone: with p the polynomial of a, the next x is p x, and the next a is p a p. All of
// them commute, so that their products are symmetric. q is the product of the polynomials, and the answer is q x.
absl::Status IterateOnGram(Backend& backend, int64_t steps, double scale, ConstMatrixView x, MatrixView u) {
  const bool wide = x.rows <= x.cols;
  const int64_t k = std::min(x.rows, x.cols);
  std::array<DeviceMatrix, 4> matrices;
  for (DeviceMatrix& matrix : matrices) {
    PRECONDOR_ASSIGN_OR_RETURN(matrix, backend.AllocateScratch(k, k));
  }
  MatrixView a = matrices[0].view(), p = matrices[1].view(), q = matrices[2].view(), other = matrices[3].view();
  const auto multiply = [&backend](ConstMatrixView l, ConstMatrixView r, MatrixView product) {
    return backend.SymmetricGemm(1.0, l, Transpose::kNo, r, Transpose::kNo, 0.0, product);
  };
  PRECONDOR_RETURN_IF_ERROR(backend.SymmetricGemm(1.0, x, Transpose(!wide), x, Transpose(wide), 0.0, a));
  PRECONDOR_RETURN_IF_ERROR(Polynomial(backend, a, q));
  PRECONDOR_RETURN_IF_ERROR(backend.Copy(q, p));
  for (int64_t i = 2; i <= steps; ++i) {
    PRECONDOR_RETURN_IF_ERROR(multiply(p, a, other));
    PRECONDOR_RETURN_IF_ERROR(multiply(other, p, a));
    PRECONDOR_RETURN_IF_ERROR(Polynomial(backend, a, p));
    PRECONDOR_RETURN_IF_ERROR(multiply(p, q, other));
    std::swap(q, other);
  }
  return wide ? backend.Gemm(scale, q, Transpose::kNo, x, Transpose::kNo, 0.0, u)
              : backend.Gemm(scale, x, Transpose::kNo, q, Transpose::kNo, 0.0, u);
}

}  // namespace

absl::StatusOr<ConstMatrixView> Expanded(Backend& backend, const SymmetricForm& form, DeviceMatrix& made) {
  if (form.is_explicit()) return form.matrix;
  PRECONDOR_ASSIGN_OR_RETURN(made, backend.AllocateScratch(form.n, form.n));
  PRECONDOR_RETURN_IF_ERROR(backend.SymmetricExpand(form, made.view()));
  return ConstMatrixView(made.view());
}

absl::StatusOr<SymmetricMatrix> Backend::AllocateSymmetric(int64_t n, SymmetricStorage storage) {
  constexpr int64_t kMaxDimension = int64_t{1} << 20;
  if (n < 0 || n > kMaxDimension) {
    return absl::InvalidArgumentError(
        absl::StrCat("AllocateSymmetric: expected a dimension of 0 ... ", kMaxDimension, ", got ", n));
  }
  constexpr int64_t kRawColumns = kTileSide / 2;  // one row of a tile in f16
  SymmetricMatrix m;
  PRECONDOR_ASSIGN_OR_RETURN(
      m.tiles_, Allocate(TileBytes(n, storage) / (kRawColumns * static_cast<int64_t>(sizeof(float))), kRawColumns));
  m.n_ = n;
  m.storage_ = storage;
  return m;
}

absl::Status Backend::SymmetricUpdateMultiply(double scale, double shift, absl::Span<const double> weights,
                                              ConstMatrixView rows, SymmetricMatrix& m, ConstMatrixView v,
                                              MatrixView y) {
  PRECONDOR_RETURN_IF_ERROR(CheckTerms("SymmetricUpdateMultiply", weights.size(), rows, m.n()));
  PRECONDOR_RETURN_IF_ERROR(Check("SymmetricUpdateMultiply", "v", v, v.rows, m.n()));
  PRECONDOR_RETURN_IF_ERROR(Check("SymmetricUpdateMultiply", "y", y, v.rows, m.n()));
  if (m.n() == 0 || (v.rows == 0 && rows.rows == 0 && scale == 1.0 && shift == 0.0)) return absl::OkStatus();
  return Run({operation::SymmetricUpdateMultiply{scale, shift, weights, rows, m.raw(), m.n(), m.storage(), v, y}});
}

absl::Status Backend::SymmetricExpand(const SymmetricForm& form, MatrixView x) {
  PRECONDOR_RETURN_IF_ERROR(CheckTerms("SymmetricExpand", form.weights.size(), form.rows, form.n));
  PRECONDOR_RETURN_IF_ERROR(Check("SymmetricExpand", "x", x, form.n, form.n));
  return form.n == 0 ? absl::OkStatus() : Run({operation::SymmetricExpand{form, x}});
}

absl::Status Backend::DensePrecondition(const SymmetricForm& l, const SymmetricForm& r, ConstMatrixView d, MatrixView u,
                                        ProductPrecision precision) {
  PRECONDOR_RETURN_IF_ERROR(CheckDensePrecondition(*this, l, r, d, u, precision));
  return d.size() == 0 ? absl::OkStatus() : Run({operation::DensePrecondition{l, r, d, u, precision}});
}

absl::Status Backend::DensePrecondition(const SymmetricForm& l, const SymmetricForm& r, ConstMatrixView d,
                                        LengthRule rule, MatrixView u, ProductPrecision precision) {
  PRECONDOR_RETURN_IF_ERROR(CheckDensePrecondition(*this, l, r, d, u, precision));
  if (d.size() == 0) return absl::OkStatus();
  std::array<double, 2> squares = {};
  PRECONDOR_RETURN_IF_ERROR(Run({operation::DensePrecondition{l, r, d, u, precision, absl::MakeSpan(squares)}}));
  PRECONDOR_ASSIGN_OR_RETURN(const double scale, rule(std::sqrt(squares[0]), std::sqrt(squares[1])));
  return ScaleBy(scale, u, u);
}

absl::Status Backend::RunByPrimitives(const operation::DensePrecondition& product) {
  const ConstMatrixView d = product.d;
  const MatrixView u = product.u;
  PRECONDOR_ASSIGN_OR_RETURN(DeviceMatrix half, AllocateScratch(d.rows, d.cols));
  DeviceMatrix made_l, made_r;
  PRECONDOR_ASSIGN_OR_RETURN(const ConstMatrixView left, Expanded(*this, product.l, made_l));
  PRECONDOR_RETURN_IF_ERROR(Gemm(1.0, left, Transpose::kNo, d, Transpose::kNo, 0.0, half.view()));
  PRECONDOR_ASSIGN_OR_RETURN(const ConstMatrixView right, Expanded(*this, product.r, made_r));
  PRECONDOR_RETURN_IF_ERROR(Gemm(1.0, half.view(), Transpose::kNo, right, Transpose::kNo, 0.0, u));
  if (product.squares.empty()) return absl::OkStatus();
  PRECONDOR_ASSIGN_OR_RETURN(product.squares[0], Dot(d, d));
  PRECONDOR_ASSIGN_OR_RETURN(product.squares[1], Dot(u, u));
  return absl::OkStatus();
}

absl::Status ApplyImplicitTerms(Backend& backend, const SymmetricForm& form, double scale, ConstMatrixView v,
                                MatrixView y) {
  if (form.rows.rows == 0) {
    return scale == 1.0 && form.shift == 0.0 ? absl::OkStatus() : backend.Axpby(form.shift, v, scale, y);
  }
  PRECONDOR_ASSIGN_OR_RETURN(DeviceMatrix products, backend.AllocateScratch(v.rows, form.rows.rows));
  const MatrixView p = products.view();
  PRECONDOR_RETURN_IF_ERROR(backend.Gemm(1.0, v, Transpose::kNo, form.rows, Transpose::kYes, 0.0, p));
  PRECONDOR_RETURN_IF_ERROR(backend.ScaleColumns(form.weights, p, p));
  PRECONDOR_RETURN_IF_ERROR(backend.Gemm(1.0, p, Transpose::kNo, form.rows, Transpose::kNo, scale, y));
  return form.shift == 0.0 ? absl::OkStatus() : backend.Axpby(form.shift, v, 1.0, y);
}

absl::Status Backend::ShermanMorrisonTerms(const SymmetricForm& h, double factor, ConstMatrixView v, MatrixView y,
                                           MatrixView terms, absl::Span<double> squares) {
  constexpr absl::string_view kOp = "ShermanMorrisonTerms";
  PRECONDOR_RETURN_IF_ERROR(Check(kOp, "v", v, v.rows, v.cols));
  PRECONDOR_RETURN_IF_ERROR(Check(kOp, "y", y, v.rows, v.cols));
  PRECONDOR_RETURN_IF_ERROR(Check(kOp, "terms", terms, v.rows, v.cols));
  const int64_t terms_of_h = static_cast<int64_t>(h.weights.size());
  PRECONDOR_RETURN_IF_ERROR(Check(kOp, "rows", h.rows, terms_of_h, terms_of_h == 0 ? h.rows.cols : v.cols));
  if (!squares.empty() && static_cast<int64_t>(squares.size()) != v.cols) {
    return absl::InvalidArgumentError(
        absl::StrCat(kOp, ": squares: expected ", v.cols, " or none, got ", squares.size()));
  }
  if (v.size() > 0) return Run({operation::ShermanMorrisonTerms{h, factor, v, y, terms, squares}});
  std::fill(squares.begin(), squares.end(), 0.0);
  return absl::OkStatus();
}

// With the eigenpairs (x_i, q_i) of V U', the terms are q_i U / sqrt(1 + x_i).
absl::Status Backend::RunByPrimitives(const operation::ShermanMorrisonTerms& make) {
  const auto& [h, factor, of, y, terms, squares] = make;
  ConstMatrixView v = of;
  const int64_t k = v.rows;
  DeviceMatrix scaled;
  if (factor != 1.0) {
    PRECONDOR_ASSIGN_OR_RETURN(scaled, AllocateScratch(k, v.cols));
    PRECONDOR_RETURN_IF_ERROR(Axpby(factor, v, 0.0, scaled.view()));
    v = scaled.view();
  }
  PRECONDOR_RETURN_IF_ERROR(ApplyImplicitTerms(*this, h, factor * h.scale, v, y));
  absl::InlinedVector<double, 16> values(k);  // avoids an allocation on the path of a step
  if (k == 1) {
    PRECONDOR_ASSIGN_OR_RETURN(values[0], Dot(v, y));
    if (!std::isfinite(values[0])) {
      return absl::FailedPreconditionError("ShermanMorrisonTerms: v: expected a finite product with the matrix");
    }
  } else {
    PRECONDOR_ASSIGN_OR_RETURN(DeviceMatrix small, AllocateScratch(k, k));
    PRECONDOR_ASSIGN_OR_RETURN(DeviceMatrix q, AllocateScratch(k, k));
    PRECONDOR_RETURN_IF_ERROR(Gemm(1.0, v, Transpose::kNo, y, Transpose::kYes, 0.0, small.view()));
    PRECONDOR_RETURN_IF_ERROR(Symmetrize(small.view()));
    PRECONDOR_RETURN_IF_ERROR(SymmetricEigen(small.view(), absl::MakeSpan(values), q.view()));
    PRECONDOR_RETURN_IF_ERROR(Gemm(1.0, q.view(), Transpose::kNo, y, Transpose::kNo, 0.0, terms));
  }
  for (double& value : values) value = 1.0 / std::sqrt(1.0 + std::max(value, 0.0));
  PRECONDOR_RETURN_IF_ERROR(ScaleRows(values, k == 1 ? y : terms, terms));
  return squares.empty() ? absl::OkStatus() : ColumnSquaredNorms(terms, squares);
}

absl::Status Backend::RunByPrimitives(const operation::LowRankPrecondition& product) {
  PRECONDOR_RETURN_IF_ERROR(ProductOfLowRank(*this, product.out_side, product.in_side, product.d, product.u));
  if (product.squares.empty()) return absl::OkStatus();
  PRECONDOR_ASSIGN_OR_RETURN(product.squares[0], Dot(product.d, product.d));
  PRECONDOR_ASSIGN_OR_RETURN(product.squares[1], Dot(product.u, product.u));
  return absl::OkStatus();
}

absl::Status Backend::RunByPrimitives(const operation::LowRankCore& make) {
  const MatrixView core = make.core;
  PRECONDOR_RETURN_IF_ERROR(UnpackLower(make.gram, core));
  PRECONDOR_RETURN_IF_ERROR(ScaleBothSides(make.roots, core, core));
  PRECONDOR_RETURN_IF_ERROR(AddDiagonal(1.0, core));
  PRECONDOR_RETURN_IF_ERROR(SpdInverse(core, core));
  PRECONDOR_RETURN_IF_ERROR(ScaleBothSides(make.roots, core, core));
  return make.packed.size() == 0 ? absl::OkStatus() : PackLower(core, make.packed);
}

absl::Status Backend::RunByPrimitives(const operation::LowRankAppend& append) {
  const int64_t k = append.rows.rows;
  const absl::Span<const int64_t> slots = append.slots;
  PRECONDOR_ASSIGN_OR_RETURN(DeviceMatrix products, AllocateScratch(k, append.vectors.rows));
  // Consecutive slots are handled together: a product can only read rows that are contiguous.
  const bool together = slots.back() - slots.front() + 1 == k;
  for (int64_t i = 0; i < k; i += together ? k : 1) {
    const int64_t count = together ? k : 1;
    const MatrixView placed = append.vectors.RowRange(slots[i], count), of_placed = products.view().RowRange(i, count);
    PRECONDOR_RETURN_IF_ERROR(ScaleRows(append.scales.subspan(i, count), append.rows.RowRange(i, count), placed));
    PRECONDOR_RETURN_IF_ERROR(Gemm(1.0, placed, Transpose::kNo, append.vectors, Transpose::kYes, 0.0, of_placed));
  }
  for (int64_t i = 0; i < k; ++i) {
    PRECONDOR_RETURN_IF_ERROR(PackRow(products.view().RowRange(i, 1), slots[i], append.gram));
  }
  return absl::OkStatus();
}

absl::Status Backend::NewtonSchulz(const operation::NewtonSchulz& step) {
  const bool has_momentum = step.momentum.size() > 0;
  const std::array<std::pair<const char*, ConstMatrixView>, 5> operands = {
      {{"d", step.d}, {"u", step.u}, {"momentum", step.momentum}, {"next", step.next}, {"lookahead", step.lookahead}}};
  for (const auto& [name, x] : operands) {
    const bool absent = x.size() == 0 && (name == operands[2].first || name == operands[4].first || !has_momentum);
    const bool fits = x.rows == step.d.rows && x.cols == step.d.cols && x.stride >= x.cols && x.data != nullptr;
    if (absent || fits) continue;
    return absl::InvalidArgumentError(absl::StrCat("NewtonSchulz: ", name, ": expected [", step.d.rows, ", ",
                                                   step.d.cols, "], got [", x.rows, ", ", x.cols, "]"));
  }
  if (step.squares.size() != 3 || step.steps < 1 || (!has_momentum && step.next.size() + step.lookahead.size() > 0)) {
    return absl::InvalidArgumentError(
        absl::StrCat("NewtonSchulz: expected 3 squares, a step or more, and outputs of a momentum only with one, got ",
                     step.squares.size(), " squares and ", step.steps, " steps"));
  }
  return step.u.size() == 0 ? absl::OkStatus() : Run({step});
}

// If d is tall, the polynomial of x'x multiplies from the right: the transpose of the published one from the left.
absl::Status Backend::RunByPrimitives(const operation::NewtonSchulz& step) {
  ConstMatrixView direction = step.d;
  PRECONDOR_ASSIGN_OR_RETURN(step.squares[0], Dot(step.d, step.d));
  if (step.momentum.size() > 0) {
    if (!std::isfinite(step.squares[0])) return absl::OkStatus();
    PRECONDOR_RETURN_IF_ERROR(Combine(1.0, step.d, step.beta, step.momentum, step.next));
    direction = step.next;
    if (step.lookahead.size() > 0) {
      PRECONDOR_RETURN_IF_ERROR(Combine(step.beta, step.next, 1.0, step.d, step.lookahead));
      direction = step.lookahead;
    }
  }
  PRECONDOR_ASSIGN_OR_RETURN(step.squares[1], Dot(direction, direction));
  if (!std::isfinite(step.squares[1])) return absl::OkStatus();
  step.squares[2] = 0;
  if (step.squares[1] == 0) return Axpby(0.0, step.u, 0.0, step.u);
  const int64_t m = step.d.rows, n = step.d.cols;
  PRECONDOR_ASSIGN_OR_RETURN(DeviceMatrix normalized, AllocateScratch(m, n));
  const MatrixView x = normalized.view();
  PRECONDOR_RETURN_IF_ERROR(ScaleBy(1 / (std::sqrt(step.squares[1]) + step.epsilon), direction, x));
  PRECONDOR_RETURN_IF_ERROR(operation::OnGram(m, n, step.steps)
                                ? IterateOnGram(*this, step.steps, step.scale, x, step.u)
                                : IterateOnMatrix(*this, step.steps, step.scale, x, step.u));
  PRECONDOR_ASSIGN_OR_RETURN(step.squares[2], Dot(step.u, step.u));
  return absl::OkStatus();
}

absl::Status Backend::OrthogonalIteration(ConstMatrixView a, ConstMatrixView q, MatrixView next,
                                          absl::Span<int64_t> order) {
  const int64_t n = q.rows;
  for (const auto& [name, x] : {std::pair("a", a), std::pair("q", q), std::pair("next", ConstMatrixView(next))}) {
    if (x.rows == n && x.cols == n && x.stride >= n && (x.data != nullptr || n == 0)) continue;
    return absl::InvalidArgumentError(
        absl::StrCat("OrthogonalIteration: ", name, ": expected [", n, ", ", n, "], got [", x.rows, ", ", x.cols, "]"));
  }
  if (static_cast<int64_t>(order.size()) != n) {
    return absl::InvalidArgumentError(
        absl::StrCat("OrthogonalIteration: order: expected ", n, " elements, got ", order.size()));
  }
  return n == 0 ? absl::OkStatus() : Run({operation::OrthogonalIteration{a, q, next, order}});
}

absl::Status Backend::RunByPrimitives(const operation::OrthogonalIteration& step) {
  const int64_t n = step.q.rows;
  PRECONDOR_ASSIGN_OR_RETURN(DeviceMatrix product, AllocateScratch(n, n));
  PRECONDOR_RETURN_IF_ERROR(Gemm(1.0, step.q, Transpose::kNo, step.a, Transpose::kNo, 0.0, product.view()));
  PRECONDOR_RETURN_IF_ERROR(Gemm(1.0, product.view(), Transpose::kNo, step.q, Transpose::kYes, 0.0, step.next));
  std::vector<double> values(n);
  PRECONDOR_RETURN_IF_ERROR(Diagonal(step.next, absl::MakeSpan(values)));
  for (const double value : values) {
    if (!std::isfinite(value))
      return absl::FailedPreconditionError("OrthogonalIteration: a: expected a finite product");
  }
  std::iota(step.order.begin(), step.order.end(), int64_t{0});
  std::stable_sort(step.order.begin(), step.order.end(), [&](int64_t i, int64_t j) { return values[i] > values[j]; });
  PRECONDOR_RETURN_IF_ERROR(Gather(step.order, {}, product.view(), step.next));
  return OrthonormalizeRows(step.next, step.next);
}

}  // namespace precondor
