// SPDX-License-Identifier: Apache-2.0
// Products on tensor cores. A block computes 64 x 128 elements, or 128 x 64 if the product has at most 64 columns. With
// more elements the registers would not suffice for two blocks a multiprocessor; with fewer a block would read operands
// more often. A block rounds its parts of both operands to bf16 on their way to shared memory, and its warps multiply
// them there. Sums are written as 64 x 64 tiles by product_tile.h.
#include <algorithm>
#include <cuda_bf16.h>
#include <mma.h>
#include <type_traits>

#include "kernels/cuda/launch.h"
#include "kernels/cuda/product_tile.h"

namespace precondor::cuda {
namespace {

namespace wmma = nvcuda::wmma;
using product::Finish;
using product::kAcross;
using product::kHeld;
using product::kSide;
using product::kThreads;
using product::LoadSlab;
using product::OutputTile;
using product::OutputTileOf;
using product::Squares;
using product::SumSquares;
using product::TilesAlong;
using product::WithLayout;

// Number of blocks that share a multiprocessor. For sm_100 the compiler needs more registers than two blocks leave.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1000
constexpr int kBlocks = 1;
#else
[[maybe_unused]] constexpr int kBlocks = 2;
#endif
constexpr int kDepth = product::kGranule;  // inner indices of a slab
constexpr int kFragment = 16;              // side of the matrices that a warp multiplies at once
constexpr int kLong = 2 * kSide;
constexpr int kWarps = static_cast<int>(kThreads / kWarp);
constexpr int kPadding = 8;  // keeps lines in different banks, and fragments aligned as required
constexpr int kSumStride = kSide + 4;

// The sizes of a block's part of c, and of a warp's part of that, kDown x kBeside fragments.
template <int kRowsOfTile, int kColumnsOfTile>
struct Shape {
  static constexpr int kRows = kRowsOfTile, kColumns = kColumnsOfTile;
  static constexpr int kDown = 2, kBeside = kRows * kColumns / (kWarps * kDown * kFragment * kFragment);
  static constexpr int kWarpRows = kDown * kFragment, kWarpColumns = kBeside * kFragment;
};
using Wide = Shape<kSide, kLong>;
using Tall = Shape<kLong, kSide>;

// Calls f with the job's shape, which depends on c alone.
template <typename Function>
__host__ __device__ __forceinline__ auto WithShape(const ProductJob& job, Function f) {
  return job.c.cols <= kSide ? f(Tall()) : f(Wide());
}

// Elements of the memory for a slab of both operands. Each operand has two planes, one after the other: the rounded
// elements, and the rounded remainders.
constexpr int PlaneElements(int lines) { return lines * (kDepth + kPadding); }
constexpr int kSlabElements = 2 * PlaneElements(kLong + kSide);
// While a block multiplies one slab, it writes the next one beside it. At the end the sums reuse this memory.
constexpr size_t kSharedBytes = 2 * kSlabElements * sizeof(__nv_bfloat16);
static_assert(kSide * kSumStride * sizeof(float) <= kSharedBytes);

// Four bf16 numbers as pairs, the form in which they are converted.
struct alignas(kFour * sizeof(__nv_bfloat16)) Pairs {
  __nv_bfloat162 at[kFour / 2];
};

// Describes how a thread moves its part of kLines lines x kDepth inner indices of an operand. kAlong: the rows of the
// operand, and of the slab, run along the inner dimension; otherwise the rows of both run across it.
template <int kLines, bool kAlong>
struct SlabLayout {
  static constexpr int kStride = (kAlong ? kDepth : kLines) + kPadding;  // of the slab's rows
  static constexpr int kFoursOfRow = (kAlong ? kDepth : kLines) / kFour;
  static constexpr int kStep = static_cast<int>(kThreads) / kFoursOfRow;
  static constexpr int kCount = kLines * kDepth / (static_cast<int>(kThreads) * kFour);

  // Returns the place of the thread's i-th four.
  __device__ static Vec4Position Here(int i) {
    const int thread = static_cast<int>(threadIdx.x);
    return {thread / kFoursOfRow + i * kStep, kStep, thread % kFoursOfRow * kFour};
  }
  // Returns the offset in a slab of the fragment of 16 lines from `line` on, at inner index k.
  __device__ static int FragmentAt(int line, int k) { return kAlong ? line * kStride + k : k * kStride + line; }

