// SPDX-License-Identifier: Apache-2.0
#include "kernels/backend.h"

#include <algorithm>
#include <cmath>
#include <type_traits>
#include <utility>
#include <variant>
#include <vector>

#include "absl/strings/str_cat.h"

#include "kernels/base/status_macros.h"
#include "kernels/operation.h"

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
  PRECONDOR_RETURN_IF_ERROR(CheckView("LowRankPrecondition", "d", d));
  PRECONDOR_RETURN_IF_ERROR(CheckShape("LowRankPrecondition", "u", u, d.rows, d.cols));
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

MatrixView Columns(MatrixView x, int64_t begin, int64_t count) {
  return MatrixView(x.data + begin, x.rows, count, x.stride);
}

LowRankInverse WithShapes(const LowRankInverse& j, int64_t d) {
  if (j.vectors.rows > 0) return j;
  return {j.c, ConstMatrixView(nullptr, 0, d), ConstMatrixView(nullptr, 0, 0), {}};
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
  PRECONDOR_RETURN_IF_ERROR(CheckView("Upload", "host", host));
  PRECONDOR_RETURN_IF_ERROR(CheckShape("Upload", "device", device, host.rows, host.cols));
  return host.size() == 0 ? absl::OkStatus() : DoUpload(host, device);
}

absl::Status Backend::UploadToIdle(ConstMatrixView host, MatrixView device) {
  PRECONDOR_RETURN_IF_ERROR(CheckView("UploadToIdle", "host", host));
  PRECONDOR_RETURN_IF_ERROR(CheckShape("UploadToIdle", "device", device, host.rows, host.cols));
  return host.size() == 0 ? absl::OkStatus() : DoUploadToIdle(host, device);
}

absl::Status Backend::Download(ConstMatrixView device, MatrixView host) {
  PRECONDOR_RETURN_IF_ERROR(CheckView("Download", "device", device));
  PRECONDOR_RETURN_IF_ERROR(CheckShape("Download", "host", host, device.rows, device.cols));
  return host.size() == 0 ? absl::OkStatus() : DoDownload(device, host);
}

absl::Status Backend::Copy(ConstMatrixView from, MatrixView to) {
  PRECONDOR_RETURN_IF_ERROR(CheckView("Copy", "from", from));
  PRECONDOR_RETURN_IF_ERROR(CheckShape("Copy", "to", to, from.rows, from.cols));
  return from.size() == 0 ? absl::OkStatus() : DoCopy(from, to);
}

absl::Status Backend::Gemm(double alpha, ConstMatrixView a, Transpose transpose_a, ConstMatrixView b,
                           Transpose transpose_b, double beta, MatrixView c) {
  const bool ta = transpose_a == Transpose::kYes, tb = transpose_b == Transpose::kYes;
  const int64_t inner = ta ? a.rows : a.cols;
  PRECONDOR_RETURN_IF_ERROR(CheckView("Gemm", "c", c));
  PRECONDOR_RETURN_IF_ERROR(CheckShape("Gemm", "a", a, ta ? inner : c.rows, ta ? c.rows : inner));
  PRECONDOR_RETURN_IF_ERROR(CheckShape("Gemm", "b", b, tb ? c.cols : inner, tb ? inner : c.cols));
  if (c.size() == 0) return absl::OkStatus();
  return inner == 0 ? DoAxpby(beta, c, 0.0, c) : DoGemm(alpha, a, transpose_a, b, transpose_b, beta, c);
}

absl::Status Backend::Axpby(double alpha, ConstMatrixView x, double beta, MatrixView y) {
  PRECONDOR_RETURN_IF_ERROR(CheckView("Axpby", "x", x));
  PRECONDOR_RETURN_IF_ERROR(CheckShape("Axpby", "y", y, x.rows, x.cols));
  return y.size() == 0 ? absl::OkStatus() : DoAxpby(alpha, x, beta, y);
}

