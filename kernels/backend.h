// SPDX-License-Identifier: Apache-2.0
// The device seam. A Backend owns a device's memory and offers the operations in which methods are written. Methods
// never access the memory behind a view, so one implementation of a method runs on every device.
//
// A public operation checks its operands' shapes and makes an Operation (kernels/operation.h), which a backend runs in
// DoRun. Errors: InvalidArgument for shapes (with the operation, the operand, the expected and the actual shape),
// ResourceExhausted for memory, Unimplemented for a primitive that a backend lacks, Internal for faults of the device.
// A failed operation leaves its outputs unspecified, but never its inputs.
//
// All matrices are f32, row-major, on this backend's device. Statistic vectors are the *rows* of a matrix [k, d].
// Scalars and the short spans on the host are f64. Results do not depend on the number of threads: sums run in a fixed
// order. Threads: operations on distinct outputs may run at once from several threads; they may share inputs.
#pragma once

#include <cstdint>
#include <limits>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"

#include "kernels/base/matrix_view.h"
#include "kernels/base/operation_kinds.h"
#include "kernels/base/random.h"
#include "kernels/device_matrix.h"
#include "kernels/operation.h"

namespace precondor {

class Backend {
 public:
  virtual ~Backend() = default;
  virtual absl::string_view name() const = 0;  // "cpu", "cuda"
  // Returns whether tasks wait for each other, so that the duration of one says little about its own work.
  virtual bool runs_tasks_together() const { return false; }
  // Returns OK, or the fault that has made the backend unusable and that all operations now return. Does not call the
  // device.
  virtual absl::Status fault() const { return absl::OkStatus(); }

  // --- Memory -----------------------------------------------------------------------------------------------
  // Allocates a zeroed matrix.
  absl::StatusOr<DeviceMatrix> Allocate(int64_t rows, int64_t cols);
  // Allocates a matrix with unspecified contents, for use as scratch that is written before it is read.
  absl::StatusOr<DeviceMatrix> AllocateScratch(int64_t rows, int64_t cols);
  // Allocates a zeroed symmetric matrix of TileBytes(n, storage) bytes. Returns Unimplemented for a storage that the
  // backend does not support; all support kF32.
  absl::StatusOr<SymmetricMatrix> AllocateSymmetric(int64_t n, SymmetricStorage storage);
  int64_t allocated_bytes() const;
  // Upper limit of allocated_bytes().
  virtual int64_t memory_limit_bytes() const { return std::numeric_limits<int64_t>::max(); }
  // Returns memory of freed matrices that is cached for reuse to the system.
  void Trim();
  absl::Status Upload(ConstMatrixView host, MatrixView device);
  // Uploads into memory that no operation under way reads or writes. The copy may run at the same time as those
  // operations.
  absl::Status UploadToIdle(ConstMatrixView host, MatrixView device);
  absl::Status Download(ConstMatrixView device, MatrixView host);
  absl::Status Copy(ConstMatrixView from, MatrixView to);

  // --- Tasks ------------------------------------------------------------------------------------------------
  // A scope for operations of one thread or fiber that may depend on each other, but not on operations of other tasks.
  // A backend may defer them and run those of several tasks together (kernels/grouping/grouping_backend.h). A fiber may
  // change its thread where a task begins or ends and in each call. Memory that operations use must live until the task
  // ends; only the task may use what it writes. A task within a task is part of it. After Finish all operations have
  // been submitted, ahead of any that begins later. An error of a deferred operation makes the backend unusable.
  class Task;
  // A scope in which a task is known to begin soon. A backend that runs tasks together may delay others for it, with a
  // bound. Results do not depend on it. Ends on any thread, when the task has begun or will not begin.
  class ExpectedTask;
  // A scope for operations whose results the host requests together. Until Finish, squared norms of matrices, rows and
  // columns, decompositions, iterations, cores and Sherman-Morrison terms of this thread may return before they have
  // run. Their results on the host are valid when Finish has returned, and their destination must live until then.
  // Finish returns the first error of these operations. A thread must not nest batches.
  class Batch;
  // Returns the stream (CUstream_st*) that runs the operations. Null if operations have run when their calls return.
  virtual void* stream() const { return nullptr; }
  // Runs operations of one kind that do not depend on each other, in any order; statuses[i] is that of operations[i].
  // Results equal those of single operations to the bit, except as docs/develop/adr/0014 and 0015 say for CUDA. An
  // operation with status ResourceExhausted has not run, and may be run again.
  void Run(absl::Span<const Operation* const> operations, absl::Span<absl::Status> statuses);