  __device__ static __forceinline__ void Store(const Vec4<float>& four, int i, bool in_two_terms,
                                               __nv_bfloat16* planes) {
    Pairs high, low;
#pragma unroll
    for (int c = 0; c < kFour; c += 2) {
      high.at[c / 2] = __floats2bfloat162_rn(four.at[c], four.at[c + 1]);
      low.at[c / 2] = __floats2bfloat162_rn(four.at[c] - __low2float(high.at[c / 2]),
                                            four.at[c + 1] - __high2float(high.at[c / 2]));
    }
    const int at = Here(i).row * kStride + Here(i).column;
    *reinterpret_cast<Pairs*>(planes + at) = high;
    if (in_two_terms) *reinterpret_cast<Pairs*>(planes + PlaneElements(kLines) + at) = low;
  }
};

// Reads an operand's slabs, one after another, from inner index k0 on; elements beyond its lines become zero. kByFours:
// all requested inner indices exist and fours of them are aligned. Then a slab is loaded while the previous one is in
// use.
template <int kLines, bool kAlong, bool kByFours>
class SlabReader {
 public:
  using Layout = SlabLayout<kLines, kAlong>;

  __device__ __forceinline__ SlabReader(const ConstMatrixView& x, int64_t line0, int64_t k0) {
    if constexpr (kByFours) {
      const Vec4Position here = Layout::Here(0);
      next_ = kAlong ? At(x.data, (line0 + here.row) * x.stride + k0 + here.column)
                     : At(x.data, (k0 + here.row) * x.stride + line0 + here.column);
      const int64_t left = kAlong ? x.rows - line0 - here.row : x.cols - line0 - here.column;
      lines_left_ = static_cast<int>(left < kLines ? left : kLines);
    }
  }
  // Loads the next slab into registers.
  __device__ __forceinline__ void Load(const ConstMatrixView& x) {
    if constexpr (kByFours) {
      const float* const from = Global(next_);
      const int64_t step = Layout::kStep * x.stride;
#pragma unroll
      for (int i = 0; i < Layout::kCount; ++i) {
        fours_[i] = Vec4<float>{};
        if ((kAlong ? i * Layout::kStep : 0) < lines_left_) {
          fours_[i] = *reinterpret_cast<const Vec4<float>*>(from + i * step);
        }
      }
      next_ = At(next_, kAlong ? int64_t{kDepth} : kDepth * x.stride);
    }
  }
  // Stores the loaded slab, which is the one at k0, to shared memory.
  __device__ __forceinline__ void Store(const ConstMatrixView& x, int64_t line0, int64_t k0, bool in_two_terms,
                                        __nv_bfloat16* planes) {
    if constexpr (kByFours) {
#pragma unroll
      for (int i = 0; i < Layout::kCount; ++i) Layout::Store(fours_[i], i, in_two_terms, planes);
    } else {  // one by one, to save registers
#pragma unroll 1
      for (int i = 0; i < Layout::kCount; ++i) {
        Vec4<float> four[1];
        LoadSlab<kLines, kDepth, kAlong>(x, line0, k0, Layout::Here(i), four);
        Layout::Store(four[0], i, in_two_terms, planes);
      }
    }
  }

 private:
  const float* next_ = nullptr;
  int lines_left_ = 0;
  Vec4<float> fours_[Layout::kCount];
};

// Returns whether whole slabs of x can be read by fours.
__device__ inline bool HasFours(const ConstMatrixView& x, bool along) {
  return MovesByFours(x.data, x.stride, along || x.cols % kFour == 0 ? kFour : 1);
}

// Fragments of a and b, by the layout of their slabs.
template <bool kAlong>
using Left = wmma::fragment<wmma::matrix_a, kFragment, kFragment, kFragment, __nv_bfloat16,
                            std::conditional_t<kAlong, wmma::row_major, wmma::col_major>>;
template <bool kAlong>
using Right = wmma::fragment<wmma::matrix_b, kFragment, kFragment, kFragment, __nv_bfloat16,
                             std::conditional_t<kAlong, wmma::col_major, wmma::row_major>>;
using Sums = wmma::fragment<wmma::accumulator, kFragment, kFragment, kFragment, float>;

// wmma::load_matrix_sync would read bf16 through generic addresses, which costs more than shared ones.
#ifdef __CUDA_ARCH__
#define PRECONDOR_LOAD_FRAGMENT(OPERAND, LAYOUT, TO, FROM, STRIDE)                                               \
  static_assert(sizeof((TO).x) == 4 * sizeof(unsigned));                                                         \
  auto* const to = reinterpret_cast<unsigned*>((TO).x);                                                          \
  asm volatile("wmma.load." OPERAND ".sync.aligned." LAYOUT ".m16n16k16.shared.bf16 {%0, %1, %2, %3}, [%4], %5;" \
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])                                              \
               : "r"(static_cast<unsigned>(__cvta_generic_to_shared(FROM))), "r"(STRIDE)                         \
               : "memory")
