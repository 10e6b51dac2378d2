// SPDX-License-Identifier: Apache-2.0
#include "kernels/cuda/cuda_backend.h"

#include <algorithm>
#include <cmath>
#include <type_traits>
#include <utility>
#include <variant>
#include <vector>

#include "absl/strings/str_cat.h"

#include "kernels/base/status_macros.h"
#include "kernels/cuda/dense_products.h"
#include "kernels/cuda/device.h"
#include "kernels/cuda/eigen.h"
#include "kernels/cuda/elementwise.h"
#include "kernels/cuda/grouped_operations.h"
#include "kernels/cuda/low_rank.h"
#include "kernels/cuda/reductions.h"
#include "kernels/cuda/sherman_morrison.h"
#include "kernels/cuda/spd_inverses.h"
#include "kernels/cuda/symmetric_eigens.h"
#include "kernels/cuda/symmetric_tiles.h"
#include "kernels/operation.h"

namespace precondor {
namespace {

using cuda::Device;
using cuda::DeviceArray;

// Row-major matrices are the transposed column-major ones that cuBLAS and cuSOLVER know: sides change, upper triangles
// are lower ones, and a product's factors change places.
cublasOperation_t Blas(Transpose transpose) { return transpose == Transpose::kYes ? CUBLAS_OP_T : CUBLAS_OP_N; }
cublasSideMode_t OtherSide(From side) { return side == From::kLeft ? CUBLAS_SIDE_RIGHT : CUBLAS_SIDE_LEFT; }
constexpr cublasFillMode_t kLowerTriangle = CUBLAS_FILL_MODE_UPPER;
constexpr cublasFillMode_t kUpperTriangle = CUBLAS_FILL_MODE_LOWER;

class CudaBackend final : public Backend {
 public:
  explicit CudaBackend(std::unique_ptr<Device> device) : device_(std::move(device)) {}

  absl::string_view name() const override { return "cuda"; }
  void* stream() const override { return device_->stream(); }
  absl::Status fault() const override { return device_->fault(); }
  int64_t memory_limit_bytes() const override { return device_->memory_limit_bytes(); }

 private:
  absl::StatusOr<float*> DoAllocate(int64_t elements) override {
    PRECONDOR_ASSIGN_OR_RETURN(void* const data, device_->Allocate(Bytes(elements), /*zeroed=*/true));
    return static_cast<float*>(data);
  }
  absl::StatusOr<float*> DoAllocateScratch(int64_t elements) override {
    PRECONDOR_ASSIGN_OR_RETURN(void* const data, device_->Allocate(Bytes(elements), /*zeroed=*/false));
    return static_cast<float*>(data);
  }
  void DoFree(float* data, int64_t elements) override { device_->Free(data, Bytes(elements)); }
  int64_t DoAllocatedBytes() const override { return device_->allocated_bytes(); }
  void DoTrim() override { device_->Trim(); }
  static int64_t Bytes(int64_t elements) { return elements * static_cast<int64_t>(sizeof(float)); }

  absl::Status DoUpload(ConstMatrixView host, MatrixView device) override { return device_->Upload(host, device); }
  absl::Status DoUploadToIdle(ConstMatrixView host, MatrixView device) override {
    return device_->UploadToIdle(host, device);
  }
  absl::Status DoDownload(ConstMatrixView device, MatrixView host) override { return device_->Download(device, host); }
  absl::Status DoCopy(ConstMatrixView from, MatrixView to) override { return device_->Copy(from, to); }

