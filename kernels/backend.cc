// SPDX-License-Identifier: Apache-2.0
#include "kernels/backend.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"

#include "kernels/base/status_macros.h"

namespace precondor {
namespace {

std::string Shape(int64_t rows, int64_t cols) { return absl::StrCat("[", rows, ", ", cols, "]"); }

absl::Status CheckView(absl::string_view op, absl::string_view operand, ConstMatrixView x) {
  const bool sane = x.rows >= 0 && x.cols >= 0 && x.stride >= x.cols && (x.data != nullptr || x.size() == 0);
  if (sane) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat(op, ": ", operand, ": expected a view with stride >= columns and data, got ", Shape(x.rows, x.cols),
                   " with stride ", x.stride, x.data == nullptr ? " and no data" : ""));
}

absl::Status CheckShape(absl::string_view op, absl::string_view operand, ConstMatrixView x, int64_t rows,
                        int64_t cols) {
  PRECONDOR_RETURN_IF_ERROR(CheckView(op, operand, x));
  if (x.rows == rows && x.cols == cols) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat(op, ": ", operand, ": expected ", Shape(rows, cols), ", got ", Shape(x.rows, x.cols)));
}

absl::Status CheckAlike(absl::string_view op, absl::string_view of_x, ConstMatrixView x, absl::string_view of_y,
                        ConstMatrixView y) {
  PRECONDOR_RETURN_IF_ERROR(CheckView(op, of_x, x));
  return CheckShape(op, of_y, y, x.rows, x.cols);
}

absl::Status CheckLength(absl::string_view op, absl::string_view operand, int64_t expected, int64_t got) {
  if (expected == got) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(op, ": ", operand, ": expected ", expected, " elements, got ", got));
}

absl::Status CheckSquare(absl::string_view op, absl::string_view operand, ConstMatrixView x) {
  return CheckShape(op, operand, x, x.rows, x.rows);
}

absl::Status CheckLowRank(absl::string_view side, const LowRankInverse& j, int64_t d) {
  const int64_t n = j.vectors.rows;
  if (n == 0) return absl::OkStatus();
  PRECONDOR_RETURN_IF_ERROR(CheckShape("LowRankPrecondition", absl::StrCat(side, " vectors"), j.vectors, n, d));
  PRECONDOR_RETURN_IF_ERROR(CheckShape("LowRankPrecondition", absl::StrCat(side, " core"), j.core, n, n));
  if (j.roots.empty()) return absl::OkStatus();
  return CheckLength("LowRankPrecondition", absl::StrCat(side, " roots"), n, static_cast<int64_t>(j.roots.size()));
}

absl::Status CheckLowRankPrecondition(const LowRankInverse& out_side, const LowRankInverse& in_side, ConstMatrixView d,
                                      ConstMatrixView u) {
  PRECONDOR_RETURN_IF_ERROR(CheckAlike("LowRankPrecondition", "d", d, "u", u));
  PRECONDOR_RETURN_IF_ERROR(CheckLowRank("output", out_side, d.rows));
  return CheckLowRank("input", in_side, d.cols);
}

absl::Status CheckTriangular(absl::string_view op, From side, ConstMatrixView a, ConstMatrixView x) {
  const int64_t n = side == From::kLeft ? x.rows : x.cols;
  PRECONDOR_RETURN_IF_ERROR(CheckView(op, "x", x));
  return CheckShape(op, "a", a, n, n);
}

absl::Status CheckIndices(absl::string_view operand, absl::Span<const int64_t> indices, int64_t end) {
  for (int64_t index : indices) {
    if (index >= 0 && index < end) continue;
    return absl::InvalidArgumentError(
        absl::StrCat("Gather: ", operand, ": expected indices in [0, ", end, "), got ", index));
  }
  return absl::OkStatus();
}

}  // namespace

DeviceMatrix::DeviceMatrix(DeviceMatrix&& other) noexcept
    : backend_(std::exchange(other.backend_, nullptr)), view_(std::exchange(other.view_, MatrixView())) {}