#else
#define PRECONDOR_LOAD_FRAGMENT(OPERAND, LAYOUT, TO, FROM, STRIDE) wmma::load_matrix_sync(TO, FROM, STRIDE)
#endif
template <int kStride>
__device__ __forceinline__ void LoadFragment(Left<true>& left, const __nv_bfloat16* from) {
  PRECONDOR_LOAD_FRAGMENT("a", "row", left, from, kStride);
}
template <int kStride>
__device__ __forceinline__ void LoadFragment(Left<false>& left, const __nv_bfloat16* from) {
  PRECONDOR_LOAD_FRAGMENT("a", "col", left, from, kStride);
}
template <int kStride>
__device__ __forceinline__ void LoadFragment(Right<true>& right, const __nv_bfloat16* from) {
  PRECONDOR_LOAD_FRAGMENT("b", "col", right, from, kStride);
}
template <int kStride>
__device__ __forceinline__ void LoadFragment(Right<false>& right, const __nv_bfloat16* from) {
  PRECONDOR_LOAD_FRAGMENT("b", "row", right, from, kStride);
}
#undef PRECONDOR_LOAD_FRAGMENT

// The offset of a warp's elements in those of its block.
template <typename ShapeOfBlock>
struct WarpPlace {
  static constexpr int kAcrossBlock = ShapeOfBlock::kColumns / ShapeOfBlock::kWarpColumns;
  __device__ static int Warp() { return static_cast<int>(threadIdx.x / kWarp); }
  __device__ static int Row() { return Warp() / kAcrossBlock * ShapeOfBlock::kWarpRows; }
  __device__ static int Column() { return Warp() % kAcrossBlock * ShapeOfBlock::kWarpColumns; }
};

// Adds the warp's part of the product of a slab to `sums`.
template <typename ShapeOfBlock, bool kAlongA, bool kAlongB>
__device__ __forceinline__ void MultiplySlab(const __nv_bfloat16* a, const __nv_bfloat16* b, bool in_two_terms,
                                             Sums (&sums)[ShapeOfBlock::kDown][ShapeOfBlock::kBeside]) {
  using A = SlabLayout<ShapeOfBlock::kRows, kAlongA>;
  using B = SlabLayout<ShapeOfBlock::kColumns, kAlongB>;
  using Warp = WarpPlace<ShapeOfBlock>;
#pragma unroll
  for (int k = 0; k < kDepth; k += kFragment) {
    Left<kAlongA> high[ShapeOfBlock::kDown], low[ShapeOfBlock::kDown];
#pragma unroll
    for (int i = 0; i < ShapeOfBlock::kDown; ++i) {
      const __nv_bfloat16* const from = a + A::FragmentAt(Warp::Row() + i * kFragment, k);
      LoadFragment<A::kStride>(high[i], from);
      if (in_two_terms) LoadFragment<A::kStride>(low[i], from + PlaneElements(ShapeOfBlock::kRows));
    }
#pragma unroll
    for (int j = 0; j < ShapeOfBlock::kBeside; ++j) {
      const __nv_bfloat16* const from = b + B::FragmentAt(Warp::Column() + j * kFragment, k);
      Right<kAlongB> right;
      LoadFragment<B::kStride>(right, from);
#pragma unroll
      for (int i = 0; i < ShapeOfBlock::kDown; ++i) {
        wmma::mma_sync(sums[i][j], high[i], right, sums[i][j]);
        if (in_two_terms) wmma::mma_sync(sums[i][j], low[i], right, sums[i][j]);
      }
      if (!in_two_terms) continue;
      LoadFragment<B::kStride>(right, from + PlaneElements(ShapeOfBlock::kColumns));
#pragma unroll
      for (int i = 0; i < ShapeOfBlock::kDown; ++i) wmma::mma_sync(sums[i][j], high[i], right, sums[i][j]);
    }
  }
}