  // --- operations that run together, one or many alike --------------------------------------------------------------
  void DoRunTogether(absl::Span<const Operation* const> operations, absl::Span<absl::Status> statuses) override {
    std::visit([&](const auto& first) { RunKind(first, operations, statuses); }, operations[0]->what);
  }
  template <typename Kind>
  void RunKind(const Kind&, absl::Span<const Operation* const> operations, absl::Span<absl::Status> statuses) {
    std::vector<const Kind*> of_kind;
    for (const Operation* operation : operations) of_kind.push_back(&std::get<Kind>(operation->what));
    if constexpr (std::is_same_v<Kind, Operation::SpdInverse> || std::is_same_v<Kind, Operation::SymmetricEigen> ||
                  std::is_same_v<Kind, Operation::LowRankCore> ||
                  std::is_same_v<Kind, Operation::ShermanMorrisonTerms>) {
      RunDecompositions(of_kind, statuses);
    } else {
      std::fill(statuses.begin(), statuses.end(), Run(of_kind));
    }
  }
  absl::Status Run(absl::Span<const Operation::Elementwise* const> all) { return cuda::RunElementwise(*device_, all); }
  absl::Status Run(absl::Span<const Operation::Gemm* const> all) { return cuda::RunProducts(*device_, all); }
  absl::Status Run(absl::Span<const Operation::SymmetricUpdateMultiply* const> all) {
    return cuda::RunSymmetricUpdates(*device_, all);
  }
  absl::Status Run(absl::Span<const Operation::RowSquaredNorms* const> all) {
    return cuda::RunRowSquaredNorms(*device_, all);
  }
  absl::Status Run(absl::Span<const Operation::ColumnSquaredNorms* const> all) {
    return cuda::RunColumnSquaredNorms(*device_, all);
  }
  absl::Status Run(absl::Span<const Operation::DensePrecondition* const> all) {
    return cuda::RunDensePreconditions(*device_, all);
  }
  absl::Status Run(absl::Span<const Operation::Dot* const> all) { return cuda::RunDots(*device_, all); }
  absl::Status Run(absl::Span<const Operation::LowRankAppend* const> all) {
    return cuda::RunLowRankAppends(*device_, all);
  }
  absl::Status Run(absl::Span<const Operation::LowRankPrecondition* const> all) {
    return cuda::RunLowRankPreconditions(*device_, all);
  }
  // Of what may turn out impossible: small ones together, the others one by one.
  template <typename Kind>
  void RunDecompositions(const std::vector<const Kind*>& all, absl::Span<absl::Status> statuses) {
    std::vector<const Kind*> small;
    std::vector<size_t> places;
    for (size_t i = 0; i < all.size(); ++i) {
      if (!IsSmall(*all[i])) {
        statuses[i] = RunLarge(*all[i]);
      } else {
        small.push_back(all[i]);
        places.push_back(i);
      }
    }
    if (small.empty()) return;
    std::vector<absl::Status> of_small(small.size());
    const absl::Status run = RunSmall(small, absl::MakeSpan(of_small));
    for (size_t i = 0; i < small.size(); ++i) statuses[places[i]] = run.ok() ? of_small[i] : run;
  }
  static bool IsSmall(const Operation::SpdInverse& inverse) { return inverse.x.rows <= cuda::kMostRowsOfSpdInverse; }
  static bool IsSmall(const Operation::LowRankCore& core) { return core.core.rows <= cuda::kMostRowsOfSpdInverse; }
  static bool IsSmall(const Operation::SymmetricEigen& eigen) {
    return eigen.q.rows <= cuda::kMostRowsOfSymmetricEigens;
  }
  static bool IsSmall(const Operation::ShermanMorrisonTerms& terms) {
    return terms.v.rows <= cuda::kMostVectorsOfTerms && terms.h.rows.rows <= cuda::kMostRowsOfTerms;
  }
  absl::Status RunLarge(const Operation::SpdInverse& inverse) { return InvertLarge(inverse.a, inverse.x); }
  absl::Status RunLarge(const Operation::SymmetricEigen& eigen) {
    return DecomposeLarge(eigen.a, eigen.values, eigen.q);
  }
  absl::Status RunLarge(const Operation::ShermanMorrisonTerms& terms) {
    return Backend::DoShermanMorrisonTerms(terms.form(), terms.factor, terms.v, terms.y, terms.terms, terms.squares);
  }
  absl::Status RunLarge(const Operation::LowRankCore& core) {
    return Backend::DoLowRankCore(core.roots, core.gram, core.core, core.packed);
  }
  absl::Status RunSmall(const std::vector<const Operation::SpdInverse*>& all, absl::Span<absl::Status> statuses) {
    return cuda::RunSpdInverses(*device_, all, statuses);
  }
  absl::Status RunSmall(const std::vector<const Operation::SymmetricEigen*>& all, absl::Span<absl::Status> statuses) {
    return cuda::RunSymmetricEigens(*device_, all, statuses);
  }
  absl::Status RunSmall(const std::vector<const Operation::ShermanMorrisonTerms*>& all,
                        absl::Span<absl::Status> statuses) {
    return cuda::RunShermanMorrisonTerms(*device_, all, statuses);
  }
  absl::Status RunSmall(const std::vector<const Operation::LowRankCore*>& all, absl::Span<absl::Status> statuses) {
    return cuda::RunLowRankCores(*device_, all, statuses);
  }
  template <typename Kind>
  absl::Status RunOneDecomposition(const Kind& operation) {
    absl::Status status;
    RunDecompositions(std::vector<const Kind*>{&operation}, {&status, 1});
    return status;
  }
  template <typename Kind>
  absl::Status RunOne(const Kind& operation) {
    const Kind* const alone = &operation;
    return Run(absl::Span<const Kind* const>(&alone, 1));
  }

