// SPDX-License-Identifier: Apache-2.0
#include "kernels/backend.h"

#include <utility>

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
  return CheckShape("LowRankPrecondition", absl::StrCat(side, " core"), j.core, n, n);
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
  if (view_.data != nullptr) backend_->DoFree(view_.data, view_.size());
}

absl::StatusOr<DeviceMatrix> Backend::Allocate(int64_t rows, int64_t cols) {
  constexpr int64_t kMaxElements = int64_t{1} << 40;
  if (rows < 0 || cols < 0 || (cols > 0 && rows > kMaxElements / cols)) {
    return absl::InvalidArgumentError(
        absl::StrCat("Allocate: expected non-negative extents and at most 2^40 elements, got ", Shape(rows, cols)));
  }
  if (rows * cols == 0) return DeviceMatrix(this, MatrixView(nullptr, rows, cols));
  PRECONDOR_ASSIGN_OR_RETURN(float* data, DoAllocate(rows * cols));
  return DeviceMatrix(this, MatrixView(data, rows, cols));
}

int64_t Backend::allocated_bytes() const { return DoAllocatedBytes(); }

absl::Status Backend::Upload(ConstMatrixView host, MatrixView device) {
  PRECONDOR_RETURN_IF_ERROR(CheckView("Upload", "host", host));
  PRECONDOR_RETURN_IF_ERROR(CheckShape("Upload", "device", device, host.rows, host.cols));
  return host.size() == 0 ? absl::OkStatus() : DoUpload(host, device);
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
  return c.size() == 0 ? absl::OkStatus() : DoGemm(alpha, a, transpose_a, b, transpose_b, beta, c);
}

absl::Status Backend::Axpby(double alpha, ConstMatrixView x, double beta, MatrixView y) {
  PRECONDOR_RETURN_IF_ERROR(CheckView("Axpby", "x", x));
  PRECONDOR_RETURN_IF_ERROR(CheckShape("Axpby", "y", y, x.rows, x.cols));
  return y.size() == 0 ? absl::OkStatus() : DoAxpby(alpha, x, beta, y);
}

