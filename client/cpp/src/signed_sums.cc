// SPDX-License-Identifier: Apache-2.0
#include "client/cpp/src/signed_sums.h"

#include <algorithm>
#include <cstring>
#include <vector>

#include "absl/base/attributes.h"

namespace precondor {
namespace {

// Tiling: a tile is read from memory once and then from the first-level cache; the sums of a group stay in registers.
constexpr int64_t kTileRows = 64;
constexpr int64_t kTileColumns = 16;
constexpr int64_t kPanelColumns = 256;  // the f64 totals of a panel stay in the cache
constexpr int64_t kGroup = 8;           // sketches whose sums are computed together

template <int kLanes>
using Lanes __attribute__((vector_size(4 * kLanes))) = float;

// total[k][c] += sum_i signs[i][k] x[i][c] over the rows of a tile and the sketches of a group. The products are exact,
// so fused and separate multiplications and additions give equal results.
template <int kLanes>
ABSL_ATTRIBUTE_ALWAYS_INLINE inline void AddTile(const float* x, int64_t stride, int64_t rows, const float* signs,
                                                 double* total) {
  for (int64_t column = 0; column < kTileColumns; column += kLanes) {
    Lanes<kLanes> sums[kGroup] = {};
    for (int64_t i = 0; i < rows; ++i) {
      Lanes<kLanes> values;
      std::memcpy(&values, x + i * stride + column, sizeof(values));
      for (int64_t k = 0; k < kGroup; ++k) sums[k] += values * signs[i * kGroup + k];
    }
    for (int64_t k = 0; k < kGroup; ++k) {
      float sum[kLanes];
      std::memcpy(sum, &sums[k], sizeof(sum));
      for (int64_t c = 0; c < kLanes; ++c) total[k * kPanelColumns + column + c] += sum[c];
    }
  }
}

using AddTileFn = void (*)(const float*, int64_t, int64_t, const float*, double*);

void AddTilePlain(const float* x, int64_t stride, int64_t rows, const float* signs, double* total) {
  AddTile<4>(x, stride, rows, signs, total);
}
#if defined(__x86_64__)
__attribute__((target("avx2"))) void AddTileAvx2(const float* x, int64_t stride, int64_t rows, const float* signs,
                                                 double* total) {
  AddTile<8>(x, stride, rows, signs, total);
}
__attribute__((target("avx512f"))) void AddTileAvx512(const float* x, int64_t stride, int64_t rows, const float* signs,
                                                      double* total) {
  AddTile<16>(x, stride, rows, signs, total);
}
#endif

// Returns the implementations that this processor can run, the fastest first.
std::vector<AddTileFn> Ways() {
  std::vector<AddTileFn> ways;
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx512f")) ways.push_back(AddTileAvx512);
  if (__builtin_cpu_supports("avx2")) ways.push_back(AddTileAvx2);
#endif
  ways.push_back(AddTilePlain);
  return ways;
}

// Expands the sign bits to +1 and -1, in the order [tile of rows][group][row of the tile][sketch of the group].
std::vector<float> Spread(absl::Span<const uint32_t> signs, int64_t rows, int64_t groups) {
  std::vector<float> spread(static_cast<size_t>(rows * groups * kGroup), 1.0f);
  if (signs.empty()) return spread;
  float* to = spread.data();
  for (int64_t begin = 0; begin < rows; begin += kTileRows) {
    const int64_t end = std::min(begin + kTileRows, rows);
    for (int64_t group = 0; group < groups; ++group) {
      for (int64_t i = begin; i < end; ++i) {
        const uint32_t word = signs[static_cast<size_t>(i)] >> (group * kGroup);
        for (int64_t k = 0; k < kGroup; ++k) *to++ = (word >> k & 1u) != 0 ? -1.0f : 1.0f;
      }
    }
  }
  return spread;
}

}  // namespace

void SignedSums(ConstMatrixView rows, absl::Span<const uint32_t> signs, double scale, MatrixView out, size_t way) {
  const int64_t groups = (out.rows + kGroup - 1) / kGroup;
  const std::vector<float> spread = Spread(signs, rows.rows, groups);
  const AddTileFn add_tile = Ways()[way];
  float edge[kTileRows * kTileColumns] = {};  // copy of the last columns if they do not fill a tile
  std::vector<double> total(static_cast<size_t>(groups * kGroup * kPanelColumns));
  for (int64_t panel = 0; panel < rows.cols; panel += kPanelColumns) {
    const int64_t width = std::min(kPanelColumns, rows.cols - panel);
    std::fill(total.begin(), total.end(), 0.0);
    for (int64_t begin = 0; begin < rows.rows; begin += kTileRows) {
      const int64_t count = std::min(kTileRows, rows.rows - begin);
      for (int64_t column = 0; column < width; column += kTileColumns) {
        const float* x = rows.row(begin) + panel + column;
        int64_t stride = rows.stride;
        if (width - column < kTileColumns) {
          for (int64_t i = 0; i < count; ++i) std::copy_n(x + i * stride, width - column, edge + i * kTileColumns);
          x = edge;
          stride = kTileColumns;
        }
        for (int64_t group = 0; group < groups; ++group) {
          add_tile(x, stride, count, &spread[static_cast<size_t>((begin * groups + group * count) * kGroup)],
                   &total[static_cast<size_t>(group * kGroup * kPanelColumns + column)]);
        }
      }
    }
    for (int64_t j = 0; j < out.rows; ++j) {
      for (int64_t c = 0; c < width; ++c) {
        out.row(j)[panel + c] = static_cast<float>(scale * total[static_cast<size_t>(j * kPanelColumns + c)]);
      }
    }
  }
}

size_t SignedSumsWays() { return Ways().size(); }

}  // namespace precondor
