// SPDX-License-Identifier: Apache-2.0
#include "kernels/cpu/symmetric_tiles.h"

#include <algorithm>
#include <cstdint>
#include <type_traits>

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/cpu/symmetric_tiles.cc"  // Highway compiles this file once for each target
#include "hwy/foreach_target.h"
// Must follow foreach_target.h.
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace precondor::tiles::HWY_NAMESPACE {
namespace {

namespace hn = hwy::HWY_NAMESPACE;

// Four adjacent vectors divide a tile's side for every number of lanes up to 16.
using Lanes = hn::CappedTag<float, 16>;
using Vector = hn::Vec<Lanes>;
constexpr int64_t kTileSize = kTileSide * kTileSide;

HWY_INLINE Vector Get(const float* from) { return hn::Load(Lanes(), from); }
HWY_INLINE Vector Get(const hwy::float16_t* from) {
  return hn::PromoteTo(Lanes(), hn::Load(hn::Rebind<hwy::float16_t, Lanes>(), from));
}
HWY_INLINE void Put(Vector value, float* to) { hn::Store(value, Lanes(), to); }
HWY_INLINE void Put(Vector value, hwy::float16_t* to) {
  const hn::Rebind<hwy::float16_t, Lanes> half;
  hn::Store(hn::DemoteTo(half, value), half, to);
}

// Prefetches kRows rows that lie kAhead rows further on; prefetching beyond the end is harmless. It targets L2, because
// a tile, its terms and its sums fill L1 (hwy::Prefetch targets L1).
template <int64_t kAhead, int64_t kRows, typename T>
HWY_INLINE void PrefetchRows(const T* rows) {
  const uintptr_t begin = reinterpret_cast<uintptr_t>(rows) + kAhead * kTileSide * sizeof(T);
  for (size_t byte = 0; byte < kRows * kTileSide * sizeof(T); byte += 64) {
    // NOLINTNEXTLINE(performance-no-int-to-ptr): a pointer may not leave its array, an address may
    __builtin_prefetch(reinterpret_cast<const char*>(begin + byte), 0, 2);
  }
}

// Operations on four adjacent vectors of a row: load and scale, add, store.
template <typename T>
HWY_INLINE void GetScaled(Vector factor, const T* from, Vector& x0, Vector& x1, Vector& x2, Vector& x3) {
  const int64_t n = static_cast<int64_t>(hn::Lanes(Lanes()));
  x0 = hn::Mul(factor, Get(from));
  x1 = hn::Mul(factor, Get(from + n));
  x2 = hn::Mul(factor, Get(from + 2 * n));
  x3 = hn::Mul(factor, Get(from + 3 * n));
}
HWY_INLINE void AddTimes(float a, Vector c0, Vector c1, Vector c2, Vector c3, Vector& x0, Vector& x1, Vector& x2,
                         Vector& x3) {
  const Vector factor = hn::Set(Lanes(), a);
  x0 = hn::MulAdd(factor, c0, x0);
  x1 = hn::MulAdd(factor, c1, x1);
  x2 = hn::MulAdd(factor, c2, x2);
  x3 = hn::MulAdd(factor, c3, x3);
}
template <typename T>
HWY_INLINE void PutAll(Vector x0, Vector x1, Vector x2, Vector x3, T* to) {
  const int64_t n = static_cast<int64_t>(hn::Lanes(Lanes()));
  Put(x0, to);
  Put(x1, to + n);
  Put(x2, to + 2 * n);
  Put(x3, to + 3 * n);
}

// out = scale in + terms on tile (I, J), `height` rows; out may be in. Four rows at a time share the loads of the
// terms. If fewer than four rows are left, the last one fills the missing places.
template <typename In, typename Out>
HWY_INLINE void UpdateTile(float scale, const Terms& terms, int64_t tile_row, int64_t tile_column, int64_t height,
                           const In* in, Out* out) {
  const int64_t n = static_cast<int64_t>(hn::Lanes(Lanes()));
  const Vector factor = hn::Set(Lanes(), scale);
  const float* left = terms.count > 0 ? terms.left + tile_row * terms.count * kTileSide : nullptr;
  const float* right = terms.count > 0 ? terms.right + tile_column * terms.count * kTileSide : nullptr;
  for (int64_t strip = 0; strip < kTileSide; strip += 4 * n) {
    for (int64_t i = 0; i < height; i += 4) {
      const int64_t last = height - 1;
      const int64_t j = HWY_MIN(i + 1, last), k = HWY_MIN(i + 2, last), l = HWY_MIN(i + 3, last);
      const int64_t ai = i * kTileSide + strip, aj = j * kTileSide + strip, ak = k * kTileSide + strip,
                    al = l * kTileSide + strip;
      // The computation takes longer than loading a line, and the loads in flight cover too little of the stream ahead
      // to keep memory busy. So prefetch further ahead.
      if (strip == 0) PrefetchRows<32, 4>(in + ai);
      Vector a0, a1, a2, a3, b0, b1, b2, b3, c0, c1, c2, c3, d0, d1, d2, d3;
      GetScaled(factor, in + ai, a0, a1, a2, a3);
      GetScaled(factor, in + aj, b0, b1, b2, b3);
      GetScaled(factor, in + ak, c0, c1, c2, c3);
      GetScaled(factor, in + al, d0, d1, d2, d3);
      const float *row = left, *column = right;
      for (int64_t p = 0; p < terms.count; ++p, row += kTileSide, column += kTileSide) {
        const Vector x0 = Get(column + strip), x1 = Get(column + strip + n);
        const Vector x2 = Get(column + strip + 2 * n), x3 = Get(column + strip + 3 * n);
        AddTimes(row[i], x0, x1, x2, x3, a0, a1, a2, a3);
        AddTimes(row[j], x0, x1, x2, x3, b0, b1, b2, b3);
        AddTimes(row[k], x0, x1, x2, x3, c0, c1, c2, c3);
        AddTimes(row[l], x0, x1, x2, x3, d0, d1, d2, d3);
      }
      PutAll(a0, a1, a2, a3, out + ai);
      PutAll(b0, b1, b2, b3, out + aj);
      PutAll(c0, c1, c2, c3, out + ak);
      PutAll(d0, d1, d2, d3, out + al);
    }
  }
}

// out = scale in + terms, plus shift on the matrix' diagonal.
template <typename In, typename Out>
HWY_INLINE void UpdateTileOrDiagonal(float scale, double shift, const Terms& terms, int64_t tile_row,
                                     int64_t tile_column, int64_t height, const In* in, Out* out) {
  if (tile_row != tile_column || shift == 0.0) {
    return UpdateTile(scale, terms, tile_row, tile_column, height, in, out);
  }
  HWY_ALIGN float tile[kTileSize];
  UpdateTile(scale, terms, tile_row, tile_column, height, in, tile);
  for (int64_t i = 0; i < height; ++i) {
    tile[i * kTileSide + i] = static_cast<float>(tile[i * kTileSide + i] + shift);
  }
  UpdateTile(1.0f, Terms(), tile_row, tile_column, height, tile, out);
}

// sums[i] += tile_i v_column, lane by lane, for each of `height` rows; and y_column += tile' v_row if kBoth.
template <bool kBoth, typename T>
HWY_INLINE void MultiplyTile(const T* tile, int64_t height, const float* v_row, const float* v_column, float* sums,
                             float* y_column) {
  const Lanes lanes;
  const int64_t n = static_cast<int64_t>(hn::Lanes(lanes));
  for (int64_t strip = 0; strip < kTileSide; strip += 4 * n) {
    const Vector v0 = Get(v_column + strip), v1 = Get(v_column + strip + n);
    const Vector v2 = Get(v_column + strip + 2 * n), v3 = Get(v_column + strip + 3 * n);
    Vector y0 = hn::Zero(lanes), y1 = y0, y2 = y0, y3 = y0;
    const T* at = tile + strip;
    for (int64_t i = 0; i < height; ++i, at += kTileSide) {
      // A stream of f16 takes half the bandwidth and needs no prefetching.
      if (std::is_same_v<T, float> && strip == 0) PrefetchRows<8, 1>(at);
      const Vector t0 = Get(at), t1 = Get(at + n), t2 = Get(at + 2 * n), t3 = Get(at + 3 * n);
      Vector sum = hn::MulAdd(t0, v0, Get(sums + i * n));
      sum = hn::MulAdd(t1, v1, sum);
      sum = hn::MulAdd(t2, v2, sum);
      Put(hn::MulAdd(t3, v3, sum), sums + i * n);
      if constexpr (kBoth) {
        const Vector v = hn::Set(lanes, v_row[i]);
        y0 = hn::MulAdd(t0, v, y0);
        y1 = hn::MulAdd(t1, v, y1);
        y2 = hn::MulAdd(t2, v, y2);
        y3 = hn::MulAdd(t3, v, y3);
      }
    }
    if constexpr (kBoth) {
      float* y = y_column + strip;
      Put(hn::Add(Get(y), y0), y);
      Put(hn::Add(Get(y + n), y1), y + n);
      Put(hn::Add(Get(y + 2 * n), y2), y + 2 * n);
      Put(hn::Add(Get(y + 3 * n), y3), y + 3 * n);
    }
  }
}

// sums[i] = the sum of the lanes at sums + i width, for all of a tile's rows. As many rows as there are lanes become
// one vector: each step adds neighbours of two vectors into one, which takes a third of the shuffles of a row-by-row
// sum.
HWY_INLINE void SumLanes(float* sums) {
#if HWY_TARGET != HWY_SCALAR
  const Lanes lanes;
  const int64_t width = static_cast<int64_t>(hn::Lanes(lanes));
  for (int64_t group = 0; group < kTileSide; group += width) {
    float* rows = sums + group * width;
    for (int64_t count = width; count > 1; count /= 2) {
      for (int64_t i = 0; i < count / 2; ++i) {
        const Vector a = Get(rows + 2 * i * width), b = Get(rows + (2 * i + 1) * width);
        Put(hn::Add(hn::ConcatEven(lanes, b, a), hn::ConcatOdd(lanes, b, a)), rows + i * width);
      }
    }
    hn::StoreU(Get(rows), lanes, sums + group);  // overwrites lanes that are already summed
  }
#endif
}

// Processes one tile row. The sums of each vector are separate, [count, kTileSide, 16].
template <typename T>
HWY_INLINE void UpdateMultiplyRow(float scale, double shift, const Terms& terms, int64_t n, int64_t row, T* tile,
                                  const float* v, int64_t count, float* y, float* sums) {
  const int64_t length = PaddedLength(n), height = TileHeight(n, row), begin = row * kTileSide;
  const bool update = scale != 1.0f || shift != 0.0 || terms.count > 0;
  std::fill(sums, sums + count * kTileSide * 16, 0.0f);
  for (int64_t column = 0; column <= row; ++column, tile += height * kTileSide) {
    if (update) UpdateTileOrDiagonal(scale, shift, terms, row, column, height, tile, tile);
    for (int64_t k = 0; k < count; ++k) {
      const float* vk = v + k * length;
      float* part = sums + k * kTileSide * 16;
      if (column == row) {
        MultiplyTile<false>(tile, height, vk + begin, vk + begin, part, nullptr);
      } else {
        float* y_column = y + k * length + column * kTileSide;
        MultiplyTile<true>(tile, height, vk + begin, vk + column * kTileSide, part, y_column);
      }
    }
  }
  for (int64_t k = 0; k < count; ++k) {
    float* part = sums + k * kTileSide * 16;
    SumLanes(part);
    std::copy_n(part, height, y + k * length + begin);
  }
}

template <typename T>
HWY_INLINE void UpdateMultiplyAll(float scale, double shift, const Terms& terms, T* data, int64_t n, const float* v,
                                  int64_t count, float* y, float* scratch) {
  // Later rows add to y_I: row I initialises y_I with its own part before they do.
  for (int64_t row = 0; row < TileRows(n); ++row) {
    UpdateMultiplyRow(scale, shift, terms, n, row, data + TileOffset(n, row, 0), v, count, y, scratch);
  }
}

void UpdateMultiply(float scale, double shift, const Terms& terms, const Tiles& m, const float* v, int64_t count,
                    float* y, float* scratch) {
  if (m.storage == SymmetricStorage::kF32) {
    UpdateMultiplyAll(scale, shift, terms, static_cast<float*>(m.data), m.n, v, count, y, scratch);
  } else {
    UpdateMultiplyAll(scale, shift, terms, static_cast<hwy::float16_t*>(m.data), m.n, v, count, y, scratch);
  }
}

template <typename T>
HWY_INLINE void ExpandAll(float scale, double shift, const Terms& terms, const T* data, int64_t n, MatrixView x) {
  HWY_ALIGN float tile[kTileSize];
  for (int64_t row = 0; row < TileRows(n); ++row) {
    const int64_t height = TileHeight(n, row), i0 = row * kTileSide;
    for (int64_t column = 0; column <= row; ++column) {
      UpdateTileOrDiagonal(scale, shift, terms, row, column, height, data + TileOffset(n, row, column), tile);
      const int64_t j0 = column * kTileSide, width = column == row ? height : kTileSide;
      for (int64_t i = 0; i < height; ++i) std::copy_n(tile + i * kTileSide, width, x.row(i0 + i) + j0);
      if (column == row) continue;
      for (int64_t j = 0; j < kTileSide; ++j) {
        float* mirrored = x.row(j0 + j) + i0;
        for (int64_t i = 0; i < height; ++i) mirrored[i] = tile[i * kTileSide + j];
      }
    }
  }
}

void Expand(float scale, double shift, const Terms& terms, const void* tiles, int64_t n, SymmetricStorage storage,
            MatrixView x) {
  if (storage == SymmetricStorage::kF32) {
    ExpandAll(scale, shift, terms, static_cast<const float*>(tiles), n, x);
  } else {
    ExpandAll(scale, shift, terms, static_cast<const hwy::float16_t*>(tiles), n, x);
  }
}

}  // namespace
}  // namespace precondor::tiles::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace precondor::tiles {

HWY_EXPORT(UpdateMultiply);
HWY_EXPORT(Expand);

int64_t MultiplyScratch(int64_t, int64_t count) { return count * kTileSide * 16; }

void UpdateMultiply(float scale, double shift, const Terms& terms, const Tiles& m, const float* v, int64_t count,
                    float* y, float* scratch) {
  HWY_DYNAMIC_DISPATCH(UpdateMultiply)(scale, shift, terms, m, v, count, y, scratch);
}

void Expand(float scale, double shift, const Terms& terms, const void* tiles, int64_t n, SymmetricStorage storage,
            MatrixView x) {
  HWY_DYNAMIC_DISPATCH(Expand)(scale, shift, terms, tiles, n, storage, x);
}

}  // namespace precondor::tiles
#endif