DeviceMatrix& DeviceMatrix::operator=(DeviceMatrix&& other) noexcept {
  std::swap(backend_, other.backend_);
  std::swap(view_, other.view_);
  return *this;
}

DeviceMatrix::~DeviceMatrix() {
  if (backend_ != nullptr && view_.data != nullptr) backend_->DoFree(view_.data, view_.size());
}

absl::StatusOr<DeviceMatrix> Backend::Allocate(int64_t rows, int64_t cols) { return Allocate(rows, cols, true); }

absl::StatusOr<DeviceMatrix> Backend::AllocateScratch(int64_t rows, int64_t cols) {
  return Allocate(rows, cols, false);
}

absl::StatusOr<DeviceMatrix> Backend::Allocate(int64_t rows, int64_t cols, bool zeroed) {
  constexpr int64_t kMaxElements = int64_t{1} << 40;
  if (rows < 0 || cols < 0 || (cols > 0 && rows > kMaxElements / cols)) {
    return absl::InvalidArgumentError(
        absl::StrCat("Allocate: expected non-negative extents and at most 2^40 elements, got ", Shape(rows, cols)));
  }
  if (rows * cols == 0) return DeviceMatrix(this, MatrixView(nullptr, rows, cols));
  PRECONDOR_ASSIGN_OR_RETURN(float* data, zeroed ? DoAllocate(rows * cols) : DoAllocateScratch(rows * cols));
  return DeviceMatrix(this, MatrixView(data, rows, cols));
}

int64_t Backend::allocated_bytes() const { return DoAllocatedBytes(); }

void Backend::Trim() { DoTrim(); }

absl::Status Backend::Upload(ConstMatrixView host, MatrixView device) {
  PRECONDOR_RETURN_IF_ERROR(CheckAlike("Upload", "host", host, "device", device));
  return host.size() == 0 ? absl::OkStatus() : DoUpload(host, device);
}

absl::Status Backend::UploadToIdle(ConstMatrixView host, MatrixView device) {
  PRECONDOR_RETURN_IF_ERROR(CheckAlike("UploadToIdle", "host", host, "device", device));
  return host.size() == 0 ? absl::OkStatus() : DoUploadToIdle(host, device);
}

absl::Status Backend::Download(ConstMatrixView device, MatrixView host) {
  PRECONDOR_RETURN_IF_ERROR(CheckAlike("Download", "device", device, "host", host));
  return host.size() == 0 ? absl::OkStatus() : DoDownload(device, host);
}

absl::Status Backend::Copy(ConstMatrixView from, MatrixView to) {
  PRECONDOR_RETURN_IF_ERROR(CheckAlike("Copy", "from", from, "to", to));
  return from.size() == 0 ? absl::OkStatus() : DoCopy(from, to);
}

absl::Status Backend::Gemm(double alpha, ConstMatrixView a, Transpose transpose_a, ConstMatrixView b,
                           Transpose transpose_b, double beta, MatrixView c, ProductPrecision precision) {
  return RunGemm({alpha, a, transpose_a, b, transpose_b, beta, c, precision});
}

absl::Status Backend::SymmetricGemm(double alpha, ConstMatrixView a, Transpose transpose_a, ConstMatrixView b,
                                    Transpose transpose_b, double beta, MatrixView c, ProductPrecision precision) {
  PRECONDOR_RETURN_IF_ERROR(CheckSquare("SymmetricGemm", "c", c));
  return RunGemm({alpha, a, transpose_a, b, transpose_b, beta, c, precision, /*symmetric=*/true});
}

