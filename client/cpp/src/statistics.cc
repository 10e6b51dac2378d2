// SPDX-License-Identifier: Apache-2.0
#include "precondor/statistics.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"

#include "client/cpp/src/signed_sums.h"
#include "kernels/base/random.h"

namespace precondor {
namespace {

// Returns one word of random bits for each row. Bit j gives the sign of sketch j; kMaxSketches bits are used.
std::vector<uint32_t> SignWords(const SketchKey& key, uint64_t first_row, int64_t rows) {
  const CounterRandom random({key.seed, key.step, key.layer, static_cast<uint64_t>(key.side), key.rank});
  std::vector<uint32_t> words(static_cast<size_t>(rows));
  for (int64_t i = 0; i < rows; ++i) {
    words[i] = static_cast<uint32_t>(random.Bits(first_row + static_cast<uint64_t>(i)));
  }
  return words;
}

float Sign(uint32_t word, int64_t sketch) { return (word >> sketch & 1u) != 0 ? -1.0f : 1.0f; }

// Writes the packed lower triangle of scale * sum_i x_i x_i'. Adds several rows in one pass over the triangle.
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

absl::Status SketchSums(const SketchKey& key, uint64_t first_row, ConstMatrixView rows, MatrixView out) {
  if (rows.rows < 1 || rows.cols < 1 || out.rows < 1 || out.rows > kMaxSketches || out.cols < rows.cols ||
      out.cols > rows.cols + 1) {
    return absl::InvalidArgumentError(
        absl::StrCat("SketchSums: expected rows [n, d] and out [q, d] or [q, d + 1], q of 1 ... ", kMaxSketches,
                     ", got rows [", rows.rows, ", ", rows.cols, "] and out [", out.rows, ", ", out.cols, "]"));
  }
  const std::vector<uint32_t> words = SignWords(key, first_row, rows.rows);
  SignedSums(rows, words, 1.0, MatrixView(out.data, out.rows, rows.cols, out.stride));
  for (int64_t sketch = 0; sketch < out.rows && out.cols > rows.cols; ++sketch) {
    float sum = 0;
    for (const uint32_t word : words) sum += Sign(word, sketch);
    out.at(sketch, rows.cols) = sum;
  }
  return absl::OkStatus();
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