absl::Status Backend::ScaleBy(double scale, MatrixView x) {
  constexpr double kLargestFactor = 1e30;
  while (scale > kLargestFactor) {
    PRECONDOR_RETURN_IF_ERROR(Axpby(kLargestFactor, x, 0.0, x));
    scale /= kLargestFactor;
  }
  return scale == 1.0 ? absl::OkStatus() : Axpby(scale, x, 0.0, x);
}

absl::Status Backend::ScaleRows(absl::Span<const double> scales, ConstMatrixView x, MatrixView y) {
  PRECONDOR_RETURN_IF_ERROR(CheckView("ScaleRows", "x", x));
  PRECONDOR_RETURN_IF_ERROR(CheckShape("ScaleRows", "y", y, x.rows, x.cols));
  PRECONDOR_RETURN_IF_ERROR(CheckLength("ScaleRows", "scales", x.rows, scales.size()));
  return y.size() == 0 ? absl::OkStatus() : DoScaleRows(scales, x, y);
}

absl::Status Backend::ScaleColumns(absl::Span<const double> scales, ConstMatrixView x, MatrixView y) {
  PRECONDOR_RETURN_IF_ERROR(CheckView("ScaleColumns", "x", x));
  PRECONDOR_RETURN_IF_ERROR(CheckShape("ScaleColumns", "y", y, x.rows, x.cols));
  PRECONDOR_RETURN_IF_ERROR(CheckLength("ScaleColumns", "scales", x.cols, scales.size()));
  return y.size() == 0 ? absl::OkStatus() : DoScaleColumns(scales, x, y);
}

absl::Status Backend::MultiplyElements(double alpha, ConstMatrixView x, ConstMatrixView y, double beta, MatrixView z) {
  PRECONDOR_RETURN_IF_ERROR(CheckView("MultiplyElements", "x", x));
  PRECONDOR_RETURN_IF_ERROR(CheckShape("MultiplyElements", "y", y, x.rows, x.cols));
  PRECONDOR_RETURN_IF_ERROR(CheckShape("MultiplyElements", "z", z, x.rows, x.cols));
  return z.size() == 0 ? absl::OkStatus() : DoMultiplyElements(alpha, x, y, beta, z);
}

absl::Status Backend::DivideByRoot(double alpha, ConstMatrixView x, ConstMatrixView v, double epsilon, MatrixView y) {
  PRECONDOR_RETURN_IF_ERROR(CheckView("DivideByRoot", "x", x));
  PRECONDOR_RETURN_IF_ERROR(CheckShape("DivideByRoot", "v", v, x.rows, x.cols));
  PRECONDOR_RETURN_IF_ERROR(CheckShape("DivideByRoot", "y", y, x.rows, x.cols));
  return y.size() == 0 ? absl::OkStatus() : DoDivideByRoot(alpha, x, v, epsilon, y);
}

absl::Status Backend::DivideByOuter(double alpha, absl::Span<const double> rows, absl::Span<const double> columns,
                                    double shift, ConstMatrixView x, MatrixView y) {
  PRECONDOR_RETURN_IF_ERROR(CheckView("DivideByOuter", "x", x));
  PRECONDOR_RETURN_IF_ERROR(CheckLength("DivideByOuter", "rows", x.rows, rows.size()));
  PRECONDOR_RETURN_IF_ERROR(CheckLength("DivideByOuter", "columns", x.cols, columns.size()));
  PRECONDOR_RETURN_IF_ERROR(CheckShape("DivideByOuter", "y", y, x.rows, x.cols));
  return y.size() == 0 ? absl::OkStatus() : DoDivideByOuter(alpha, rows, columns, shift, x, y);
}

absl::Status Backend::Gather(absl::Span<const int64_t> rows, absl::Span<const int64_t> columns, ConstMatrixView x,
                             MatrixView y) {
  PRECONDOR_RETURN_IF_ERROR(CheckView("Gather", "x", x));
  const int64_t count = rows.empty() ? x.rows : static_cast<int64_t>(rows.size());
  const int64_t width = columns.empty() ? x.cols : static_cast<int64_t>(columns.size());
  PRECONDOR_RETURN_IF_ERROR(CheckShape("Gather", "y", y, count, width));
  PRECONDOR_RETURN_IF_ERROR(CheckIndices("rows", rows, x.rows));
  PRECONDOR_RETURN_IF_ERROR(CheckIndices("columns", columns, x.cols));
  return y.size() == 0 ? absl::OkStatus() : DoGather(rows, columns, x, y);
}