absl::Status Backend::RunGemm(const operation::Gemm& gemm) {
  const auto& [alpha, a, transpose_a, b, transpose_b, beta, c, precision, symmetric] = gemm;
  const bool ta = transpose_a == Transpose::kYes, tb = transpose_b == Transpose::kYes;
  const int64_t inner = ta ? a.rows : a.cols;
  PRECONDOR_RETURN_IF_ERROR(CheckView("Gemm", "c", c));
  PRECONDOR_RETURN_IF_ERROR(CheckShape("Gemm", "a", a, ta ? inner : c.rows, ta ? c.rows : inner));
  PRECONDOR_RETURN_IF_ERROR(CheckShape("Gemm", "b", b, tb ? c.cols : inner, tb ? inner : c.cols));
  if (c.size() == 0) return absl::OkStatus();
  return inner == 0 ? Axpby(beta, c, 0.0, c) : Run({gemm});
}

absl::Status Backend::Combine(double alpha, ConstMatrixView x, double beta, ConstMatrixView v, MatrixView y) {
  PRECONDOR_RETURN_IF_ERROR(CheckAlike("Combine", "x", x, "y", y));
  PRECONDOR_RETURN_IF_ERROR(CheckAlike("Combine", "v", v, "y", y));
  return RunElementwise({.alpha = alpha, .beta = beta, .x = x, .v = v, .y = y});
}

absl::Status Backend::Axpby(double alpha, ConstMatrixView x, double beta, MatrixView y) {
  return Combine(alpha, x, beta, y, y);
}

absl::Status Backend::ScaleBy(double scale, ConstMatrixView x, MatrixView y) {
  constexpr double kLargestFactor = 1e30;
  while (scale > kLargestFactor) {
    PRECONDOR_RETURN_IF_ERROR(Axpby(kLargestFactor, x, 0.0, y));
    scale /= kLargestFactor;
    x = y;
  }
  return scale == 1.0 && x.data == y.data ? absl::OkStatus() : Axpby(scale, x, 0.0, y);
}

absl::Status Backend::ScaleRows(absl::Span<const double> scales, ConstMatrixView x, MatrixView y) {
  PRECONDOR_RETURN_IF_ERROR(CheckAlike("ScaleRows", "x", x, "y", y));
  PRECONDOR_RETURN_IF_ERROR(CheckLength("ScaleRows", "scales", x.rows, scales.size()));
  return RunElementwise({.kind = ElementwiseKind::kScaleRows, .scales = scales, .x = x, .y = y});
}

absl::Status Backend::ScaleColumns(absl::Span<const double> scales, ConstMatrixView x, MatrixView y) {
  PRECONDOR_RETURN_IF_ERROR(CheckAlike("ScaleColumns", "x", x, "y", y));
  PRECONDOR_RETURN_IF_ERROR(CheckLength("ScaleColumns", "scales", x.cols, scales.size()));
  return RunElementwise({.kind = ElementwiseKind::kScaleColumns, .scales = scales, .x = x, .y = y});
}

absl::Status Backend::MultiplyElements(double alpha, ConstMatrixView x, ConstMatrixView y, double beta, MatrixView z) {
  PRECONDOR_RETURN_IF_ERROR(CheckAlike("MultiplyElements", "x", x, "y", y));
  PRECONDOR_RETURN_IF_ERROR(CheckShape("MultiplyElements", "z", z, x.rows, x.cols));
  return RunElementwise({.kind = ElementwiseKind::kMultiply, .alpha = alpha, .beta = beta, .x = x, .v = y, .y = z});
}

absl::Status Backend::DivideByRoot(double alpha, ConstMatrixView x, ConstMatrixView v, double epsilon, MatrixView y) {
  PRECONDOR_RETURN_IF_ERROR(CheckAlike("DivideByRoot", "x", x, "v", v));
  PRECONDOR_RETURN_IF_ERROR(CheckShape("DivideByRoot", "y", y, x.rows, x.cols));
  return RunElementwise(
      {.kind = ElementwiseKind::kDivideByRoot, .alpha = alpha, .beta = epsilon, .x = x, .v = v, .y = y});
}

