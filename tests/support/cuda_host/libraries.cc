// SPDX-License-Identifier: Apache-2.0
// The routines of cuBLAS and cuSOLVER that kernels/cuda calls, by OpenBLAS and its LAPACK: both are column-major, so
// that arguments mean the same. They run in their stream's order.
#include "tests/support/cuda_host/libraries.h"

#include <algorithm>
#include <cblas.h>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <cublas_v2.h>
#include <cuda_bf16.h>
#include <cusolverDn.h>
#include <utility>
#include <vector>

#include "kernels/cpu/lapack.h"
#include "tests/support/cuda_host/stream.h"

struct cublasContext {
  static constexpr char kModule[] = "cuBLAS";
  const int device = precondor::cuda_host::CurrentDevice();
  cudaStream_t stream = nullptr;
};
struct cusolverDnContext {
  static constexpr char kModule[] = "cuSOLVER";
  const int device = precondor::cuda_host::CurrentDevice();
  cudaStream_t stream = nullptr;
};
struct cusolverDnParams {};

namespace {

namespace host = precondor::cuda_host;

CBLAS_TRANSPOSE Blas(cublasOperation_t op) { return op == CUBLAS_OP_N ? CblasNoTrans : CblasTrans; }
CBLAS_UPLO Blas(cublasFillMode_t uplo) { return uplo == CUBLAS_FILL_MODE_LOWER ? CblasLower : CblasUpper; }
CBLAS_SIDE Blas(cublasSideMode_t side) { return side == CUBLAS_SIDE_LEFT ? CblasLeft : CblasRight; }
CBLAS_DIAG Blas(cublasDiagType_t diag) { return diag == CUBLAS_DIAG_UNIT ? CblasUnit : CblasNonUnit; }
const char* Lapack(cublasFillMode_t uplo) { return uplo == CUBLAS_FILL_MODE_LOWER ? "L" : "U"; }

// A handle belongs to the device that was current when it was made, and works on that alone.
template <typename Handle>
bool OnItsDevice(Handle handle) {
  return handle->device == host::CurrentDevice() && handle->device == host::DeviceOf(handle->stream);
}

// A routine's launch. A fault of the device has no status of its own in either library.
template <typename Handle>
cudaError_t Launch(Handle handle, std::function<void()> work) {
  if (const cudaError_t error = host::CountCall(); error != cudaSuccess) return error;
  if (!host::LoadModule(handle->device, handle->kModule, host::kLibraryModuleBytes)) return cudaErrorMemoryAllocation;
  host::Enqueue(handle->stream, std::move(work));
  return cudaSuccess;
}
cublasStatus_t Put(cublasHandle_t handle, std::function<void()> work) {
  if (!OnItsDevice(handle)) return CUBLAS_STATUS_INVALID_VALUE;
  const cudaError_t error = Launch(handle, std::move(work));
  if (error == cudaErrorMemoryAllocation) return CUBLAS_STATUS_ALLOC_FAILED;
  return error == cudaSuccess ? CUBLAS_STATUS_SUCCESS : CUBLAS_STATUS_EXECUTION_FAILED;
}
cusolverStatus_t Put(cusolverDnHandle_t handle, std::function<void()> work) {
  if (!OnItsDevice(handle)) return CUSOLVER_STATUS_INVALID_VALUE;
  const cudaError_t error = Launch(handle, std::move(work));
  if (error == cudaErrorMemoryAllocation) return CUSOLVER_STATUS_ALLOC_FAILED;
  return error == cudaSuccess ? CUSOLVER_STATUS_SUCCESS : CUSOLVER_STATUS_EXECUTION_FAILED;
}

// A handle takes memory of its device until it is destroyed.
template <typename Handle>
cudaError_t New(Handle*& handle) {
  if (const cudaError_t error = host::CountCall(); error != cudaSuccess) return error;
  if (!host::TakeMemory(host::CurrentDevice(), host::kHandleBytes)) return cudaErrorMemoryAllocation;
  handle = new Handle;
  host::AddLiveObjects(1);
  return cudaSuccess;
}
template <typename Handle>
void Delete(Handle* handle) {
  host::GiveMemory(handle->device, host::kHandleBytes);
  delete handle;
  host::AddLiveObjects(-1);
}
// The LAPACK routine finds its own work space; a device's must be asked for all the same.
cusolverStatus_t Size(int elements, int* size) {
  *size = elements;
  return CUSOLVER_STATUS_SUCCESS;
}

// Eigenvectors take the place of a.
int Eigenvectors(const char* uplo, int n, double* a, int lda, double* w, double* work, int work_size) {
  const int iwork_size = 3 + 5 * n;
  std::vector<int> iwork(static_cast<size_t>(iwork_size));
  int info = 0;
  dsyevd_("V", uplo, &n, a, &lda, w, work, &work_size, iwork.data(), &iwork_size, &info);
  return info;
}
int EigenvectorsWork(int n) { return 1 + 6 * n + 2 * n * n; }

// A column-major matrix of T [rows, cols], without what lies between its columns, each element as `value` makes it.
template <typename T, typename Value>
std::vector<float> Packed(const void* data, int64_t rows, int64_t cols, int64_t stride, Value value) {
  const auto* in = static_cast<const T*>(data);
  std::vector<float> out(static_cast<size_t>(rows * cols));
  for (int64_t j = 0; j < cols; ++j) {
    for (int64_t i = 0; i < rows; ++i) out[static_cast<size_t>(j * rows + i)] = value(in[j * stride + i]);
  }
  return out;
}

std::vector<float> ToF32(const void* data, int64_t rows, int64_t cols, int64_t stride) {
  return Packed<__nv_bfloat16>(data, rows, cols, stride, [](__nv_bfloat16 x) { return __bfloat162float(x); });
}

// A column-major product c = alpha op(a) op(b) + beta c.
struct Product {
  cublasOperation_t op_a, op_b;
  int64_t m, n, k, lda, ldb, ldc;
  float alpha, beta;

