// SPDX-License-Identifier: Apache-2.0
#include "kernels/cuda/global_memory.h"
#include "kernels/cuda/launch.h"
#include "kernels/cuda/reductions.h"

namespace precondor::cuda {
namespace {

constexpr unsigned kThreads = 256;
constexpr int64_t kRowsOfColumnPiece = 256;

// Returns the greater number, or NaN if one is NaN.
struct Greater {
  __device__ double operator()(double a, double b) const { return b > a || b != b ? b : a; }
};

// Number of elements that a thread loads before it waits for the first.
constexpr int kTogether = 8;

// Returns the offset of element `at` of x, counted row by row.
template <bool kContiguous>
__device__ __forceinline__ int64_t OffsetOf(ConstMatrixView x, int64_t at) {
  return kContiguous ? at : at / x.cols * x.stride + at % x.cols;
}

// Returns the result of value = combine(value, f(at)) for at = first, first + step, ... below size, in this order.
// value is 0 at first.
template <typename Function, typename Combine>
__device__ __forceinline__ double CombineStrided(int64_t first, int64_t step, int64_t size, Function f,
                                                 Combine combine) {
  double value = 0;
  for (int64_t begin = first; begin < size; begin += kTogether * step) {
    decltype(f(begin)) loaded[kTogether] = {};
#pragma unroll
    for (int u = 0; u < kTogether; ++u) {
      if (begin + u * step < size) loaded[u] = f(begin + u * step);
    }
#pragma unroll
    for (int u = 0; u < kTogether; ++u) {
      if (begin + u * step < size) value = combine(value, loaded[u]);
    }
  }
  return value;
}

// Sets partials[piece] to the combination of f(x_ij, i, j) over every pieces-th run of kThreads elements, from run
// `piece` on. `pieces` is the size of the grid.
template <bool kContiguous, typename Function, typename Combine>
__global__ void __launch_bounds__(kThreads)
    PartialsKernel(ConstMatrixView x, Function f, Combine combine, double* partials) {
  const auto load = [&](int64_t at) { return x.data[OffsetOf<kContiguous>(x, at)]; };
  const int64_t step = int64_t{gridDim.x} * kThreads;
  int64_t at = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  double value = CombineStrided(at, step, x.size(), load, [&](double before, float element) {
    const double next = combine(before, f(element, at / x.cols, at % x.cols));
    at += step;
    return next;
  });
  value = CombineBlock<kThreads>(value, combine);
  if (threadIdx.x == 0) partials[blockIdx.x] = value;
}

template <typename Combine>
__global__ void __launch_bounds__(kThreads)
    TotalKernel(int64_t count, Combine combine, const double* partials, double* out) {
  double value = 0;
  for (int64_t i = threadIdx.x; i < count; i += kThreads) value = combine(value, partials[i]);
  value = CombineBlock<kThreads>(value, combine);
  if (threadIdx.x == 0) *out = value;
}

template <typename Function, typename Combine>
cudaError_t Reduce(cudaStream_t stream, ConstMatrixView x, Function f, Combine combine, double* partials, double* out) {
  const int64_t pieces = ReductionPartials(x);
  const dim3 grid(static_cast<unsigned>(pieces)), block(kThreads);
  const cudaError_t error =
      x.contiguous() ? Launch(stream, grid, block, PartialsKernel<true, Function, Combine>, x, f, combine, partials)
                     : Launch(stream, grid, block, PartialsKernel<false, Function, Combine>, x, f, combine, partials);
  if (error != cudaSuccess) return error;
  return Launch(stream, dim3(1), dim3(kThreads), TotalKernel<Combine>, pieces, combine, partials, out);
}

// One warp handles a row.
__global__ void __launch_bounds__(kThreads)
    RowSquaredNormsKernel(const RowNormsJob* jobs, int count, int64_t rows, double* out) {
  constexpr int64_t kRows = kThreads / kWarp;
  const unsigned lane = threadIdx.x % kWarp;
  for (int64_t row = blockIdx.x * kRows + threadIdx.x / kWarp; row < rows; row += gridDim.x * kRows) {
    const RowNormsJob job = JobOf(jobs, count, row);
    const float* const x = job.x.row(row - job.first);
    const bool aligned = MovesByFours(job.x.data, job.x.stride, kFour);
    constexpr int kStep = kWarp * kFour, kFours = 4;
    double sum = 0;
    for (int64_t j = lane * kFour; j < job.x.cols; j += kStep * kFours) {
      Vec4<float> fours[kFours];
      LoadFoursOfRow(x, job.x.cols, j, kStep, aligned, fours);
#pragma unroll
      for (int i = 0; i < kFours; ++i) {
#pragma unroll
        for (int c = 0; c < kFour; ++c) sum += double{fours[i].at[c]} * fours[i].at[c];
      }
    }
    for (unsigned offset = kWarp / 2; offset > 0; offset /= 2) sum += __shfl_down_sync(0xffffffffu, sum, offset);
    if (lane == 0) out[row] = sum;
  }
}

struct Pair {
  float x, y;
};

// Returns the thread's part of the combination of f(x_ij, y_ij), in the order of CombineStrided.
template <bool kContiguous, typename Function, typename Combine>
__device__ __forceinline__ double PartOf(const DotJob& job, int64_t first, int64_t step, Function f, Combine combine) {
  const float *const x = Global(job.x.data), *const y = Global(job.y.data);
  return CombineStrided(
      first, step, job.x.size(),
      [&](int64_t at) {
        return Pair{x[OffsetOf<kContiguous>(job.x, at)], y[OffsetOf<kContiguous>(job.y, at)]};
      },
      [&](double before, Pair pair) { return combine(before, f(pair)); });
}

template <typename Function, typename Combine>
__global__ void __launch_bounds__(kThreads)
    DotPartialsKernel(const DotJob* jobs, int count, int64_t pieces, Function f, Combine combine, double* partials) {
  for (int64_t piece = blockIdx.x; piece < pieces; piece += gridDim.x) {
    const DotJob job = JobOf(jobs, count, piece);
    const int64_t first = (piece - job.first) * kThreads + threadIdx.x, step = ReductionPartials(job.x) * kThreads;
    const bool contiguous = job.x.contiguous() && job.y.contiguous();
    double value =
        contiguous ? PartOf<true>(job, first, step, f, combine) : PartOf<false>(job, first, step, f, combine);
    value = CombineBlock<kThreads>(value, combine);
    if (threadIdx.x == 0) partials[piece] = value;
  }
}

// One block handles a job.
template <typename Combine>
__global__ void __launch_bounds__(kThreads)
    DotTotalsKernel(const DotJob* jobs, Combine combine, const double* partials, double* out) {
  const DotJob job = jobs[blockIdx.x];
  const int64_t pieces = ReductionPartials(job.x);
  double value = 0;
  for (int64_t i = threadIdx.x; i < pieces; i += kThreads) value = combine(value, partials[job.first + i]);
  value = CombineBlock<kThreads>(value, combine);
  if (threadIdx.x == 0) out[blockIdx.x] = value;
}

template <typename Function, typename Combine>
cudaError_t Reduce(cudaStream_t stream, const DotJob* jobs, int count, int64_t pieces, Function f, Combine combine,
                   double* partials, double* out) {
  const dim3 grid(static_cast<unsigned>(Blocks(pieces, 1))), block(kThreads);
  const cudaError_t error =
      Launch(stream, grid, block, DotPartialsKernel<Function, Combine>, jobs, count, pieces, f, combine, partials);
  if (error != cudaSuccess) return error;
  return Launch(stream, dim3(static_cast<unsigned>(count)), block, DotTotalsKernel<Combine>, jobs, combine, partials,
                out);
}

__host__ __device__ constexpr int64_t ColumnPieces(ConstMatrixView x) {
  return x.rows <= kRowsOfColumnPiece ? 1 : (x.rows + kRowsOfColumnPiece - 1) / kRowsOfColumnPiece;
}
__host__ __device__ constexpr int64_t ColumnBlocks(ConstMatrixView x) { return (x.cols + kThreads - 1) / kThreads; }

// Sets partials[piece, j] for each kRowsOfColumnPiece rows, or out[j] if there is one piece. One thread handles a
// column.
__global__ void __launch_bounds__(kThreads) ColumnNormsKernel(ManyJobs<ColumnNormsJob> jobs, int64_t blocks) {
  for (int64_t block = blockIdx.x; block < blocks; block += gridDim.x) {
    const ColumnNormsJob job = jobs.Of(block);
    const int64_t across = ColumnBlocks(job.x), piece = (block - job.first) / across;
    const int64_t j = (block - job.first) % across * kThreads + threadIdx.x;
    if (j >= job.x.cols) continue;
    const int64_t begin = piece * kRowsOfColumnPiece;
    const int64_t end = begin + kRowsOfColumnPiece < job.x.rows ? begin + kRowsOfColumnPiece : job.x.rows;
    const float* const x = Global(job.x.data) + j;
    double sum = 0;
#pragma unroll 16
    for (int64_t i = begin; i < end; ++i) {
      const double value = x[i * job.x.stride];
      sum += value * value;
    }
    (ColumnPieces(job.x) > 1 ? job.partials[piece * job.x.cols + j] : job.out[j]) = sum;
  }
}

// blockIdx.y is the job's index.
__global__ void __launch_bounds__(kThreads) ColumnTotalsKernel(const ColumnNormsJob* jobs) {
  const ColumnNormsJob job = jobs[blockIdx.y];
  const int64_t pieces = ColumnPieces(job.x), cols = job.x.cols;
  if (pieces <= 1) return;
  for (int64_t j = int64_t{blockIdx.x} * kThreads + threadIdx.x; j < cols; j += int64_t{gridDim.x} * kThreads) {
    double sum = 0;
    for (int64_t piece = 0; piece < pieces; ++piece) sum += job.partials[piece * cols + j];
    job.out[j] = sum;
  }
}

__global__ void __launch_bounds__(kThreads) DiagonalKernel(ConstMatrixView a, double* out) {
  for (int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x; i < a.rows; i += int64_t{gridDim.x} * kThreads) {
    out[i] = a.at(i, i);
  }
}

dim3 Grid(int64_t items, int64_t items_of_block) { return dim3(static_cast<unsigned>(Blocks(items, items_of_block))); }

}  // namespace

cudaError_t Dots(cudaStream_t stream, const DotJob* jobs, int count, int64_t pieces, double* partials, double* out) {
  return Reduce(
      stream, jobs, count, pieces, [] __device__(Pair pair) { return double{pair.x} * pair.y; }, Add(), partials, out);
}

cudaError_t AbsoluteSums(cudaStream_t stream, const DotJob* jobs, int count, int64_t pieces, double* partials,
                         double* out) {
  return Reduce(
      stream, jobs, count, pieces, [] __device__(Pair pair) { return fabs(double{pair.x}); }, Add(), partials, out);
}

cudaError_t AbsoluteMaxima(cudaStream_t stream, const DotJob* jobs, int count, int64_t pieces, double* partials,
                           double* out) {
  return Reduce(
      stream, jobs, count, pieces, [] __device__(Pair pair) { return fabs(double{pair.x}); }, Greater(), partials, out);
}

cudaError_t CountNonFinite(cudaStream_t stream, ConstMatrixView x, bool lower, double* partials, double* out) {
  return Reduce(
      stream, x,
      [=] __device__(float value, int64_t i, int64_t j) { return isfinite(value) || (lower && j > i) ? 0.0 : 1.0; },
      Add(), partials, out);
}

cudaError_t RowSquaredNorms(cudaStream_t stream, const RowNormsJob* jobs, int count, int64_t rows, double* out) {
  return Launch(stream, Grid(rows, kThreads / kWarp), dim3(kThreads), RowSquaredNormsKernel, jobs, count, rows, out);
}

int64_t ColumnPartials(ConstMatrixView x) { return ColumnPieces(x) > 1 ? ColumnPieces(x) * x.cols : 0; }

int64_t ColumnNormsBlocks(ConstMatrixView x) { return ColumnPieces(x) * ColumnBlocks(x); }

cudaError_t ColumnSquaredNorms(cudaStream_t stream, const ColumnNormsJob* jobs, int count, int64_t blocks) {
  return LaunchJobs(stream, blocks, kThreads, ColumnNormsKernel, ManyJobs<ColumnNormsJob>{jobs, count});
}

cudaError_t ColumnSumPartials(cudaStream_t stream, const ColumnNormsJob* jobs, int count) {
  constexpr unsigned kBlocksOfJob = 64;
  return Launch(stream, dim3(kBlocksOfJob, static_cast<unsigned>(count)), dim3(kThreads), ColumnTotalsKernel, jobs);
}

cudaError_t Diagonal(cudaStream_t stream, ConstMatrixView a, double* out) {
  return Launch(stream, Grid(a.rows, kThreads), dim3(kThreads), DiagonalKernel, a, out);
}

}  // namespace precondor::cuda