absl::Status Backend::ScaleBothSides(absl::Span<const double> scales, ConstMatrixView x, MatrixView y) {
  PRECONDOR_RETURN_IF_ERROR(CheckSquare("ScaleBothSides", "x", x));
  PRECONDOR_RETURN_IF_ERROR(CheckShape("ScaleBothSides", "y", y, x.rows, x.cols));
  PRECONDOR_RETURN_IF_ERROR(CheckLength("ScaleBothSides", "scales", x.rows, scales.size()));
  return y.size() == 0 ? absl::OkStatus() : DoScaleBothSides(scales, x, y);
}

absl::Status Backend::AddDiagonal(double value, MatrixView a) {
  PRECONDOR_RETURN_IF_ERROR(CheckSquare("AddDiagonal", "a", a));
  return a.size() == 0 ? absl::OkStatus() : DoAddDiagonal(value, a);
}

absl::StatusOr<double> Backend::Dot(ConstMatrixView x, ConstMatrixView y) {
  PRECONDOR_RETURN_IF_ERROR(CheckView("Dot", "x", x));
  PRECONDOR_RETURN_IF_ERROR(CheckShape("Dot", "y", y, x.rows, x.cols));
  if (x.size() == 0) return 0.0;
  return DoDot(x, y);
}

absl::Status Backend::RowSquaredNorms(ConstMatrixView x, absl::Span<double> out) {
  PRECONDOR_RETURN_IF_ERROR(CheckView("RowSquaredNorms", "x", x));
  PRECONDOR_RETURN_IF_ERROR(CheckLength("RowSquaredNorms", "out", x.rows, out.size()));
  return x.rows == 0 ? absl::OkStatus() : DoRowSquaredNorms(x, out);
}

absl::Status Backend::ColumnSquaredNorms(ConstMatrixView x, absl::Span<double> out) {
  PRECONDOR_RETURN_IF_ERROR(CheckView("ColumnSquaredNorms", "x", x));
  PRECONDOR_RETURN_IF_ERROR(CheckLength("ColumnSquaredNorms", "out", x.cols, out.size()));
  return x.cols == 0 ? absl::OkStatus() : DoColumnSquaredNorms(x, out);
}

absl::StatusOr<double> Backend::AbsoluteSum(ConstMatrixView x) {
  PRECONDOR_RETURN_IF_ERROR(CheckView("AbsoluteSum", "x", x));
  if (x.size() == 0) return 0.0;
  return DoAbsoluteSum(x);
}

absl::StatusOr<double> Backend::AbsoluteMaximum(ConstMatrixView x) {
  PRECONDOR_RETURN_IF_ERROR(CheckView("AbsoluteMaximum", "x", x));
  if (x.size() == 0) return 0.0;
  return DoAbsoluteMaximum(x);
}

absl::Status Backend::Diagonal(ConstMatrixView a, absl::Span<double> out) {
  PRECONDOR_RETURN_IF_ERROR(CheckSquare("Diagonal", "a", a));
  PRECONDOR_RETURN_IF_ERROR(CheckLength("Diagonal", "out", a.rows, out.size()));
  return a.size() == 0 ? absl::OkStatus() : DoDiagonal(a, out);
}

absl::Status Backend::Symmetrize(MatrixView a) {
  PRECONDOR_RETURN_IF_ERROR(CheckSquare("Symmetrize", "a", a));
  return a.size() == 0 ? absl::OkStatus() : DoSymmetrize(a);
}

absl::Status Backend::PackLower(ConstMatrixView x, MatrixView packed) {
  PRECONDOR_RETURN_IF_ERROR(CheckSquare("PackLower", "x", x));
  PRECONDOR_RETURN_IF_ERROR(CheckShape("PackLower", "packed", packed, 1, x.rows * (x.rows + 1) / 2));
  return x.size() == 0 ? absl::OkStatus() : DoPackLower(x, packed);
}