  int64_t rows_a() const { return op_a == CUBLAS_OP_N ? m : k; }
  int64_t cols_a() const { return op_a == CUBLAS_OP_N ? k : m; }
  int64_t rows_b() const { return op_b == CUBLAS_OP_N ? k : n; }
  int64_t cols_b() const { return op_b == CUBLAS_OP_N ? n : k; }
  bool StridesFit() const { return lda >= rows_a() && ldb >= rows_b() && ldc >= m; }
};

// c's elements, of f32 or bf16, each as `value` makes it of what it was.
template <typename Value>
void ForEachElement(const Product& product, void* c, cudaDataType c_type, Value value) {
  for (int64_t j = 0; j < product.n; ++j) {
    for (int64_t i = 0; i < product.m; ++i) {
      if (c_type == CUDA_R_32F) {
        float& x = static_cast<float*>(c)[j * product.ldc + i];
        x = value(x);
      } else {
        __nv_bfloat16& x = static_cast<__nv_bfloat16*>(c)[j * product.ldc + i];
        x = __float2bfloat16_rn(value(__bfloat162float(x)));
      }
    }
  }
}

// By which the elements of a batch's results change. It is about as large as the change of another order of the sums,
// or of another rounding. Calls with one number of matrices change alike.
float ChangeOf(int64_t count, cudaDataType type) {
  return (type == CUDA_R_16BF ? 0x1p-8f : 0x1p-20f) * (count % 2 == 0 ? 1.0f : -1.0f);
}
template <typename T>
void ChangeByCompany(int64_t count, int64_t rows, int64_t cols, T* x, int64_t stride) {
  if (!host::libraries.company_changes_bits) return;
  for (int64_t j = 0; j < cols; ++j) {
    for (int64_t i = 0; i < rows; ++i) x[j * stride + i] *= 1 + ChangeOf(count, CUDA_R_32F);
  }
}

// x in TF32, whose mantissa has 10 bits, to the nearest; in f32 again.
float RoundedToTf32(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof(bits));
  if (std::isfinite(x)) bits += uint32_t{1} << 12;  // halves away from zero
  bits &= ~uint32_t{0x1fff};
  std::memcpy(&x, &bits, sizeof(x));
  return x;
}

