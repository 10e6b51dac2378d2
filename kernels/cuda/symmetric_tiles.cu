// SPDX-License-Identifier: Apache-2.0
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "kernels/cuda/global_memory.h"
#include "kernels/cuda/launch.h"
#include "kernels/cuda/symmetric_tiles.h"

namespace precondor::cuda {
namespace {

// A block has 16 x 16 threads. Each holds four rows, 16 apart, of four neighbouring columns.
constexpr unsigned kThreads = 256;
constexpr int kSide = static_cast<int>(kTileSide);
constexpr int kAcross = 16;
constexpr int kHeld = 4;
constexpr int kTermsAtOnce = 16;
constexpr int kVectorsAtOnce = 4;
constexpr int kWarps = kThreads / kWarp;

struct SymmetricTile {
  int64_t row = 0;     // I
  int64_t column = 0;  // J <= I
};

// Returns the place of a tile. Tiles are numbered by tile row: tile (I, J) is number I (I + 1) / 2 + J.
__device__ SymmetricTile SymmetricTileOf(int64_t tile) {
  int64_t row = static_cast<int64_t>((sqrt(8.0 * static_cast<double>(tile) + 1.0) - 1.0) / 2.0);
  while (row * (row + 1) / 2 > tile) --row;
  while ((row + 1) * (row + 2) / 2 <= tile) ++row;
  return {row, tile - row * (row + 1) / 2};
}

struct Held {
  float at[kHeld][kHeld];
};

// The thread's rows and first column in a tile.
__device__ int HeldRow(int r) { return static_cast<int>(threadIdx.x) / kAcross + kAcross * r; }
__device__ int HeldColumn() { return static_cast<int>(threadIdx.x) % kAcross * kHeld; }

__device__ float ToFloat(float value) { return value; }
__device__ float ToFloat(__half value) { return __half2float(value); }
__device__ void Round(float value, float& to) { to = value; }
__device__ void Round(float value, __half& to) { to = __float2half_rn(value); }
__device__ void Round(float value, __nv_bfloat16& to) { to = __float2bfloat16_rn(value); }

template <typename T>
__device__ void LoadFour(const T* from, float* to) {
  const Vec4<T> four = *reinterpret_cast<const Vec4<T>*>(from);
#pragma unroll
  for (int c = 0; c < kHeld; ++c) to[c] = ToFloat(four.at[c]);
}
// Stores four elements, rounded to T, and sets `from` to what it stored.
template <typename T>
__device__ void StoreFour(float* from, T* to) {
  Vec4<T> four;
#pragma unroll
  for (int c = 0; c < kHeld; ++c) {
    Round(from[c], four.at[c]);
    from[c] = ToFloat(four.at[c]);
  }
  *reinterpret_cast<Vec4<T>*>(to) = four;
}

// Loads the thread's elements of a tile. Rows from `height` on do not exist: they become zero and are never stored.
template <typename T>
__device__ void LoadTile(const T* tile, int height, Held& held) {
#pragma unroll
  for (int r = 0; r < kHeld; ++r) {
    if (HeldRow(r) < height) {
      LoadFour(Global(tile) + HeldRow(r) * kSide + HeldColumn(), held.at[r]);
    } else {
      for (int c = 0; c < kHeld; ++c) held.at[r][c] = 0.0f;
    }
  }
}

template <typename T>
__device__ void StoreTile(Held& held, int height, T* tile) {
#pragma unroll
  for (int r = 0; r < kHeld; ++r) {
    if (HeldRow(r) < height) StoreFour(held.at[r], Global(tile) + HeldRow(r) * kSide + HeldColumn());
  }
}

// Up to kTermsAtOnce terms that a block adds to a tile: the terms' elements at the tile's rows (left) and columns
// (right). Both carry sqrt |weight|, so that the two triangles of a tile on the diagonal are rounded alike.
struct Terms {
  alignas(sizeof(Vec4<float>)) float left[kTermsAtOnce][kSide];
  alignas(sizeof(Vec4<float>)) float right[kTermsAtOnce][kSide];
  double weights[kTermsAtOnce];  // sqrt |weight| with the sign of the weight
};

// Returns the number of terms to add at once from term `begin` on.
__device__ int TermsFrom(const SymmetricJob& job, int64_t begin) {
  const int64_t left = job.rows.rows - begin;
  return static_cast<int>(left < kTermsAtOnce ? left : kTermsAtOnce);
}

// Loads the terms from `begin` on. Each thread loads before it stores. All threads of the block must call it.
__device__ void FetchTerms(const SymmetricJob& job, SymmetricTile place, int64_t begin, Terms& to) {
  constexpr int kTermsOfPass = static_cast<int>(kThreads) / kSide, kPasses = kTermsAtOnce / kTermsOfPass;
  const int terms = TermsFrom(job, begin);
  const int first = static_cast<int>(threadIdx.x) / kSide, i = static_cast<int>(threadIdx.x) % kSide;
  const int64_t row = place.row * kTileSide + i, column = place.column * kTileSide + i;
  const float* const rows = Global(job.rows.data) + begin * job.rows.stride;
  float down[kPasses], across[kPasses];
#pragma unroll
  for (int pass = 0; pass < kPasses; ++pass) {
    const int p = first + pass * kTermsOfPass;
    down[pass] = p < terms && row < job.n ? rows[p * job.rows.stride + row] : 0.0f;
    across[pass] = p < terms && column < job.n ? rows[p * job.rows.stride + column] : 0.0f;
  }
  if (static_cast<int>(threadIdx.x) < terms) {
    const double weight = Global(job.weights)[begin + threadIdx.x];
    to.weights[threadIdx.x] = copysign(sqrt(fabs(weight)), weight);
  }
  __syncthreads();
#pragma unroll
  for (int pass = 0; pass < kPasses; ++pass) {
    const int p = first + pass * kTermsOfPass;
    if (p >= terms) continue;
    const double root = to.weights[p];
    to.left[p][i] = static_cast<float>(root * down[pass]);
    to.right[p][i] = static_cast<float>(fabs(root) * across[pass]);
  }
}

// Sets held = scale held + shift I + terms, for the tile at `place`, whose loads may still be in flight. All threads of
// the block must call it.
__device__ void UpdateTile(const SymmetricJob& job, SymmetricTile place, Terms& terms, Held& held) {
  for (int64_t begin = 0; begin == 0 || begin < job.rows.rows; begin += kTermsAtOnce) {
    __syncthreads();  // waits until no thread reads the previous terms
    FetchTerms(job, place, begin, terms);
    if (begin == 0) {
#pragma unroll
      for (int r = 0; r < kHeld; ++r) {
#pragma unroll
        for (int c = 0; c < kHeld; ++c) held.at[r][c] *= job.scale;
      }
    }
    __syncthreads();
    const int count = TermsFrom(job, begin);
    for (int p = 0; p < count; ++p) {
      float across[kHeld];
      LoadFour(&terms.right[p][HeldColumn()], across);
#pragma unroll
      for (int r = 0; r < kHeld; ++r) {
        const float down = terms.left[p][HeldRow(r)];
#pragma unroll
        for (int c = 0; c < kHeld; ++c) held.at[r][c] = fmaf(down, across[c], held.at[r][c]);
      }
    }
  }
  if (place.row != place.column || job.shift == 0.0) return;
  const int64_t row0 = place.row * kTileSide;
#pragma unroll
  for (int r = 0; r < kHeld; ++r) {
#pragma unroll
    for (int c = 0; c < kHeld; ++c) {
      const int i = HeldRow(r);
      if (i == HeldColumn() + c && row0 + i < job.n) {
        held.at[r][c] = static_cast<float>(held.at[r][c] + job.shift);
      }
    }
  }
}

// The thread's elements of kVectorsAtOnce vectors at the tile's rows and columns.
static_assert(kVectorsAtOnce * kSide == kThreads);
struct VectorElements {
  float row, column;
};
__device__ VectorElements LoadVectors(const SymmetricJob& job, SymmetricTile place, int64_t begin) {
  const int64_t k = begin + static_cast<int>(threadIdx.x) / kSide;
  const int i = static_cast<int>(threadIdx.x) % kSide;
  const int64_t row = place.row * kTileSide + i, column = place.column * kTileSide + i;
  const float* const v = At(Global(job.v.data), k * job.v.stride);
  return {k < job.v.rows && row < job.n ? v[row] : 0.0f, k < job.v.rows && column < job.n ? v[column] : 0.0f};
}

// Computes what the tile contributes to segments I (rows) and J (columns) of y, in partials[tile][vector][2][64].
// `elements` are those of the first kVectorsAtOnce vectors.
__device__ void MultiplyTile(const SymmetricJob& job, SymmetricTile place, int64_t tile, const Held& held,
                             VectorElements elements) {
  alignas(sizeof(Vec4<float>)) __shared__ float of_row[kVectorsAtOnce][kSide], of_column[kVectorsAtOnce][kSide];
  __shared__ float by_warp[kVectorsAtOnce][kWarps][kSide];
  const int warp = static_cast<int>(threadIdx.x / kWarp), lane = static_cast<int>(threadIdx.x % kWarp);
  float* const partials = Global(job.partials) + tile * job.v.rows * 2 * kTileSide;
  for (int64_t begin = 0; begin < job.v.rows; begin += kVectorsAtOnce) {
    const int vectors = static_cast<int>(job.v.rows - begin < kVectorsAtOnce ? job.v.rows - begin : kVectorsAtOnce);
    if (begin > 0) elements = LoadVectors(job, place, begin);
    __syncthreads();  // waits until no thread reads the previous vectors
    of_row[threadIdx.x / kSide][threadIdx.x % kSide] = elements.row;
    of_column[threadIdx.x / kSide][threadIdx.x % kSide] = elements.column;
    __syncthreads();
    for (int k = 0; k < vectors; ++k) {
      float across[kHeld], down[kHeld] = {0.0f, 0.0f, 0.0f, 0.0f};
      LoadFour(&of_column[k][HeldColumn()], across);
#pragma unroll
      for (int r = 0; r < kHeld; ++r) {
        float sum = 0.0f;
        const float v = of_row[k][HeldRow(r)];
#pragma unroll
        for (int c = 0; c < kHeld; ++c) {
          sum = fmaf(held.at[r][c], across[c], sum);
          down[c] = fmaf(held.at[r][c], v, down[c]);
        }
        // The 16 threads of a row are half a warp.
        for (int offset = kAcross / 2; offset > 0; offset /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, offset);
        if (lane % kAcross == 0) partials[(begin + k) * 2 * kTileSide + HeldRow(r)] = sum;
      }
#pragma unroll
      for (int c = 0; c < kHeld; ++c) {
        down[c] += __shfl_xor_sync(0xffffffffu, down[c], kAcross);  // the warp's other rows
        if (lane < kAcross) by_warp[k][warp][HeldColumn() + c] = down[c];
      }
    }
    __syncthreads();
    for (int at = static_cast<int>(threadIdx.x); at < vectors * kSide; at += kThreads) {
      const int k = at / kSide, j = at % kSide;
      float sum = 0.0f;
      for (int w = 0; w < kWarps; ++w) sum += by_warp[k][w][j];
      partials[((begin + k) * 2 + 1) * kTileSide + j] = sum;
    }
  }
}

template <typename T>
__device__ __forceinline__ void UpdateMultiplyTile(const SymmetricJob& job, int64_t tile, Terms& terms) {
  const SymmetricTile place = SymmetricTileOf(tile);
  const int height = static_cast<int>(TileHeight(job.n, place.row));
  T* const data = static_cast<T*>(job.tiles) + TileOffset(job.n, place.row, place.column);
  Held held;
  LoadTile(data, height, held);
  const VectorElements elements = LoadVectors(job, place, 0);
  if (job.updates()) {
    UpdateTile(job, place, terms, held);
    StoreTile(held, height, data);
  }
  MultiplyTile(job, place, tile, held, elements);
}

__global__ void __launch_bounds__(kThreads, 3) UpdateMultiplyKernel(ManyJobs<SymmetricJob> jobs, int64_t tiles) {
  __shared__ Terms terms;
  const Share share = ShareOf(tiles);
  for (unsigned tile = share.begin; tile < share.end; ++tile) {
    const SymmetricJob& job = jobs.InShared(share, tile);
    if (job.storage == SymmetricStorage::kF32) {
      UpdateMultiplyTile<float>(job, tile - job.first, terms);
    } else {
      UpdateMultiplyTile<__half>(job, tile - job.first, terms);
    }
  }
}

// One block handles a (segment of y, vector): the tiles of tile row I, and those below the diagonal in tile column I.
// Each element has four threads, each of which adds the contributions of every fourth tile.
constexpr int kSummers = static_cast<int>(kThreads) / kSide;
__global__ void __launch_bounds__(kThreads) SumPartialsKernel(const SymmetricJob* jobs, int64_t segments) {
  __shared__ double sums[kSummers][kSide];
  const SymmetricJob job = jobs[blockIdx.y];
  const int64_t tile_rows = TileRows(job.n), mine = tile_rows * job.v.rows;
  const int summer = static_cast<int>(threadIdx.x) / kSide, element = static_cast<int>(threadIdx.x) % kSide;
  for (int64_t at = blockIdx.x; at < segments && at < mine; at += gridDim.x) {
    const int64_t k = at / tile_rows, segment = at % tile_rows, i = segment * kTileSide + element;
    const float* const partials = Global(job.partials) + k * 2 * kTileSide + element;
    const int64_t stride = job.v.rows * 2 * kTileSide;  // from one tile to the next
    double sum = 0;
#pragma unroll 8
    for (int64_t column = summer; column <= segment; column += kSummers) {
      sum += partials[(segment * (segment + 1) / 2 + column) * stride];
    }
#pragma unroll 8
    for (int64_t row = segment + 1 + summer; row < tile_rows; row += kSummers) {
      sum += partials[(row * (row + 1) / 2 + segment) * stride + kTileSide];
    }
    __syncthreads();  // waits until no thread reads the previous sums
    sums[summer][element] = sum;
    __syncthreads();
    if (summer > 0 || i >= job.n) continue;
    for (int other = 1; other < kSummers; ++other) sum += sums[other][element];
    job.y.at(k, i) = static_cast<float>(sum);
  }
}

// A transposed tile. One column of padding keeps the elements that neighbouring threads write in different banks.
struct Turned {
  float at[kSide][kSide + 1];
};
__device__ Vec4Position PlaceInTile() { return {HeldRow(0), kAcross, HeldColumn()}; }

// Stores the tile of x at `place` and its mirror image. The mirror image is transposed in shared memory, so that both
// are written row by row. All threads of the block must call it.
template <typename T>
__device__ __forceinline__ void StoreExpanded(const ExpandJob& job, SymmetricTile place, const Held& held,
                                              Turned& turned) {
  const BasicMatrixView<T> x(static_cast<T*>(job.x), job.m.n, job.m.n, job.stride);
  const int64_t row0 = place.row * kTileSide, column0 = place.column * kTileSide;
  Vec4<T> rounded[kHeld];
#pragma unroll
  for (int r = 0; r < kHeld; ++r) {
#pragma unroll
    for (int c = 0; c < kHeld; ++c) {
      Round(held.at[r][c], rounded[r].at[c]);
      turned.at[HeldColumn() + c][HeldRow(r)] = held.at[r][c];
    }
  }
  StoreVec4s(rounded, Vec4sOf<kSide, kSide>(x, row0, column0, PlaceInTile()));
  if (place.row == place.column) return;
  __syncthreads();
#pragma unroll
  for (int r = 0; r < kHeld; ++r) {
#pragma unroll
    for (int c = 0; c < kHeld; ++c) Round(turned.at[HeldRow(r)][HeldColumn() + c], rounded[r].at[c]);
  }
  StoreVec4s(rounded, Vec4sOf<kSide, kSide>(x, column0, row0, PlaceInTile()));
}

template <typename Jobs>
__global__ void __launch_bounds__(kThreads, 3) ExpandKernel(Jobs jobs, int64_t tiles) {
  __shared__ union Memory {
    Terms terms;
    Turned turned;
  } memory;
  const Share share = ShareOf(tiles);
  for (unsigned at = share.begin; at < share.end; ++at) {
    const ExpandJob& job = jobs.InShared(share, at);
    const SymmetricTile place = SymmetricTileOf(at - job.first);
    const int height = static_cast<int>(TileHeight(job.m.n, place.row));
    const int64_t offset = TileOffset(job.m.n, place.row, place.column);
    Held held;
    if (job.m.storage == SymmetricStorage::kF32) {
      LoadTile(static_cast<const float*>(job.m.tiles) + offset, height, held);
    } else {
      LoadTile(static_cast<const __half*>(job.m.tiles) + offset, height, held);
    }
    UpdateTile(job.m, place, memory.terms, held);
    __syncthreads();  // waits until no thread reads the terms
    if (job.in_bf16) {
      StoreExpanded<__nv_bfloat16>(job, place, held, memory.turned);
    } else {
      StoreExpanded<float>(job, place, held, memory.turned);
    }
  }
}

}  // namespace

cudaError_t SymmetricUpdateMultiply(cudaStream_t stream, const SymmetricJob* jobs, int count, int64_t tiles) {
  return LaunchJobs(stream, tiles, kThreads, UpdateMultiplyKernel, ManyJobs<SymmetricJob>{jobs, count});
}

cudaError_t SymmetricSumPartials(cudaStream_t stream, const SymmetricJob* jobs, int count, int64_t segments) {
  const dim3 grid(static_cast<unsigned>(Blocks(segments, 1)), static_cast<unsigned>(count));
  return Launch(stream, grid, dim3(kThreads), SumPartialsKernel, jobs, segments);
}

cudaError_t SymmetricExpand(cudaStream_t stream, const ExpandJob& job) {
  return LaunchJobs(stream, TileCount(job.m.n), kThreads, ExpandKernel<OneJob<ExpandJob>>, OneJob<ExpandJob>{job});
}

cudaError_t SymmetricExpand(cudaStream_t stream, const ExpandJob* jobs, int count, int64_t tiles) {
  return LaunchJobs(stream, tiles, kThreads, ExpandKernel<ManyJobs<ExpandJob>>, ManyJobs<ExpandJob>{jobs, count});
}

}  // namespace precondor::cuda