absl::Status Backend::UnpackLower(ConstMatrixView packed, MatrixView x) {
  PRECONDOR_RETURN_IF_ERROR(CheckSquare("UnpackLower", "x", x));
  PRECONDOR_RETURN_IF_ERROR(CheckShape("UnpackLower", "packed", packed, 1, x.rows * (x.rows + 1) / 2));
  return x.size() == 0 ? absl::OkStatus() : DoUnpackLower(packed, x);
}

absl::Status Backend::PackRow(ConstMatrixView x, int64_t i, MatrixView packed) {
  PRECONDOR_RETURN_IF_ERROR(CheckShape("PackRow", "x", x, 1, x.cols));
  PRECONDOR_RETURN_IF_ERROR(CheckShape("PackRow", "packed", packed, 1, x.cols * (x.cols + 1) / 2));
  if (i < 0 || i >= x.cols) {
    return absl::InvalidArgumentError(absl::StrCat("PackRow: i: expected a row in [0, ", x.cols, "), got ", i));
  }
  return DoPackRow(x, i, packed);
}

absl::Status Backend::SpdInverse(ConstMatrixView a, MatrixView x) {
  PRECONDOR_RETURN_IF_ERROR(CheckSquare("SpdInverse", "a", a));
  PRECONDOR_RETURN_IF_ERROR(CheckShape("SpdInverse", "x", x, a.rows, a.cols));
  return a.size() == 0 ? absl::OkStatus() : DoSpdInverse(a, x);
}

absl::Status Backend::SymmetricEigen(ConstMatrixView a, absl::Span<double> values, MatrixView q) {
  PRECONDOR_RETURN_IF_ERROR(CheckSquare("SymmetricEigen", "a", a));
  PRECONDOR_RETURN_IF_ERROR(CheckShape("SymmetricEigen", "q", q, a.rows, a.cols));
  PRECONDOR_RETURN_IF_ERROR(CheckLength("SymmetricEigen", "values", a.rows, values.size()));
  constexpr int64_t kMaxRows = 32766;  // LAPACK counts its work space, 1 + 6 n + 2 n^2, in 32 bits
  if (a.rows > kMaxRows) {
    return absl::InvalidArgumentError(
        absl::StrCat("SymmetricEigen: a: expected at most ", kMaxRows, " rows, got ", a.rows));
  }
  return a.size() == 0 ? absl::OkStatus() : DoSymmetricEigen(a, values, q);
}

absl::Status Backend::TriangularMultiply(From side, ConstMatrixView a, Transpose transpose, MatrixView x) {
  PRECONDOR_RETURN_IF_ERROR(CheckTriangular("TriangularMultiply", side, a, x));
  return x.size() == 0 ? absl::OkStatus() : DoTriangularMultiply(side, a, transpose, x);
}

absl::Status Backend::TriangularSolve(From side, ConstMatrixView a, Transpose transpose, MatrixView x) {
  PRECONDOR_RETURN_IF_ERROR(CheckTriangular("TriangularSolve", side, a, x));
  return x.size() == 0 ? absl::OkStatus() : DoTriangularSolve(side, a, transpose, x);
}

absl::Status Backend::OrthonormalizeRows(ConstMatrixView a, MatrixView q) {
  PRECONDOR_RETURN_IF_ERROR(CheckView("OrthonormalizeRows", "a", a));
  PRECONDOR_RETURN_IF_ERROR(CheckShape("OrthonormalizeRows", "q", q, a.rows, a.cols));
  if (a.rows > a.cols) {
    return absl::InvalidArgumentError(
        absl::StrCat("OrthonormalizeRows: a: expected at most as many rows as columns, got ", Shape(a.rows, a.cols)));
  }
  return a.size() == 0 ? absl::OkStatus() : DoOrthonormalizeRows(a, q);
}