  // --- Primitives -------------------------------------------------------------------------------------------
  // c = alpha op(a) op(b) + beta c. c must alias neither a nor b. If beta == 0, the previous contents of c are ignored,
  // NaN included. kTf32 may round a and b by 2^-10 of their elements; all other precisions are f32.
  absl::Status Gemm(double alpha, ConstMatrixView a, Transpose transpose_a, ConstMatrixView b, Transpose transpose_b,
                    double beta, MatrixView c, ProductPrecision precision = ProductPrecision::kF32);
  // Gemm for a product that is symmetric, as is c if beta is not 0. One triangle of c may be read. Faster on the CPU.
  absl::Status SymmetricGemm(double alpha, ConstMatrixView a, Transpose transpose_a, ConstMatrixView b,
                             Transpose transpose_b, double beta, MatrixView c,
                             ProductPrecision precision = ProductPrecision::kF32);
  // y = alpha x + beta v; Axpby: of y itself. A matrix with coefficient 0 is ignored, NaN included. y may be x or v.
  absl::Status Combine(double alpha, ConstMatrixView x, double beta, ConstMatrixView v, MatrixView y);
  absl::Status Axpby(double alpha, ConstMatrixView x, double beta, MatrixView y);
  // y = scale x, for any scale >= 0 whose result fits f32, even if scale itself is beyond f32's range. y may be x.
  absl::Status ScaleBy(double scale, ConstMatrixView x, MatrixView y);
  // y_i = scales[i] x_i for every row i. x may be y.
  absl::Status ScaleRows(absl::Span<const double> scales, ConstMatrixView x, MatrixView y);
  // y_ij = scales[j] x_ij for every column j. x may be y.
  absl::Status ScaleColumns(absl::Span<const double> scales, ConstMatrixView x, MatrixView y);
  // y_ij = scales[i] x_ij scales[j] for square x. x may be y.
  absl::Status ScaleBothSides(absl::Span<const double> scales, ConstMatrixView x, MatrixView y);
  // z_ij = alpha x_ij y_ij + beta z_ij. If beta == 0, the previous contents of z are ignored, NaN included. x, y and z
  // may be the same matrix.
  absl::Status MultiplyElements(double alpha, ConstMatrixView x, ConstMatrixView y, double beta, MatrixView z);
  // y_ij = alpha x_ij / (sqrt(v_ij) + epsilon). x, v and y may be the same matrix.
  absl::Status DivideByRoot(double alpha, ConstMatrixView x, ConstMatrixView v, double epsilon, MatrixView y);
  // y_ij = alpha x_ij / (rows[i] columns[j] + shift). The factor of x_ij is computed in f64 and rounded once. x may be
  // y.
  absl::Status DivideByOuter(double alpha, absl::Span<const double> rows, absl::Span<const double> columns,
                             double shift, ConstMatrixView x, MatrixView y);
  // y_ij = x[rows[i], columns[j]]; an empty span stands for all rows or columns in their order. y must not alias x.
  absl::Status Gather(absl::Span<const int64_t> rows, absl::Span<const int64_t> columns, ConstMatrixView x,
                      MatrixView y);
  // a += value on the diagonal of square a.
  absl::Status AddDiagonal(double value, MatrixView a);
  // Returns sum_ij x_ij y_ij, accumulated in f64.
  absl::StatusOr<double> Dot(ConstMatrixView x, ConstMatrixView y);
  // *out = sum_ij x_ij^2. Accumulated in f64.
  absl::Status SquaredNorm(ConstMatrixView x, double* out);
  // out[i] = |x_i|^2; out[j] = sum_i x_ij^2. Accumulated in f64.
  absl::Status RowSquaredNorms(ConstMatrixView x, absl::Span<double> out);
  absl::Status ColumnSquaredNorms(ConstMatrixView x, absl::Span<double> out);
  // Return sum_ij |x_ij|, accumulated in f64, and max_ij |x_ij|. NaN if an element is NaN, 0 if there are no elements.
  absl::StatusOr<double> AbsoluteSum(ConstMatrixView x);
  absl::StatusOr<double> AbsoluteMaximum(ConstMatrixView x);
  // out[i] = a_ii.
  absl::Status Diagonal(ConstMatrixView a, absl::Span<double> out);
  // a = (a + a') / 2.
  absl::Status Symmetrize(MatrixView a);
  // PackLower copies the lower triangle of x [n, n], row after row, to packed [1, n (n + 1) / 2]. UnpackLower copies it
  // back to both triangles. The first m rows of a packed matrix are its first m (m + 1) / 2 elements. Arguments must
  // not alias.
  absl::Status PackLower(ConstMatrixView x, MatrixView packed);
  absl::Status UnpackLower(ConstMatrixView packed, MatrixView x);
  // Copies x [1, n] to row i and column i of the packed symmetric n x n matrix, 0 <= i < n. x must not alias packed.
  absl::Status PackRow(ConstMatrixView x, int64_t i, MatrixView packed);
  // x = a^-1 for symmetric positive definite a, of which the lower triangle is read. x may be a. Returns
  // FailedPrecondition and leaves x unchanged if a is not numerically positive definite or not finite.
  absl::Status SpdInverse(ConstMatrixView a, MatrixView x);
  // Decomposes symmetric a, of which the lower triangle is read: a = sum_i values[i] q_i q_i' with q_i the *rows* of q
  // and ascending values. Returns FailedPrecondition and leaves the outputs unchanged if a is not finite or the
  // decomposition does not converge. Returns InvalidArgument if n > 32766.
  absl::Status SymmetricEigen(ConstMatrixView a, absl::Span<double> values, MatrixView q);
  // x = op(a) x (kLeft) or x op(a) (kRight) for upper triangular a; elements below the diagonal of a are not read. x
  // must not alias a.
  absl::Status TriangularMultiply(From side, ConstMatrixView a, Transpose transpose, MatrixView x);
  // x = op(a)^-1 x (kLeft) or x op(a)^-1 (kRight) for upper triangular a; elements below the diagonal of a are not
  // read. x must not alias a. A zero on the diagonal gives infinities or NaN, as a division does.
  absl::Status TriangularSolve(From side, ConstMatrixView a, Transpose transpose, MatrixView x);
  // Orthonormalises the rows of a [n, d], n <= d, from the first to the last: a = l q with l lower triangular and no
  // negative number on its diagonal. A row that depends on earlier rows gets an unspecified direction orthogonal to
  // them. q may be a. Returns FailedPrecondition and leaves q unchanged if a is not finite.
  absl::Status OrthonormalizeRows(ConstMatrixView a, MatrixView q);

