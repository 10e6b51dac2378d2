// SPDX-License-Identifier: Apache-2.0
#include "precondor/statistics.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"

#include "kernels/base/random.h"

namespace precondor {
namespace {

// Columns and rows are worked on in blocks: the partial sums of a block stay in the first-level cache, and f32 sums
// are short (kRowBlock terms) before they are folded into f64 totals. The order is fixed by the shape alone.
constexpr int64_t kColumnBlock = 256;
constexpr int64_t kRowBlock = 64;
constexpr int64_t kUnroll = 4;

// One word of random bits a row; bit j is the sign of sketch j. kMaxSketches bits are used.
std::vector<uint32_t> SignWords(const SketchKey& key, uint64_t first_row, int64_t rows) {
  const CounterRandom random({key.seed, key.step, key.layer, static_cast<uint64_t>(key.side), key.rank});
  std::vector<uint32_t> words(static_cast<size_t>(rows));
  for (int64_t i = 0; i < rows; ++i) {
    words[i] = static_cast<uint32_t>(random.Bits(first_row + static_cast<uint64_t>(i)));
  }
  return words;
}

float Sign(uint32_t word, int64_t sketch) { return (word >> sketch & 1u) != 0 ? -1.0f : 1.0f; }

// sum[j] += s0 x0[j] + ... + s3 x3[j], left to right.
void AddFour(const float* __restrict const* x, const float* s, int64_t n, float* __restrict sum) {
  const float* __restrict x0 = x[0];
  const float* __restrict x1 = x[1];
  const float* __restrict x2 = x[2];
  const float* __restrict x3 = x[3];
  for (int64_t j = 0; j < n; ++j) sum[j] = (((sum[j] + s[0] * x0[j]) + s[1] * x1[j]) + s[2] * x2[j]) + s[3] * x3[j];
}

void AddOne(const float* __restrict x, float s, int64_t n, float* __restrict sum) {
  for (int64_t j = 0; j < n; ++j) sum[j] += s * x[j];
}

// sum[j] += sum_i sign_i x_ij over rows [begin, end) and columns [column, column + n); words empty: all signs +1.
void AddRows(ConstMatrixView rows, int64_t begin, int64_t end, int64_t column, int64_t n,
             const std::vector<uint32_t>& words, int64_t sketch, float* sum) {
  const auto sign = [&](int64_t i) { return words.empty() ? 1.0f : Sign(words[i], sketch); };
  int64_t i = begin;
  for (; i + kUnroll <= end; i += kUnroll) {
    const float* x[kUnroll];
    float s[kUnroll];
    for (int64_t u = 0; u < kUnroll; ++u) {
      x[u] = rows.row(i + u) + column;
      s[u] = sign(i + u);
    }
    AddFour(x, s, n, sum);
  }
  for (; i < end; ++i) AddOne(rows.row(i) + column, sign(i), n, sum);
}

// out_j = scale * sum_i s_ij x_i for every row j of out.
void SignedSums(ConstMatrixView rows, const std::vector<uint32_t>& words, double scale, MatrixView out) {
  std::vector<double> total(static_cast<size_t>(out.rows * kColumnBlock));
  float partial[kColumnBlock];
  for (int64_t column = 0; column < rows.cols; column += kColumnBlock) {
    const int64_t n = std::min(kColumnBlock, rows.cols - column);
    std::fill(total.begin(), total.end(), 0.0);
    for (int64_t begin = 0; begin < rows.rows; begin += kRowBlock) {
      const int64_t end = std::min(begin + kRowBlock, rows.rows);
      for (int64_t sketch = 0; sketch < out.rows; ++sketch) {
        std::fill(partial, partial + n, 0.0f);
        AddRows(rows, begin, end, column, n, words, sketch, partial);
        double* sum = &total[sketch * kColumnBlock];
        for (int64_t j = 0; j < n; ++j) sum[j] += partial[j];
      }
    }
    for (int64_t sketch = 0; sketch < out.rows; ++sketch) {
      const double* sum = &total[sketch * kColumnBlock];
      float* to = out.row(sketch) + column;
      for (int64_t j = 0; j < n; ++j) to[j] = static_cast<float>(scale * sum[j]);
    }
  }
}

// Lower triangle of scale * sum_i x_i x_i', packed, some rows at a time so that the triangle is passed over less often.
void PackedMoment(ConstMatrixView rows, double scale, float* out) {
  constexpr int64_t kRowsTogether = 8;
  const int64_t d = rows.cols;
  std::fill(out, out + PackedElements(d), 0.0f);
  for (int64_t begin = 0; begin < rows.rows; begin += kRowsTogether) {
    const int64_t end = std::min(begin + kRowsTogether, rows.rows);
    float* to = out;
    for (int64_t i = 0; i < d; to += ++i) {
      for (int64_t r = begin; r < end; ++r) {
        const float* x = rows.row(r);
        const float factor = x[i];
        for (int64_t j = 0; j <= i; ++j) to[j] += factor * x[j];
      }
    }
  }
  for (int64_t i = 0; i < PackedElements(d); ++i) out[i] = static_cast<float>(scale * out[i]);
}

}  // namespace

StatisticsShape ShapeOfStatistics(const SessionSpec& spec, int64_t layer, int64_t d, int64_t rows) {
  if (StatisticsOf(spec, layer) != StatisticsKind::kCovariance) return {VectorsPerWorker(spec, layer), d};
  return rows <= MaxRows(d) ? StatisticsShape{rows, d} : StatisticsShape{1, PackedElements(d)};
}

void SketchSigns(const SketchKey& key, uint64_t first_row, MatrixView out) {
  const std::vector<uint32_t> words = SignWords(key, first_row, out.cols);
  for (int64_t sketch = 0; sketch < out.rows; ++sketch) {
    for (int64_t i = 0; i < out.cols; ++i) out.at(sketch, i) = Sign(words[i], sketch);
  }
}

absl::Status ComputeStatistics(const SessionSpec& spec, const SketchKey& key, ConstMatrixView rows, double row_scale,
                               MatrixView out) {
  if (rows.rows < 1 || rows.cols < 1) {
    return absl::InvalidArgumentError(absl::StrCat(
        "ComputeStatistics: rows: expected at least one row and one column, got [", rows.rows, ", ", rows.cols, "]"));
  }
  const StatisticsShape shape = ShapeOfStatistics(spec, key.layer, rows.cols, rows.rows);
  if (out.rows != shape.rows || out.cols != shape.cols) {
    return absl::InvalidArgumentError(absl::StrCat("ComputeStatistics: out: expected [", shape.rows, ", ", shape.cols,
                                                   "], got [", out.rows, ", ", out.cols, "]"));
  }
  const double n = static_cast<double>(rows.rows);
  const StatisticsKind kind = StatisticsOf(spec, key.layer);
  if (kind == StatisticsKind::kCovariance && rows.rows > MaxRows(rows.cols)) {
    PackedMoment(rows, row_scale * row_scale / n, out.data);
  } else if (kind == StatisticsKind::kCovariance) {
    for (int64_t i = 0; i < rows.rows; ++i) {
      for (int64_t j = 0; j < rows.cols; ++j) out.at(i, j) = static_cast<float>(row_scale * rows.at(i, j));
    }
  } else if (kind == StatisticsKind::kSigned) {
    SignedSums(rows, SignWords(key, 0, rows.rows), row_scale / std::sqrt(n), out);
  } else {
    SignedSums(rows, {}, row_scale / n, out);
  }
  return absl::OkStatus();
}

double KlClipScale(absl::Span<const double> inner_products, double learning_rate, double clip) {
  double sum = 0;
  for (const double product : inner_products) sum += product;
  const double bound = std::abs(sum) * learning_rate * learning_rate;
  if (std::isnan(bound)) return 0.0;
  return bound > clip ? std::sqrt(clip / bound) : 1.0;
}

}  // namespace precondor