  absl::Status DoGemm(double alpha, ConstMatrixView a, Transpose transpose_a, ConstMatrixView b, Transpose transpose_b,
                      double beta, MatrixView c) override {
    return RunOne(Operation::Gemm{alpha, a, transpose_a, b, transpose_b, beta, c});
  }
  absl::Status DoAxpby(double alpha, ConstMatrixView x, double beta, MatrixView y) override {
    return RunOne(Operation::Elementwise{.alpha = alpha, .beta = beta, .x = x, .y = y});
  }
  absl::Status Scale(ElementwiseKind kind, absl::Span<const double> scales, ConstMatrixView x, MatrixView y) {
    return RunOne(Operation::Elementwise{.kind = kind, .scales = {scales.begin(), scales.end()}, .x = x, .y = y});
  }
  absl::Status DoScaleRows(absl::Span<const double> scales, ConstMatrixView x, MatrixView y) override {
    return Scale(ElementwiseKind::kScaleRows, scales, x, y);
  }
  absl::Status DoScaleColumns(absl::Span<const double> scales, ConstMatrixView x, MatrixView y) override {
    return Scale(ElementwiseKind::kScaleColumns, scales, x, y);
  }
  absl::Status DoScaleBothSides(absl::Span<const double> scales, ConstMatrixView x, MatrixView y) override {
    return Scale(ElementwiseKind::kScaleBothSides, scales, x, y);
  }
  absl::Status DoAddDiagonal(double value, MatrixView a) override {
    return RunOne(Operation::Elementwise{.kind = ElementwiseKind::kAddDiagonal, .alpha = value, .x = a, .y = a});
  }
  absl::Status DoSymmetrize(MatrixView a) override {
    return RunOne(Operation::Elementwise{.kind = ElementwiseKind::kSymmetrize, .x = a, .y = a});
  }
  absl::Status DoPackLower(ConstMatrixView x, MatrixView packed) override {
    return RunOne(Operation::Elementwise{.kind = ElementwiseKind::kPackLower, .x = x, .y = packed});
  }
  absl::Status DoUnpackLower(ConstMatrixView packed, MatrixView x) override {
    return RunOne(Operation::Elementwise{.kind = ElementwiseKind::kUnpackLower, .x = packed, .y = x});
  }
  absl::Status DoPackRow(ConstMatrixView x, int64_t i, MatrixView packed) override {
    return RunOne(Operation::Elementwise{.kind = ElementwiseKind::kPackRow, .row = i, .x = x, .y = packed});
  }
  absl::Status DoSymmetricUpdateMultiply(double scale, double shift, absl::Span<const double> weights,
                                         ConstMatrixView rows, SymmetricMatrix& m, ConstMatrixView v,
                                         MatrixView y) override {
    return RunOne(Operation::SymmetricUpdateMultiply{
        scale, shift, {weights.begin(), weights.end()}, rows, m.raw(), m.n(), m.storage(), v, y});
  }
  absl::Status DoRowSquaredNorms(ConstMatrixView x, absl::Span<double> out) override {
    return RunOne(Operation::RowSquaredNorms{x, out});
  }
  absl::Status DoColumnSquaredNorms(ConstMatrixView x, absl::Span<double> out) override {
    return RunOne(Operation::ColumnSquaredNorms{x, out});
  }
  absl::StatusOr<double> DoDot(ConstMatrixView x, ConstMatrixView y) override {
    double out = 0;
    PRECONDOR_RETURN_IF_ERROR(RunOne(Operation::Dot{x, y, &out}));
    return out;
  }
  absl::Status DoSpdInverse(ConstMatrixView a, MatrixView x) override {
    return RunOneDecomposition(Operation::SpdInverse{a, x});
  }
  absl::Status DoSymmetricEigen(ConstMatrixView a, absl::Span<double> values, MatrixView q) override {
    return RunOneDecomposition(Operation::SymmetricEigen{a, values, q});
  }
  absl::Status DoLowRankCore(absl::Span<const double> roots, ConstMatrixView gram, MatrixView core,
                             MatrixView packed) override {
    return RunOneDecomposition(Operation::LowRankCore{{roots.begin(), roots.end()}, gram, core, packed});
  }
  absl::Status DoLowRankAppend(absl::Span<const double> scales, ConstMatrixView rows, absl::Span<const int64_t> slots,
                               MatrixView vectors, MatrixView gram) override {
    return RunOne(
        Operation::LowRankAppend{{scales.begin(), scales.end()}, rows, {slots.begin(), slots.end()}, vectors, gram});
  }
  absl::Status DoShermanMorrisonTerms(const SymmetricForm& h, double factor, ConstMatrixView v, MatrixView y,
                                      MatrixView terms, absl::Span<double> squares) override {
    return RunOneDecomposition(
        Operation::ShermanMorrisonTerms{h, {h.weights.begin(), h.weights.end()}, factor, v, y, terms, squares});
  }
  absl::Status DoDensePrecondition(const SymmetricForm& l, const SymmetricForm& r, ConstMatrixView d,
                                   ProductPrecision precision, absl::Span<double> squares, MatrixView u) override {
    return RunOne(Operation::DensePrecondition{
        l, r, {l.weights.begin(), l.weights.end()}, {r.weights.begin(), r.weights.end()}, d, u, precision, squares});
  }
  absl::Status DoLowRankPrecondition(const LowRankInverse& out_side, const LowRankInverse& in_side, ConstMatrixView d,
                                     ProductPrecision precision, absl::Span<double> squares, MatrixView u) override {
    return RunOne(Operation::LowRankPrecondition{out_side, in_side, d, u, precision, squares});
  }

