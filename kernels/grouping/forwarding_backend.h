// SPDX-License-Identifier: Apache-2.0
// A Backend that passes every operation on to another one, for others to derive from. Composites keep their default
// form, in terms of its own operations.
#pragma once

#include "absl/status/status.h"
#include "absl/status/statusor.h"

#include "kernels/backend.h"
#include "kernels/base/status_macros.h"

namespace precondor {

// Thread-safe where `inner`, which outlives it, and Before are.
class ForwardingBackend : public Backend {
 public:
  explicit ForwardingBackend(Backend& inner) : inner_(inner) {}
  absl::string_view name() const override { return inner_.name(); }
  void* stream() const override { return inner_.stream(); }
  absl::Status fault() const override { return inner_.fault(); }
  int64_t memory_limit_bytes() const override { return inner_.memory_limit_bytes(); }

 protected:
  // Before an operation is passed on; an error is the operation's, which is then not.
  virtual absl::Status Before() { return absl::OkStatus(); }
  Backend& inner() { return inner_; }

  // What Backend keeps from everybody else, for those who derive from this one.
  static absl::StatusOr<float*> AllocateOn(Backend& backend, int64_t elements) { return backend.DoAllocate(elements); }
  static absl::StatusOr<float*> AllocateScratchOn(Backend& backend, int64_t elements) {
    return backend.DoAllocateScratch(elements);
  }
  static void FreeOn(Backend& backend, float* data, int64_t elements) { backend.DoFree(data, elements); }
  static bool KnowsSymmetricOn(const Backend& backend, SymmetricStorage storage) {
    return backend.DoKnowsSymmetric(storage);
  }

  absl::StatusOr<float*> DoAllocate(int64_t elements) override {
    PRECONDOR_RETURN_IF_ERROR(Before());
    return AllocateOn(inner_, elements);
  }
  absl::StatusOr<float*> DoAllocateScratch(int64_t elements) override {
    PRECONDOR_RETURN_IF_ERROR(Before());
    return AllocateScratchOn(inner_, elements);
  }
  void DoFree(float* data, int64_t elements) override { FreeOn(inner_, data, elements); }
  int64_t DoAllocatedBytes() const override { return inner_.allocated_bytes(); }
  void DoTrim() override { inner_.Trim(); }
  absl::Status DoSettle() override {
    return Forward([&] { return inner_.Settle(); });
  }
  void DoRunTogether(absl::Span<const Operation* const> operations, absl::Span<absl::Status> statuses) override {
    const absl::Status before = Before();
    if (before.ok()) return inner_.RunTogether(operations, statuses);
    for (absl::Status& status : statuses) status = before;
  }
  absl::Status DoUpload(ConstMatrixView host, MatrixView device) override {
    return Forward([&] { return inner_.Upload(host, device); });
  }
  absl::Status DoUploadToIdle(ConstMatrixView host, MatrixView device) override {
    return Forward([&] { return inner_.UploadToIdle(host, device); });
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
    PRECONDOR_RETURN_IF_ERROR(Before());
    return inner_.Dot(x, y);
  }
  absl::Status DoRowSquaredNorms(ConstMatrixView x, absl::Span<double> out) override {
    return Forward([&] { return inner_.RowSquaredNorms(x, out); });
  }
  absl::Status DoColumnSquaredNorms(ConstMatrixView x, absl::Span<double> out) override {
    return Forward([&] { return inner_.ColumnSquaredNorms(x, out); });
  }
  absl::StatusOr<double> DoAbsoluteSum(ConstMatrixView x) override {
    PRECONDOR_RETURN_IF_ERROR(Before());
    return inner_.AbsoluteSum(x);
  }
  absl::StatusOr<double> DoAbsoluteMaximum(ConstMatrixView x) override {
    PRECONDOR_RETURN_IF_ERROR(Before());
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
    return Forward([&] { return inner_.SpdInverse(a, x); });
  }
  absl::Status DoSymmetricEigen(ConstMatrixView a, absl::Span<double> values, MatrixView q) override {
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

 private:
  template <typename Operation>
  absl::Status Forward(Operation operation) {
    PRECONDOR_RETURN_IF_ERROR(Before());
    return operation();
  }

  Backend& inner_;
};

}  // namespace precondor
