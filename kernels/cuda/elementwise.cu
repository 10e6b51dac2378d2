// SPDX-License-Identifier: Apache-2.0
#include "kernels/cuda/elementwise.h"
#include "kernels/cuda/global_memory.h"
#include "kernels/cuda/launch.h"

namespace precondor::cuda {
namespace {

constexpr unsigned kRowsOfBlock = 8;

// Number of elements that a thread loads before it stores the first.
constexpr int kHeld = 4;

// Sets out(i, j) = f(i, j) for all i, j. Neighbouring threads of a warp handle neighbours in a row.
template <int kTogether, typename Output, typename Function>
__global__ void __launch_bounds__(kWarp* kRowsOfBlock) ForEachKernel(Output out, Function f) {
  constexpr int64_t kColumns = kWarp * kTogether;
  for (int64_t i = int64_t{blockIdx.y} * kRowsOfBlock + threadIdx.y; i < out.rows;
       i += int64_t{gridDim.y} * kRowsOfBlock) {
    for (int64_t j0 = int64_t{blockIdx.x} * kColumns + threadIdx.x; j0 < out.cols;
         j0 += int64_t{gridDim.x} * kColumns) {
      decltype(f(i, j0)) values[kTogether] = {};
      if (j0 + (kTogether - 1) * int64_t{kWarp} < out.cols) {
#pragma unroll
        for (int c = 0; c < kTogether; ++c) values[c] = f(i, j0 + c * int64_t{kWarp});
      } else {
        for (int c = 0; c < kTogether && j0 + c * int64_t{kWarp} < out.cols; ++c) {
          values[c] = f(i, j0 + c * int64_t{kWarp});
        }
      }
#pragma unroll
      for (int c = 0; c < kTogether; ++c) {
        const int64_t j = j0 + c * int64_t{kWarp};
        if (j < out.cols) out.at(i, j) = values[c];
      }
    }
  }
}

template <int kTogether = kHeld, typename Output, typename Function>
cudaError_t ForEach(cudaStream_t stream, Output out, Function f) {
  constexpr int64_t kMaxGridY = 65535;
  const dim3 grid(static_cast<unsigned>(std::min<int64_t>(Blocks(out.cols, kWarp * kTogether), 1024)),
                  static_cast<unsigned>(std::min(Blocks(out.rows, kRowsOfBlock), kMaxGridY)));
  return Launch(stream, grid, dim3(kWarp, kRowsOfBlock), ForEachKernel<kTogether, Output, Function>, out, f);
}

__host__ __device__ constexpr int64_t PackedIndex(int64_t i, int64_t j) { return i * (i + 1) / 2 + j; }

// Returns the first 64 bits of Philox4x32-10, as kernels/base/random.cc computes them.
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
// The part of a matrix with several rows, and of a single row, that a block handles.
constexpr int kRowsOfPart = 32;
constexpr int kColumnsOfPart = 128;
constexpr int64_t kElementsOfPart = int64_t{kRowsOfPart} * kColumnsOfPart;

struct Extent {
  int64_t rows, cols;
};

// Returns the range of indices (i, j) over which the job runs.
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

// For a job of one kind, Has says whether it writes at (i, j), ValueAt computes the value, and Put stores it.
template <ElementwiseKind kKind>
__device__ __forceinline__ bool Has(int64_t i, int64_t j) {
  if (kKind == ElementwiseKind::kPackLower) return j <= i;
  return kKind != ElementwiseKind::kSymmetrize || j < i;  // the thread of the element below the diagonal writes both
}

template <ElementwiseKind kKind>
__device__ __forceinline__ float ValueAt(const ElementwiseJob& job, int64_t i, int64_t j) {
  const ConstMatrixView x(Global(job.x.data), job.x.rows, job.x.cols, job.x.stride);
  const ConstMatrixView y(Global(job.y.data), job.y.rows, job.y.cols, job.y.stride);
  if constexpr (kKind == ElementwiseKind::kAxpby) {
    const float from_x = job.alpha != 0.0 ? static_cast<float>(job.alpha) * x.at(i, j) : 0.0f;
    return job.beta != 0.0 ? fmaf(static_cast<float>(job.beta), Global(job.v.data)[i * job.v.stride + j], from_x)
                           : from_x;
  } else if constexpr (kKind == ElementwiseKind::kScaleRows) {
    return static_cast<float>(job.scales[i]) * x.at(i, j);
  } else if constexpr (kKind == ElementwiseKind::kScaleColumns) {
    return static_cast<float>(job.scales[j]) * x.at(i, j);
  } else if constexpr (kKind == ElementwiseKind::kScaleBothSides) {
    return static_cast<float>(job.scales[i] * job.scales[j] * x.at(i, j));
  } else if constexpr (kKind == ElementwiseKind::kAddDiagonal) {
    return static_cast<float>(y.at(j, j) + job.alpha);
  } else if constexpr (kKind == ElementwiseKind::kUnpackLower) {
    return x.data[j <= i ? PackedIndex(i, j) : PackedIndex(j, i)];
  } else if constexpr (kKind == ElementwiseKind::kPackRow) {
    return x.data[j];
  } else if constexpr (kKind == ElementwiseKind::kSymmetrize) {
    return 0.5f * y.at(i, j) + 0.5f * y.at(j, i);
  } else if constexpr (kKind == ElementwiseKind::kMultiply) {
    const float product = static_cast<float>(job.alpha) * x.at(i, j) * Global(job.v.data)[i * job.v.stride + j];
    return job.beta != 0.0 ? fmaf(static_cast<float>(job.beta), y.at(i, j), product) : product;
  } else if constexpr (kKind == ElementwiseKind::kDivideByRoot) {
    const float root = sqrtf(Global(job.v.data)[i * job.v.stride + j]);
    return static_cast<float>(job.alpha) * x.at(i, j) / (root + static_cast<float>(job.beta));
  } else if constexpr (kKind == ElementwiseKind::kDivideByOuter) {
    return static_cast<float>(job.alpha / (job.scales[i] * job.column_scales[j] + job.beta)) * x.at(i, j);
  } else if constexpr (kKind == ElementwiseKind::kGather) {
    return x.at(job.rows == nullptr ? i : job.rows[i], job.columns == nullptr ? j : job.columns[j]);
  } else {
    static_assert(kKind == ElementwiseKind::kPackLower);
    return x.at(i, j);
  }
}

template <ElementwiseKind kKind>
__device__ __forceinline__ void Put(const ElementwiseJob& job, int64_t i, int64_t j, float value) {
  const MatrixView y(Global(job.y.data), job.y.rows, job.y.cols, job.y.stride);
  if constexpr (kKind == ElementwiseKind::kAddDiagonal) {
    y.at(j, j) = value;
  } else if constexpr (kKind == ElementwiseKind::kPackLower) {
    y.data[PackedIndex(i, j)] = value;
  } else if constexpr (kKind == ElementwiseKind::kPackRow) {
    y.data[j <= job.row ? PackedIndex(job.row, j) : PackedIndex(j, job.row)] = value;
  } else {
    y.at(i, j) = value;
    if constexpr (kKind == ElementwiseKind::kSymmetrize) y.at(j, i) = value;
  }
}

// Handles columns j, j + step, ... of row i that are below `end`, kHeld at most.
template <ElementwiseKind kKind>
__device__ __forceinline__ void RunSome(const ElementwiseJob& job, int64_t i, int64_t j, int64_t step, int64_t end) {
  float values[kHeld];
#pragma unroll
  for (int c = 0; c < kHeld; ++c) {
    const int64_t column = j + c * step;
    values[c] = column < end && Has<kKind>(i, column) ? ValueAt<kKind>(job, i, column) : 0.0f;
  }
#pragma unroll
  for (int c = 0; c < kHeld; ++c) {
    const int64_t column = j + c * step;
    if (column < end && Has<kKind>(i, column)) Put<kKind>(job, i, column, values[c]);
  }
}

// Handles a part of a matrix or of a single row.
template <ElementwiseKind kKind>
__device__ __forceinline__ void RunPart(const ElementwiseJob& job, Extent extent, int64_t part) {
  if (extent.rows == 1) {
    const int64_t end = std::min(extent.cols, (part + 1) * kElementsOfPart);
    for (int64_t j = part * kElementsOfPart + threadIdx.x; j < end; j += kHeld * kThreads) {
      RunSome<kKind>(job, 0, j, kThreads, end);
    }
    return;
  }
  const int64_t across = Parts(extent.cols, kColumnsOfPart);
  const int64_t row = part / across * kRowsOfPart, column = part % across * kColumnsOfPart;
  const int64_t last_row = std::min(extent.rows, row + kRowsOfPart);
  for (int64_t i = row + threadIdx.x / kWarp; i < last_row; i += kRowsOfBlock) {
    RunSome<kKind>(job, i, column + threadIdx.x % kWarp, kWarp, extent.cols);
  }
}

// Handles a part of y = alpha x + beta v, which moves most of the bytes: a thread has the loads of four rows of four
// columns in flight.
__device__ __forceinline__ void RunAxpbyPart(const ElementwiseJob& job, Extent extent, int64_t part) {
  static_assert(kColumnsOfPart == kWarp * kFour && kRowsOfPart == kRowsOfBlock * kHeld);
  const int64_t across = Parts(extent.cols, kColumnsOfPart);
  const int64_t row = part / across * kRowsOfPart, column = part % across * kColumnsOfPart;
  const Vec4Position at = {static_cast<int>(threadIdx.x / kWarp), kRowsOfBlock,
                           static_cast<int>(threadIdx.x % kWarp) * kFour};
  const float alpha = static_cast<float>(job.alpha), beta = static_cast<float>(job.beta);
  Vec4<float> x[kHeld] = {}, v[kHeld];
#pragma unroll
  for (Vec4<float>& four : v) {
#pragma unroll
    for (float& element : four.at) element = -0.0f;  // what is not read adds nothing, not even the sign of a zero
  }
  if (job.alpha != 0.0) LoadVec4s(Vec4sOf<kRowsOfPart, kColumnsOfPart>(job.x, row, column, at), x);
  if (job.beta != 0.0) LoadVec4s(Vec4sOf<kRowsOfPart, kColumnsOfPart>(job.v, row, column, at), v);
#pragma unroll
  for (int r = 0; r < kHeld; ++r) {
#pragma unroll
    for (int c = 0; c < kFour; ++c) v[r].at[c] = fmaf(beta, v[r].at[c], alpha * x[r].at[c]);
  }
  StoreVec4s(v, Vec4sOf<kRowsOfPart, kColumnsOfPart>(job.y, row, column, at));
}

__device__ __forceinline__ void RunPart(const ElementwiseJob& job, int64_t part) {
  const Extent extent = ExtentOf(job);
  switch (job.kind) {
    case ElementwiseKind::kAxpby:
      return extent.rows == 1 ? RunPart<ElementwiseKind::kAxpby>(job, extent, part) : RunAxpbyPart(job, extent, part);
    case ElementwiseKind::kScaleRows:
      return RunPart<ElementwiseKind::kScaleRows>(job, extent, part);
    case ElementwiseKind::kScaleColumns:
      return RunPart<ElementwiseKind::kScaleColumns>(job, extent, part);
    case ElementwiseKind::kScaleBothSides:
      return RunPart<ElementwiseKind::kScaleBothSides>(job, extent, part);
    case ElementwiseKind::kAddDiagonal:
      return RunPart<ElementwiseKind::kAddDiagonal>(job, extent, part);
    case ElementwiseKind::kPackLower:
      return RunPart<ElementwiseKind::kPackLower>(job, extent, part);
    case ElementwiseKind::kUnpackLower:
      return RunPart<ElementwiseKind::kUnpackLower>(job, extent, part);
    case ElementwiseKind::kPackRow:
      return RunPart<ElementwiseKind::kPackRow>(job, extent, part);
    case ElementwiseKind::kSymmetrize:
      return RunPart<ElementwiseKind::kSymmetrize>(job, extent, part);
    case ElementwiseKind::kMultiply:
      return RunPart<ElementwiseKind::kMultiply>(job, extent, part);
    case ElementwiseKind::kDivideByRoot:
      return RunPart<ElementwiseKind::kDivideByRoot>(job, extent, part);
    case ElementwiseKind::kDivideByOuter:
      return RunPart<ElementwiseKind::kDivideByOuter>(job, extent, part);
    case ElementwiseKind::kGather:
      return RunPart<ElementwiseKind::kGather>(job, extent, part);
  }
}

template <typename Jobs>
__global__ void __launch_bounds__(kThreads, 4) ElementwiseKernel(Jobs jobs, int64_t blocks) {
  for (int64_t block = blockIdx.x; block < blocks; block += gridDim.x) {
    const ElementwiseJob job = jobs.Of(block);
    RunPart(job, block - job.first);
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

cudaError_t FillNormal(cudaStream_t stream, uint32_t key0, uint32_t key1, uint64_t nonce, MatrixView x) {
  const int64_t cols = x.cols;
  return ForEach<1>(stream, x, [=] __device__(int64_t i, int64_t j) {
    constexpr double kTwoPi = 6.283185307179586476925;
    const uint64_t number = static_cast<uint64_t>(i * cols + j);
    const uint64_t bits = PhiloxBits(key0, key1, nonce, number / 2);
    const double uniform = (static_cast<double>(bits >> 32) + 0.5) * 0x1p-32;
    const double angle = kTwoPi * 0x1p-32 * static_cast<double>(static_cast<uint32_t>(bits));
    const double radius = sqrt(-2.0 * log(uniform));
    return static_cast<float>(radius * (number % 2 == 0 ? cos(angle) : sin(angle)));
  });
}

cudaError_t WidenLower(cudaStream_t stream, ConstMatrixView a, double* out) {
  return ForEach(stream, BasicMatrixView<double>(out, a.rows, a.cols), [=] __device__(int64_t i, int64_t j) {
    return static_cast<double>(j <= i ? a.at(i, j) : a.at(j, i));
  });
}

cudaError_t Widen(cudaStream_t stream, ConstMatrixView a, double* out) {
  return ForEach(stream, BasicMatrixView<double>(out, a.rows, a.cols),
                 [=] __device__(int64_t i, int64_t j) { return static_cast<double>(a.at(i, j)); });
}

cudaError_t Narrow(cudaStream_t stream, const double* in, MatrixView out) {
  return ForEach(stream, out,
                 [=] __device__(int64_t i, int64_t j) { return static_cast<float>(in[i * out.cols + j]); });
}

cudaError_t NarrowWithSigns(cudaStream_t stream, const double* in, const double* signs, int64_t step, MatrixView out) {
  return ForEach(stream, out, [=] __device__(int64_t i, int64_t j) {
    return static_cast<float>(signs[i * step] < 0 ? -in[i * out.cols + j] : in[i * out.cols + j]);
  });
}

}  // namespace precondor::cuda