  // --- the rest, one by one -----------------------------------------------------------------------------------------
  absl::Status DoMultiplyElements(double alpha, ConstMatrixView x, ConstMatrixView y, double beta,
                                  MatrixView z) override {
    return device_->Run("MultiplyElements",
                        [&](cudaStream_t stream) { return cuda::MultiplyElements(stream, alpha, x, y, beta, z); });
  }

  absl::Status DoDivideByRoot(double alpha, ConstMatrixView x, ConstMatrixView v, double epsilon,
                              MatrixView y) override {
    return device_->Run("DivideByRoot",
                        [&](cudaStream_t stream) { return cuda::DivideByRoot(stream, alpha, x, v, epsilon, y); });
  }

  absl::Status DoDivideByOuter(double alpha, absl::Span<const double> rows, absl::Span<const double> columns,
                               double shift, ConstMatrixView x, MatrixView y) override {
    PRECONDOR_ASSIGN_OR_RETURN(const DeviceArray<double> sent_rows, device_->Send(rows));
    PRECONDOR_ASSIGN_OR_RETURN(const DeviceArray<double> sent_columns, device_->Send(columns));
    return device_->Run("DivideByOuter", [&](cudaStream_t stream) {
      return cuda::DivideByOuter(stream, alpha, sent_rows.data(), sent_columns.data(), shift, x, y);
    });
  }

  absl::Status DoGather(absl::Span<const int64_t> rows, absl::Span<const int64_t> columns, ConstMatrixView x,
                        MatrixView y) override {
    PRECONDOR_ASSIGN_OR_RETURN(const DeviceArray<int64_t> sent_rows, device_->Send(rows));
    PRECONDOR_ASSIGN_OR_RETURN(const DeviceArray<int64_t> sent_columns, device_->Send(columns));
    return device_->Run("Gather", [&](cudaStream_t stream) {
      return cuda::Gather(stream, sent_rows.data(), sent_columns.data(), x, y);
    });
  }

  absl::Status DoFillNormal(const CounterRandom& random, MatrixView x) override {
    return device_->Run("FillNormal", [&](cudaStream_t stream) {
      return cuda::FillNormal(stream, random.key()[0], random.key()[1], random.nonce(), x);
    });
  }

