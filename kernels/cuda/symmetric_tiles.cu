// SPDX-License-Identifier: Apache-2.0
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "kernels/cuda/launch.h"
#include "kernels/cuda/symmetric_tiles.h"

namespace precondor::cuda {
namespace {

// 16 x 16 threads; each holds four rows, 16 apart, of four neighbouring columns.
constexpr unsigned kThreads = 256;
constexpr int kSide = static_cast<int>(kTileSide);
constexpr int kAcross = 16;
constexpr int kHeld = 4;
constexpr int kTermsAtOnce = 16;
constexpr int kVectorsAtOnce = 4;
constexpr int kWarps = kThreads / kWarp;

struct Place {
  int64_t row = 0;     // I
  int64_t column = 0;  // J <= I
};

// Tiles are counted tile row after tile row: tile (I, J) is number I (I + 1) / 2 + J.
__device__ Place PlaceOf(int64_t tile) {
  int64_t row = static_cast<int64_t>((sqrt(8.0 * static_cast<double>(tile) + 1.0) - 1.0) / 2.0);
  while (row * (row + 1) / 2 > tile) --row;
  while ((row + 1) * (row + 2) / 2 <= tile) ++row;
  return {row, tile - row * (row + 1) / 2};
}

// What a thread moves at once.
template <typename T>
struct alignas(kHeld * sizeof(T)) Four {
  T at[kHeld];
};

struct Held {
  float at[kHeld][kHeld];
};

// The thread's place in a tile.
__device__ int HeldRow(int r) { return static_cast<int>(threadIdx.x) / kAcross + kAcross * r; }
__device__ int HeldColumn() { return static_cast<int>(threadIdx.x) % kAcross * kHeld; }

__device__ float ToFloat(float value) { return value; }
__device__ float ToFloat(__half value) { return __half2float(value); }
__device__ void Round(float value, float& to) { to = value; }
__device__ void Round(float value, __half& to) { to = __float2half_rn(value); }
__device__ void Round(float value, __nv_bfloat16& to) { to = __float2bfloat16_rn(value); }

template <typename T>
__device__ void LoadFour(const T* from, float* to) {
  const Four<T> four = *reinterpret_cast<const Four<T>*>(from);
#pragma unroll
  for (int c = 0; c < kHeld; ++c) to[c] = ToFloat(four.at[c]);
}
// Leaves in `from` what has been stored.
template <typename T>
__device__ void StoreFour(float* from, T* to) {
  Four<T> four;
#pragma unroll
  for (int c = 0; c < kHeld; ++c) {
    Round(from[c], four.at[c]);
    from[c] = ToFloat(four.at[c]);
  }
  *reinterpret_cast<Four<T>*>(to) = four;
}

// Rows from `height` on are zero and never stored.
template <typename T>
__device__ void LoadTile(const T* tile, int height, Held& held) {
#pragma unroll
  for (int r = 0; r < kHeld; ++r) {
    if (HeldRow(r) < height) {
      LoadFour(tile + HeldRow(r) * kSide + HeldColumn(), held.at[r]);
    } else {
      for (int c = 0; c < kHeld; ++c) held.at[r][c] = 0.0f;
    }
  }
}

template <typename T>
__device__ void StoreTile(Held& held, int height, T* tile) {
#pragma unroll
  for (int r = 0; r < kHeld; ++r) {
    if (HeldRow(r) < height) StoreFour(held.at[r], tile + HeldRow(r) * kSide + HeldColumn());
  }
}

// held = scale held + shift I + terms, on the tile at `place`. Both sides of a term carry sqrt |weight|, so that the
// two triangles of a tile on the diagonal are rounded alike.
__device__ void UpdateTile(const SymmetricJob& job, Place place, Held& held) {
  alignas(sizeof(Four<float>)) __shared__ float left[kTermsAtOnce][kSide], right[kTermsAtOnce][kSide];
#pragma unroll
  for (int r = 0; r < kHeld; ++r) {
#pragma unroll
    for (int c = 0; c < kHeld; ++c) held.at[r][c] *= job.scale;
  }
  const int64_t row0 = place.row * kTileSide, column0 = place.column * kTileSide;
  for (int64_t begin = 0; begin < job.rows.rows; begin += kTermsAtOnce) {
    const int terms = static_cast<int>(job.rows.rows - begin < kTermsAtOnce ? job.rows.rows - begin : kTermsAtOnce);
    __syncthreads();  // whoever still reads the terms before
    for (int at = static_cast<int>(threadIdx.x); at < terms * kSide; at += kThreads) {
      const int p = at / kSide, i = at % kSide;
      const double weight = job.weights[begin + p], root = sqrt(fabs(weight));
      const float* row = job.rows.row(begin + p);
      const float in_row = row0 + i < job.n ? static_cast<float>(root * row[row0 + i]) : 0.0f;
      left[p][i] = weight < 0 ? -in_row : in_row;
      right[p][i] = column0 + i < job.n ? static_cast<float>(root * row[column0 + i]) : 0.0f;
    }
    __syncthreads();
    for (int p = 0; p < terms; ++p) {
      float across[kHeld];
      LoadFour(&right[p][HeldColumn()], across);
#pragma unroll
      for (int r = 0; r < kHeld; ++r) {
        const float down = left[p][HeldRow(r)];
#pragma unroll
        for (int c = 0; c < kHeld; ++c) held.at[r][c] = fmaf(down, across[c], held.at[r][c]);
      }
    }
  }
  if (place.row != place.column || job.shift == 0.0) return;
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

// What the tile gives to y's segments I (rows) and J (columns): partials[tile][vector][2][64].
__device__ void MultiplyTile(const SymmetricJob& job, Place place, int64_t tile, const Held& held) {
  alignas(sizeof(Four<float>)) __shared__ float of_row[kVectorsAtOnce][kSide], of_column[kVectorsAtOnce][kSide];
  __shared__ float by_warp[kVectorsAtOnce][kWarps][kSide];
  const int64_t row0 = place.row * kTileSide, column0 = place.column * kTileSide;
  const int warp = static_cast<int>(threadIdx.x / kWarp), lane = static_cast<int>(threadIdx.x % kWarp);
  float* const partials = job.partials + tile * job.v.rows * 2 * kTileSide;
  for (int64_t begin = 0; begin < job.v.rows; begin += kVectorsAtOnce) {
    const int vectors = static_cast<int>(job.v.rows - begin < kVectorsAtOnce ? job.v.rows - begin : kVectorsAtOnce);
    __syncthreads();  // whoever still reads the vectors before
    for (int at = static_cast<int>(threadIdx.x); at < vectors * kSide; at += kThreads) {
      const int k = at / kSide, i = at % kSide;
      const float* v = job.v.row(begin + k);
      of_row[k][i] = row0 + i < job.n ? v[row0 + i] : 0.0f;
      of_column[k][i] = column0 + i < job.n ? v[column0 + i] : 0.0f;
    }
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
__device__ void UpdateMultiplyTile(const SymmetricJob& job, int64_t tile) {
  const Place place = PlaceOf(tile);
  const int height = static_cast<int>(TileHeight(job.n, place.row));
  T* const data = static_cast<T*>(job.tiles) + TileOffset(job.n, place.row, place.column);
  Held held;
  LoadTile(data, height, held);
  if (job.updates()) {
    UpdateTile(job, place, held);
    StoreTile(held, height, data);
  }
  MultiplyTile(job, place, tile, held);
}

__global__ void __launch_bounds__(kThreads) UpdateMultiplyKernel(const SymmetricJob* jobs, int count, int64_t tiles) {
  for (int64_t tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
    const SymmetricJob job = JobOf(jobs, count, tile);  // a copy: what the kernel stores cannot change it
    if (job.storage == SymmetricStorage::kF32) {
      UpdateMultiplyTile<float>(job, tile - job.first);
    } else {
      UpdateMultiplyTile<__half>(job, tile - job.first);
    }
  }
}

// One block of 64 threads a (segment of y, vector): first the tiles of row I, then those below in column I.
__global__ void __launch_bounds__(kSide) SumPartialsKernel(const SymmetricJob* jobs, int64_t segments) {
  const SymmetricJob job = jobs[blockIdx.y];
  const int64_t tile_rows = TileRows(job.n), mine = tile_rows * job.v.rows;
  for (int64_t at = blockIdx.x; at < segments && at < mine; at += gridDim.x) {
    const int64_t k = at / tile_rows, segment = at % tile_rows, i = segment * kTileSide + threadIdx.x;
    if (i >= job.n) continue;
    double sum = 0;
    for (int64_t column = 0; column <= segment; ++column) {
      const int64_t tile = segment * (segment + 1) / 2 + column;
      sum += job.partials[(tile * job.v.rows + k) * 2 * kTileSide + threadIdx.x];
    }
    for (int64_t row = segment + 1; row < tile_rows; ++row) {
      const int64_t tile = row * (row + 1) / 2 + segment;
      sum += job.partials[((tile * job.v.rows + k) * 2 + 1) * kTileSide + threadIdx.x];
    }
    job.y.at(k, i) = static_cast<float>(sum);
  }
}

// x's tile at `place`, and its mirror image.
template <typename T>
__device__ void StoreExpanded(const ExpandJob& job, Place place, const Held& held) {
  T* const x = static_cast<T*>(job.x);
  const int64_t row0 = place.row * kTileSide, column0 = place.column * kTileSide;
  for (int r = 0; r < kHeld; ++r) {
    for (int c = 0; c < kHeld; ++c) {
      const int64_t i = row0 + HeldRow(r), j = column0 + HeldColumn() + c;
      if (i >= job.m.n || j >= job.m.n) continue;
      Round(held.at[r][c], x[i * job.stride + j]);
      if (place.row != place.column) Round(held.at[r][c], x[j * job.stride + i]);
    }
  }
}

template <typename Jobs>
__global__ void __launch_bounds__(kThreads, 4) ExpandKernel(Jobs jobs, int64_t tiles) {
  for (int64_t at = blockIdx.x; at < tiles; at += gridDim.x) {
    const ExpandJob& job = jobs.Of(at);
    const Place place = PlaceOf(at - job.first);
    const int height = static_cast<int>(TileHeight(job.m.n, place.row));
    const int64_t offset = TileOffset(job.m.n, place.row, place.column);
    Held held;
    if (job.m.storage == SymmetricStorage::kF32) {
      LoadTile(static_cast<const float*>(job.m.tiles) + offset, height, held);
    } else {
      LoadTile(static_cast<const __half*>(job.m.tiles) + offset, height, held);
    }
    UpdateTile(job.m, place, held);
    if (job.in_bf16) {
      StoreExpanded<__nv_bfloat16>(job, place, held);
    } else {
      StoreExpanded<float>(job, place, held);
    }
  }
}

template <typename T>
__global__ void __launch_bounds__(kThreads) CompressKernel(ConstMatrixView x, T* tiles) {
  for (int64_t tile = blockIdx.x; tile < TileCount(x.rows); tile += gridDim.x) {
    const Place place = PlaceOf(tile);
    const int64_t row0 = place.row * kTileSide, column0 = place.column * kTileSide;
    Held held;
    for (int r = 0; r < kHeld; ++r) {
      for (int c = 0; c < kHeld; ++c) {
        const int64_t i = row0 + HeldRow(r), j = column0 + HeldColumn() + c;
        held.at[r][c] = i >= x.rows || j >= x.rows ? 0.0f : i >= j ? x.at(i, j) : x.at(j, i);
      }
    }
    StoreTile(held, static_cast<int>(TileHeight(x.rows, place.row)),
              tiles + TileOffset(x.rows, place.row, place.column));
  }
}

dim3 GridOfTiles(int64_t tiles) { return dim3(static_cast<unsigned>(Blocks(tiles, 1))); }

}  // namespace

cudaError_t SymmetricUpdateMultiply(cudaStream_t stream, const SymmetricJob* jobs, int count, int64_t tiles) {
  return Launch(stream, GridOfTiles(tiles), dim3(kThreads), UpdateMultiplyKernel, jobs, count, tiles);
}

cudaError_t SymmetricSumPartials(cudaStream_t stream, const SymmetricJob* jobs, int count, int64_t segments) {
  const dim3 grid(static_cast<unsigned>(Blocks(segments, 1)), static_cast<unsigned>(count));
  return Launch(stream, grid, dim3(kSide), SumPartialsKernel, jobs, segments);
}

cudaError_t SymmetricExpand(cudaStream_t stream, const ExpandJob& job) {
  return LaunchJobs(stream, TileCount(job.m.n), kThreads, ExpandKernel<OneJob<ExpandJob>>, OneJob<ExpandJob>{job});
}

cudaError_t SymmetricExpand(cudaStream_t stream, const ExpandJob* jobs, int count, int64_t tiles) {
  return LaunchJobs(stream, tiles, kThreads, ExpandKernel<ManyJobs<ExpandJob>>, ManyJobs<ExpandJob>{jobs, count});
}

cudaError_t SymmetricCompress(cudaStream_t stream, ConstMatrixView x, void* tiles, SymmetricStorage storage) {
  const dim3 grid = GridOfTiles(TileCount(x.rows));
  if (storage == SymmetricStorage::kF32) {
    return Launch(stream, grid, dim3(kThreads), CompressKernel<float>, x, static_cast<float*>(tiles));
  }
  return Launch(stream, grid, dim3(kThreads), CompressKernel<__half>, x, static_cast<__half*>(tiles));
}

}  // namespace precondor::cuda
