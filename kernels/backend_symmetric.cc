// SPDX-License-Identifier: Apache-2.0
// Backend's operations on symmetric matrices in tiles, products with dense symmetric matrices, and Sherman-Morrison
// terms.
#include <algorithm>
#include <array>
#include <cmath>

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
  return ScaleBy(scale, u);
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

}  // namespace precondor