  // out[0 ...] = what `launch` leaves in device memory, given the partial sums' memory.
  absl::Status Reduce(absl::string_view what, int64_t partials, absl::Span<double> out,
                      absl::FunctionRef<cudaError_t(cudaStream_t, double*, double*)> launch) {
    const int64_t size = static_cast<int64_t>(out.size());
    PRECONDOR_ASSIGN_OR_RETURN(const DeviceArray<double> memory, device_->Array<double>(size + partials));
    PRECONDOR_RETURN_IF_ERROR(
        device_->Run(what, [&](cudaStream_t stream) { return launch(stream, memory.data() + size, memory.data()); }));
    return device_->Receive(memory, out);
  }
  absl::StatusOr<double> ReduceToOne(absl::string_view what, ConstMatrixView x,
                                     absl::FunctionRef<cudaError_t(cudaStream_t, double*, double*)> launch) {
    double value = 0;
    PRECONDOR_RETURN_IF_ERROR(Reduce(what, cuda::ReductionPartials(x), absl::MakeSpan(&value, 1), launch));
    return value;
  }

  absl::StatusOr<double> DoAbsoluteSum(ConstMatrixView x) override {
    return ReduceToOne("AbsoluteSum", x, [&](cudaStream_t stream, double* partials, double* out) {
      return cuda::AbsoluteSum(stream, x, partials, out);
    });
  }
  absl::StatusOr<double> DoAbsoluteMaximum(ConstMatrixView x) override {
    return ReduceToOne("AbsoluteMaximum", x, [&](cudaStream_t stream, double* partials, double* out) {
      return cuda::AbsoluteMaximum(stream, x, partials, out);
    });
  }
  absl::Status DoDiagonal(ConstMatrixView a, absl::Span<double> out) override {
    return Reduce("Diagonal", 0, out,
                  [&](cudaStream_t stream, double*, double* diagonal) { return cuda::Diagonal(stream, a, diagonal); });
  }

  // --- decompositions: in f64 on a copy, so that a failure changes nothing ----------------------------------------
  absl::Status CheckFinite(absl::string_view what, ConstMatrixView a, bool lower) {
    PRECONDOR_ASSIGN_OR_RETURN(const double bad,
                               ReduceToOne(what, a, [&](cudaStream_t stream, double* partials, double* out) {
                                 return cuda::CountNonFinite(stream, a, lower, partials, out);
                               }));
    if (bad == 0) return absl::OkStatus();
    return absl::FailedPreconditionError(absl::StrCat(what, ": a: expected finite elements"));
  }
  absl::StatusOr<DeviceArray<double>> WidenLower(absl::string_view what, ConstMatrixView a) {
    PRECONDOR_RETURN_IF_ERROR(CheckFinite(what, a, /*lower=*/true));
    PRECONDOR_ASSIGN_OR_RETURN(DeviceArray<double> wide, device_->Array<double>(a.size()));
    PRECONDOR_RETURN_IF_ERROR(
        device_->Run(what, [&](cudaStream_t stream) { return cuda::WidenLower(stream, a, wide.data()); }));
    return wide;
  }

  // Asks `size` for the work space of a routine, runs it, and returns the routine's info.
  absl::StatusOr<int> Solve(
      absl::string_view what, absl::FunctionRef<cusolverStatus_t(cusolverDnHandle_t, int*)> size,
      absl::FunctionRef<cusolverStatus_t(cusolverDnHandle_t, double* work, int work_size, int* info)> routine) {
    int work_size = 0, info = 0;
    PRECONDOR_RETURN_IF_ERROR(
        device_->AskSolver(what, [&](cusolverDnHandle_t solver) { return size(solver, &work_size); }));
    PRECONDOR_ASSIGN_OR_RETURN(const DeviceArray<double> work, device_->Array<double>(std::max(work_size, 1)));
    PRECONDOR_ASSIGN_OR_RETURN(const DeviceArray<int> device_info, device_->Array<int>(1));
    PRECONDOR_RETURN_IF_ERROR(device_->RunSolver(
        what, [&](cusolverDnHandle_t solver) { return routine(solver, work.data(), work_size, device_info.data()); }));
    PRECONDOR_RETURN_IF_ERROR(device_->Receive(device_info, absl::MakeSpan(&info, 1)));
    return info;
  }