absl::Status Backend::DivideByOuter(double alpha, absl::Span<const double> rows, absl::Span<const double> columns,
                                    double shift, ConstMatrixView x, MatrixView y) {
  PRECONDOR_RETURN_IF_ERROR(CheckView("DivideByOuter", "x", x));
  PRECONDOR_RETURN_IF_ERROR(CheckLength("DivideByOuter", "rows", x.rows, rows.size()));
  PRECONDOR_RETURN_IF_ERROR(CheckLength("DivideByOuter", "columns", x.cols, columns.size()));
  PRECONDOR_RETURN_IF_ERROR(CheckShape("DivideByOuter", "y", y, x.rows, x.cols));
  return RunElementwise({.kind = ElementwiseKind::kDivideByOuter,
                         .alpha = alpha,
                         .beta = shift,
                         .scales = rows,
                         .column_scales = columns,
                         .x = x,
                         .y = y});
}

absl::Status Backend::Gather(absl::Span<const int64_t> rows, absl::Span<const int64_t> columns, ConstMatrixView x,
                             MatrixView y) {
  PRECONDOR_RETURN_IF_ERROR(CheckView("Gather", "x", x));
  const int64_t count = rows.empty() ? x.rows : static_cast<int64_t>(rows.size());
  const int64_t width = columns.empty() ? x.cols : static_cast<int64_t>(columns.size());
  PRECONDOR_RETURN_IF_ERROR(CheckShape("Gather", "y", y, count, width));
  PRECONDOR_RETURN_IF_ERROR(CheckIndices("rows", rows, x.rows));
  PRECONDOR_RETURN_IF_ERROR(CheckIndices("columns", columns, x.cols));
  return RunElementwise({.kind = ElementwiseKind::kGather, .rows = rows, .columns = columns, .x = x, .y = y});
}

absl::Status Backend::ScaleBothSides(absl::Span<const double> scales, ConstMatrixView x, MatrixView y) {
  PRECONDOR_RETURN_IF_ERROR(CheckSquare("ScaleBothSides", "x", x));
  PRECONDOR_RETURN_IF_ERROR(CheckShape("ScaleBothSides", "y", y, x.rows, x.cols));
  PRECONDOR_RETURN_IF_ERROR(CheckLength("ScaleBothSides", "scales", x.rows, scales.size()));
  return RunElementwise({.kind = ElementwiseKind::kScaleBothSides, .scales = scales, .x = x, .y = y});
}

absl::Status Backend::AddDiagonal(double value, MatrixView a) {
  PRECONDOR_RETURN_IF_ERROR(CheckSquare("AddDiagonal", "a", a));
  return RunElementwise({.kind = ElementwiseKind::kAddDiagonal, .alpha = value, .x = a, .y = a});
}

absl::StatusOr<double> Backend::Dot(ConstMatrixView x, ConstMatrixView y) {
  PRECONDOR_RETURN_IF_ERROR(CheckAlike("Dot", "x", x, "y", y));
  if (x.size() == 0) return 0.0;
  double out = 0;
  PRECONDOR_RETURN_IF_ERROR(Run({operation::Dot{x, y, &out}}));
  return out;
}

absl::Status Backend::SquaredNorm(ConstMatrixView x, double* out) {
  PRECONDOR_RETURN_IF_ERROR(CheckView("SquaredNorm", "x", x));
  *out = 0;
  return x.size() == 0 ? absl::OkStatus() : Run({operation::Dot{x, x, out, Awaited::kOutcome}});
}

absl::Status Backend::RowSquaredNorms(ConstMatrixView x, absl::Span<double> out) {
  PRECONDOR_RETURN_IF_ERROR(CheckView("RowSquaredNorms", "x", x));
  PRECONDOR_RETURN_IF_ERROR(CheckLength("RowSquaredNorms", "out", x.rows, out.size()));
  return x.rows == 0 ? absl::OkStatus() : Run({operation::RowSquaredNorms{x, out}});
}