absl::Status Backend::LowRankCore(absl::Span<const double> roots, ConstMatrixView gram, MatrixView core) {
  const int64_t n = static_cast<int64_t>(roots.size());
  PRECONDOR_RETURN_IF_ERROR(CheckShape("LowRankCore", "gram", gram, 1, n * (n + 1) / 2));
  PRECONDOR_RETURN_IF_ERROR(CheckShape("LowRankCore", "core", core, n, n));
  return n == 0 ? absl::OkStatus() : DoLowRankCore(roots, gram, core);
}

absl::Status Backend::LowRankPrecondition(const LowRankInverse& out_side, const LowRankInverse& in_side,
                                          ConstMatrixView d, MatrixView u) {
  PRECONDOR_RETURN_IF_ERROR(CheckLowRankPrecondition(out_side, in_side, d, u));
  return d.size() == 0 ? absl::OkStatus() : DoLowRankPrecondition(out_side, in_side, d, u);
}

absl::Status Backend::LowRankPrecondition(const LowRankInverse& out_side, const LowRankInverse& in_side,
                                          ConstMatrixView d, LengthRule rule, MatrixView u) {
  PRECONDOR_RETURN_IF_ERROR(CheckLowRankPrecondition(out_side, in_side, d, u));
  return d.size() == 0 ? absl::OkStatus() : DoLowRankPrecondition(out_side, in_side, d, rule, u);
}

bool Backend::KnowsProducts(ProductPrecision precision) const { return DoKnowsProducts(precision); }

absl::Status Backend::DensePrecondition(ConstMatrixView l, ConstMatrixView r, ConstMatrixView d, MatrixView u,
                                        ProductPrecision precision) {
  PRECONDOR_RETURN_IF_ERROR(CheckView("DensePrecondition", "d", d));
  PRECONDOR_RETURN_IF_ERROR(CheckShape("DensePrecondition", "l", l, d.rows, d.rows));
  PRECONDOR_RETURN_IF_ERROR(CheckShape("DensePrecondition", "r", r, d.cols, d.cols));
  PRECONDOR_RETURN_IF_ERROR(CheckShape("DensePrecondition", "u", u, d.rows, d.cols));
  if (!KnowsProducts(precision)) {
    return absl::UnimplementedError(
        absl::StrCat("DensePrecondition: precision: expected F32, all that this ", name(), " backend knows, got BF16"));
  }
  return d.size() == 0 ? absl::OkStatus() : DoDensePrecondition(l, r, d, precision, u);
}

absl::Status Backend::FillNormal(const CounterRandom& random, MatrixView x) {
  PRECONDOR_RETURN_IF_ERROR(CheckView("FillNormal", "x", x));
  return x.size() == 0 ? absl::OkStatus() : DoFillNormal(random, x);
}

void Backend::RunTogether(absl::Span<const Operation* const> operations, absl::Span<absl::Status> statuses) {
  if (!operations.empty()) DoRunTogether(operations, statuses);
}

void Backend::DoRunTogether(absl::Span<const Operation* const> operations, absl::Span<absl::Status> statuses) {
  for (size_t i = 0; i < operations.size(); ++i) statuses[i] = RunAlone(*operations[i]);
}

absl::Status Backend::RunAlone(const Operation& operation) {
  const auto run = [&](const auto& what) -> absl::Status {
    using Kind = std::decay_t<decltype(what)>;
    if constexpr (std::is_same_v<Kind, Operation::Elementwise>) {
      return RunElementwise(operation);
    } else if constexpr (std::is_same_v<Kind, Operation::Gemm>) {
      return DoGemm(what.alpha, what.a, what.transpose_a, what.b, what.transpose_b, what.beta, what.c);
    } else if constexpr (std::is_same_v<Kind, Operation::SymmetricUpdateMultiply>) {
      SymmetricMatrix m = SymmetricMatrix::Showing(what.raw, what.n, what.storage);
      return DoSymmetricUpdateMultiply(what.scale, what.shift, what.weights, what.rows, m, what.v, what.y);
    } else if constexpr (std::is_same_v<Kind, Operation::RowSquaredNorms>) {
      return DoRowSquaredNorms(what.x, what.out);
    } else if constexpr (std::is_same_v<Kind, Operation::Dot>) {
      PRECONDOR_ASSIGN_OR_RETURN(*what.out, DoDot(what.x, what.y));
      return absl::OkStatus();
    } else if constexpr (std::is_same_v<Kind, Operation::SpdInverse>) {
      return DoSpdInverse(what.a, what.x);
    } else {
      static_assert(std::is_same_v<Kind, Operation::LowRankCore>);
      return DoLowRankCore(what.roots, what.gram, what.core);
    }
  };
  return std::visit(run, operation.what);
}

