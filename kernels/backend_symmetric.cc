// SPDX-License-Identifier: Apache-2.0
// Backend's operations on symmetric matrices in tiles: checks, and defaults that treat each tile as a small matrix.
// Also products with dense symmetric matrices, and Sherman-Morrison terms.
#include <algorithm>
#include <array>
#include <cmath>
#include <utility>

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

// Returns tile (I, J) of f32 storage, without the zeros beyond the matrix' last column.
template <typename View>
View Tile(View raw, int64_t n, int64_t tile_row, int64_t tile_column) {
  const int64_t width = TileHeight(n, tile_column);
  return View(raw.data + TileOffset(n, tile_row, tile_column), TileHeight(n, tile_row), width, kTileSide);
}

template <typename View>
View Columns(View x, int64_t tile) {
  return View(x.rows == 0 ? nullptr : x.data + tile * kTileSide, x.rows, TileHeight(x.cols, tile), x.stride);
}

// The vectors rows_i sqrt |weights[i]|, those with positive weights first.
struct Terms {
  DeviceMatrix rows;
  int64_t positive = 0;
};

absl::StatusOr<Terms> MakeTerms(Backend& backend, absl::Span<const double> weights, ConstMatrixView rows) {
  Terms terms;
  PRECONDOR_ASSIGN_OR_RETURN(terms.rows, backend.Allocate(rows.rows, rows.cols));
  int64_t place = 0;
  for (const bool positive : {true, false}) {
    for (int64_t i = 0; i < rows.rows; ++i) {
      if ((weights[i] > 0) != positive) continue;
      const MatrixView row = terms.rows.view().RowRange(place++, 1);
      PRECONDOR_RETURN_IF_ERROR(backend.Axpby(std::sqrt(std::fabs(weights[i])), rows.RowRange(i, 1), 0.0, row));
    }
    if (positive) terms.positive = place;
  }
  return terms;
}