  absl::Status InvertLarge(ConstMatrixView a, MatrixView x) {
    const int n = static_cast<int>(a.rows);
    PRECONDOR_ASSIGN_OR_RETURN(const DeviceArray<double> wide, WidenLower("SpdInverse", a));
    double* const m = wide.data();
    PRECONDOR_ASSIGN_OR_RETURN(
        int info, Solve(
                      "SpdInverse",
                      [&](cusolverDnHandle_t solver, int* size) {
                        return cusolverDnDpotrf_bufferSize(solver, kLowerTriangle, n, m, n, size);
                      },
                      [&](cusolverDnHandle_t solver, double* work, int work_size, int* device_info) {
                        return cusolverDnDpotrf(solver, kLowerTriangle, n, m, n, work, work_size, device_info);
                      }));
    if (info == 0) {
      PRECONDOR_ASSIGN_OR_RETURN(
          info, Solve(
                    "SpdInverse",
                    [&](cusolverDnHandle_t solver, int* size) {
                      return cusolverDnDpotri_bufferSize(solver, kLowerTriangle, n, m, n, size);
                    },
                    [&](cusolverDnHandle_t solver, double* work, int work_size, int* device_info) {
                      return cusolverDnDpotri(solver, kLowerTriangle, n, m, n, work, work_size, device_info);
                    }));
    }
    PRECONDOR_RETURN_IF_ERROR(cuda::InverseStatus(info, n));
    return device_->Run("SpdInverse", [&](cudaStream_t stream) { return cuda::NarrowLower(stream, m, x); });
  }

  absl::Status DecomposeLarge(ConstMatrixView a, absl::Span<double> values, MatrixView q) {
    const int n = static_cast<int>(a.rows);
    PRECONDOR_ASSIGN_OR_RETURN(const DeviceArray<double> wide, WidenLower("SymmetricEigen", a));
    PRECONDOR_ASSIGN_OR_RETURN(const DeviceArray<double> eigenvalues, device_->Array<double>(n));
    double *const m = wide.data(), *const w = eigenvalues.data();
    PRECONDOR_ASSIGN_OR_RETURN(const int info,
                               Solve(
                                   "SymmetricEigen",
                                   [&](cusolverDnHandle_t solver, int* size) {
                                     return cusolverDnDsyevd_bufferSize(solver, CUSOLVER_EIG_MODE_VECTOR,
                                                                        kLowerTriangle, n, m, n, w, size);
                                   },
                                   [&](cusolverDnHandle_t solver, double* work, int work_size, int* device_info) {
                                     return cusolverDnDsyevd(solver, CUSOLVER_EIG_MODE_VECTOR, kLowerTriangle, n, m, n,
                                                             w, work, work_size, device_info);
                                   }));
    PRECONDOR_RETURN_IF_ERROR(cuda::EigenStatus(info));
    PRECONDOR_RETURN_IF_ERROR(device_->Receive(eigenvalues, values));
    return device_->Run("SymmetricEigen", [&](cudaStream_t stream) { return cuda::Narrow(stream, m, q); });
  }

  absl::Status DoOrthonormalizeRows(ConstMatrixView a, MatrixView q) override {
    const int d = static_cast<int>(a.cols), n = static_cast<int>(a.rows);
    PRECONDOR_RETURN_IF_ERROR(CheckFinite("OrthonormalizeRows", a, /*lower=*/false));
    PRECONDOR_ASSIGN_OR_RETURN(const DeviceArray<double> wide, device_->Array<double>(a.size()));
    PRECONDOR_ASSIGN_OR_RETURN(const DeviceArray<double> tau, device_->Array<double>(n));
    PRECONDOR_ASSIGN_OR_RETURN(const DeviceArray<double> signs, device_->Array<double>(n));
    double* const m = wide.data();
    PRECONDOR_RETURN_IF_ERROR(
        device_->Run("OrthonormalizeRows", [&](cudaStream_t stream) { return cuda::Widen(stream, a, m); }));
    PRECONDOR_ASSIGN_OR_RETURN(
        int info,
        Solve(
            "OrthonormalizeRows",
            [&](cusolverDnHandle_t solver, int* size) { return cusolverDnDgeqrf_bufferSize(solver, d, n, m, d, size); },
            [&](cusolverDnHandle_t solver, double* work, int work_size, int* device_info) {
              return cusolverDnDgeqrf(solver, d, n, m, d, tau.data(), work, work_size, device_info);
            }));
    // What R has on its diagonal, before Q takes its place.
    PRECONDOR_RETURN_IF_ERROR(device_->Run("OrthonormalizeRows", [&](cudaStream_t stream) {
      return cudaMemcpy2DAsync(signs.data(), sizeof(double), m, (d + 1) * sizeof(double), sizeof(double), n,
                               cudaMemcpyDeviceToDevice, stream);
    }));
    if (info == 0) {
      PRECONDOR_ASSIGN_OR_RETURN(
          info, Solve(
                    "OrthonormalizeRows",
                    [&](cusolverDnHandle_t solver, int* size) {
                      return cusolverDnDorgqr_bufferSize(solver, d, n, n, m, d, tau.data(), size);
                    },
                    [&](cusolverDnHandle_t solver, double* work, int work_size, int* device_info) {
                      return cusolverDnDorgqr(solver, d, n, n, m, d, tau.data(), work, work_size, device_info);
                    }));
    }
    if (info != 0) return absl::InternalError(absl::StrCat("OrthonormalizeRows: cuSOLVER says ", info));
    return device_->Run("OrthonormalizeRows",
                        [&](cudaStream_t stream) { return cuda::NarrowWithSigns(stream, m, signs.data(), 1, q); });
  }