std::vector<float> RoundedToTf32(const void* data, int64_t rows, int64_t cols, int64_t stride) {
  return Packed<float>(data, rows, cols, stride, [](float x) { return RoundedToTf32(x); });
}

// Sums in f32.
void Multiply(const Product& p, cudaDataType type, cublasComputeType_t compute, const void* a, const void* b, void* c,
              cudaDataType c_type) {
  const auto multiply = [&p](const float* left, int64_t ld_left, const float* right, int64_t ld_right, float beta,
                             float* out, int64_t ld_out) {
    cblas_sgemm(CblasColMajor, Blas(p.op_a), Blas(p.op_b), p.m, p.n, p.k, p.alpha, left, ld_left, right, ld_right, beta,
                out, ld_out);
  };
  if (type == CUDA_R_16BF) {
    const std::vector<float> left = ToF32(a, p.rows_a(), p.cols_a(), p.lda);
    const std::vector<float> right = ToF32(b, p.rows_b(), p.cols_b(), p.ldb);
    std::vector<float> product(static_cast<size_t>(p.m * p.n));
    multiply(left.data(), p.rows_a(), right.data(), p.rows_b(), 0.0f, product.data(), p.m);
    auto next = product.begin();
    ForEachElement(p, c, c_type, [&](float x) { return *next++ + (p.beta == 0 ? 0 : p.beta * x); });
  } else if (compute == CUBLAS_COMPUTE_32F_FAST_TF32) {
    const std::vector<float> left = RoundedToTf32(a, p.rows_a(), p.cols_a(), p.lda);
    const std::vector<float> right = RoundedToTf32(b, p.rows_b(), p.cols_b(), p.ldb);
    multiply(left.data(), p.rows_a(), right.data(), p.rows_b(), p.beta, static_cast<float*>(c), p.ldc);
  } else {
    multiply(static_cast<const float*>(a), p.lda, static_cast<const float*>(b), p.ldb, p.beta, static_cast<float*>(c),
             p.ldc);
  }
}

// Types that cuBLAS has in batches: bf16 or f32 for bf16 and f32 for f32, summed in f32, and f32 rounded to TF32
// besides. A combination that it would only refuse is an error of ours.
void ExpectInBatches(cudaDataType a, cudaDataType b, cudaDataType c, cublasComputeType_t compute) {
  const bool plain = compute == CUBLAS_COMPUTE_32F && (a == CUDA_R_32F || a == CUDA_R_16BF);
  const bool tf32 = compute == CUBLAS_COMPUTE_32F_FAST_TF32 && a == CUDA_R_32F;
  if (a == b && (a == c || c == CUDA_R_32F) && (plain || tf32)) return;
  std::fprintf(stderr,
               "batched products: expected bf16 or f32 in CUBLAS_COMPUTE_32F or f32 in its FAST_TF32, got types "
               "%d, %d, %d in %d\n",
               a, b, c, compute);
  std::abort();
}

// The alignment that cuBLAS asks of matrices in batches where they have 16 bits, or where f32 is rounded.
void ExpectAligned(const void* data) {
  if (reinterpret_cast<uintptr_t>(data) % 16 == 0) return;
  std::fprintf(stderr, "batched products: expected a matrix at a multiple of 16 bytes, got %p\n", data);
  std::abort();
}

}  // namespace

namespace precondor::cuda_host {
Libraries libraries{.company_changes_bits = std::getenv("CUDA_HOST_COMPANY_CHANGES_BITS") != nullptr};
}  // namespace precondor::cuda_host

