// SPDX-License-Identifier: Apache-2.0
#include "kernels/cuda/global_memory.h"
#include "kernels/cuda/launch.h"
#include "kernels/cuda/spd_inverses.h"

namespace precondor::cuda {
namespace {

// A block has 16 x 16 threads. Each holds 4 x 4 elements, 16 apart, of the block's 64 x 64.
constexpr int kThreads = 256;
constexpr int kAcross = 16;
constexpr int kHeld = 4;
constexpr int kSide = kAcross * kHeld;
constexpr int kPanel = 8;              // number of columns that are swept at once
constexpr size_t kStaticBytes = 1024;  // at most, of shared memory: Pivot and what the runtime uses

__host__ __device__ constexpr int64_t Packed(int64_t i, int64_t j) { return i * (i + 1) / 2 + j; }
__device__ int Row(int r) { return static_cast<int>(threadIdx.x) / kAcross + kAcross * r; }
__device__ int Column(int c) { return static_cast<int>(threadIdx.x) % kAcross + kAcross * c; }

// Bytes of two panels. A panel holds kPanel columns, each as a row of n elements; the second one holds them multiplied
// by the pivot's inverse.
constexpr size_t PanelBytes(int64_t n) { return 2 * kPanel * n * sizeof(double); }
constexpr size_t SharedBytes(int64_t n) { return PanelBytes(n) + SpdInverseWork(n) * sizeof(double); }

// The panel's block on the diagonal, later its inverse.
struct Pivot {
  double at[kPanel][kPanel];
  int info;  // info of the matrix, see SpdInverses
};

// Calls f(row0, column0) for each 64 x 64 block on and below the diagonal.
template <typename Function>
__device__ __forceinline__ void ForEachBlock(int n, Function f) {
  for (int row0 = 0; row0 < n; row0 += kSide) {
    for (int column0 = 0; column0 <= row0; column0 += kSide) f(row0, column0);
  }
}

// Sets `a` to the packed lower triangle of the matrix to invert, in f64. Returns false in all threads if an element is
// not finite.
__device__ __forceinline__ bool Widen(const SpdInverseJob& job, double* a, Pivot& pivot) {
  const int n = static_cast<int>(job.x.rows);
  const float* const from = Global(job.a.data);
  if (threadIdx.x == 0) pivot.info = 0;
  __syncthreads();
  bool finite = true;
  ForEachBlock(n, [&](int row0, int column0) {
    float values[kHeld][kHeld];
#pragma unroll
    for (int r = 0; r < kHeld; ++r) {
#pragma unroll
      for (int c = 0; c < kHeld; ++c) {
        const int i = row0 + Row(r), j = column0 + Column(c);
        const int64_t at = job.roots == nullptr ? i * job.a.stride + j : Packed(i, j);
        values[r][c] = i < n && j <= i ? from[at] : 0.0f;
      }
    }
#pragma unroll
    for (int r = 0; r < kHeld; ++r) {
#pragma unroll
      for (int c = 0; c < kHeld; ++c) {
        const int i = row0 + Row(r), j = column0 + Column(c);
        if (i >= n || j > i) continue;
        double value = values[r][c];
        if (job.roots != nullptr) value = (i == j ? 1.0 : 0.0) + job.roots[i] * job.roots[j] * value;
        finite = finite && isfinite(value);
        a[Packed(i, j)] = value;
      }
    }
  });
  if (!finite) pivot.info = -1;
  __syncthreads();
  return pivot.info == 0;
}

// Copies columns [k0, k0 + kPanel) of the symmetric matrix to `panel` and their block on the diagonal to `pivot`.
// Beyond the matrix, panel has zeros and pivot the identity.
__device__ __forceinline__ void CopyPanel(int n, int k0, const double* a, double* panel, Pivot& pivot) {
  for (int at = static_cast<int>(threadIdx.x); at < kPanel * n; at += kThreads) {
    const int p = at / n, i = at % n, k = k0 + p;
    const double value = k >= n ? 0.0 : i >= k ? a[Packed(i, k)] : a[Packed(k, i)];
    panel[p * n + i] = value;
    if (i >= k0 && i < k0 + kPanel) pivot.at[i - k0][p] = value;
  }
  for (int at = static_cast<int>(threadIdx.x); at < kPanel * kPanel; at += kThreads) {
    const int p = at / kPanel, q = at % kPanel;
    if (k0 + p >= n) pivot.at[p][q] = p == q ? 1.0 : 0.0;
  }
  __syncthreads();
}

// Inverts the pivot in place by Gauss-Jordan steps, whose pivots are the squares of those of Cholesky's decomposition.
// Returns in all threads 0, or the number, from 1, of the first pivot that is not positive.
__device__ __forceinline__ int InvertPivot(Pivot& pivot) {
  constexpr int kElements = kPanel * kPanel / static_cast<int>(kWarp);
  if (threadIdx.x < kWarp) {
    int info = 0;
    for (int s = 0; s < kPanel && info == 0; ++s) {
      const double diagonal = pivot.at[s][s];
      if (!(diagonal > 0)) info = s + 1;
      double next[kElements];
      for (int e = 0; e < kElements; ++e) {
        const int p = (static_cast<int>(threadIdx.x) + e * static_cast<int>(kWarp)) / kPanel,
                  q = static_cast<int>(threadIdx.x) % kPanel;
        const double factor = (p == s ? 1.0 : -pivot.at[p][s]) / diagonal;
        next[e] = (p == s ? 0.0 : q == s ? 0.0 : pivot.at[p][q]) + factor * (q == s ? 1.0 : pivot.at[s][q]);
      }
      __syncwarp();
      for (int e = 0; e < kElements; ++e) {
        const int p = (static_cast<int>(threadIdx.x) + e * static_cast<int>(kWarp)) / kPanel,
                  q = static_cast<int>(threadIdx.x) % kPanel;
        pivot.at[p][q] = next[e];
      }
      __syncwarp();
    }
    if (threadIdx.x == 0) pivot.info = info;
  }
  __syncthreads();
  return pivot.info;
}

// Sets `scaled` to the panel times the pivot's inverse.
__device__ __forceinline__ void ScalePanel(int n, const double* panel, const Pivot& pivot, double* scaled) {
  for (int at = static_cast<int>(threadIdx.x); at < kPanel * n; at += kThreads) {
    const int p = at / n, i = at % n;
    double sum = 0;
    for (int q = 0; q < kPanel; ++q) sum += panel[q * n + i] * pivot.at[q][p];
    scaled[p * n + i] = sum;
  }
  __syncthreads();
}

// Completes the sweep over columns [k0, k0 + kPanel). These columns become `scaled`, their block on the diagonal
// becomes minus the pivot's inverse, and scaled times panel' is subtracted from all others.
__device__ __forceinline__ void UpdateRest(int n, int k0, const double* panel, const double* scaled, const Pivot& pivot,
                                           double* a) {
  ForEachBlock(n, [&](int row0, int column0) {
    double sums[kHeld][kHeld] = {};
    for (int p = 0; p < kPanel; ++p) {
      double down[kHeld], across[kHeld];
#pragma unroll
      for (int r = 0; r < kHeld; ++r) down[r] = scaled[p * n + std::min(row0 + Row(r), n - 1)];
#pragma unroll
      for (int c = 0; c < kHeld; ++c) across[c] = panel[p * n + std::min(column0 + Column(c), n - 1)];
#pragma unroll
      for (int r = 0; r < kHeld; ++r) {
#pragma unroll
        for (int c = 0; c < kHeld; ++c) sums[r][c] = fma(down[r], across[c], sums[r][c]);
      }
    }
#pragma unroll
    for (int r = 0; r < kHeld; ++r) {
#pragma unroll
      for (int c = 0; c < kHeld; ++c) {
        const int i = row0 + Row(r), j = column0 + Column(c);
        if (i >= n || j > i) continue;
        const bool in_row = i >= k0 && i < k0 + kPanel, in_column = j >= k0 && j < k0 + kPanel;
        double& element = a[Packed(i, j)];
        if (in_row && in_column) {
          element = -pivot.at[i - k0][j - k0];
        } else if (in_column) {
          element = scaled[(j - k0) * n + i];
        } else if (in_row) {
          element = scaled[(i - k0) * n + j];
        } else {
          element -= sums[r][c];
        }
      }
    }
  });
  __syncthreads();
}

// Sets a = -a^-1, packed, by the sweep operator (Goodnight 1979) over panels of columns. Returns in all threads 0, or
// the number, from 1, of a leading minor that is not positive.
__device__ __forceinline__ int Sweep(int n, double* a, double* panel, Pivot& pivot) {
  double* const scaled = panel + kPanel * n;
  for (int k0 = 0; k0 < n; k0 += kPanel) {
    CopyPanel(n, k0, a, panel, pivot);
    const int info = InvertPivot(pivot);
    if (info != 0) return k0 + info;
    ScalePanel(n, panel, pivot, scaled);
    UpdateRest(n, k0, panel, scaled, pivot, a);
  }
  return 0;
}

// Sets both triangles of x, row by row, from the packed -a^-1, and `packed` if it is not null.
__device__ __forceinline__ void Narrow(const SpdInverseJob& job, const double* a) {
  const int n = static_cast<int>(job.x.rows);
  float* const x = Global(job.x.data);
  for (int i = static_cast<int>(threadIdx.x / kWarp); i < n; i += kThreads / static_cast<int>(kWarp)) {
    const double root = job.roots == nullptr ? 1.0 : job.roots[i];
    for (int j = static_cast<int>(threadIdx.x % kWarp); j < n; j += static_cast<int>(kWarp)) {
      double value = -a[j <= i ? Packed(i, j) : Packed(j, i)];
      if (job.roots != nullptr) value *= root * job.roots[j];
      x[i * job.x.stride + j] = static_cast<float>(value);
      if (job.packed != nullptr && j <= i) Global(job.packed)[Packed(i, j)] = static_cast<float>(value);
    }
  }
}

__device__ __forceinline__ int Invert(const SpdInverseJob& job, double* a, double* panel, Pivot& pivot) {
  if (!Widen(job, a, pivot)) return -1;
  const int info = Sweep(static_cast<int>(job.x.rows), a, panel, pivot);
  if (info == 0) Narrow(job, a);
  return info;
}

__global__ void __launch_bounds__(kThreads, 2)
    SpdInversesKernel(const SpdInverseJob* jobs, size_t shared_bytes, int* infos) {
  __shared__ Pivot pivot;
  const SpdInverseJob job = jobs[blockIdx.x];
  double* const panel = static_cast<double*>(DynamicShared());
  const int info = SharedBytes(job.x.rows) <= shared_bytes ? Invert(job, panel + 2 * kPanel * job.x.rows, panel, pivot)
                                                           : Invert(job, Global(job.work), panel, pivot);
  if (threadIdx.x == 0) infos[blockIdx.x] = info;
}

}  // namespace

cudaError_t SpdInverses(cudaStream_t stream, const SpdInverseJob* jobs, int count, int64_t most_rows, int* infos) {
  int device = 0, most_bytes = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error != cudaSuccess) return error;
  error = cudaDeviceGetAttribute(&most_bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
  if (error != cudaSuccess) return error;
  // Always requests the maximum, because another thread may be about to launch with more shared memory than this one.
  const size_t allowed = static_cast<size_t>(most_bytes) - kStaticBytes;
  error = cudaFuncSetAttribute(reinterpret_cast<const void*>(SpdInversesKernel),
                               cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(allowed));
  if (error != cudaSuccess) return error;
  const size_t shared_bytes = std::min(SharedBytes(most_rows), allowed);
  return LaunchWithShared(stream, dim3(static_cast<unsigned>(count)), dim3(kThreads), shared_bytes, SpdInversesKernel,
                          jobs, shared_bytes, infos);
}

}  // namespace precondor::cuda