absl::Status Backend::ColumnSquaredNorms(ConstMatrixView x, absl::Span<double> out) {
  PRECONDOR_RETURN_IF_ERROR(CheckView("ColumnSquaredNorms", "x", x));
  PRECONDOR_RETURN_IF_ERROR(CheckLength("ColumnSquaredNorms", "out", x.cols, out.size()));
  return x.cols == 0 ? absl::OkStatus() : Run({operation::ColumnSquaredNorms{x, out}});
}

absl::StatusOr<double> Backend::AbsoluteSum(ConstMatrixView x) {
  PRECONDOR_RETURN_IF_ERROR(CheckView("AbsoluteSum", "x", x));
  if (x.size() == 0) return 0.0;
  double out = 0;
  PRECONDOR_RETURN_IF_ERROR(Run({operation::AbsoluteSum{x, &out}}));
  return out;
}

absl::StatusOr<double> Backend::AbsoluteMaximum(ConstMatrixView x) {
  PRECONDOR_RETURN_IF_ERROR(CheckView("AbsoluteMaximum", "x", x));
  if (x.size() == 0) return 0.0;
  double out = 0;
  PRECONDOR_RETURN_IF_ERROR(Run({operation::AbsoluteMaximum{x, &out}}));
  return out;
}

absl::Status Backend::Diagonal(ConstMatrixView a, absl::Span<double> out) {
  PRECONDOR_RETURN_IF_ERROR(CheckSquare("Diagonal", "a", a));
  PRECONDOR_RETURN_IF_ERROR(CheckLength("Diagonal", "out", a.rows, out.size()));
  return a.size() == 0 ? absl::OkStatus() : Run({operation::Diagonal{a, out}});
}

absl::Status Backend::Symmetrize(MatrixView a) {
  PRECONDOR_RETURN_IF_ERROR(CheckSquare("Symmetrize", "a", a));
  return RunElementwise({.kind = ElementwiseKind::kSymmetrize, .x = a, .y = a});
}

absl::Status Backend::PackLower(ConstMatrixView x, MatrixView packed) {
  PRECONDOR_RETURN_IF_ERROR(CheckSquare("PackLower", "x", x));
  PRECONDOR_RETURN_IF_ERROR(CheckShape("PackLower", "packed", packed, 1, x.rows * (x.rows + 1) / 2));
  return RunElementwise({.kind = ElementwiseKind::kPackLower, .x = x, .y = packed});
}

absl::Status Backend::UnpackLower(ConstMatrixView packed, MatrixView x) {
  PRECONDOR_RETURN_IF_ERROR(CheckSquare("UnpackLower", "x", x));
  PRECONDOR_RETURN_IF_ERROR(CheckShape("UnpackLower", "packed", packed, 1, x.rows * (x.rows + 1) / 2));
  return RunElementwise({.kind = ElementwiseKind::kUnpackLower, .x = packed, .y = x});
}

absl::Status Backend::PackRow(ConstMatrixView x, int64_t i, MatrixView packed) {
  PRECONDOR_RETURN_IF_ERROR(CheckShape("PackRow", "x", x, 1, x.cols));
  PRECONDOR_RETURN_IF_ERROR(CheckShape("PackRow", "packed", packed, 1, x.cols * (x.cols + 1) / 2));
  if (i < 0 || i >= x.cols) {
    return absl::InvalidArgumentError(absl::StrCat("PackRow: i: expected a row in [0, ", x.cols, "), got ", i));
  }
  return Run({operation::Elementwise{.kind = ElementwiseKind::kPackRow, .row = i, .x = x, .y = packed}});
}

absl::Status Backend::SpdInverse(ConstMatrixView a, MatrixView x) {
  PRECONDOR_RETURN_IF_ERROR(CheckSquare("SpdInverse", "a", a));
  PRECONDOR_RETURN_IF_ERROR(CheckShape("SpdInverse", "x", x, a.rows, a.cols));
  return a.size() == 0 ? absl::OkStatus() : Run({operation::SpdInverse{a, x}});
}

