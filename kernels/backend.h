// SPDX-License-Identifier: Apache-2.0
// The device seam. A Backend owns a device's memory and offers the operations that methods are written with;
// methods never touch the memory behind a view, so that one text of each method runs on every device.
//
// A public operation checks its operands' shapes and makes an Operation (kernels/operation.h) of them, which a backend
// runs in DoRun. Errors: InvalidArgument for shapes (they name the
// operation, the operand, expected and got), ResourceExhausted for memory, Unimplemented for a primitive that a
// backend lacks, Internal for the device's faults. A failed operation leaves its outputs unspecified, never its inputs.
//
// All matrices are f32, row-major, on this backend's device. Statistic vectors are the *rows* of a matrix [k, d].
// Scalars and the short host spans are f64. Results do not depend on the number of threads: sums run in a fixed
// order. Threads: operations on distinct outputs may run at the same time from several threads; inputs may be shared.
#pragma once

#include <cstdint>
#include <limits>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"

#include "kernels/base/matrix_view.h"
#include "kernels/base/product_precision.h"
#include "kernels/base/random.h"
#include "kernels/base/scope.h"
#include "kernels/base/symmetric_tiles.h"
#include "kernels/device_matrix.h"
#include "kernels/low_rank_inverse.h"
#include "kernels/operation.h"
#include "kernels/symmetric_form.h"

namespace precondor {

class Backend {
 public:
  virtual ~Backend() = default;
  virtual absl::string_view name() const = 0;  // "cpu", "cuda"
  // Whether tasks wait for each other, so that the time that one takes says little of its own work.
  virtual bool runs_tasks_together() const { return false; }
  // OK until a fault has ended the backend's use: that fault, which operations return from then on. Asks no device.
  virtual absl::Status fault() const { return absl::OkStatus(); }

  // --- memory -----------------------------------------------------------------------------------------------
  // Zeroed.
  absl::StatusOr<DeviceMatrix> Allocate(int64_t rows, int64_t cols);
  // Not zeroed: the contents are unspecified, for a matrix that is written before it is read.
  absl::StatusOr<DeviceMatrix> AllocateScratch(int64_t rows, int64_t cols);
  // Unimplemented for a storage that the backend does not know; all know kF32. TileBytes(n, storage) bytes.
  absl::StatusOr<SymmetricMatrix> AllocateSymmetric(int64_t n, SymmetricStorage storage);
  int64_t allocated_bytes() const;
  // The most that allocated_bytes() may be.
  virtual int64_t memory_limit_bytes() const { return std::numeric_limits<int64_t>::max(); }
  // Gives back what freed matrices left for the next to use.
  void Trim();
  absl::Status Upload(ConstMatrixView host, MatrixView device);
  // The same into memory that no operation under way reads or writes: it may be copied while those run.
  absl::Status UploadToIdle(ConstMatrixView host, MatrixView device);
  absl::Status Download(ConstMatrixView device, MatrixView host);
  absl::Status Copy(ConstMatrixView from, MatrixView to);

  // --- tasks ------------------------------------------------------------------------------------------------
  // Operations of one thread or fiber that depend on each other and on those of no other task: a backend may defer
  // them and run those of several tasks together (kernels/grouping/grouping_backend.h). A fiber may change its thread
  // where a task begins or ends and in each call. Memory that operations use must live until the task ends; only the
  // task uses what it writes. A task within a task is part of it. After Finish all operations are on their way, before
  // any that begins later. The error of a deferred one ends the backend's use.
  class Task;
  // Operations whose results the host waits for, asked for together: until Finish, squared norms of rows and columns,
  // decompositions, cores and Sherman-Morrison terms of this thread may return before they have run. What they write
  // for the host is there when Finish has returned, whose error is the first of theirs; until then it must live. Not
  // within another of the thread.
  class Batch;
  // Operations of this thread so far are on their way to the device: those launched from now on, by any thread, come
  // after them on its stream. The error of an operation that was deferred.
  absl::Status Flush() { return DoFlush(); }
  // The stream (CUstream_st*) on which a collective over the device's memory has to follow the operations; null where
  // these have run when their calls return.
  virtual void* stream() const { return nullptr; }
  // Runs operations of one kind that do not depend on each other, in any order; statuses[i] is that of operations[i].
  // What comes out is to the bit what each would give alone, but for what docs/adr/0014 and 0015 say of CUDA. An
  // operation that is ResourceExhausted has not run, and may be run again.
  void Run(absl::Span<const Operation* const> operations, absl::Span<absl::Status> statuses);

