// SPDX-License-Identifier: Apache-2.0
#include "kernels/cuda/cuda_backend.h"

#include <algorithm>
#include <cmath>
#include <cuda_bf16.h>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"

#include "kernels/base/status_macros.h"
#include "kernels/cuda/device.h"
#include "kernels/cuda/elementwise.h"
#include "kernels/cuda/reductions.h"
#include "kernels/cuda/symmetric_tiles.h"

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

 private:
  absl::StatusOr<float*> DoAllocate(int64_t elements) override {
    PRECONDOR_ASSIGN_OR_RETURN(void* const data, device_->Allocate(Bytes(elements), /*zeroed=*/true));
    return static_cast<float*>(data);
  }
  void DoFree(float* data, int64_t elements) override { device_->Free(data, Bytes(elements)); }
  int64_t DoAllocatedBytes() const override { return device_->allocated_bytes(); }
  void DoTrim() override { device_->Trim(); }
  static int64_t Bytes(int64_t elements) { return elements * static_cast<int64_t>(sizeof(float)); }

  absl::Status DoUpload(ConstMatrixView host, MatrixView device) override { return device_->Upload(host, device); }
  absl::Status DoDownload(ConstMatrixView device, MatrixView host) override { return device_->Download(device, host); }
  absl::Status DoCopy(ConstMatrixView from, MatrixView to) override { return device_->Copy(from, to); }

  absl::Status DoGemm(double alpha, ConstMatrixView a, Transpose transpose_a, ConstMatrixView b, Transpose transpose_b,
                      double beta, MatrixView c) override {
    const float fa = static_cast<float>(alpha), fb = static_cast<float>(beta);
    const int64_t inner = transpose_a == Transpose::kYes ? a.rows : a.cols;
    return device_->RunBlas("Gemm", [&](cublasHandle_t blas) {
      return cublasSgemm_64(blas, Blas(transpose_b), Blas(transpose_a), c.cols, c.rows, inner, &fa, b.data, b.stride,
                            a.data, a.stride, &fb, c.data, c.stride);
    });
  }

  absl::Status DoAxpby(double alpha, ConstMatrixView x, double beta, MatrixView y) override {
    return device_->Run("Axpby", [&](cudaStream_t stream) { return cuda::Axpby(stream, alpha, x, beta, y); });
  }

  absl::Status DoScaleRows(absl::Span<const double> scales, ConstMatrixView x, MatrixView y) override {
    PRECONDOR_ASSIGN_OR_RETURN(const DeviceArray<double> sent, device_->Send(scales));
    return device_->Run("ScaleRows", [&](cudaStream_t stream) { return cuda::ScaleRows(stream, sent.data(), x, y); });
  }

  absl::Status DoScaleColumns(absl::Span<const double> scales, ConstMatrixView x, MatrixView y) override {
    PRECONDOR_ASSIGN_OR_RETURN(const DeviceArray<double> sent, device_->Send(scales));
    return device_->Run("ScaleColumns",
                        [&](cudaStream_t stream) { return cuda::ScaleColumns(stream, sent.data(), x, y); });
  }

  absl::Status DoScaleBothSides(absl::Span<const double> scales, ConstMatrixView x, MatrixView y) override {
    PRECONDOR_ASSIGN_OR_RETURN(const DeviceArray<double> sent, device_->Send(scales));
    return device_->Run("ScaleBothSides",
                        [&](cudaStream_t stream) { return cuda::ScaleBothSides(stream, sent.data(), x, y); });
  }

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

  absl::Status DoAddDiagonal(double value, MatrixView a) override {
    return device_->Run("AddDiagonal", [&](cudaStream_t stream) { return cuda::AddDiagonal(stream, value, a); });
  }
  absl::Status DoSymmetrize(MatrixView a) override {
    return device_->Run("Symmetrize", [&](cudaStream_t stream) { return cuda::Symmetrize(stream, a); });
  }
  absl::Status DoPackLower(ConstMatrixView x, MatrixView packed) override {
    return device_->Run("PackLower", [&](cudaStream_t stream) { return cuda::PackLower(stream, x, packed); });
  }
  absl::Status DoUnpackLower(ConstMatrixView packed, MatrixView x) override {
    return device_->Run("UnpackLower", [&](cudaStream_t stream) { return cuda::UnpackLower(stream, packed, x); });
  }
  absl::Status DoPackRow(ConstMatrixView x, int64_t i, MatrixView packed) override {
    return device_->Run("PackRow", [&](cudaStream_t stream) { return cuda::PackRow(stream, x, i, packed); });
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

  absl::StatusOr<double> DoDot(ConstMatrixView x, ConstMatrixView y) override {
    return ReduceToOne("Dot", x, [&](cudaStream_t stream, double* partials, double* out) {
      return cuda::Dot(stream, x, y, partials, out);
    });
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
  absl::Status DoRowSquaredNorms(ConstMatrixView x, absl::Span<double> out) override {
    constexpr int64_t kLongRow = 1 << 16;  // more than one warp should walk
    if (x.cols > kLongRow && x.rows < 64) {
      for (int64_t i = 0; i < x.rows; ++i) {
        PRECONDOR_ASSIGN_OR_RETURN(out[i], DoDot(x.RowRange(i, 1), x.RowRange(i, 1)));
      }
      return absl::OkStatus();
    }
    return Reduce("RowSquaredNorms", 0, out,
                  [&](cudaStream_t stream, double*, double* norms) { return cuda::RowSquaredNorms(stream, x, norms); });
  }
  absl::Status DoColumnSquaredNorms(ConstMatrixView x, absl::Span<double> out) override {
    return Reduce("ColumnSquaredNorms", cuda::ColumnPartials(x), out,
                  [&](cudaStream_t stream, double* partials, double* norms) {
                    return cuda::ColumnSquaredNorms(stream, x, partials, norms);
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
        device_->RunSolver(what, [&](cusolverDnHandle_t solver) { return size(solver, &work_size); }));
    PRECONDOR_ASSIGN_OR_RETURN(const DeviceArray<double> work, device_->Array<double>(std::max(work_size, 1)));
    PRECONDOR_ASSIGN_OR_RETURN(const DeviceArray<int> device_info, device_->Array<int>(1));
    PRECONDOR_RETURN_IF_ERROR(device_->RunSolver(
        what, [&](cusolverDnHandle_t solver) { return routine(solver, work.data(), work_size, device_info.data()); }));
    PRECONDOR_RETURN_IF_ERROR(device_->Receive(device_info, absl::MakeSpan(&info, 1)));
    return info;
  }

  absl::Status DoSpdInverse(ConstMatrixView a, MatrixView x) override {
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
    if (info != 0) {
      return absl::FailedPreconditionError(
          absl::StrCat("SpdInverse: a: expected positive definite, but leading minor ", info, " of ", n, " is not"));
    }
    return device_->Run("SpdInverse", [&](cudaStream_t stream) { return cuda::NarrowLower(stream, m, x); });
  }

  absl::Status DoSymmetricEigen(ConstMatrixView a, absl::Span<double> values, MatrixView q) override {
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
    if (info != 0) {
      return absl::FailedPreconditionError(absl::StrCat("SymmetricEigen: no convergence, cuSOLVER says ", info));
    }
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
  absl::Status DoDensePrecondition(ConstMatrixView l, ConstMatrixView r, ConstMatrixView d, ProductPrecision precision,
                                   MatrixView u) override {
    if (precision == ProductPrecision::kF32) return Backend::DoDensePrecondition(l, r, d, precision, u);
    PRECONDOR_ASSIGN_OR_RETURN(const DeviceArray<__nv_bfloat16> left, Rounded(l));
    PRECONDOR_ASSIGN_OR_RETURN(const DeviceArray<__nv_bfloat16> right, Rounded(r));
    PRECONDOR_ASSIGN_OR_RETURN(const DeviceArray<__nv_bfloat16> middle, Rounded(d));
    PRECONDOR_ASSIGN_OR_RETURN(const DeviceArray<__nv_bfloat16> half, device_->Array<__nv_bfloat16>(d.size()));
    PRECONDOR_RETURN_IF_ERROR(
        Bf16Product(left.data(), middle.data(), d.rows, d.cols, d.rows, half.data(), CUDA_R_16BF, d.cols));
    return Bf16Product(half.data(), right.data(), d.rows, d.cols, d.cols, u.data, CUDA_R_32F, u.stride);
  }
  absl::StatusOr<DeviceArray<__nv_bfloat16>> Rounded(ConstMatrixView x) {
    PRECONDOR_ASSIGN_OR_RETURN(DeviceArray<__nv_bfloat16> out, device_->Array<__nv_bfloat16>(x.size()));
    PRECONDOR_RETURN_IF_ERROR(device_->Run(
        "DensePrecondition", [&](cudaStream_t stream) { return cuda::RoundToBf16(stream, x, out.data()); }));
    return out;
  }
  // c [m, n] = a [m, inner] b [inner, n], summed in f32.
  absl::Status Bf16Product(const __nv_bfloat16* a, const __nv_bfloat16* b, int64_t m, int64_t n, int64_t inner, void* c,
                           cudaDataType_t type, int64_t stride) {
    const float one = 1.0f, zero = 0.0f;
    return device_->RunBlas("DensePrecondition", [&](cublasHandle_t blas) {
      return cublasGemmEx_64(blas, CUBLAS_OP_N, CUBLAS_OP_N, n, m, inner, &one, b, CUDA_R_16BF, n, a, CUDA_R_16BF,
                             inner, &zero, c, type, stride, CUBLAS_COMPUTE_32F, CUBLAS_GEMM_DEFAULT);
    });
  }

  // --- symmetric matrices in tiles --------------------------------------------------------------------------------
  bool DoKnowsSymmetric(SymmetricStorage) const override { return true; }

  static cuda::SymmetricJob Job(double scale, double shift, const DeviceArray<double>& weights, ConstMatrixView rows,
                                void* tiles, const SymmetricMatrix& m) {
    cuda::SymmetricJob job;
    job.tiles = tiles;
    job.n = m.n();
    job.storage = m.storage();
    job.scale = static_cast<float>(scale);
    job.shift = shift;
    job.weights = weights.data();
    job.rows = rows;
    return job;
  }

  absl::Status DoSymmetricUpdateMultiply(double scale, double shift, absl::Span<const double> weights,
                                         ConstMatrixView rows, SymmetricMatrix& m, ConstMatrixView v,
                                         MatrixView y) override {
    PRECONDOR_ASSIGN_OR_RETURN(const DeviceArray<double> sent, device_->Send(weights));
    PRECONDOR_ASSIGN_OR_RETURN(const DeviceArray<float> partials,
                               device_->Array<float>(cuda::PartialElements(m.n(), v.rows)));
    cuda::SymmetricJob job = Job(scale, shift, sent, rows, m.raw().data, m);
    job.v = v;
    job.y = y;
    job.partials = partials.data();
    PRECONDOR_ASSIGN_OR_RETURN(const DeviceArray<cuda::SymmetricJob> jobs,
                               device_->Send(absl::Span<const cuda::SymmetricJob>(&job, 1)));
    PRECONDOR_RETURN_IF_ERROR(device_->Run("SymmetricUpdateMultiply", [&](cudaStream_t stream) {
      return cuda::SymmetricUpdateMultiply(stream, jobs.data(), 1, cuda::TileCount(m.n()));
    }));
    if (v.rows == 0) return absl::OkStatus();
    const auto sum = [&](cudaStream_t stream) {
      return cuda::SymmetricSumPartials(stream, jobs.data(), 1, TileRows(m.n()) * v.rows);
    };
    // m has changed: an error now must not be taken for one that left it alone.
    return job.updates() ? device_->RunOrLose("SymmetricUpdateMultiply", sum)
                         : device_->Run("SymmetricUpdateMultiply", sum);
  }

  absl::Status DoSymmetricExpand(double scale, double shift, absl::Span<const double> weights, ConstMatrixView rows,
                                 const SymmetricMatrix& m, MatrixView x) override {
    PRECONDOR_ASSIGN_OR_RETURN(const DeviceArray<double> sent, device_->Send(weights));
    // The kernel only reads; the job's type is that of an update.
    const cuda::SymmetricJob job = Job(scale, shift, sent, rows, const_cast<float*>(m.raw().data), m);
    return device_->Run("SymmetricExpand", [&](cudaStream_t stream) { return cuda::SymmetricExpand(stream, job, x); });
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
  PRECONDOR_ASSIGN_OR_RETURN(std::unique_ptr<Device> device, Device::Make(options.device, options.memory_limit_bytes));
  return std::unique_ptr<Backend>(std::make_unique<CudaBackend>(std::move(device)));
}

}  // namespace precondor
