// SPDX-License-Identifier: Apache-2.0
#include "kernels/cuda/cuda_backend.h"

#include <algorithm>
#include <utility>
#include <variant>
#include <vector>

#include "absl/container/inlined_vector.h"
#include "absl/strings/str_cat.h"

#include "kernels/base/status_macros.h"
#include "kernels/cuda/device.h"
#include "kernels/cuda/elementwise.h"
#include "kernels/cuda/grouped_operations.h"
#include "kernels/cuda/reductions.h"
#include "kernels/cuda/sherman_morrison.h"
#include "kernels/cuda/spd_inverses.h"
#include "kernels/cuda/symmetric_tiles.h"
#include "kernels/operation.h"

namespace precondor {
namespace {

using cuda::Device;
using cuda::DeviceArray;

// cuBLAS and cuSOLVER expect column-major matrices, for which a row-major matrix is its transpose: sides swap, upper
// triangles are lower ones, and the factors of a product swap.
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
  bool has_tensor_cores() const override { return true; }
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

  void DoRun(absl::Span<const Operation* const> operations, absl::Span<absl::Status> statuses) override {
    std::visit([&](const auto& first) { RunKind(first, operations, statuses); }, operations[0]->what);
  }
  template <typename Kind>
  void RunKind(const Kind&, absl::Span<const Operation* const> operations, absl::Span<absl::Status> statuses) {
    absl::InlinedVector<const Kind*, 1> of_kind;
    for (const Operation* operation : operations) of_kind.push_back(operation->As<Kind>());
    const absl::Span<const Kind* const> all = of_kind;
    if constexpr (requires { cuda::RunTogether(*device_, all); }) {
      std::fill(statuses.begin(), statuses.end(), cuda::RunTogether(*device_, all));
    } else if constexpr (requires { RunOrRepeat(all, statuses); }) {
      RunOrRepeat(all, statuses);
    } else if constexpr (requires { cuda::RunSmall(*device_, all, statuses); }) {
      RunDecompositions(all, statuses);
    } else {
      for (size_t i = 0; i < all.size(); ++i) statuses[i] = RunOne(*all[i]);
    }
  }

  // Runs the iterations together, and those again, one at a time and in f64, that need more than f32.
  void RunOrRepeat(absl::Span<const operation::OrthogonalIteration* const> all, absl::Span<absl::Status> statuses) {
    absl::InlinedVector<bool, 16> done(all.size());
    const absl::Status run = cuda::RunOrthogonalIterations(*device_, all, absl::MakeSpan(done));
    for (size_t i = 0; i < all.size(); ++i) statuses[i] = !run.ok() || done[i] ? run : RunByPrimitives(*all[i]);
  }
  // Runs operations each of which can fail on its own: small ones together, and the others together or one at a time.
  template <typename Kind>
  void RunDecompositions(absl::Span<const Kind* const> all, absl::Span<absl::Status> statuses) {
    const auto is_small = [&](size_t i) { return IsSmall(*all[i]); };
    RunSome(all, statuses, is_small, [&](auto some, auto out) { return cuda::RunSmall(*device_, some, out); });
    if constexpr (requires { cuda::RunLarge(*device_, all, statuses); }) {
      const auto is_large = [&](size_t i) { return !is_small(i); };
      RunSome(all, statuses, is_large, [&](auto some, auto out) { return cuda::RunLarge(*device_, some, out); });
    } else {
      for (size_t i = 0; i < all.size(); ++i) {
        if (!is_small(i)) statuses[i] = RunLarge(*all[i]);
      }
    }
  }
  // Runs those of `all` that `takes` names. `run` sets the status of each, or fails for all of them.
  template <typename Kind, typename Takes, typename RunAll>
  static void RunSome(absl::Span<const Kind* const> all, absl::Span<absl::Status> statuses, Takes takes, RunAll run) {
    std::vector<const Kind*> some;
    std::vector<size_t> places;
    for (size_t i = 0; i < all.size(); ++i) {
      if (!takes(i)) continue;
      some.push_back(all[i]);
      places.push_back(i);
    }
    if (some.empty()) return;
    std::vector<absl::Status> of_some(some.size());
    const absl::Status status = run(absl::MakeConstSpan(some), absl::MakeSpan(of_some));
    for (size_t i = 0; i < some.size(); ++i) statuses[places[i]] = status.ok() ? of_some[i] : status;
  }
  static bool IsSmall(const operation::SpdInverse& inverse) { return inverse.x.rows <= cuda::kMostRowsOfSpdInverse; }
  static bool IsSmall(const operation::LowRankCore& core) { return core.core.rows <= cuda::kMostRowsOfSpdInverse; }
  static bool IsSmall(const operation::SymmetricEigen& eigen) {
    return eigen.q.rows <= cuda::kMostRowsOfSymmetricEigens;
  }
  static bool IsSmall(const operation::ShermanMorrisonTerms& terms) {
    return terms.v.rows <= cuda::kMostVectorsOfTerms && terms.h.rows.rows <= cuda::kMostRowsOfTerms;
  }
  absl::Status RunLarge(const operation::SymmetricEigen& eigen) {
    return DecomposeLarge(eigen.a, eigen.values, eigen.q);
  }
  template <operation::Composite Kind>
  absl::Status RunLarge(const Kind& composite) {
    return RunByPrimitives(composite);
  }
  // --- the other kinds, one operation at a time ---------------------------------------------------------------------
  // Runs composites for which this backend has no function of its own.
  template <operation::Composite Kind>
  absl::Status RunOne(const Kind& composite) {
    return RunByPrimitives(composite);
  }
  absl::Status RunOne(const operation::FillNormal& fill) {
    return device_->Run("FillNormal", [&](cudaStream_t stream) {
      return cuda::FillNormal(stream, fill.random.key()[0], fill.random.key()[1], fill.random.nonce(), fill.x);
    });
  }