absl::Status Backend::SymmetricEigen(ConstMatrixView a, absl::Span<double> values, MatrixView q) {
  PRECONDOR_RETURN_IF_ERROR(CheckSquare("SymmetricEigen", "a", a));
  PRECONDOR_RETURN_IF_ERROR(CheckShape("SymmetricEigen", "q", q, a.rows, a.cols));
  PRECONDOR_RETURN_IF_ERROR(CheckLength("SymmetricEigen", "values", a.rows, values.size()));
  constexpr int64_t kMaxRows = 32766;  // LAPACK stores the size of its work space, 1 + 6 n + 2 n^2, in 32 bits
  if (a.rows > kMaxRows) {
    return absl::InvalidArgumentError(
        absl::StrCat("SymmetricEigen: a: expected at most ", kMaxRows, " rows, got ", a.rows));
  }
  return a.size() == 0 ? absl::OkStatus() : Run({operation::SymmetricEigen{a, values, q}});
}

absl::Status Backend::TriangularMultiply(From side, ConstMatrixView a, Transpose transpose, MatrixView x) {
  PRECONDOR_RETURN_IF_ERROR(CheckTriangular("TriangularMultiply", side, a, x));
  return x.size() == 0 ? absl::OkStatus() : Run({operation::TriangularMultiply{side, a, transpose, x}});
}

absl::Status Backend::TriangularSolve(From side, ConstMatrixView a, Transpose transpose, MatrixView x) {
  PRECONDOR_RETURN_IF_ERROR(CheckTriangular("TriangularSolve", side, a, x));
  return x.size() == 0 ? absl::OkStatus() : Run({operation::TriangularSolve{side, a, transpose, x}});
}

absl::Status Backend::OrthonormalizeRows(ConstMatrixView a, MatrixView q) {
  PRECONDOR_RETURN_IF_ERROR(CheckAlike("OrthonormalizeRows", "a", a, "q", q));
  if (a.rows > a.cols) {
    return absl::InvalidArgumentError(
        absl::StrCat("OrthonormalizeRows: a: expected at most as many rows as columns, got ", Shape(a.rows, a.cols)));
  }
  return a.size() == 0 ? absl::OkStatus() : Run({operation::OrthonormalizeRows{a, q}});
}

absl::Status Backend::LowRankCore(absl::Span<const double> roots, ConstMatrixView gram, MatrixView core,
                                  MatrixView packed) {
  const int64_t n = static_cast<int64_t>(roots.size());
  PRECONDOR_RETURN_IF_ERROR(CheckShape("LowRankCore", "gram", gram, 1, n * (n + 1) / 2));
  PRECONDOR_RETURN_IF_ERROR(CheckShape("LowRankCore", "core", core, n, n));
  if (packed.size() > 0) PRECONDOR_RETURN_IF_ERROR(CheckShape("LowRankCore", "packed", packed, 1, n * (n + 1) / 2));
  return n == 0 ? absl::OkStatus() : Run({operation::LowRankCore{roots, gram, core, packed}});
}

absl::Status Backend::LowRankAppend(absl::Span<const double> scales, ConstMatrixView rows,
                                    absl::Span<const int64_t> slots, MatrixView vectors, MatrixView gram) {
  const int64_t n = vectors.rows;
  PRECONDOR_RETURN_IF_ERROR(CheckView("LowRankAppend", "rows", rows));
  PRECONDOR_RETURN_IF_ERROR(CheckShape("LowRankAppend", "vectors", vectors, n, rows.cols));
  PRECONDOR_RETURN_IF_ERROR(CheckShape("LowRankAppend", "gram", gram, 1, n * (n + 1) / 2));
  PRECONDOR_RETURN_IF_ERROR(CheckLength("LowRankAppend", "scales", rows.rows, static_cast<int64_t>(scales.size())));
  PRECONDOR_RETURN_IF_ERROR(CheckLength("LowRankAppend", "slots", rows.rows, static_cast<int64_t>(slots.size())));
  for (size_t i = 0; i < slots.size(); ++i) {
    const int64_t least = i == 0 ? 0 : slots[i - 1] + 1;
    if (slots[i] >= least && slots[i] < n) continue;
    return absl::InvalidArgumentError(
        absl::StrCat("LowRankAppend: slots: expected ascending rows in [", least, ", ", n, "), got ", slots[i]));
  }
  return rows.rows == 0 ? absl::OkStatus() : Run({operation::LowRankAppend{scales, rows, slots, vectors, gram}});
}

