// SPDX-License-Identifier: Apache-2.0
// A Backend that passes every operation on to another one, remembers the peak of its memory and fails on demand.
// Composites keep their default form, so that their scratch is seen too.
#pragma once

#include <algorithm>
#include <map>

#include "absl/status/status.h"

#include "kernels/backend.h"

namespace precondor {

// One thread at a time. `inner` outlives it.
class ForwardingBackend final : public Backend {
 public:
  explicit ForwardingBackend(Backend& inner) : inner_(inner) {}
  absl::string_view name() const override { return inner_.name(); }

  int64_t peak_bytes() const { return peak_bytes_; }
  void ResetPeak() { peak_bytes_ = live_bytes_; }
  // Counts operations that may fail (everything but Free) from here on; the n-th (from 0) fails with Internal.
  void FailAt(int64_t n) {
    operations_ = 0;
    fail_at_ = n;
  }
  void NeverFail() { fail_at_ = -1; }
  // From here on SpdInverse, or SymmetricEigen, finds no decomposition.
  void RefuseInverses(bool refuse) { refuse_inverses_ = refuse; }
  void RefuseEigen(bool refuse) { refuse_eigen_ = refuse; }
  bool failed() const { return fail_at_ >= 0 && operations_ > fail_at_; }

 private:
  absl::Status Count() { return operations_++ == fail_at_ ? absl::InternalError("injected fault") : absl::OkStatus(); }
  template <typename Operation>
  absl::Status Forward(Operation operation) {
    absl::Status injected = Count();
    return injected.ok() ? operation() : injected;
  }