  // Copies to `out` what `launch`, given the memory for partial sums, leaves in device memory.
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

  absl::Status RunOne(const operation::Diagonal& of) {
    return Reduce("Diagonal", 0, of.out, [&](cudaStream_t stream, double*, double* diagonal) {
      return cuda::Diagonal(stream, of.a, diagonal);
    });
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

  // Gets the routine's work space size from `size`, runs the routine, and returns its info.
  absl::StatusOr<int> Solve(
      absl::string_view what, absl::FunctionRef<cusolverStatus_t(cusolverDnHandle_t, int*)> size,
      absl::FunctionRef<cusolverStatus_t(cusolverDnHandle_t, double* work, int work_size, int* info)> routine) {
    int work_size = 0, info = 0;
    PRECONDOR_RETURN_IF_ERROR(
        device_->QuerySolver(what, [&](cusolverDnHandle_t solver) { return size(solver, &work_size); }));
    PRECONDOR_ASSIGN_OR_RETURN(const DeviceArray<double> work, device_->Array<double>(std::max(work_size, 1)));
    PRECONDOR_ASSIGN_OR_RETURN(const DeviceArray<int> device_info, device_->Array<int>(1));
    PRECONDOR_RETURN_IF_ERROR(device_->RunSolver(
        what, [&](cusolverDnHandle_t solver) { return routine(solver, work.data(), work_size, device_info.data()); }));
    PRECONDOR_RETURN_IF_ERROR(device_->Receive(device_info, absl::MakeSpan(&info, 1)));
    return info;
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

  absl::Status RunOne(const operation::OrthonormalizeRows& make) {
    const ConstMatrixView a = make.a;
    const MatrixView q = make.q;
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
    // Saves R's diagonal before Q overwrites it.
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

  absl::Status RunOne(const operation::TriangularMultiply& product) {
    const ConstMatrixView a = product.a;
    const MatrixView x = product.x;
    const float one = 1.0f;
    return device_->RunBlas("TriangularMultiply", [&](cublasHandle_t blas) {
      return cublasStrmm_64(blas, OtherSide(product.side), kUpperTriangle, Blas(product.transpose),
                            CUBLAS_DIAG_NON_UNIT, x.cols, x.rows, &one, a.data, a.stride, x.data, x.stride, x.data,
                            x.stride);
    });
  }

  absl::Status RunOne(const operation::TriangularSolve& product) {
    const ConstMatrixView a = product.a;
    const MatrixView x = product.x;
    const float one = 1.0f;
    return device_->RunBlas("TriangularSolve", [&](cublasHandle_t blas) {
      return cublasStrsm_64(blas, OtherSide(product.side), kUpperTriangle, Blas(product.transpose),
                            CUBLAS_DIAG_NON_UNIT, x.cols, x.rows, &one, a.data, a.stride, x.data, x.stride);
    });
  }

  bool DoSupportsPrecision(ProductPrecision) const override { return true; }

  // --- symmetric matrices in tiles --------------------------------------------------------------------------------

  absl::Status RunOne(const operation::SymmetricExpand& expand) {
    PRECONDOR_ASSIGN_OR_RETURN(const DeviceArray<double> sent, device_->Send(expand.form.weights));
    const cuda::ExpandJob job = {
        .m = cuda::JobOfForm(expand.form, sent.data()), .x = expand.x.data, .stride = expand.x.stride};
    return device_->Run("SymmetricExpand", [&](cudaStream_t stream) { return cuda::SymmetricExpand(stream, job); });
  }

  const std::unique_ptr<Device> device_;
};

}  // namespace

absl::StatusOr<std::unique_ptr<Backend>> MakeCudaBackend(const CudaBackendOptions& options) {
  if (options.memory_limit_bytes <= 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("cuda backend: expected positive memory_limit_bytes, got ", options.memory_limit_bytes));
  }
  PRECONDOR_ASSIGN_OR_RETURN(std::unique_ptr<Device> device, Device::Make(options.device, options.memory_limit_bytes));
  return std::unique_ptr<Backend>(std::make_unique<CudaBackend>(std::move(device)));
}

}  // namespace precondor
