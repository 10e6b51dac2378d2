// SPDX-License-Identifier: Apache-2.0
#include "kernels/cuda/elementwise.h"
#include "kernels/cuda/launch.h"

namespace precondor::cuda {
namespace {

constexpr unsigned kRowsOfBlock = 8;

// f(i, j) for all i, j. Neighbours in a row are neighbours in a warp.
template <typename Function>
__global__ void __launch_bounds__(kWarp* kRowsOfBlock) ForEachKernel(int64_t rows, int64_t cols, Function f) {
  for (int64_t i = int64_t{blockIdx.y} * kRowsOfBlock + threadIdx.y; i < rows; i += int64_t{gridDim.y} * kRowsOfBlock) {
    for (int64_t j = int64_t{blockIdx.x} * kWarp + threadIdx.x; j < cols; j += int64_t{gridDim.x} * kWarp) f(i, j);
  }
}

template <typename Function>
cudaError_t ForEach(cudaStream_t stream, int64_t rows, int64_t cols, Function f) {
  constexpr int64_t kMaxGridY = 65535;
  const dim3 grid(static_cast<unsigned>(std::min<int64_t>(Blocks(cols, kWarp), 1024)),
                  static_cast<unsigned>(std::min(Blocks(rows, kRowsOfBlock), kMaxGridY)));
  return Launch(stream, grid, dim3(kWarp, kRowsOfBlock), ForEachKernel<Function>, rows, cols, f);
}

__host__ __device__ constexpr int64_t PackedIndex(int64_t i, int64_t j) { return i * (i + 1) / 2 + j; }

// The first 64 bits of Philox4x32-10, as kernels/base/random.cc computes them.
__device__ uint64_t PhiloxBits(uint32_t key0, uint32_t key1, uint64_t nonce, uint64_t counter) {
  uint32_t c0 = static_cast<uint32_t>(counter), c1 = static_cast<uint32_t>(counter >> 32);
  uint32_t c2 = static_cast<uint32_t>(nonce), c3 = static_cast<uint32_t>(nonce >> 32);
  for (int round = 0; round < 10; ++round) {
    const uint64_t p0 = uint64_t{0xD2511F53u} * c0, p1 = uint64_t{0xCD9E8D57u} * c2;
    const uint32_t next0 = static_cast<uint32_t>(p1 >> 32) ^ c1 ^ key0;
    const uint32_t next2 = static_cast<uint32_t>(p0 >> 32) ^ c3 ^ key1;
    c0 = next0;
    c1 = static_cast<uint32_t>(p1);
    c2 = next2;
    c3 = static_cast<uint32_t>(p0);
    key0 += 0x9E3779B9u;
    key1 += 0xBB67AE85u;
  }
  return (uint64_t{c1} << 32) | c0;
}

// --- operations that run together -----------------------------------------------------------------------------------

constexpr unsigned kThreads = kWarp * kRowsOfBlock;
// A block's part of a matrix, and of a single row.
constexpr int64_t kRowsOfPart = 32;
constexpr int64_t kColumnsOfPart = 128;
constexpr int64_t kElementsOfPart = kRowsOfPart * kColumnsOfPart;

struct Extent {
  int64_t rows, cols;
};

// Over which elements the job runs.
__host__ __device__ Extent ExtentOf(const ElementwiseJob& job) {
  switch (job.kind) {
    case ElementwiseKind::kAddDiagonal:
      return {1, job.y.rows};
    case ElementwiseKind::kPackLower:
    case ElementwiseKind::kPackRow:
      return {job.x.rows, job.x.cols};
    default:
      return {job.y.rows, job.y.cols};
  }
}

__host__ __device__ constexpr int64_t Parts(int64_t size, int64_t part) { return (size + part - 1) / part; }

__device__ __forceinline__ void Apply(const ElementwiseJob& job, int64_t i, int64_t j) {
  const ConstMatrixView x = job.x;
  const MatrixView y = job.y;
  switch (job.kind) {
    case ElementwiseKind::kAxpby: {
      const float from_x = job.alpha != 0.0 ? static_cast<float>(job.alpha) * x.at(i, j) : 0.0f;
      y.at(i, j) = job.beta != 0.0 ? fmaf(static_cast<float>(job.beta), y.at(i, j), from_x) : from_x;
      return;
    }
    case ElementwiseKind::kScaleRows:
      y.at(i, j) = static_cast<float>(job.scales[i]) * x.at(i, j);
      return;
    case ElementwiseKind::kScaleColumns:
      y.at(i, j) = static_cast<float>(job.scales[j]) * x.at(i, j);
      return;
    case ElementwiseKind::kScaleBothSides:
      y.at(i, j) = static_cast<float>(job.scales[i] * job.scales[j] * x.at(i, j));
      return;
    case ElementwiseKind::kAddDiagonal:
      y.at(j, j) = static_cast<float>(y.at(j, j) + job.alpha);
      return;
    case ElementwiseKind::kPackLower:
      if (j <= i) y.data[PackedIndex(i, j)] = x.at(i, j);
      return;
    case ElementwiseKind::kUnpackLower:
      y.at(i, j) = x.data[j <= i ? PackedIndex(i, j) : PackedIndex(j, i)];
      return;
    case ElementwiseKind::kPackRow:
      y.data[j <= job.row ? PackedIndex(job.row, j) : PackedIndex(j, job.row)] = x.data[j];
      return;
    case ElementwiseKind::kSymmetrize:  // the thread of the element below writes both
      if (j < i) y.at(i, j) = y.at(j, i) = 0.5f * y.at(i, j) + 0.5f * y.at(j, i);
      return;
  }
}

template <typename Jobs>
__global__ void __launch_bounds__(kThreads, 4) ElementwiseKernel(Jobs jobs, int64_t blocks) {
  for (int64_t block = blockIdx.x; block < blocks; block += gridDim.x) {
    const ElementwiseJob& job = jobs.Of(block);
    const Extent extent = ExtentOf(job);
    const int64_t part = block - job.first;
    if (extent.rows == 1) {
      const int64_t end = std::min(extent.cols, (part + 1) * kElementsOfPart);
      for (int64_t j = part * kElementsOfPart + threadIdx.x; j < end; j += kThreads) Apply(job, 0, j);
      continue;
    }
    const int64_t across = Parts(extent.cols, kColumnsOfPart);
    const int64_t row = part / across * kRowsOfPart, column = part % across * kColumnsOfPart;
    const int64_t last_row = std::min(extent.rows, row + kRowsOfPart),
                  last_column = std::min(extent.cols, column + kColumnsOfPart);
    for (int64_t i = row + threadIdx.x / kWarp; i < last_row; i += kRowsOfBlock) {
      for (int64_t j = column + threadIdx.x % kWarp; j < last_column; j += kWarp) Apply(job, i, j);
    }
  }
}

}  // namespace

int64_t ElementwiseBlocks(const ElementwiseJob& job) {
  const Extent extent = ExtentOf(job);
  return extent.rows == 1 ? Parts(extent.cols, kElementsOfPart)
                          : Parts(extent.rows, kRowsOfPart) * Parts(extent.cols, kColumnsOfPart);
}

cudaError_t Elementwise(cudaStream_t stream, const ElementwiseJob& job) {
  return LaunchJobs(stream, ElementwiseBlocks(job), kThreads, ElementwiseKernel<OneJob<ElementwiseJob>>,
                    OneJob<ElementwiseJob>{job});
}

cudaError_t Elementwise(cudaStream_t stream, const ElementwiseJob* jobs, int count, int64_t blocks) {
  return LaunchJobs(stream, blocks, kThreads, ElementwiseKernel<ManyJobs<ElementwiseJob>>,
                    ManyJobs<ElementwiseJob>{jobs, count});
}

cudaError_t MultiplyElements(cudaStream_t stream, double alpha, ConstMatrixView x, ConstMatrixView y, double beta,
                             MatrixView z) {
  const float fa = static_cast<float>(alpha), fb = static_cast<float>(beta);
  const bool reads_z = beta != 0.0;
  return ForEach(stream, z.rows, z.cols, [=] __device__(int64_t i, int64_t j) {
    const float product = fa * x.at(i, j) * y.at(i, j);
    z.at(i, j) = reads_z ? fmaf(fb, z.at(i, j), product) : product;
  });
}

cudaError_t DivideByRoot(cudaStream_t stream, double alpha, ConstMatrixView x, ConstMatrixView v, double epsilon,
                         MatrixView y) {
  const float fa = static_cast<float>(alpha), fe = static_cast<float>(epsilon);
  return ForEach(stream, y.rows, y.cols,
                 [=] __device__(int64_t i, int64_t j) { y.at(i, j) = fa * x.at(i, j) / (sqrtf(v.at(i, j)) + fe); });
}

cudaError_t DivideByOuter(cudaStream_t stream, double alpha, const double* rows, const double* columns, double shift,
                          ConstMatrixView x, MatrixView y) {
  return ForEach(stream, y.rows, y.cols, [=] __device__(int64_t i, int64_t j) {
    y.at(i, j) = static_cast<float>(alpha / (rows[i] * columns[j] + shift)) * x.at(i, j);
  });
}

cudaError_t Gather(cudaStream_t stream, const int64_t* rows, const int64_t* columns, ConstMatrixView x, MatrixView y) {
  return ForEach(stream, y.rows, y.cols, [=] __device__(int64_t i, int64_t j) {
    y.at(i, j) = x.at(rows == nullptr ? i : rows[i], columns == nullptr ? j : columns[j]);
  });
}

cudaError_t FillNormal(cudaStream_t stream, uint32_t key0, uint32_t key1, uint64_t nonce, MatrixView x) {
  const int64_t cols = x.cols;
  return ForEach(stream, x.rows, x.cols, [=] __device__(int64_t i, int64_t j) {
    constexpr double kTwoPi = 6.283185307179586476925;
    const uint64_t number = static_cast<uint64_t>(i * cols + j);
    const uint64_t bits = PhiloxBits(key0, key1, nonce, number / 2);
    const double uniform = (static_cast<double>(bits >> 32) + 0.5) * 0x1p-32;
    const double angle = kTwoPi * 0x1p-32 * static_cast<double>(static_cast<uint32_t>(bits));
    const double radius = sqrt(-2.0 * log(uniform));
    x.at(i, j) = static_cast<float>(radius * (number % 2 == 0 ? cos(angle) : sin(angle)));
  });
}

cudaError_t WidenLower(cudaStream_t stream, ConstMatrixView a, double* out) {
  return ForEach(stream, a.rows, a.cols,
                 [=] __device__(int64_t i, int64_t j) { out[i * a.cols + j] = j <= i ? a.at(i, j) : a.at(j, i); });
}

cudaError_t Widen(cudaStream_t stream, ConstMatrixView a, double* out) {
  return ForEach(stream, a.rows, a.cols, [=] __device__(int64_t i, int64_t j) { out[i * a.cols + j] = a.at(i, j); });
}

cudaError_t Narrow(cudaStream_t stream, const double* in, MatrixView out) {
  return ForEach(stream, out.rows, out.cols,
                 [=] __device__(int64_t i, int64_t j) { out.at(i, j) = static_cast<float>(in[i * out.cols + j]); });
}

cudaError_t NarrowWithSigns(cudaStream_t stream, const double* in, const double* signs, int64_t step, MatrixView out) {
  return ForEach(stream, out.rows, out.cols, [=] __device__(int64_t i, int64_t j) {
    out.at(i, j) = static_cast<float>(signs[i * step] < 0 ? -in[i * out.cols + j] : in[i * out.cols + j]);
  });
}

cudaError_t NarrowLower(cudaStream_t stream, const double* in, MatrixView out) {
  return ForEach(stream, out.rows, out.cols, [=] __device__(int64_t i, int64_t j) {
    out.at(i, j) = static_cast<float>(j <= i ? in[i * out.cols + j] : in[j * out.cols + i]);
  });
}

}  // namespace precondor::cuda
