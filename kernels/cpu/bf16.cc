// SPDX-License-Identifier: Apache-2.0
#include "kernels/cpu/bf16.h"

#include <algorithm>

#include "kernels/cpu/onednn.h"
#include "kernels/cpu/vector_ops.h"

namespace precondor::cpu {
namespace {

constexpr int64_t kRows = onednn::kPackedRows, kColumns = onednn::kPackedColumns;

int64_t RoundUp(int64_t value, int64_t unit) { return (value + unit - 1) / unit * unit; }

// Returns the floats that `count` bf16 numbers take, rounded up so that what follows is aligned.
int64_t Floats(int64_t count) { return RoundUp(count, 32) / 2; }
int64_t PackedFloats(int64_t rows, int64_t cols) { return Floats(RoundUp(rows, kRows) * RoundUp(cols, kColumns)); }

void Round(ConstMatrixView x, uint16_t* out) {
  for (int64_t i = 0; i < x.rows; ++i) RoundToBf16(x.row(i), x.cols, out + i * x.cols);
}

// Packs two rows at a time as pairs, in blocks of kColumns pairs. It packs several blocks at a time, so that rows are
// read in long pieces and few places are written at once.
void Pack(ConstMatrixView x, uint16_t* out) {
  constexpr int64_t kBlocksAtOnce = 16;
  const int64_t height = RoundUp(x.rows, kRows), width = RoundUp(x.cols, kColumns);
  uint32_t* pairs = reinterpret_cast<uint32_t*>(out);
  for (int64_t group = 0; group < width; group += kBlocksAtOnce * kColumns) {
    const int64_t group_end = std::min(group + kBlocksAtOnce * kColumns, width);
    for (int64_t i = 0; i < height; i += 2) {
      for (int64_t column = group; column < group_end; column += kColumns) {
        uint32_t* to = pairs + column * height / 2 + i / 2 * kColumns;
        const int64_t count = i < x.rows ? std::min(kColumns, x.cols - column) : 0;
        if (count > 0) PairAsBf16(x.row(i) + column, i + 1 < x.rows ? x.row(i + 1) + column : nullptr, count, to);
        std::fill(to + count, to + kColumns, 0);
      }
    }
  }
}

}  // namespace

bool SupportsBf16() { return onednn::ProcessorHasBf16(); }

int64_t Bf16Scratch(int64_t m, int64_t n) {
  return Floats(m * m) + PackedFloats(m, n) + Floats(m * n) + PackedFloats(n, n);
}

bool Bf16Precondition(ConstMatrixView l, ConstMatrixView r, ConstMatrixView d, float* scratch, MatrixView u) {
  const int64_t m = d.rows, n = d.cols;
  uint16_t* const left = reinterpret_cast<uint16_t*>(scratch);
  uint16_t* const packed_d = reinterpret_cast<uint16_t*>(scratch += Floats(m * m));
  uint16_t* const half = reinterpret_cast<uint16_t*>(scratch += PackedFloats(m, n));
  uint16_t* const packed_r = reinterpret_cast<uint16_t*>(scratch + Floats(m * n));
  Round(l, left);
  Pack(d, packed_d);
  if (!onednn::Bf16Product(m, n, m, left, packed_d, half)) return false;
  Pack(r, packed_r);
  return onednn::Bf16Product(m, n, n, half, packed_r, u);
}

}  // namespace precondor::cpu