// Adds the warp's part of the block's elements of op(a) op(b) to `sums`, over `count` slabs from k0 on. While the block
// multiplies a slab, its loads of the next one are in flight. A warp that has finished writes its part of the next slab
// to the other half of the memory, while other warps still read the current one: `odd` selects the half.
template <typename ShapeOfBlock, bool kAlongA, bool kAlongB, bool kByFours>
__device__ __forceinline__ void Multiply(const ProductJob& job, const OutputTile& place, int64_t k0, int count,
                                         __nv_bfloat16* slabs, int odd,
                                         Sums (&sums)[ShapeOfBlock::kDown][ShapeOfBlock::kBeside]) {
  constexpr int kPlanesOfA = 2 * PlaneElements(ShapeOfBlock::kRows);
  if (count <= 0) return;
  const bool in_two_terms = job.in_two_terms;
  SlabReader<ShapeOfBlock::kRows, kAlongA, kByFours> a(job.a, place.row0, k0);
  SlabReader<ShapeOfBlock::kColumns, kAlongB, kByFours> b(job.b, place.column0, k0);
  a.Load(job.a);
  b.Load(job.b);
  for (; count > 0; --count, k0 += kDepth, odd ^= 1) {
    __nv_bfloat16* const slab = slabs + odd * kSlabElements;
    a.Store(job.a, place.row0, k0, in_two_terms, slab);
    b.Store(job.b, place.column0, k0, in_two_terms, slab + kPlanesOfA);
    __syncthreads();  // waits until the slab is complete and no thread reads the other one
    if (count > 1) {
      a.Load(job.a);
      b.Load(job.b);
    }
    MultiplySlab<ShapeOfBlock, kAlongA, kAlongB>(slab, slab + kPlanesOfA, in_two_terms, sums);
  }
}

// Prefetches the block's part of the source, which Write reads at the end, to the L2 cache.
template <typename ShapeOfBlock>
__device__ __forceinline__ void Fetch(const ProductJob& job, const OutputTile& place) {
#ifdef __CUDA_ARCH__
  constexpr int kLine = 32, kAcrossTile = ShapeOfBlock::kColumns / kLine;  // elements of a line of the cache
  static_assert(ShapeOfBlock::kRows * kAcrossTile == kThreads);
  const int thread = static_cast<int>(threadIdx.x);
  const int64_t row = place.row0 + thread / kAcrossTile, column = place.column0 + thread % kAcrossTile * kLine;
  if (job.beta == 0.0f || row >= job.source.rows || column >= job.source.cols) return;
  asm volatile("prefetch.global.L2 [%0];" ::"l"(Global(job.source.data) + row * job.source.stride + column));
#endif
}

// Writes the warps' sums, one tile of 64 x 64 elements after another, and adds to `squares`.
template <typename ShapeOfBlock>
__device__ __forceinline__ void Write(const ProductJob& job, const OutputTile& place, float* memory,
                                      Sums (&sums)[ShapeOfBlock::kDown][ShapeOfBlock::kBeside], Squares& squares) {
  using Warp = WarpPlace<ShapeOfBlock>;
  const int thread = static_cast<int>(threadIdx.x);
  const unsigned across = TilesAlong(job.c.cols, kSide);
  for (int row = 0; row < ShapeOfBlock::kRows; row += kSide) {
    for (int column = 0; column < ShapeOfBlock::kColumns; column += kSide) {
      OutputTile tile = place;
      tile.row0 += row;
      tile.column0 += column;
      if (tile.row0 >= job.c.rows || tile.column0 >= job.c.cols) continue;
      tile.tile = static_cast<unsigned>(tile.row0 / kSide) * across + static_cast<unsigned>(tile.column0 / kSide);
      __syncthreads();  // waits until no thread reads the slabs or the previous tile
      if (Warp::Row() / kSide * kSide == row && Warp::Column() / kSide * kSide == column) {
#pragma unroll
        for (int i = 0; i < ShapeOfBlock::kDown; ++i) {
#pragma unroll
          for (int j = 0; j < ShapeOfBlock::kBeside; ++j) {
            float* const to = memory + (Warp::Row() - row + i * kFragment) * kSumStride + Warp::Column() - column;
            wmma::store_matrix_sync(to + j * kFragment, sums[i][j], kSumStride, wmma::mem_row_major);
          }
        }
      }
      __syncthreads();
      float held[kHeld][kHeld];
#pragma unroll
      for (int i = 0; i < kHeld; ++i) {
        const float* const from = memory + (thread / kAcross * kHeld + i) * kSumStride + thread % kAcross * kHeld;
        const Vec4<float> four = *reinterpret_cast<const Vec4<float>*>(from);
#pragma unroll
        for (int j = 0; j < kHeld; ++j) held[i][j] = four.at[j];
      }
      Finish<true>(job, tile, held, squares);
    }
  }
}