  absl::Status DoTriangularMultiply(From side, ConstMatrixView a, Transpose transpose, MatrixView x) override {
    const float one = 1.0f;
    return device_->RunBlas("TriangularMultiply", [&](cublasHandle_t blas) {
      return cublasStrmm_64(blas, OtherSide(side), kUpperTriangle, Blas(transpose), CUBLAS_DIAG_NON_UNIT, x.cols,
                            x.rows, &one, a.data, a.stride, x.data, x.stride, x.data, x.stride);
    });
  }

  absl::Status DoTriangularSolve(From side, ConstMatrixView a, Transpose transpose, MatrixView x) override {
    const float one = 1.0f;
    return device_->RunBlas("TriangularSolve", [&](cublasHandle_t blas) {
      return cublasStrsm_64(blas, OtherSide(side), kUpperTriangle, Blas(transpose), CUBLAS_DIAG_NON_UNIT, x.cols,
                            x.rows, &one, a.data, a.stride, x.data, x.stride);
    });
  }

  bool DoKnowsProducts(ProductPrecision) const override { return true; }

  // --- symmetric matrices in tiles --------------------------------------------------------------------------------
  bool DoKnowsSymmetric(SymmetricStorage) const override { return true; }

  absl::Status DoSymmetricExpand(double scale, double shift, absl::Span<const double> weights, ConstMatrixView rows,
                                 const SymmetricMatrix& m, MatrixView x) override {
    PRECONDOR_ASSIGN_OR_RETURN(const DeviceArray<double> sent, device_->Send(weights));
    const cuda::ExpandJob job = {.m = cuda::JobOfForm(SymmetricForm(scale, shift, weights, rows, m), sent.data()),
                                 .x = x.data,
                                 .stride = x.stride};
    return device_->Run("SymmetricExpand", [&](cudaStream_t stream) { return cuda::SymmetricExpand(stream, job); });
  }

  absl::Status DoSymmetricCompress(ConstMatrixView x, SymmetricMatrix& m) override {
    return device_->Run("SymmetricCompress", [&](cudaStream_t stream) {
      return cuda::SymmetricCompress(stream, x, m.raw().data, m.storage());
    });
  }

  const std::unique_ptr<Device> device_;
};

}  // namespace

absl::StatusOr<int> CountCudaDevices() {
  int count = 0;
  PRECONDOR_RETURN_IF_ERROR(cuda::ToStatus("CUDA devices", cudaGetDeviceCount(&count)));
  if (count == 0) return absl::UnavailableError("CUDA devices: there is none");
  return count;
}

absl::StatusOr<std::unique_ptr<Backend>> MakeCudaBackend(const CudaBackendOptions& options) {
  if (options.memory_limit_bytes <= 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("cuda backend: expected positive memory_limit_bytes, got ", options.memory_limit_bytes));
  }
  PRECONDOR_ASSIGN_OR_RETURN(std::unique_ptr<Device> device,
                             Device::Make(options.device, options.memory_limit_bytes, options.peers));
  return std::unique_ptr<Backend>(std::make_unique<CudaBackend>(std::move(device)));
}

}  // namespace precondor