  // --- Composites: a backend may fuse them; the default, which those on tiles lack, uses primitives --------------
  // core = s (I + s G s)^-1 s for the diagonal s of `roots` [n], >= 0, and symmetric G, packed [1, n (n + 1) / 2]. core
  // [n, n] is symmetric to the bit. Unless `packed` has no elements, it receives core's lower triangle in the order of
  // PackLower. Returns FailedPrecondition, with core and `packed` unspecified, if SpdInverse does so for I + s G s.
  absl::Status LowRankCore(absl::Span<const double> roots, ConstMatrixView gram, MatrixView core,
                           MatrixView packed = {});
  // For all i, row slots[i] of `vectors` [n, d] becomes scales[i] rows_i, and row and column slots[i] of gram, packed
  // [1, n (n + 1) / 2], become that row's products with all rows of `vectors`. Other elements stay. Slots must ascend.
  // rows [k, d] must not alias `vectors`. Scratch of the default: k n elements.
  absl::Status LowRankAppend(absl::Span<const double> scales, ConstMatrixView rows, absl::Span<const int64_t> slots,
                             MatrixView vectors, MatrixView gram);
  // u = J_out d J_in for inverse factors of low-rank form, d and u [m, n]. Never forms an m x m or n x n matrix. u must
  // not alias d. Cost: 4 (p + q) m n + O((p + q)^2 (m + min(m, n))) FLOP for ranks p, q. Scratch of the default: (p +
  // q)(m + n) + q m + p q elements. `precision` rounds the factors of all products, and kBf16 all products but u too.
  // Backends without an implementation in `precision` use f32.
  absl::Status LowRankPrecondition(const LowRankInverse& out_side, const LowRankInverse& in_side, ConstMatrixView d,
                                   MatrixView u, ProductPrecision precision = ProductPrecision::kF32);
  // u = rule(|d|, |J_out d J_in|) J_out d J_in. A backend that knows this norm before it has u applies the factor in
  // its last product. Returns the rule's error, with u then unspecified.
  absl::Status LowRankPrecondition(const LowRankInverse& out_side, const LowRankInverse& in_side, ConstMatrixView d,
                                   LengthRule rule, MatrixView u, ProductPrecision precision = ProductPrecision::kF32);
  // u = l d r for dense symmetric l [m, m], r [n, n]; the second form multiplies by rule(|d|, |l d r|). u must not
  // alias any input. Returns Unimplemented if !SupportsPrecision(precision). kBf16 may round l, r, d, l d and l d r by
  // 2^-9 of their elements, kTf32 all but l d r by 2^-10.
  absl::Status DensePrecondition(const SymmetricForm& l, const SymmetricForm& r, ConstMatrixView d, MatrixView u,
                                 ProductPrecision precision = ProductPrecision::kF32);
  absl::Status DensePrecondition(const SymmetricForm& l, const SymmetricForm& r, ConstMatrixView d, LengthRule rule,
                                 MatrixView u, ProductPrecision precision = ProductPrecision::kF32);
  // Every backend supports all precisions except kBf16.
  bool SupportsPrecision(ProductPrecision precision) const;
  // Returns whether products of TF32 and bf16 are many times as fast as those of f32. A method's option `precision`
  // then has one of these as its default.
  virtual bool has_tensor_cores() const { return false; }
  // An answer of method muon (docs/use/methods/muon.md), d and u [m, n]:
  //   next = d + beta momentum; direction = d + beta next, or `next` if `lookahead` has no elements;
  //   x = direction / (|direction| + epsilon); `steps` times: a = x x', x = (p I + q a + r a a) x; u = scale x
  // with kNewtonSchulzLinear, kNewtonSchulzCubic and kNewtonSchulzQuintic for p, q and r. `lookahead` receives the
  // direction. If `momentum` has no elements, the direction is d, and `next` and `lookahead` have none either. u = 0 if
  // the direction is 0. squares = |d|^2, |direction|^2, |u|^2; if one of them is not finite, all outputs and the
  // squares behind it are unspecified. Outputs must not alias each other or an input. `precision` rounds the factors of
  // all products, and kBf16 x and the products too. Backends without an implementation in `precision` use f32.
  // Scratch of the default: m n + 2 k^2 elements, k = min(m, n), or m n + 4 k^2 where operation::OnGram.
  absl::Status NewtonSchulz(const operation::NewtonSchulz& step);
  // One step of orthogonal iteration for symmetric a [n, n], of which both triangles are read, from the orthonormal
  // rows of q [n, n]: sorts the rows by falling q_i' a q_i, multiplies them by a and makes them orthonormal as
  // OrthonormalizeRows does. Row i of `next` comes from row order[i] of q; of equal rows the first comes first. `next`
  // must not alias a or q. Returns FailedPrecondition, with the outputs unspecified, if a q_i is not finite. Scratch of
  // the default: n^2 elements, and OrthonormalizeRows'.
  absl::Status OrthogonalIteration(ConstMatrixView a, ConstMatrixView q, MatrixView next, absl::Span<int64_t> order);
  // Computes terms [k, n] with sum_i terms_i' terms_i = U'(I + V U')^-1 U for V = factor v, U = V h. This is the matrix
  // that a Sherman-Morrison step subtracts from h = scale m + shift I + sum_i weights[i] rows_i rows_i'. On input y is
  // v m; its contents are unspecified afterwards. m itself is not read. If not empty, squares[j] = sum_i terms_ij^2.
  // terms must not alias memory of h. Returns FailedPrecondition if V U' is not finite. Scratch of the default: k (n +
  // p + 2 k) elements, and SymmetricEigen's of k rows.
  absl::Status ShermanMorrisonTerms(const SymmetricForm& h, double factor, ConstMatrixView v, MatrixView y,
                                    MatrixView terms, absl::Span<double> squares);
  // x_ij = number i cols + j of `random`'s standard normals.
  absl::Status FillNormal(const CounterRandom& random, MatrixView x);
  // m = scale m + shift I + sum_i weights[i] rows_i rows_i' for rows [p, n]; then y = v m for v, y [k, n] and m as
  // stored, in one pass over m. p, k >= 0. m is only read if scale is 1, shift is 0 and p is 0. y must not alias any
  // input. A failure leaves m unchanged.
  absl::Status SymmetricUpdateMultiply(double scale, double shift, absl::Span<const double> weights,
                                       ConstMatrixView rows, SymmetricMatrix& m, ConstMatrixView v, MatrixView y);
  // Expands an implicit form to the full matrix x, both triangles. With f32 storage, x equals to the bit what
  // SymmetricUpdateMultiply would make of m.
  absl::Status SymmetricExpand(const SymmetricForm& form, MatrixView x);