  // --- primitives -------------------------------------------------------------------------------------------
  // c = alpha op(a) op(b) + beta c. c must alias neither a nor b. beta == 0 ignores what c held, NaN included.
  absl::Status Gemm(double alpha, ConstMatrixView a, Transpose transpose_a, ConstMatrixView b, Transpose transpose_b,
                    double beta, MatrixView c);
  // y = alpha x + beta y. A coefficient of 0 ignores its matrix, NaN included. x may be y.
  absl::Status Axpby(double alpha, ConstMatrixView x, double beta, MatrixView y);
  // x *= scale for any scale >= 0 whose result fits f32, itself within f32's range or not.
  absl::Status ScaleBy(double scale, MatrixView x);
  // y_i = scales[i] x_i for every row i. x may be y.
  absl::Status ScaleRows(absl::Span<const double> scales, ConstMatrixView x, MatrixView y);
  // y_ij = scales[j] x_ij for every column j. x may be y.
  absl::Status ScaleColumns(absl::Span<const double> scales, ConstMatrixView x, MatrixView y);
  // y_ij = scales[i] x_ij scales[j] for square x. x may be y.
  absl::Status ScaleBothSides(absl::Span<const double> scales, ConstMatrixView x, MatrixView y);
  // z_ij = alpha x_ij y_ij + beta z_ij. beta == 0 ignores what z held, NaN included. x, y and z may be the same.
  absl::Status MultiplyElements(double alpha, ConstMatrixView x, ConstMatrixView y, double beta, MatrixView z);
  // y_ij = alpha x_ij / (sqrt(v_ij) + epsilon). x, v and y may be the same.
  absl::Status DivideByRoot(double alpha, ConstMatrixView x, ConstMatrixView v, double epsilon, MatrixView y);
  // y_ij = alpha x_ij / (rows[i] columns[j] + shift), the factor of x_ij computed in f64 and rounded once. x may be y.
  absl::Status DivideByOuter(double alpha, absl::Span<const double> rows, absl::Span<const double> columns,
                             double shift, ConstMatrixView x, MatrixView y);
  // y_ij = x[rows[i], columns[j]]; an empty span stands for all rows or columns in their order. y must not alias x.
  absl::Status Gather(absl::Span<const int64_t> rows, absl::Span<const int64_t> columns, ConstMatrixView x,
                      MatrixView y);
  // a += value on the diagonal of square a.
  absl::Status AddDiagonal(double value, MatrixView a);
  // sum_ij x_ij y_ij, accumulated in f64.
  absl::StatusOr<double> Dot(ConstMatrixView x, ConstMatrixView y);
  // out[i] = |x_i|^2; out[j] = sum_i x_ij^2. Accumulated in f64.
  absl::Status RowSquaredNorms(ConstMatrixView x, absl::Span<double> out);
  absl::Status ColumnSquaredNorms(ConstMatrixView x, absl::Span<double> out);
  // sum_ij |x_ij|, accumulated in f64, and max_ij |x_ij|; NaN where an element is NaN, 0 where there is none.
  absl::StatusOr<double> AbsoluteSum(ConstMatrixView x);
  absl::StatusOr<double> AbsoluteMaximum(ConstMatrixView x);
  // out[i] = a_ii.
  absl::Status Diagonal(ConstMatrixView a, absl::Span<double> out);
  // a = (a + a') / 2.
  absl::Status Symmetrize(MatrixView a);
  // The lower triangle of x [n, n], row after row, as packed [1, n (n + 1) / 2]; and back, to both triangles. The first
  // m rows of a packed matrix are the first m (m + 1) / 2 elements. Neither may alias.
  absl::Status PackLower(ConstMatrixView x, MatrixView packed);
  absl::Status UnpackLower(ConstMatrixView packed, MatrixView x);
  // Row i and column i of the packed symmetric n x n matrix become x [1, n], 0 <= i < n. x must not alias packed.
  absl::Status PackRow(ConstMatrixView x, int64_t i, MatrixView packed);
  // x = a^-1 for symmetric positive definite a (lower triangle read). x may be a. FailedPrecondition, x unchanged,
  // when a is not numerically positive definite or not finite.
  absl::Status SpdInverse(ConstMatrixView a, MatrixView x);
  // a = sum_i values[i] q_i q_i' (lower triangle read), q_i the *rows* of q, values ascending. FailedPrecondition,
  // outputs unchanged, when a is not finite or the decomposition does not converge. InvalidArgument beyond n = 32766.
  absl::Status SymmetricEigen(ConstMatrixView a, absl::Span<double> values, MatrixView q);
  // x = op(a) x (kLeft) or x op(a) (kRight) for upper triangular a; what lies below a's diagonal is not read. x must
  // not alias a.
  absl::Status TriangularMultiply(From side, ConstMatrixView a, Transpose transpose, MatrixView x);
  // x = op(a)^-1 x or x op(a)^-1, as above. A zero on the diagonal makes infinities or NaN, as a division does.
  absl::Status TriangularSolve(From side, ConstMatrixView a, Transpose transpose, MatrixView x);
  // The rows of a [n, d], n <= d, made orthonormal from the first to the last: a = l q with l lower triangular and no
  // negative number on its diagonal. Rows that depend on those before them get some direction orthogonal to them. q may
  // be a. FailedPrecondition, q unchanged, when a is not finite.
  absl::Status OrthonormalizeRows(ConstMatrixView a, MatrixView q);