absl::Status Backend::RunElementwise(const Operation& operation) {
  const auto& e = std::get<Operation::Elementwise>(operation.what);
  switch (e.kind) {
    case ElementwiseKind::kAxpby:
      return DoAxpby(e.alpha, e.x, e.beta, e.y);
    case ElementwiseKind::kScaleRows:
      return DoScaleRows(e.scales, e.x, e.y);
    case ElementwiseKind::kScaleColumns:
      return DoScaleColumns(e.scales, e.x, e.y);
    case ElementwiseKind::kScaleBothSides:
      return DoScaleBothSides(e.scales, e.x, e.y);
    case ElementwiseKind::kAddDiagonal:
      return DoAddDiagonal(e.alpha, e.y);
    case ElementwiseKind::kPackLower:
      return DoPackLower(e.x, e.y);
    case ElementwiseKind::kUnpackLower:
      return DoUnpackLower(e.x, e.y);
    case ElementwiseKind::kPackRow:
      return DoPackRow(e.x, e.row, e.y);
  }
  return absl::InternalError("RunTogether: unknown kind of operation");
}

// With X = P D, Y = D Q' and K = P Y,
//   J_out D J_in / (c_out c_in) = (I - P'SP) D (I - Q'TQ) = D - [P'S, Y] [X - K T Q; T Q]
//                                                         = D - [P'S, (Y - P'S K) T] [X; Q],
// so that two products make X and Y and one of inner size p + q makes u. Of the two forms the one whose small products
// have the shorter side of D is taken. Each product is in the orientation in which BLAS is fastest: Q D' for Y, say,
// takes up to twice as long.
absl::Status Backend::DoLowRankPrecondition(const LowRankInverse& out_side, const LowRankInverse& in_side,
                                            ConstMatrixView d, MatrixView u) {
  const double scale = out_side.c * in_side.c;
  // Views of the right shape also where a side has no vectors.
  const LowRankInverse out = WithShapes(out_side, d.rows), in = WithShapes(in_side, d.cols);
  const int64_t p = out.vectors.rows, q = in.vectors.rows;
  PRECONDOR_RETURN_IF_ERROR(scale == 1.0 ? DoCopy(d, u) : DoAxpby(scale, d, 0.0, u));
  if (p + q == 0) return absl::OkStatus();
  PRECONDOR_ASSIGN_OR_RETURN(DeviceMatrix left, AllocateScratch(d.rows, p + q));
  PRECONDOR_ASSIGN_OR_RETURN(DeviceMatrix right, AllocateScratch(p + q, d.cols));
  PRECONDOR_ASSIGN_OR_RETURN(DeviceMatrix k, AllocateScratch(p, q));
  const MatrixView ps = Columns(left.view(), 0, p), y = Columns(left.view(), p, q);
  const MatrixView x = right.view().RowRange(0, p), rest = right.view().RowRange(p, q);
  PRECONDOR_RETURN_IF_ERROR(Gemm(1.0, out.vectors, Transpose::kNo, d, Transpose::kNo, 0.0, x));
  PRECONDOR_RETURN_IF_ERROR(Gemm(1.0, out.vectors, Transpose::kYes, out.core, Transpose::kNo, 0.0, ps));
  if (d.rows < d.cols) {
    PRECONDOR_ASSIGN_OR_RETURN(DeviceMatrix raw_y, AllocateScratch(d.rows, q));
    PRECONDOR_RETURN_IF_ERROR(Gemm(1.0, d, Transpose::kNo, in.vectors, Transpose::kYes, 0.0, raw_y.view()));
    PRECONDOR_RETURN_IF_ERROR(Gemm(1.0, out.vectors, Transpose::kNo, raw_y.view(), Transpose::kNo, 0.0, k.view()));
    PRECONDOR_RETURN_IF_ERROR(Gemm(-1.0, ps, Transpose::kNo, k.view(), Transpose::kNo, 1.0, raw_y.view()));
    PRECONDOR_RETURN_IF_ERROR(Gemm(1.0, raw_y.view(), Transpose::kNo, in.core, Transpose::kNo, 0.0, y));
    PRECONDOR_RETURN_IF_ERROR(Copy(in.vectors, rest));
  } else {
    PRECONDOR_RETURN_IF_ERROR(Gemm(1.0, d, Transpose::kNo, in.vectors, Transpose::kYes, 0.0, y));
    PRECONDOR_RETURN_IF_ERROR(Gemm(1.0, in.core, Transpose::kNo, in.vectors, Transpose::kNo, 0.0, rest));
    PRECONDOR_RETURN_IF_ERROR(Gemm(1.0, x, Transpose::kNo, in.vectors, Transpose::kYes, 0.0, k.view()));
    PRECONDOR_RETURN_IF_ERROR(Gemm(-1.0, k.view(), Transpose::kNo, rest, Transpose::kNo, 1.0, x));
  }
  return Gemm(-scale, left.view(), Transpose::kNo, right.view(), Transpose::kNo, 1.0, u);
}