// Returns the number of blocks of each part of a product.
template <typename ShapeOfBlock>
__host__ __device__ constexpr unsigned BlocksOfPart(const ProductJob& job, ShapeOfBlock) {
  return TilesAlong(job.c.rows, ShapeOfBlock::kRows) * TilesAlong(job.c.cols, ShapeOfBlock::kColumns);
}

__global__ void __launch_bounds__(kThreads, kBlocks) TensorProductKernel(ManyJobs<ProductJob> jobs, int64_t blocks) {
  __shared__ OutputTile place;  // shared, to save registers
  auto* const slabs = static_cast<__nv_bfloat16*>(DynamicShared());
  const Share share = ShareOf(blocks);
  for (unsigned block = share.begin; block < share.end; ++block) {
    const ProductJob& job = jobs.InShared(share, block);
    WithShape(job, [&](auto shape) {
      using ShapeOfBlock = decltype(shape);
      __syncthreads();  // waits until no thread reads the previous place or sums
      if (threadIdx.x == 0) place = OutputTileOf<ShapeOfBlock::kRows, ShapeOfBlock::kColumns>(job, block - job.first);
      __syncthreads();
      Fetch<ShapeOfBlock>(job, place);
      Sums sums[ShapeOfBlock::kDown][ShapeOfBlock::kBeside];
      for (auto& row : sums) {
        for (Sums& part : row) wmma::fill_fragment(part, 0.0f);
      }
      const bool by_fours = HasFours(job.a, !job.transpose_a) && HasFours(job.b, job.transpose_b);
      const int inner = static_cast<int>(place.end - place.begin), whole = by_fours ? inner / kDepth : 0;
      WithLayout(job, [&](auto along_a, auto along_b) {
        constexpr bool kAlongA = decltype(along_a)::value, kAlongB = decltype(along_b)::value;
        Multiply<ShapeOfBlock, kAlongA, kAlongB, true>(job, place, place.begin, whole, slabs, 0, sums);
        const int rest = (inner + kDepth - 1) / kDepth - whole;
        Multiply<ShapeOfBlock, kAlongA, kAlongB, false>(job, place, place.begin + whole * kDepth, rest, slabs,
                                                        whole % 2, sums);
      });
      Squares squares;
      Write<ShapeOfBlock>(job, place, reinterpret_cast<float*>(slabs), sums, squares);
      if (job.squares != nullptr) SumSquares(job, place.tile, BlocksOfPart(job, shape), squares);
    });
  }
}

}  // namespace

int64_t TensorProductBlocks(const ProductJob& job) {
  return WithShape(job, [&](auto shape) { return int64_t{BlocksOfPart(job, shape)} * job.parts; });
}

cudaError_t TensorProducts(cudaStream_t stream, const ProductJob* jobs, int count, int64_t blocks) {
  const cudaError_t error =
      cudaFuncSetAttribute(reinterpret_cast<const void*>(TensorProductKernel),
                           cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(kSharedBytes));
  if (error != cudaSuccess) return error;
  const dim3 grid(static_cast<unsigned>(std::min(blocks, kMaxBlocks)));
  return LaunchWithShared(stream, grid, dim3(kThreads), kSharedBytes, TensorProductKernel,
                          ManyJobs<ProductJob>{jobs, count}, blocks);
}

}  // namespace precondor::cuda