  absl::StatusOr<float*> DoAllocate(int64_t elements) override {
    absl::Status injected = Count();
    if (!injected.ok()) return injected;
    absl::StatusOr<DeviceMatrix> block = inner_.Allocate(1, elements);
    if (!block.ok()) return block.status();
    float* data = block->view().data;
    blocks_[data] = *std::move(block);
    live_bytes_ += elements * static_cast<int64_t>(sizeof(float));
    peak_bytes_ = std::max(peak_bytes_, live_bytes_);
    return data;
  }
  void DoFree(float* data, int64_t elements) override {
    blocks_.erase(data);
    live_bytes_ -= elements * static_cast<int64_t>(sizeof(float));
  }
  int64_t DoAllocatedBytes() const override { return live_bytes_; }
  void DoTrim() override { inner_.Trim(); }
  absl::Status DoUpload(ConstMatrixView host, MatrixView device) override {
    return Forward([&] { return inner_.Upload(host, device); });
  }
  absl::Status DoDownload(ConstMatrixView device, MatrixView host) override {
    return Forward([&] { return inner_.Download(device, host); });
  }
  absl::Status DoCopy(ConstMatrixView from, MatrixView to) override {
    return Forward([&] { return inner_.Copy(from, to); });
  }
  absl::Status DoGemm(double alpha, ConstMatrixView a, Transpose transpose_a, ConstMatrixView b, Transpose transpose_b,
                      double beta, MatrixView c) override {
    return Forward([&] { return inner_.Gemm(alpha, a, transpose_a, b, transpose_b, beta, c); });
  }
  absl::Status DoAxpby(double alpha, ConstMatrixView x, double beta, MatrixView y) override {
    return Forward([&] { return inner_.Axpby(alpha, x, beta, y); });
  }
  absl::Status DoScaleRows(absl::Span<const double> scales, ConstMatrixView x, MatrixView y) override {
    return Forward([&] { return inner_.ScaleRows(scales, x, y); });
  }
  absl::Status DoScaleColumns(absl::Span<const double> scales, ConstMatrixView x, MatrixView y) override {
    return Forward([&] { return inner_.ScaleColumns(scales, x, y); });
  }
  absl::Status DoMultiplyElements(double alpha, ConstMatrixView x, ConstMatrixView y, double beta,
                                  MatrixView z) override {
    return Forward([&] { return inner_.MultiplyElements(alpha, x, y, beta, z); });
  }
  absl::Status DoDivideByRoot(double alpha, ConstMatrixView x, ConstMatrixView v, double epsilon,
                              MatrixView y) override {
    return Forward([&] { return inner_.DivideByRoot(alpha, x, v, epsilon, y); });
  }
  absl::Status DoDivideByOuter(double alpha, absl::Span<const double> rows, absl::Span<const double> columns,
                               double shift, ConstMatrixView x, MatrixView y) override {
    return Forward([&] { return inner_.DivideByOuter(alpha, rows, columns, shift, x, y); });
  }
  absl::Status DoGather(absl::Span<const int64_t> rows, absl::Span<const int64_t> columns, ConstMatrixView x,
                        MatrixView y) override {
    return Forward([&] { return inner_.Gather(rows, columns, x, y); });
  }
  absl::Status DoScaleBothSides(absl::Span<const double> scales, ConstMatrixView x, MatrixView y) override {
    return Forward([&] { return inner_.ScaleBothSides(scales, x, y); });
  }
  absl::Status DoAddDiagonal(double value, MatrixView a) override {
    return Forward([&] { return inner_.AddDiagonal(value, a); });
  }
  absl::StatusOr<double> DoDot(ConstMatrixView x, ConstMatrixView y) override {
    absl::Status injected = Count();
    if (!injected.ok()) return injected;
    return inner_.Dot(x, y);
  }
  absl::Status DoRowSquaredNorms(ConstMatrixView x, absl::Span<double> out) override {
    return Forward([&] { return inner_.RowSquaredNorms(x, out); });
  }
  absl::Status DoColumnSquaredNorms(ConstMatrixView x, absl::Span<double> out) override {
    return Forward([&] { return inner_.ColumnSquaredNorms(x, out); });
  }
  absl::StatusOr<double> DoAbsoluteSum(ConstMatrixView x) override {
    absl::Status injected = Count();
    if (!injected.ok()) return injected;
    return inner_.AbsoluteSum(x);
  }
  absl::StatusOr<double> DoAbsoluteMaximum(ConstMatrixView x) override {
    absl::Status injected = Count();
    if (!injected.ok()) return injected;
    return inner_.AbsoluteMaximum(x);
  }
  absl::Status DoDiagonal(ConstMatrixView a, absl::Span<double> out) override {
    return Forward([&] { return inner_.Diagonal(a, out); });
  }
  absl::Status DoSymmetrize(MatrixView a) override {
    return Forward([&] { return inner_.Symmetrize(a); });
  }
  absl::Status DoPackLower(ConstMatrixView x, MatrixView packed) override {
    return Forward([&] { return inner_.PackLower(x, packed); });
  }
  absl::Status DoUnpackLower(ConstMatrixView packed, MatrixView x) override {
    return Forward([&] { return inner_.UnpackLower(packed, x); });
  }
  absl::Status DoPackRow(ConstMatrixView x, int64_t i, MatrixView packed) override {
    return Forward([&] { return inner_.PackRow(x, i, packed); });
  }
  absl::Status DoSpdInverse(ConstMatrixView a, MatrixView x) override {
    if (refuse_inverses_) return absl::FailedPreconditionError("refused");
    return Forward([&] { return inner_.SpdInverse(a, x); });
  }
  absl::Status DoSymmetricEigen(ConstMatrixView a, absl::Span<double> values, MatrixView q) override {
    if (refuse_eigen_) return absl::FailedPreconditionError("refused");
    return Forward([&] { return inner_.SymmetricEigen(a, values, q); });
  }
  absl::Status DoTriangularMultiply(From side, ConstMatrixView a, Transpose transpose, MatrixView x) override {
    return Forward([&] { return inner_.TriangularMultiply(side, a, transpose, x); });
  }
  absl::Status DoTriangularSolve(From side, ConstMatrixView a, Transpose transpose, MatrixView x) override {
    return Forward([&] { return inner_.TriangularSolve(side, a, transpose, x); });
  }
  absl::Status DoOrthonormalizeRows(ConstMatrixView a, MatrixView q) override {
    return Forward([&] { return inner_.OrthonormalizeRows(a, q); });
  }

  Backend& inner_;
  std::map<float*, DeviceMatrix> blocks_;
  int64_t live_bytes_ = 0;
  int64_t peak_bytes_ = 0;
  int64_t operations_ = 0;
  int64_t fail_at_ = -1;
  bool refuse_inverses_ = false;
  bool refuse_eigen_ = false;
};

}  // namespace precondor
