// SPDX-License-Identifier: Apache-2.0
#include "kernels/cuda/global_memory.h"
#include "kernels/cuda/launch.h"
#include "kernels/cuda/matrix_passes.h"

namespace precondor::cuda {
namespace {

// Passes over matrices in parts of 32 x 128 elements, one for each block, and sums over them. The parts of a sum, and
// their order, depend on the matrix' shape alone.
constexpr unsigned kThreadsOfPart = 256;
constexpr int kRowsOfPart = 32;
constexpr int kColumnsOfPart = 128;
constexpr int kHeldOfPart = kRowsOfPart / static_cast<int>(kThreadsOfPart / kWarp);  // number of rows of a thread
static_assert(kColumnsOfPart == kWarp * kFour);

__host__ __device__ constexpr int64_t PartsAcross(int64_t cols) { return (cols + kColumnsOfPart - 1) / kColumnsOfPart; }
__host__ __device__ constexpr int64_t PartsOf(int64_t rows, int64_t cols) {
  return (rows + kRowsOfPart - 1) / kRowsOfPart * PartsAcross(cols);
}

// The part of a matrix that a block handles. A warp handles every eighth row of it, and a thread four neighbouring
// columns of each.
struct MatrixPart {
  int64_t row, column;

  __device__ MatrixPart(int64_t cols, int64_t part)
      : row(part / PartsAcross(cols) * kRowsOfPart), column(part % PartsAcross(cols) * kColumnsOfPart) {}
  __device__ static Vec4Position OfThread() {
    return {static_cast<int>(threadIdx.x / kWarp), kThreadsOfPart / kWarp,
            static_cast<int>(threadIdx.x % kWarp) * kFour};
  }
  template <typename T>
  __device__ Vec4s<T> Of(const BasicMatrixView<T>& x) const {
    return Vec4sOf<kRowsOfPart, kColumnsOfPart>(x, row, column, OfThread());
  }
};

// Returns the sum of `count` numbers that other blocks have written, in thread 0.
__device__ double TotalOfParts(const double* partials, int64_t count) {
  double sum = 0;
  for (int64_t i = threadIdx.x; i < count; i += kThreadsOfPart) sum += __ldcg(partials + i);
  return CombineBlock<kThreadsOfPart>(sum, Add());
}

// Adds up kSums numbers of all threads of all blocks of a job: the last block sets totals[i] to the sum of all sums[i].
// `partials` [kSums, parts].
template <int kSums>
__device__ void AddParts(const double (&sums)[kSums], int64_t part, int64_t parts, double* partials, unsigned* arrived,
                         double* totals) {
#pragma unroll
  for (int i = 0; i < kSums; ++i) {
    const double sum = CombineBlock<kThreadsOfPart>(sums[i], Add());
    if (threadIdx.x == 0) partials[i * parts + part] = sum;
  }
  if (!IsLastBlockByFirstThread(arrived, static_cast<unsigned>(parts))) return;
  for (int i = 0; i < kSums; ++i) {
    const double total = TotalOfParts(partials + i * parts, parts);
    if (threadIdx.x == 0) totals[i] = total;
  }
}

__device__ double Wide(float x) { return x; }
__device__ double Wide(__nv_bfloat16 x) { return __bfloat162float(x); }
__device__ void Set(float& to, double value) { to = static_cast<float>(value); }
__device__ void Set(__nv_bfloat16& to, double value) { to = __float2bfloat16_rn(static_cast<float>(value)); }

template <typename From, typename To>
__device__ double FactorOf(const ScaledCopyJob<From, To>& job) {
  if (job.norm == nullptr) return job.factor;
  return *job.norm == 0 ? 0 : job.factor / (sqrt(*job.norm) + job.epsilon);
}

template <typename From, typename To>
__global__ void __launch_bounds__(kThreadsOfPart)
    ScaledCopyKernel(ManyJobs<ScaledCopyJob<From, To>> jobs, int64_t blocks) {
  for (int64_t block = blockIdx.x; block < blocks; block += gridDim.x) {
    const ScaledCopyJob<From, To> job = jobs.Of(block);
    const MatrixPart part(job.to.cols, block - job.first);
    Vec4<From> values[kHeldOfPart];
    LoadVec4s(part.Of(job.from), values);
    const double factor = FactorOf(job);
    const Vec4Position at = MatrixPart::OfThread();
    const int64_t below = part.row + at.row - (part.column + at.column);  // of the thread's first element
    Vec4<To> copies[kHeldOfPart];
    double sums[1] = {};
#pragma unroll
    for (int i = 0; i < kHeldOfPart; ++i) {
#pragma unroll
      for (int c = 0; c < kFour; ++c) {
        double value = factor * Wide(values[i].at[c]);
        if (below + i * at.step == c) value += job.shift;
        Set(copies[i].at[c], value);
        sums[0] += value * value;
      }
    }
    StoreVec4s(copies, part.Of(job.to));
    if (job.square.totals == nullptr) continue;
    AddParts(sums, block - job.first, PartsOf(job.to.rows, job.to.cols), job.square.partials, job.square.arrived,
             job.square.totals);
  }
}

// values = alpha d + beta values; elements that do not exist are zeros and stay so.
__device__ void AddTo(Vec4<float> (&values)[kHeldOfPart], float alpha, const Vec4<float> (&d)[kHeldOfPart],
                      float beta) {
#pragma unroll
  for (int i = 0; i < kHeldOfPart; ++i) {
#pragma unroll
    for (int c = 0; c < kFour; ++c) values[i].at[c] = fmaf(beta, values[i].at[c], alpha * d[i].at[c]);
  }
}

__device__ double SquareOf(const Vec4<float> (&values)[kHeldOfPart]) {
  double sum = 0;
#pragma unroll
  for (int i = 0; i < kHeldOfPart; ++i) {
#pragma unroll
    for (int c = 0; c < kFour; ++c) sum += double{values[i].at[c]} * values[i].at[c];
  }
  return sum;
}

__global__ void __launch_bounds__(kThreadsOfPart) MomentumKernel(ManyJobs<MomentumJob> jobs, int64_t blocks) {
  for (int64_t block = blockIdx.x; block < blocks; block += gridDim.x) {
    const MomentumJob job = jobs.Of(block);
    const MatrixPart part(job.d.cols, block - job.first);
    Vec4<float> d[kHeldOfPart], values[kHeldOfPart];
    LoadVec4s(part.Of(job.d), d);
    double sums[2] = {};
    if (job.momentum.data != nullptr) {
      LoadVec4s(part.Of(job.momentum), values);
      AddTo(values, job.alpha, d, job.beta);
      StoreVec4s(values, part.Of(job.next));
      if (job.lookahead.data != nullptr) {
        AddTo(values, 1.0f, d, job.beta);
        StoreVec4s(values, part.Of(job.lookahead));
      }
      sums[1] = SquareOf(values);
    }
    sums[0] = SquareOf(d);
    if (job.momentum.data == nullptr) sums[1] = sums[0];
    AddParts(sums, block - job.first, PartsOf(job.d.rows, job.d.cols), job.squares.partials, job.squares.arrived,
             job.squares.totals);
  }
}

}  // namespace

int64_t ScaledCopyBlocks(int64_t rows, int64_t cols) { return PartsOf(rows, cols); }

template <typename From, typename To>
cudaError_t ScaledCopies(cudaStream_t stream, const ScaledCopyJob<From, To>* jobs, int count, int64_t blocks) {
  return LaunchJobs(stream, blocks, kThreadsOfPart, ScaledCopyKernel<From, To>,
                    ManyJobs<ScaledCopyJob<From, To>>{jobs, count});
}
template cudaError_t ScaledCopies(cudaStream_t, const ScaledCopyJob<float, float>*, int, int64_t);
template cudaError_t ScaledCopies(cudaStream_t, const ScaledCopyJob<float, __nv_bfloat16>*, int, int64_t);
template cudaError_t ScaledCopies(cudaStream_t, const ScaledCopyJob<__nv_bfloat16, __nv_bfloat16>*, int, int64_t);
template cudaError_t ScaledCopies(cudaStream_t, const ScaledCopyJob<__nv_bfloat16, float>*, int, int64_t);

cudaError_t AddMomentum(cudaStream_t stream, const MomentumJob* jobs, int count, int64_t blocks) {
  return LaunchJobs(stream, blocks, kThreadsOfPart, MomentumKernel, ManyJobs<MomentumJob>{jobs, count});
}

}  // namespace precondor::cuda