absl::Status Backend::ScaleRows(absl::Span<const double> scales, ConstMatrixView x, MatrixView y) {
  PRECONDOR_RETURN_IF_ERROR(CheckView("ScaleRows", "x", x));
  PRECONDOR_RETURN_IF_ERROR(CheckShape("ScaleRows", "y", y, x.rows, x.cols));
  PRECONDOR_RETURN_IF_ERROR(CheckLength("ScaleRows", "scales", x.rows, scales.size()));
  return y.size() == 0 ? absl::OkStatus() : DoScaleRows(scales, x, y);
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

absl::Status Backend::Diagonal(ConstMatrixView a, absl::Span<double> out) {
  PRECONDOR_RETURN_IF_ERROR(CheckSquare("Diagonal", "a", a));
  PRECONDOR_RETURN_IF_ERROR(CheckLength("Diagonal", "out", a.rows, out.size()));
  return a.size() == 0 ? absl::OkStatus() : DoDiagonal(a, out);
}

absl::Status Backend::Symmetrize(MatrixView a) {
  PRECONDOR_RETURN_IF_ERROR(CheckSquare("Symmetrize", "a", a));
  return a.size() == 0 ? absl::OkStatus() : DoSymmetrize(a);
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
  return a.size() == 0 ? absl::OkStatus() : DoSymmetricEigen(a, values, q);
}

absl::Status Backend::LowRankPrecondition(const LowRankInverse& out_side, const LowRankInverse& in_side,
                                          ConstMatrixView d, MatrixView u) {
  PRECONDOR_RETURN_IF_ERROR(CheckView("LowRankPrecondition", "d", d));
  PRECONDOR_RETURN_IF_ERROR(CheckShape("LowRankPrecondition", "u", u, d.rows, d.cols));
  PRECONDOR_RETURN_IF_ERROR(CheckLowRank("output", out_side, d.rows));
  PRECONDOR_RETURN_IF_ERROR(CheckLowRank("input", in_side, d.cols));
  return d.size() == 0 ? absl::OkStatus() : DoLowRankPrecondition(out_side, in_side, d, u);
}

absl::Status Backend::DensePrecondition(ConstMatrixView l, ConstMatrixView r, ConstMatrixView d, MatrixView u) {
  PRECONDOR_RETURN_IF_ERROR(CheckView("DensePrecondition", "d", d));
  PRECONDOR_RETURN_IF_ERROR(CheckShape("DensePrecondition", "l", l, d.rows, d.rows));
  PRECONDOR_RETURN_IF_ERROR(CheckShape("DensePrecondition", "r", r, d.cols, d.cols));
  PRECONDOR_RETURN_IF_ERROR(CheckShape("DensePrecondition", "u", u, d.rows, d.cols));
  return d.size() == 0 ? absl::OkStatus() : DoDensePrecondition(l, r, d, u);
}

// J_out D J_in / (c_out c_in) = (I - P'SP) D (I - Q'TQ)
//   = D - P'S (P D - (P D Q') T Q) - (D Q') T Q,
// so that D is read three times and the big products have the inner sizes p and q.
absl::Status Backend::DoLowRankPrecondition(const LowRankInverse& out_side, const LowRankInverse& in_side,
                                            ConstMatrixView d, MatrixView u) {
  const int64_t p = out_side.vectors.rows, q = in_side.vectors.rows;
  const double scale = out_side.c * in_side.c;
  PRECONDOR_RETURN_IF_ERROR(Axpby(scale, d, 0.0, u));
  DeviceMatrix weighted_in;  // T Q [q, n]
  if (q > 0) {
    PRECONDOR_ASSIGN_OR_RETURN(weighted_in, Allocate(q, d.cols));
    PRECONDOR_ASSIGN_OR_RETURN(DeviceMatrix dq, Allocate(d.rows, q));
    PRECONDOR_RETURN_IF_ERROR(
        Gemm(1.0, in_side.core, Transpose::kNo, in_side.vectors, Transpose::kNo, 0.0, weighted_in.view()));
    PRECONDOR_RETURN_IF_ERROR(Gemm(1.0, d, Transpose::kNo, in_side.vectors, Transpose::kYes, 0.0, dq.view()));
    PRECONDOR_RETURN_IF_ERROR(Gemm(-scale, dq.view(), Transpose::kNo, weighted_in.view(), Transpose::kNo, 1.0, u));
  }
  if (p == 0) return absl::OkStatus();
  PRECONDOR_ASSIGN_OR_RETURN(DeviceMatrix pd, Allocate(p, d.cols));
  PRECONDOR_RETURN_IF_ERROR(Gemm(1.0, out_side.vectors, Transpose::kNo, d, Transpose::kNo, 0.0, pd.view()));
  if (q > 0) {
    PRECONDOR_ASSIGN_OR_RETURN(DeviceMatrix small, Allocate(p, q));
    PRECONDOR_RETURN_IF_ERROR(
        Gemm(1.0, pd.view(), Transpose::kNo, in_side.vectors, Transpose::kYes, 0.0, small.view()));
    PRECONDOR_RETURN_IF_ERROR(
        Gemm(-1.0, small.view(), Transpose::kNo, weighted_in.view(), Transpose::kNo, 1.0, pd.view()));
  }
  PRECONDOR_ASSIGN_OR_RETURN(DeviceMatrix weighted, Allocate(p, d.cols));
  PRECONDOR_RETURN_IF_ERROR(Gemm(1.0, out_side.core, Transpose::kNo, pd.view(), Transpose::kNo, 0.0, weighted.view()));
  return Gemm(-scale, out_side.vectors, Transpose::kYes, weighted.view(), Transpose::kNo, 1.0, u);
}

absl::Status Backend::DoDensePrecondition(ConstMatrixView l, ConstMatrixView r, ConstMatrixView d, MatrixView u) {
  PRECONDOR_ASSIGN_OR_RETURN(DeviceMatrix half, Allocate(d.rows, d.cols));
  PRECONDOR_RETURN_IF_ERROR(Gemm(1.0, l, Transpose::kNo, d, Transpose::kNo, 0.0, half.view()));
  return Gemm(1.0, half.view(), Transpose::kNo, r, Transpose::kNo, 0.0, u);
}

}  // namespace precondor
