// SPDX-License-Identifier: Apache-2.0
#include "kernels/cuda/block_reduce.h"
#include "kernels/cuda/launch.h"
#include "kernels/cuda/reductions.h"

namespace precondor::cuda {
namespace {

constexpr unsigned kThreads = 256;
constexpr int64_t kRowsOfColumnPiece = 256;

// NaN wins.
struct Greater {
  __device__ double operator()(double a, double b) const { return b > a || b != b ? b : a; }
};

// partials[piece] of f(i, j) over every pieces-th run of kThreads elements, from run `piece` on.
template <typename Function, typename Combine>
__global__ void __launch_bounds__(kThreads)
    PartialsKernel(int64_t rows, int64_t cols, Function f, Combine combine, double* partials) {
  const int64_t size = rows * cols;
  double value = 0;
  for (int64_t at = int64_t{blockIdx.x} * kThreads + threadIdx.x; at < size; at += int64_t{gridDim.x} * kThreads) {
    value = combine(value, f(at / cols, at % cols));
  }
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
  const cudaError_t error = Launch(stream, dim3(static_cast<unsigned>(pieces)), dim3(kThreads),
                                   PartialsKernel<Function, Combine>, x.rows, x.cols, f, combine, partials);
  if (error != cudaSuccess) return error;
  return Launch(stream, dim3(1), dim3(kThreads), TotalKernel<Combine>, pieces, combine, partials, out);
}

// One warp a row.
__global__ void __launch_bounds__(kThreads)
    RowSquaredNormsKernel(const RowNormsJob* jobs, int count, int64_t rows, double* out) {
  constexpr int64_t kRows = kThreads / kWarp;
  const unsigned lane = threadIdx.x % kWarp;
  for (int64_t row = blockIdx.x * kRows + threadIdx.x / kWarp; row < rows; row += gridDim.x * kRows) {
    const RowNormsJob job = JobOf(jobs, count, row);
    const float* const x = job.x.row(row - job.first);
    double sum = 0;
    for (int64_t j = lane; j < job.x.cols; j += kWarp) sum += double{x[j]} * x[j];
    for (unsigned offset = kWarp / 2; offset > 0; offset /= 2) sum += __shfl_down_sync(0xffffffffu, sum, offset);
    if (lane == 0) out[row] = sum;
  }
}

__global__ void __launch_bounds__(kThreads)
    DotPartialsKernel(const DotJob* jobs, int count, int64_t pieces, double* partials) {
  for (int64_t piece = blockIdx.x; piece < pieces; piece += gridDim.x) {
    const DotJob job = JobOf(jobs, count, piece);
    const int64_t size = job.x.size(), cols = job.x.cols, step = ReductionPartials(job.x) * kThreads;
    double value = 0;
    for (int64_t at = (piece - job.first) * kThreads + threadIdx.x; at < size; at += step) {
      value += double{job.x.at(at / cols, at % cols)} * job.y.at(at / cols, at % cols);
    }
    value = CombineBlock<kThreads>(value, Add());
    if (threadIdx.x == 0) partials[piece] = value;
  }
}

// One block a job.
__global__ void __launch_bounds__(kThreads) DotTotalsKernel(const DotJob* jobs, const double* partials, double* out) {
  const DotJob job = jobs[blockIdx.x];
  const int64_t pieces = ReductionPartials(job.x);
  double value = 0;
  for (int64_t i = threadIdx.x; i < pieces; i += kThreads) value += partials[job.first + i];
  value = CombineBlock<kThreads>(value, Add());
  if (threadIdx.x == 0) out[blockIdx.x] = value;
}

__host__ __device__ constexpr int64_t ColumnPieces(ConstMatrixView x) {
  return x.rows <= kRowsOfColumnPiece ? 1 : (x.rows + kRowsOfColumnPiece - 1) / kRowsOfColumnPiece;
}
__host__ __device__ constexpr int64_t ColumnBlocks(ConstMatrixView x) { return (x.cols + kThreads - 1) / kThreads; }

// partials[piece, j] over kRowsOfColumnPiece rows, or out[j] over all; one thread a column.
__global__ void __launch_bounds__(kThreads) ColumnNormsKernel(ManyJobs<ColumnNormsJob> jobs, int64_t blocks) {
  for (int64_t block = blockIdx.x; block < blocks; block += gridDim.x) {
    const ColumnNormsJob job = jobs.Of(block);
    const int64_t across = ColumnBlocks(job.x), piece = (block - job.first) / across;
    const int64_t j = (block - job.first) % across * kThreads + threadIdx.x;
    if (j >= job.x.cols) continue;
    const int64_t begin = piece * kRowsOfColumnPiece;
    const int64_t end = begin + kRowsOfColumnPiece < job.x.rows ? begin + kRowsOfColumnPiece : job.x.rows;
    double sum = 0;
    for (int64_t i = begin; i < end; ++i) sum += double{job.x.at(i, j)} * job.x.at(i, j);
    (ColumnPieces(job.x) > 1 ? job.partials[piece * job.x.cols + j] : job.out[j]) = sum;
  }
}

// A block's y is its job.
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
  const cudaError_t error =
      Launch(stream, Grid(pieces, 1), dim3(kThreads), DotPartialsKernel, jobs, count, pieces, partials);
  if (error != cudaSuccess) return error;
  return Launch(stream, dim3(static_cast<unsigned>(count)), dim3(kThreads), DotTotalsKernel, jobs, partials, out);
}

cudaError_t AbsoluteSum(cudaStream_t stream, ConstMatrixView x, double* partials, double* out) {
  return Reduce(
      stream, x, [=] __device__(int64_t i, int64_t j) { return fabs(double{x.at(i, j)}); }, Add(), partials, out);
}

cudaError_t AbsoluteMaximum(cudaStream_t stream, ConstMatrixView x, double* partials, double* out) {
  return Reduce(
      stream, x, [=] __device__(int64_t i, int64_t j) { return fabs(double{x.at(i, j)}); }, Greater(), partials, out);
}

cudaError_t CountNonFinite(cudaStream_t stream, ConstMatrixView x, bool lower, double* partials, double* out) {
  return Reduce(
      stream, x, [=] __device__(int64_t i, int64_t j) { return (lower && j > i) || isfinite(x.at(i, j)) ? 0.0 : 1.0; },
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