absl::Status Backend::LowRankPrecondition(const LowRankInverse& out_side, const LowRankInverse& in_side,
                                          ConstMatrixView d, MatrixView u, ProductPrecision precision) {
  PRECONDOR_RETURN_IF_ERROR(CheckLowRankPrecondition(out_side, in_side, d, u));
  return d.size() == 0 ? absl::OkStatus() : Run({operation::LowRankPrecondition{out_side, in_side, d, u, precision}});
}

absl::Status Backend::LowRankPrecondition(const LowRankInverse& out_side, const LowRankInverse& in_side,
                                          ConstMatrixView d, LengthRule rule, MatrixView u,
                                          ProductPrecision precision) {
  PRECONDOR_RETURN_IF_ERROR(CheckLowRankPrecondition(out_side, in_side, d, u));
  if (d.size() == 0) return absl::OkStatus();
  operation::LowRankPrecondition product{out_side, in_side, d, u, precision};
  if (applies_length_rules()) {
    product.rule = &rule;
    return Run({product});
  }
  std::array<double, 2> squares = {};
  product.squares = absl::MakeSpan(squares);
  PRECONDOR_RETURN_IF_ERROR(Run({product}));
  PRECONDOR_ASSIGN_OR_RETURN(const double scale, rule(std::sqrt(squares[0]), std::sqrt(squares[1])));
  return ScaleBy(scale, u, u);
}

bool Backend::SupportsPrecision(ProductPrecision precision) const { return DoSupportsPrecision(precision); }

absl::Status Backend::FillNormal(const CounterRandom& random, MatrixView x) {
  PRECONDOR_RETURN_IF_ERROR(CheckView("FillNormal", "x", x));
  return x.size() == 0 ? absl::OkStatus() : Run({operation::FillNormal{random, x}});
}

absl::Status Backend::RunElementwise(const operation::Elementwise& elementwise) {
  return elementwise.y.size() == 0 ? absl::OkStatus() : Run({elementwise});
}

void Backend::Run(absl::Span<const Operation* const> operations, absl::Span<absl::Status> statuses) {
  if (!operations.empty()) DoRun(operations, statuses);
}

absl::Status Backend::Run(const Operation& operation) {
  const Operation* const alone = &operation;
  absl::Status status;
  DoRun({&alone, 1}, {&status, 1});
  return status;
}

// Generates the numbers on the host, in parts that fit a core's cache, and uploads them.
absl::Status Backend::RunByPrimitives(const operation::FillNormal& fill) {
  const MatrixView x = fill.x;
  constexpr int64_t kPartElements = 1 << 16;
  const int64_t most = std::max<int64_t>(kPartElements / x.cols, 1);
  std::vector<float> part(std::min(most, x.rows) * x.cols);
  for (int64_t row = 0; row < x.rows; row += most) {
    const int64_t rows = std::min(most, x.rows - row);
    const absl::Span<float> values = absl::MakeSpan(part).first(rows * x.cols);
    fill.random.Normals(static_cast<uint64_t>(row * x.cols), values);
    PRECONDOR_RETURN_IF_ERROR(Upload(ConstMatrixView(values.data(), rows, x.cols), x.RowRange(row, rows)));
  }
  return absl::OkStatus();
}

}  // namespace precondor