 protected:
  virtual absl::StatusOr<float*> DoAllocate(int64_t elements) = 0;  // zeroed, 64-byte aligned
  // Returns memory that need not be zeroed, if that is cheaper.
  virtual absl::StatusOr<float*> DoAllocateScratch(int64_t elements) { return DoAllocate(elements); }
  virtual void DoFree(float* data, int64_t elements) = 0;
  virtual int64_t DoAllocatedBytes() const = 0;
  virtual void DoTrim() {}  // default for backends that cache nothing
  virtual void DoBeginTask() {}
  virtual absl::Status DoEndTask() { return absl::OkStatus(); }
  virtual void DoExpectTask() {}
  virtual absl::Status DoEndExpectation() { return absl::OkStatus(); }
  virtual void DoBeginBatch() {}
  virtual absl::Status DoEndBatch() { return absl::OkStatus(); }
  virtual absl::Status DoUpload(ConstMatrixView host, MatrixView device) = 0;
  virtual absl::Status DoUploadToIdle(ConstMatrixView host, MatrixView device) { return DoUpload(host, device); }
  virtual absl::Status DoDownload(ConstMatrixView device, MatrixView host) = 0;
  virtual absl::Status DoCopy(ConstMatrixView from, MatrixView to) = 0;

  // Implements Run, for at least one operation. Outputs are never empty, and the inner dimension of a Gemm is at least
  // 1.
  virtual void DoRun(absl::Span<const Operation* const> operations, absl::Span<absl::Status> statuses) = 0;
  virtual bool DoSupportsPrecision(ProductPrecision precision) const { return precision != ProductPrecision::kBf16; }
  // Whether LowRankPrecondition with a rule runs as one operation. Otherwise it runs as an operation that returns the
  // norms, followed by ScaleBy.
  virtual bool applies_length_rules() const { return false; }