// Computes to = scale from + shift I + terms for one tile. to may be from.
absl::Status UpdateTile(Backend& backend, double scale, double shift, const Terms& terms, ConstMatrixView from,
                        int64_t tile_row, int64_t tile_column, MatrixView to) {
  PRECONDOR_RETURN_IF_ERROR(backend.Axpby(scale, from, 0.0, to));
  const ConstMatrixView all = terms.rows.view();
  for (const bool positive : {true, false}) {
    const int64_t begin = positive ? 0 : terms.positive;
    const ConstMatrixView rows = all.RowRange(begin, (positive ? terms.positive : all.rows) - begin);
    if (rows.rows == 0) continue;
    PRECONDOR_RETURN_IF_ERROR(backend.Gemm(positive ? 1.0 : -1.0, Columns(rows, tile_row), Transpose::kYes,
                                           Columns(rows, tile_column), Transpose::kNo, 1.0, to));
  }
  if (tile_row != tile_column) return absl::OkStatus();
  PRECONDOR_RETURN_IF_ERROR(backend.Symmetrize(to));  // rounding may differ between the product's triangles
  return shift == 0.0 ? absl::OkStatus() : backend.AddDiagonal(shift, to);
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
  if (!DoSupportsSymmetric(storage)) {
    return absl::UnimplementedError(
        absl::StrCat("AllocateSymmetric: backend ", name(), " keeps symmetric matrices in f32"));
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

absl::Status Backend::SymmetricCompress(ConstMatrixView x, SymmetricMatrix& m) {
  PRECONDOR_RETURN_IF_ERROR(Check("SymmetricCompress", "x", x, m.n(), m.n()));
  return m.n() == 0 ? absl::OkStatus() : Run({operation::SymmetricCompress{x, m.raw(), m.n(), m.storage()}});
}

absl::Status Backend::RunByPrimitives(const operation::SymmetricUpdateMultiply& update) {
  const auto& [scale, shift, weights, rows, raw, n, storage, v, y] = update;
  PRECONDOR_ASSIGN_OR_RETURN(const Terms terms, MakeTerms(*this, weights, rows));
  const bool updates = scale != 1.0 || shift != 0.0 || rows.rows > 0;
  SymmetricMatrix updated;  // a copy, so that a failure changes nothing
  if (updates) {
    PRECONDOR_ASSIGN_OR_RETURN(updated, AllocateSymmetric(n, storage));
  }
  PRECONDOR_RETURN_IF_ERROR(Axpby(0.0, y, 0.0, y));
  for (int64_t i = 0; i < TileRows(n); ++i) {
    for (int64_t j = 0; j <= i; ++j) {
      MatrixView tile = Tile(raw, n, i, j);
      if (updates) {
        const MatrixView to = Tile(updated.raw(), n, i, j);
        PRECONDOR_RETURN_IF_ERROR(UpdateTile(*this, scale, shift, terms, tile, i, j, to));
        tile = to;
      }
      PRECONDOR_RETURN_IF_ERROR(Gemm(1.0, Columns(v, j), Transpose::kNo, tile, Transpose::kYes, 1.0, Columns(y, i)));
      if (i == j) continue;
      PRECONDOR_RETURN_IF_ERROR(Gemm(1.0, Columns(v, i), Transpose::kNo, tile, Transpose::kNo, 1.0, Columns(y, j)));
    }
  }
  return updates ? Copy(updated.raw(), raw) : absl::OkStatus();
}

absl::Status Backend::RunByPrimitives(const operation::SymmetricExpand& expand) {
  const SymmetricForm& form = expand.form;
  const MatrixView x = expand.x;
  PRECONDOR_ASSIGN_OR_RETURN(const Terms terms, MakeTerms(*this, form.weights, form.rows));
  PRECONDOR_ASSIGN_OR_RETURN(DeviceMatrix identity, Allocate(kTileSide, kTileSide));
  PRECONDOR_RETURN_IF_ERROR(AddDiagonal(1.0, identity.view()));
  for (int64_t i = 0; i < TileRows(form.n); ++i) {
    for (int64_t j = 0; j <= i; ++j) {
      const ConstMatrixView tile = Tile(form.raw, form.n, i, j);
      const MatrixView to = Columns(x.RowRange(i * kTileSide, tile.rows), j);
      PRECONDOR_RETURN_IF_ERROR(UpdateTile(*this, form.scale, form.shift, terms, tile, i, j, to));
      if (i == j) continue;
      // The backends have no transposition; a product with the identity does it.
      PRECONDOR_RETURN_IF_ERROR(Gemm(1.0, to, Transpose::kYes, identity.view().Corner(to.rows, to.rows), Transpose::kNo,
                                     0.0, Columns(x.RowRange(j * kTileSide, kTileSide), i)));
    }
  }
  return absl::OkStatus();
}

absl::Status Backend::RunByPrimitives(const operation::SymmetricCompress& compress) {
  const auto& [x, raw, n, storage] = compress;
  // Tiles on the diagonal get their upper triangle from the lower one through the packed form.
  for (int64_t i = 0; i < TileRows(n); ++i) {
    for (int64_t j = 0; j < i; ++j) {
      PRECONDOR_RETURN_IF_ERROR(Copy(Columns(x.RowRange(i * kTileSide, TileHeight(n, i)), j), Tile(raw, n, i, j)));
    }
    const MatrixView tile = Tile(raw, n, i, i);
    PRECONDOR_ASSIGN_OR_RETURN(DeviceMatrix packed, Allocate(1, tile.rows * (tile.rows + 1) / 2));
    PRECONDOR_RETURN_IF_ERROR(PackLower(Columns(x.RowRange(i * kTileSide, tile.rows), i), packed.view()));
    PRECONDOR_RETURN_IF_ERROR(UnpackLower(packed.view(), tile));
  }
  return absl::OkStatus();
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
