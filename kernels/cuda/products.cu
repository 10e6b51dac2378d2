// SPDX-License-Identifier: Apache-2.0
#include <cstdint>
#include <type_traits>

#include "kernels/cuda/global_memory.h"
#include "kernels/cuda/launch.h"
#include "kernels/cuda/products.h"

namespace precondor::cuda {
namespace {

// A block has 16 x 16 threads. Each thread computes 4 x 4 of the block's 64 x 64 elements.
constexpr unsigned kThreads = 256;
constexpr int kAcross = 16;
constexpr int kHeld = 4;
constexpr int kSide = kAcross * kHeld;
[[maybe_unused]] constexpr int kBlocks = 4;  // number of blocks that share a multiprocessor
constexpr int kDepth = 32;                   // inner indices of a slab
constexpr int kFours = kSide * kDepth / (static_cast<int>(kThreads) * kFour);

__host__ __device__ constexpr unsigned TilesAlong(int64_t size) {
  return static_cast<unsigned>((size + kSide - 1) / kSide);
}

// The tile of c that a block computes begins here.
struct OutputTile {
  int64_t row0, column0;
};

// Loads the thread's fours of a slab of an operand: kSide lines from line0 on x kDepth inner indices from k0 on. If
// kAlong, the rows of x run along the inner dimension and are the lines; otherwise the columns of x are the lines.
// Elements outside x become zero.
template <bool kAlong>
__device__ __forceinline__ void LoadSlab(const ConstMatrixView& x, int64_t line0, int64_t k0, Vec4Position at,
                                         Vec4<float> (&fours)[kFours]) {
  if constexpr (kAlong) {
    LoadVec4s(Vec4sOf<kSide, kDepth>(x, line0, k0, at), fours);
  } else {
    LoadVec4s(Vec4sOf<kDepth, kSide>(x, k0, line0, at), fours);
  }
}

// Calls f with two constants, std::true_type or std::false_type: whether the rows of a, and those of b, run along the
// inner dimension. The loops of each of the four cases are compiled separately, which takes fewer registers.
template <typename Function>
__device__ __forceinline__ void WithLayout(const ProductJob& job, Function f) {
  if (!job.transpose_a) {
    job.transpose_b ? f(std::true_type(), std::true_type()) : f(std::true_type(), std::false_type());
  } else {
    job.transpose_b ? f(std::false_type(), std::true_type()) : f(std::false_type(), std::false_type());
  }
}

// A slab of an operand, inner index first. The padding keeps columns in different banks, and rows aligned for what a
// thread reads at once.
struct alignas(sizeof(Vec4<float>)) Slab {
  float at[kDepth][kSide + kHeld];
};

// Returns the fours of an operand that a thread copies to the slab. kAlong: the operand's rows run along the inner
// dimension. In both cases neighbours in a warp are neighbours in memory.
template <bool kAlong>
__device__ __forceinline__ Vec4Position PlaceInSlab() {
  const int thread = static_cast<int>(threadIdx.x), across = (kAlong ? kDepth : kSide) / kFour;
  return {thread / across, static_cast<int>(kThreads) / across, thread % across * kFour};
}

template <bool kAlong>
__device__ __forceinline__ void Store(const Vec4<float> (&fours)[kFours], Slab& slab) {
  const Vec4Position place = PlaceInSlab<kAlong>();
#pragma unroll
  for (int i = 0; i < kFours; ++i) {
    const int row = place.row + i * place.step;
    if constexpr (kAlong) {
#pragma unroll
      for (int c = 0; c < kFour; ++c) slab.at[place.column + c][row] = fours[i].at[c];
    } else {
      *reinterpret_cast<Vec4<float>*>(&slab.at[row][place.column]) = fours[i];
    }
  }
}

// Sets `sums` to the thread's elements of op(a) op(b), slab by slab along the inner dimension. While a block multiplies
// a slab of each operand, its loads of the next two are in flight.
template <bool kAlongA, bool kAlongB>
__device__ __forceinline__ void Multiply(const ProductJob& job, const OutputTile& place, Slab& a, Slab& b,
                                         float (&sums)[kHeld][kHeld]) {
  const int row_of_thread = static_cast<int>(threadIdx.x) / kAcross * kHeld;
  const int column_of_thread = static_cast<int>(threadIdx.x) % kAcross * kHeld;
  const int inner = static_cast<int>(job.inner);
  Vec4<float> of_a[kFours], of_b[kFours];
  LoadSlab<kAlongA>(job.a, place.row0, 0, PlaceInSlab<kAlongA>(), of_a);
  LoadSlab<kAlongB>(job.b, place.column0, 0, PlaceInSlab<kAlongB>(), of_b);
  for (int k0 = 0; k0 < inner; k0 += kDepth) {
    __syncthreads();  // waits until no thread reads the previous slabs
    Store<kAlongA>(of_a, a);
    Store<kAlongB>(of_b, b);
    __syncthreads();
    if (k0 + kDepth < inner) {
      LoadSlab<kAlongA>(job.a, place.row0, k0 + kDepth, PlaceInSlab<kAlongA>(), of_a);
      LoadSlab<kAlongB>(job.b, place.column0, k0 + kDepth, PlaceInSlab<kAlongB>(), of_b);
    }
#pragma unroll 8
    for (int k = 0; k < kDepth; ++k) {
      const Vec4<float> left = *reinterpret_cast<const Vec4<float>*>(&a.at[k][row_of_thread]);
      const Vec4<float> right = *reinterpret_cast<const Vec4<float>*>(&b.at[k][column_of_thread]);
      for (int i = 0; i < kHeld; ++i) {
        for (int j = 0; j < kHeld; ++j) sums[i][j] = fmaf(left.at[i], right.at[j], sums[i][j]);
      }
    }
  }
}

// Computes and stores the thread's elements of c from `sums`, those of op(a) op(b).
__device__ __forceinline__ void Finish(const ProductJob& job, const OutputTile& place,
                                       const float (&sums)[kHeld][kHeld]) {
  const int thread = static_cast<int>(threadIdx.x);
  const Vec4Position at = {thread / kAcross * kHeld, 1, thread % kAcross * kHeld};
  Vec4<float> c[kHeld] = {};
  if (job.beta != 0.0f) {
    LoadVec4s(Vec4sOf<kSide, kSide>(ConstMatrixView(job.c), place.row0, place.column0, at), c);
  }
#pragma unroll
  for (int i = 0; i < kHeld; ++i) {
#pragma unroll
    for (int j = 0; j < kHeld; ++j) {
      const float product = job.alpha * sums[i][j];
      c[i].at[j] = job.beta != 0.0f ? fmaf(job.beta, c[i].at[j], product) : product;
    }
  }
  StoreVec4s(c, Vec4sOf<kSide, kSide>(job.c, place.row0, place.column0, at));
}

template <typename Jobs>
__global__ void __launch_bounds__(kThreads, kBlocks) ProductKernel(Jobs jobs, int64_t blocks) {
  __shared__ Slab slabs[2];
  __shared__ OutputTile place;  // shared, to save registers
  __shared__ Share share;
  Slab &a = slabs[0], &b = slabs[1];
  if (threadIdx.x == 0) share = ShareOf(blocks);
  __syncthreads();
  for (unsigned block = share.begin; block < share.end; ++block) {
    const ProductJob& job = jobs.InShared(share, block);
    __syncthreads();  // waits until no thread reads the previous place
    if (threadIdx.x == 0) {
      const unsigned tile = block - static_cast<unsigned>(job.first), across = TilesAlong(job.c.cols);
      place = {int64_t{tile / across} * kSide, int64_t{tile % across} * kSide};
    }
    __syncthreads();
    float sums[kHeld][kHeld] = {};
    WithLayout(job, [&](auto along_a, auto along_b) {
      Multiply<decltype(along_a)::value, decltype(along_b)::value>(job, place, a, b, sums);
    });
    Finish(job, place, sums);
  }
}

}  // namespace

int64_t ProductBlocks(const ProductJob& job) { return int64_t{TilesAlong(job.c.rows)} * TilesAlong(job.c.cols); }

cudaError_t Product(cudaStream_t stream, const ProductJob& job) {
  return LaunchJobs(stream, ProductBlocks(job), kThreads, ProductKernel<OneJob<ProductJob>>, OneJob<ProductJob>{job});
}

cudaError_t Products(cudaStream_t stream, const ProductJob* jobs, int count, int64_t blocks) {
  return LaunchJobs(stream, blocks, kThreads, ProductKernel<ManyJobs<ProductJob>>, ManyJobs<ProductJob>{jobs, count});
}

}  // namespace precondor::cuda