  // --- composites: a default in terms of the primitives, for a backend to fuse ---------------------------------
  // core = s (I + s G s)^-1 s for the diagonal s of `roots` [n], >= 0, and symmetric G, packed [1, n (n + 1) / 2]; core
  // [n, n] is symmetric to the bit; `packed`, unless it is without elements, becomes core's lower triangle as PackLower
  // has it. FailedPrecondition, core and `packed` unspecified, where SpdInverse says so of I + s G s.
  absl::Status LowRankCore(absl::Span<const double> roots, ConstMatrixView gram, MatrixView core,
                           MatrixView packed = {});
  // Row slots[i] of `vectors` [n, d] becomes scales[i] rows_i, for all i, and row and column slots[i] of gram, packed
  // [1, n (n + 1) / 2], that row's products with all rows of `vectors`; other elements stay. Slots ascend. rows [k, d]
  // must not alias `vectors`. Scratch of the default: k n elements.
  absl::Status LowRankAppend(absl::Span<const double> scales, ConstMatrixView rows, absl::Span<const int64_t> slots,
                             MatrixView vectors, MatrixView gram);
  // u = J_out d J_in for J's of the low-rank form, d and u [m, n], never forming an m x m or n x n matrix.
  // u must not alias d. Cost: 4 (p + q) m n + O((p + q)^2 (m + min(m, n))) FLOP for ranks p, q.
  // Scratch of the default: (p + q)(m + n) + q m + p q elements. A precision is for backends with a form of their own
  // in it; others take f32.
  absl::Status LowRankPrecondition(const LowRankInverse& out_side, const LowRankInverse& in_side, ConstMatrixView d,
                                   MatrixView u, ProductPrecision precision = ProductPrecision::kF32);
  // The same, times rule(|d|, |J_out d J_in|): a backend that knows this length before it has u scales in its last
  // product. The rule's errors are passed on; u is unspecified then.
  absl::Status LowRankPrecondition(const LowRankInverse& out_side, const LowRankInverse& in_side, ConstMatrixView d,
                                   LengthRule rule, MatrixView u, ProductPrecision precision = ProductPrecision::kF32);
  // u = l d r for dense symmetric l [m, m], r [n, n], times the rule's factor. u must not alias. Unimplemented where
  // !SupportsPrecision(precision). May round: kBf16 l, r, d, l d, l d r by 2^-9 of elements, kTf32 all but l d r by
  // 2^-10.
  absl::Status DensePrecondition(const SymmetricForm& l, const SymmetricForm& r, ConstMatrixView d, MatrixView u,
                                 ProductPrecision precision = ProductPrecision::kF32);
  absl::Status DensePrecondition(const SymmetricForm& l, const SymmetricForm& r, ConstMatrixView d, LengthRule rule,
                                 MatrixView u, ProductPrecision precision = ProductPrecision::kF32);
  // Every backend supports all precisions except kBf16.
  bool SupportsPrecision(ProductPrecision precision) const;
  // terms [k, n], sum_i terms_i' terms_i = U'(I + V U')^-1 U for V = factor v, U = V h, by which a Sherman-Morrison
  // step lessens h = scale m + shift I + sum_i weights[i] rows_i rows_i'. y is v m before, and unspecified after; m is
  // not looked at. squares[j] = sum_i terms_ij^2, where not empty. terms must not alias what h shows.
  // FailedPrecondition where V U' is not finite. Scratch of the default: k (n + p + 2 k) elements, and SymmetricEigen's
  // of k rows.
  absl::Status ShermanMorrisonTerms(const SymmetricForm& h, double factor, ConstMatrixView v, MatrixView y,
                                    MatrixView terms, absl::Span<double> squares);
  // x_ij = number i cols + j of `random`'s standard normals.
  absl::Status FillNormal(const CounterRandom& random, MatrixView x);
  // m = scale m + shift I + sum_i weights[i] rows_i rows_i', for rows [p, n]; then y = v m for v, y [k, n], of the m
  // that is stored, in one pass over it. p, k >= 0. With scale 1, shift 0 and p = 0 m is only read. y must not alias.
  // A failure leaves m alone.
  absl::Status SymmetricUpdateMultiply(double scale, double shift, absl::Span<const double> weights,
                                       ConstMatrixView rows, SymmetricMatrix& m, ConstMatrixView v, MatrixView y);
  // x = a form that is not stored, both triangles: in f32 storage to the bit what SymmetricUpdateMultiply would make of
  // m.
  absl::Status SymmetricExpand(const SymmetricForm& form, MatrixView x);
  // m = x for symmetric x (lower triangle read).
  absl::Status SymmetricCompress(ConstMatrixView x, SymmetricMatrix& m);