  // Runs a composite as other operations of this backend, for backends without an implementation of their own.
  absl::Status RunByPrimitives(const operation::FillNormal& fill);
  absl::Status RunByPrimitives(const operation::LowRankCore& make);
  absl::Status RunByPrimitives(const operation::LowRankAppend& append);
  absl::Status RunByPrimitives(const operation::LowRankPrecondition& product);
  absl::Status RunByPrimitives(const operation::DensePrecondition& product);
  absl::Status RunByPrimitives(const operation::NewtonSchulz& step);
  absl::Status RunByPrimitives(const operation::OrthogonalIteration& step);
  absl::Status RunByPrimitives(const operation::ShermanMorrisonTerms& make);

 private:
  friend class DeviceMatrix;
  friend class ForwardingBackend;  // kernels/grouping/forwarding_backend.h
  absl::StatusOr<DeviceMatrix> Allocate(int64_t rows, int64_t cols, bool zeroed);
  absl::Status Run(const Operation& operation);
  absl::Status RunElementwise(const operation::Elementwise& elementwise);  // unless it has no elements
  absl::Status RunGemm(const operation::Gemm& gemm);
};

// Calls kBegin on `owner` at construction and kEnd at Finish or destruction. One thread at a time. `owner` must outlive
// it.
template <typename Owner, void (Owner::*kBegin)(), absl::Status (Owner::*kEnd)()>
class Scope {
 public:
  explicit Scope(Owner& owner) : owner_(&owner) { (owner.*kBegin)(); }
  ~Scope() { (void)Finish(); }
  Scope(const Scope&) = delete;
  Scope& operator=(const Scope&) = delete;
  // Calls kEnd and returns its status. Later calls do nothing and return OK.
  absl::Status Finish() {
    Owner* const owner = std::exchange(owner_, nullptr);
    return owner == nullptr ? absl::OkStatus() : (owner->*kEnd)();
  }

 private:
  Owner* owner_;
};
class Backend::Task : public Scope<Backend, &Backend::DoBeginTask, &Backend::DoEndTask> {
 public:
  using Scope::Scope;
};
class Backend::ExpectedTask : public Scope<Backend, &Backend::DoExpectTask, &Backend::DoEndExpectation> {
 public:
  using Scope::Scope;
};
class Backend::Batch : public Scope<Backend, &Backend::DoBeginBatch, &Backend::DoEndBatch> {
 public:
  using Scope::Scope;
};

}  // namespace precondor