absl::Status Backend::DoLowRankPrecondition(const LowRankInverse& out_side, const LowRankInverse& in_side,
                                            ConstMatrixView d, LengthRule rule, MatrixView u) {
  PRECONDOR_RETURN_IF_ERROR(DoLowRankPrecondition(out_side, in_side, d, u));
  PRECONDOR_ASSIGN_OR_RETURN(const double d_square, Dot(d, d));
  PRECONDOR_ASSIGN_OR_RETURN(const double u_square, Dot(u, u));
  PRECONDOR_ASSIGN_OR_RETURN(const double scale, rule(std::sqrt(d_square), std::sqrt(u_square)));
  return ScaleBy(scale, u);
}

absl::Status Backend::DoLowRankCore(absl::Span<const double> roots, ConstMatrixView gram, MatrixView core) {
  PRECONDOR_RETURN_IF_ERROR(DoUnpackLower(gram, core));
  PRECONDOR_RETURN_IF_ERROR(DoScaleBothSides(roots, core, core));
  PRECONDOR_RETURN_IF_ERROR(DoAddDiagonal(1.0, core));
  PRECONDOR_RETURN_IF_ERROR(DoSpdInverse(core, core));
  return DoScaleBothSides(roots, core, core);
}

absl::Status Backend::DoDensePrecondition(ConstMatrixView l, ConstMatrixView r, ConstMatrixView d, ProductPrecision,
                                          MatrixView u) {
  PRECONDOR_ASSIGN_OR_RETURN(DeviceMatrix half, AllocateScratch(d.rows, d.cols));
  PRECONDOR_RETURN_IF_ERROR(Gemm(1.0, l, Transpose::kNo, d, Transpose::kNo, 0.0, half.view()));
  return Gemm(1.0, half.view(), Transpose::kNo, r, Transpose::kNo, 0.0, u);
}

// By way of the host, in parts that stay in a core's cache.
absl::Status Backend::DoFillNormal(const CounterRandom& random, MatrixView x) {
  constexpr int64_t kPartElements = 1 << 16;
  const int64_t most = std::max<int64_t>(kPartElements / x.cols, 1);
  std::vector<float> part(std::min(most, x.rows) * x.cols);
  for (int64_t row = 0; row < x.rows; row += most) {
    const int64_t rows = std::min(most, x.rows - row);
    const absl::Span<float> values = absl::MakeSpan(part).first(rows * x.cols);
    random.Normals(static_cast<uint64_t>(row * x.cols), values);
    PRECONDOR_RETURN_IF_ERROR(Upload(ConstMatrixView(values.data(), rows, x.cols), x.RowRange(row, rows)));
  }
  return absl::OkStatus();
}

}  // namespace precondor