extern "C" {

cublasStatus_t cublasCreate_v2(cublasHandle_t* handle) {
  openblas_set_num_threads(1);  // sums in one order
  const cudaError_t error = New(*handle);
  if (error == cudaErrorMemoryAllocation) return CUBLAS_STATUS_ALLOC_FAILED;
  return error == cudaSuccess ? CUBLAS_STATUS_SUCCESS : CUBLAS_STATUS_NOT_INITIALIZED;
}
cublasStatus_t cublasDestroy_v2(cublasHandle_t handle) {
  Delete(handle);
  return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasSetStream_v2(cublasHandle_t handle, cudaStream_t stream) {
  handle->stream = stream;
  return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasSetWorkspace_v2(cublasHandle_t, void*, size_t) { return CUBLAS_STATUS_SUCCESS; }
cublasStatus_t cublasSetMathMode(cublasHandle_t, cublasMath_t) { return CUBLAS_STATUS_SUCCESS; }
const char* cublasGetStatusString(cublasStatus_t) { return "made on the host"; }

cublasStatus_t cublasSgemm_v2_64(cublasHandle_t handle, cublasOperation_t op_a, cublasOperation_t op_b, int64_t m,
                                 int64_t n, int64_t k, const float* alpha, const float* a, int64_t lda, const float* b,
                                 int64_t ldb, const float* beta, float* c, int64_t ldc) {
  return Put(handle, [=, alpha = *alpha, beta = *beta] {
    cblas_sgemm(CblasColMajor, Blas(op_a), Blas(op_b), m, n, k, alpha, a, lda, b, ldb, beta, c, ldc);
  });
}

// As in batches, and bf16 factors of a product in f32.
cublasStatus_t cublasGemmEx_64(cublasHandle_t handle, cublasOperation_t op_a, cublasOperation_t op_b, int64_t m,
                               int64_t n, int64_t k, const void* alpha, const void* a, cudaDataType a_type, int64_t lda,
                               const void* b, cudaDataType b_type, int64_t ldb, const void* beta, void* c,
                               cudaDataType c_type, int64_t ldc, cublasComputeType_t compute, cublasGemmAlgo_t) {
  const bool in_bf16 = a_type == CUDA_R_16BF && compute == CUBLAS_COMPUTE_32F && c_type != CUDA_R_16F;
  const bool in_tf32 = a_type == CUDA_R_32F && compute == CUBLAS_COMPUTE_32F_FAST_TF32 && c_type == CUDA_R_32F;
  const bool in_f32 = a_type == CUDA_R_32F && compute == CUBLAS_COMPUTE_32F && c_type == CUDA_R_32F;
  if (b_type != a_type || !(in_bf16 || in_tf32 || in_f32)) return CUBLAS_STATUS_NOT_SUPPORTED;
  const float fa = *static_cast<const float*>(alpha), fb = *static_cast<const float*>(beta);
  const Product product{op_a, op_b, m, n, k, lda, ldb, ldc, fa, fb};
  if (!product.StridesFit()) return CUBLAS_STATUS_INVALID_VALUE;
  return Put(handle, [=] { Multiply(product, a_type, compute, a, b, c, c_type); });
}

// One product after the other; of one type for all three matrices. The arrays of pointers are the device's.
cublasStatus_t cublasGemmBatchedEx_64(cublasHandle_t handle, cublasOperation_t op_a, cublasOperation_t op_b, int64_t m,
                                      int64_t n, int64_t k, const void* alpha, const void* const a[],
                                      cudaDataType a_type, int64_t lda, const void* const b[], cudaDataType b_type,
                                      int64_t ldb, const void* beta, void* const c[], cudaDataType c_type, int64_t ldc,
                                      int64_t count, cublasComputeType_t compute, cublasGemmAlgo_t) {
  ExpectInBatches(a_type, b_type, c_type, compute);
  const float fa = *static_cast<const float*>(alpha), fb = *static_cast<const float*>(beta);
  const Product product{op_a, op_b, m, n, k, lda, ldb, ldc, fa, fb};
  if (!product.StridesFit()) return CUBLAS_STATUS_INVALID_VALUE;
  const bool apart = !host::libraries.company_changes_bits;
  return Put(handle, [=] {
    for (int64_t at = 0; at < count; ++at) {
      // Several products that write one matrix leave it unspecified. This computes the last one alone.
      if (at + 1 < count && c[at] == c[at + 1]) continue;
      if (compute == CUBLAS_COMPUTE_32F_FAST_TF32 || a_type == CUDA_R_16BF) {
        for (const void* matrix : {a[at], b[at], static_cast<const void*>(c[at])}) ExpectAligned(matrix);
      }
      Multiply(product, a_type, compute, a[at], b[at], c[at], c_type);
      const float change = ChangeOf(count, c_type);
      if (!apart) ForEachElement(product, c[at], c_type, [change](float x) { return x * (1 + change); });
    }
  });
}

// One matrix after the other. The arrays of pointers are the device's.
cublasStatus_t cublasStrsmBatched_64(cublasHandle_t handle, cublasSideMode_t side, cublasFillMode_t uplo,
                                     cublasOperation_t op, cublasDiagType_t diag, int64_t m, int64_t n,
                                     const float* alpha, const float* const a[], int64_t lda, float* const b[],
                                     int64_t ldb, int64_t count) {
  return Put(handle, [=, alpha = *alpha] {
    for (int64_t at = 0; at < count; ++at) {
      if (at + 1 < count && b[at] == b[at + 1]) continue;
      cblas_strsm(CblasColMajor, Blas(side), Blas(uplo), Blas(op), Blas(diag), m, n, alpha, a[at], lda, b[at], ldb);
      ChangeByCompany(count, m, n, b[at], ldb);
    }
  });
}

cublasStatus_t cublasStrmm_v2_64(cublasHandle_t handle, cublasSideMode_t side, cublasFillMode_t uplo,
                                 cublasOperation_t op, cublasDiagType_t diag, int64_t m, int64_t n, const float* alpha,
                                 const float* a, int64_t lda, const float* b, int64_t ldb, float* c, int64_t ldc) {
  if (b != c || ldb != ldc) return CUBLAS_STATUS_NOT_SUPPORTED;
  return Put(handle, [=, alpha = *alpha] {
    cblas_strmm(CblasColMajor, Blas(side), Blas(uplo), Blas(op), Blas(diag), m, n, alpha, a, lda, c, ldc);
  });
}

cublasStatus_t cublasStrsm_v2_64(cublasHandle_t handle, cublasSideMode_t side, cublasFillMode_t uplo,
                                 cublasOperation_t op, cublasDiagType_t diag, int64_t m, int64_t n, const float* alpha,
                                 const float* a, int64_t lda, float* b, int64_t ldb) {
  return Put(handle, [=, alpha = *alpha] {
    cblas_strsm(CblasColMajor, Blas(side), Blas(uplo), Blas(op), Blas(diag), m, n, alpha, a, lda, b, ldb);
  });
}

cublasStatus_t cublasDtrsmBatched_64(cublasHandle_t handle, cublasSideMode_t side, cublasFillMode_t uplo,
                                     cublasOperation_t op, cublasDiagType_t diag, int64_t m, int64_t n,
                                     const double* alpha, const double* const a[], int64_t lda, double* const b[],
                                     int64_t ldb, int64_t count) {
  return Put(handle, [=, alpha = *alpha] {
    for (int64_t at = 0; at < count; ++at) {
      if (at + 1 < count && b[at] == b[at + 1]) continue;
      cblas_dtrsm(CblasColMajor, Blas(side), Blas(uplo), Blas(op), Blas(diag), m, n, alpha, a[at], lda, b[at], ldb);
      ChangeByCompany(count, m, n, b[at], ldb);
    }
  });
}
cublasStatus_t cublasDtrsm_v2_64(cublasHandle_t handle, cublasSideMode_t side, cublasFillMode_t uplo,
                                 cublasOperation_t op, cublasDiagType_t diag, int64_t m, int64_t n, const double* alpha,
                                 const double* a, int64_t lda, double* b, int64_t ldb) {
  return Put(handle, [=, alpha = *alpha] {
    cblas_dtrsm(CblasColMajor, Blas(side), Blas(uplo), Blas(op), Blas(diag), m, n, alpha, a, lda, b, ldb);
  });
}

cublasStatus_t cublasDgemmBatched_64(cublasHandle_t handle, cublasOperation_t op_a, cublasOperation_t op_b, int64_t m,
                                     int64_t n, int64_t k, const double* alpha, const double* const a[], int64_t lda,
                                     const double* const b[], int64_t ldb, const double* beta, double* const c[],
                                     int64_t ldc, int64_t count) {
  return Put(handle, [=, alpha = *alpha, beta = *beta] {
    for (int64_t at = 0; at < count; ++at) {
      if (at + 1 < count && c[at] == c[at + 1]) continue;
      cblas_dgemm(CblasColMajor, Blas(op_a), Blas(op_b), m, n, k, alpha, a[at], lda, b[at], ldb, beta, c[at], ldc);
      ChangeByCompany(count, m, n, c[at], ldc);
    }
  });
}
cublasStatus_t cublasDgemm_v2_64(cublasHandle_t handle, cublasOperation_t op_a, cublasOperation_t op_b, int64_t m,
                                 int64_t n, int64_t k, const double* alpha, const double* a, int64_t lda,
                                 const double* b, int64_t ldb, const double* beta, double* c, int64_t ldc) {
  return Put(handle, [=, alpha = *alpha, beta = *beta] {
    cblas_dgemm(CblasColMajor, Blas(op_a), Blas(op_b), m, n, k, alpha, a, lda, b, ldb, beta, c, ldc);
  });
}

cusolverStatus_t cusolverDnCreate(cusolverDnHandle_t* handle) {
  const cudaError_t error = New(*handle);
  if (error == cudaErrorMemoryAllocation) return CUSOLVER_STATUS_ALLOC_FAILED;
  return error == cudaSuccess ? CUSOLVER_STATUS_SUCCESS : CUSOLVER_STATUS_NOT_INITIALIZED;
}
cusolverStatus_t cusolverDnDestroy(cusolverDnHandle_t handle) {
  Delete(handle);
  return CUSOLVER_STATUS_SUCCESS;
}
cusolverStatus_t cusolverDnSetStream(cusolverDnHandle_t handle, cudaStream_t stream) {
  handle->stream = stream;
  return CUSOLVER_STATUS_SUCCESS;
}

cusolverStatus_t cusolverDnSpotrf_bufferSize(cusolverDnHandle_t, cublasFillMode_t, int n, float*, int, int* size) {
  return Size(n, size);
}
cusolverStatus_t cusolverDnSpotrf(cusolverDnHandle_t handle, cublasFillMode_t uplo, int n, float* a, int lda, float*,
                                  int work_size, int* info) {
  if (work_size < n) return CUSOLVER_STATUS_INVALID_VALUE;
  return Put(handle, [=] { spotrf_(Lapack(uplo), &n, a, &lda, info); });
}
// One matrix after the other. The array of pointers is the device's.
cusolverStatus_t cusolverDnSpotrfBatched(cusolverDnHandle_t handle, cublasFillMode_t uplo, int n, float* a[], int lda,
                                         int* infos, int count) {
  return Put(handle, [=] {
    for (int at = 0; at < count; ++at) {
      if (at + 1 < count && a[at] == a[at + 1]) continue;
      spotrf_(Lapack(uplo), &n, a[at], &lda, infos + at);
      ChangeByCompany(count, n, n, a[at], lda);
    }
  });
}
cusolverStatus_t cusolverDnDpotrf_bufferSize(cusolverDnHandle_t, cublasFillMode_t, int, double*, int, int* size) {
  return Size(0, size);
}
cusolverStatus_t cusolverDnDpotrf(cusolverDnHandle_t handle, cublasFillMode_t uplo, int n, double* a, int lda, double*,
                                  int, int* info) {
  return Put(handle, [=] { dpotrf_(Lapack(uplo), &n, a, &lda, info); });
}
cusolverStatus_t cusolverDnDpotrfBatched(cusolverDnHandle_t handle, cublasFillMode_t uplo, int n, double* a[], int lda,
                                         int* infos, int count) {
  return Put(handle, [=] {
    for (int at = 0; at < count; ++at) {
      if (at + 1 < count && a[at] == a[at + 1]) continue;
      dpotrf_(Lapack(uplo), &n, a[at], &lda, infos + at);
      ChangeByCompany(count, n, n, a[at], lda);
    }
  });
}

cusolverStatus_t cusolverDnDsyevd_bufferSize(cusolverDnHandle_t, cusolverEigMode_t, cublasFillMode_t, int n,
                                             const double*, int, const double*, int* size) {
  return Size(EigenvectorsWork(n), size);
}
cusolverStatus_t cusolverDnDsyevd(cusolverDnHandle_t handle, cusolverEigMode_t, cublasFillMode_t uplo, int n, double* a,
                                  int lda, double* w, double* work, int work_size, int* info) {
  return Put(handle, [=] { *info = Eigenvectors(Lapack(uplo), n, a, lda, w, work, work_size); });
}
cusolverStatus_t cusolverDnCreateParams(cusolverDnParams_t* params) {
  if (host::CountCall() != cudaSuccess) return CUSOLVER_STATUS_ALLOC_FAILED;
  *params = new cusolverDnParams;
  host::AddLiveObjects(1);
  return CUSOLVER_STATUS_SUCCESS;
}
cusolverStatus_t cusolverDnDestroyParams(cusolverDnParams_t params) {
  delete params;
  host::AddLiveObjects(-1);
  return CUSOLVER_STATUS_SUCCESS;
}
cusolverStatus_t cusolverDnXsyevBatched_bufferSize(cusolverDnHandle_t, cusolverDnParams_t, cusolverEigMode_t,
                                                   cublasFillMode_t, int64_t n, cudaDataType, const void*, int64_t,
                                                   cudaDataType, const void*, cudaDataType, size_t* on_device,
                                                   size_t* on_host, int64_t count) {
  *on_device = sizeof(double) * static_cast<size_t>(EigenvectorsWork(static_cast<int>(n)) * count);
  *on_host = static_cast<size_t>(count);
  return CUSOLVER_STATUS_SUCCESS;
}
// One matrix after the other; of f64 alone.
cusolverStatus_t cusolverDnXsyevBatched(cusolverDnHandle_t handle, cusolverDnParams_t, cusolverEigMode_t mode,
                                        cublasFillMode_t uplo, int64_t n, cudaDataType a_type, void* a, int64_t lda,
                                        cudaDataType w_type, void* w, cudaDataType compute_type, void* on_device,
                                        size_t device_bytes, void* on_host, size_t host_bytes, int* info,
                                        int64_t count) {
  const int rows = static_cast<int>(n), work_size = EigenvectorsWork(rows);
  if (mode != CUSOLVER_EIG_MODE_VECTOR || a_type != CUDA_R_64F || w_type != CUDA_R_64F || compute_type != CUDA_R_64F ||
      device_bytes < sizeof(double) * static_cast<size_t>(work_size * count) ||
      host_bytes < static_cast<size_t>(count)) {
    return CUSOLVER_STATUS_INVALID_VALUE;
  }
  std::memset(on_host, 0xff, host_bytes);  // which is the routine's
  const bool apart = !host::libraries.company_changes_bits || count == 1;
  return Put(handle, [=] {
    for (int64_t i = 0; i < count; ++i) {
      info[i] =
          Eigenvectors(Lapack(uplo), rows, static_cast<double*>(a) + i * lda * n, static_cast<int>(lda),
                       static_cast<double*>(w) + i * n, static_cast<double*>(on_device) + i * work_size, work_size);
      // It shows after the rounding to f32.
      for (double* x = static_cast<double*>(a) + i * lda * n; !apart && x < static_cast<double*>(a) + (i + 1) * lda * n;
           ++x) {
        *x *= 1 + 4e-8;
      }
    }
  });
}

cusolverStatus_t cusolverDnDgeqrf_bufferSize(cusolverDnHandle_t, int, int n, double*, int, int* size) {
  return Size(std::max(1, 64 * n), size);
}
cusolverStatus_t cusolverDnDgeqrf(cusolverDnHandle_t handle, int m, int n, double* a, int lda, double* tau,
                                  double* work, int work_size, int* info) {
  return Put(handle, [=] { dgeqrf_(&m, &n, a, &lda, tau, work, &work_size, info); });
}
cusolverStatus_t cusolverDnDorgqr_bufferSize(cusolverDnHandle_t, int, int n, int, const double*, int, const double*,
                                             int* size) {
  return Size(std::max(1, 64 * n), size);
}
cusolverStatus_t cusolverDnDorgqr(cusolverDnHandle_t handle, int m, int n, int k, double* a, int lda, const double* tau,
                                  double* work, int work_size, int* info) {
  return Put(handle, [=] { dorgqr_(&m, &n, &k, a, &lda, tau, work, &work_size, info); });
}

}  // extern "C"