 protected:
  virtual absl::StatusOr<float*> DoAllocate(int64_t elements) = 0;  // zeroed, 64-byte aligned
  // Not zeroed, if that is cheaper.
  virtual absl::StatusOr<float*> DoAllocateScratch(int64_t elements) { return DoAllocate(elements); }
  virtual void DoFree(float* data, int64_t elements) = 0;
  virtual int64_t DoAllocatedBytes() const = 0;
  virtual void DoTrim() {}  // for backends that keep nothing
  virtual void DoBeginTask() {}
  virtual absl::Status DoEndTask() { return absl::OkStatus(); }
  virtual void DoBeginBatch() {}
  virtual absl::Status DoEndBatch() { return absl::OkStatus(); }
  virtual absl::Status DoFlush() { return absl::OkStatus(); }  // for backends that defer nothing
  virtual absl::Status DoUpload(ConstMatrixView host, MatrixView device) = 0;
  virtual absl::Status DoUploadToIdle(ConstMatrixView host, MatrixView device) { return DoUpload(host, device); }
  virtual absl::Status DoDownload(ConstMatrixView device, MatrixView host) = 0;
  virtual absl::Status DoCopy(ConstMatrixView from, MatrixView to) = 0;

  // Run, of at least one operation; their outputs have elements, and a Gemm an inner dimension of 1 or more.
  virtual void DoRun(absl::Span<const Operation* const> operations, absl::Span<absl::Status> statuses) = 0;
  virtual bool DoSupportsPrecision(ProductPrecision precision) const { return precision != ProductPrecision::kBf16; }
  // SymmetricUpdateMultiply, SymmetricExpand and SymmetricCompress by primitives know f32 alone.
  virtual bool DoKnowsSymmetric(SymmetricStorage storage) const { return storage == SymmetricStorage::kF32; }
  // Whether LowRankPrecondition with a rule is one operation; otherwise it is one that tells lengths, and ScaleBy.
  virtual bool applies_length_rules() const { return false; }

  // For a backend that has no way of its own: what an operation comes to in terms of others, which this one runs.
  absl::Status RunByPrimitives(const operation::FillNormal& fill);
  absl::Status RunByPrimitives(const operation::SymmetricUpdateMultiply& update);
  absl::Status RunByPrimitives(const operation::SymmetricExpand& expand);
  absl::Status RunByPrimitives(const operation::SymmetricCompress& compress);
  absl::Status RunByPrimitives(const operation::LowRankCore& make);
  absl::Status RunByPrimitives(const operation::LowRankAppend& append);
  absl::Status RunByPrimitives(const operation::LowRankPrecondition& product);
  absl::Status RunByPrimitives(const operation::DensePrecondition& product);
  absl::Status RunByPrimitives(const operation::ShermanMorrisonTerms& make);

 private:
  friend class DeviceMatrix;
  friend class ForwardingBackend;  // kernels/grouping/forwarding_backend.h
  absl::StatusOr<DeviceMatrix> Allocate(int64_t rows, int64_t cols, bool zeroed);
  absl::Status Run(const Operation& operation);
};

class Backend::Task : public Scope<Backend, &Backend::DoBeginTask, &Backend::DoEndTask> {
 public:
  using Scope::Scope;
};
class Backend::Batch : public Scope<Backend, &Backend::DoBeginBatch, &Backend::DoEndBatch> {
 public:
  using Scope::Scope;
};

}  // namespace precondor
