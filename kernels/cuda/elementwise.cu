// SPDX-License-Identifier: Apache-2.0
#include "kernels/cuda/elementwise.h"
#include "kernels/cuda/launch.h"

namespace precondor::cuda {
namespace {

constexpr unsigned kRowsOfBlock = 8;

// f(i, j) for all i, j. Neighbours in a row are neighbours in a warp.
template <typename Function>
__global__ void __launch_bounds__(kWarp* kRowsOfBlock) ForEachKernel(int64_t rows, int64_t cols, Function f) {
  for (int64_t i = int64_t{blockIdx.y} * kRowsOfBlock + threadIdx.y; i < rows; i += int64_t{gridDim.y} * kRowsOfBlock) {
    for (int64_t j = int64_t{blockIdx.x} * kWarp + threadIdx.x; j < cols; j += int64_t{gridDim.x} * kWarp) f(i, j);
  }
}

template <typename Function>
cudaError_t ForEach(cudaStream_t stream, int64_t rows, int64_t cols, Function f) {
  constexpr int64_t kMaxGridY = 65535;
  const dim3 grid(static_cast<unsigned>(std::min<int64_t>(Blocks(cols, kWarp), 1024)),
                  static_cast<unsigned>(std::min(Blocks(rows, kRowsOfBlock), kMaxGridY)));
  return Launch(stream, grid, dim3(kWarp, kRowsOfBlock), ForEachKernel<Function>, rows, cols, f);
}

// a_ij and a_ji become combine(a_ij, a_ji) for j < i: the thread of the element below writes both.
template <typename Combine>
cudaError_t CombineTriangles(cudaStream_t stream, MatrixView a, Combine combine) {
  return ForEach(stream, a.rows, a.cols, [a, combine] __device__(int64_t i, int64_t j) {
    if (j < i) a.at(i, j) = a.at(j, i) = combine(a.at(i, j), a.at(j, i));
  });
}

__host__ __device__ constexpr int64_t PackedIndex(int64_t i, int64_t j) { return i * (i + 1) / 2 + j; }

// The first 64 bits of Philox4x32-10, as kernels/base/random.cc computes them.
__device__ uint64_t PhiloxBits(uint32_t key0, uint32_t key1, uint64_t nonce, uint64_t counter) {
  uint32_t c0 = static_cast<uint32_t>(counter), c1 = static_cast<uint32_t>(counter >> 32);
  uint32_t c2 = static_cast<uint32_t>(nonce), c3 = static_cast<uint32_t>(nonce >> 32);
  for (int round = 0; round < 10; ++round) {
    const uint64_t p0 = uint64_t{0xD2511F53u} * c0, p1 = uint64_t{0xCD9E8D57u} * c2;
    const uint32_t next0 = static_cast<uint32_t>(p1 >> 32) ^ c1 ^ key0;
    const uint32_t next2 = static_cast<uint32_t>(p0 >> 32) ^ c3 ^ key1;
    c0 = next0;
    c1 = static_cast<uint32_t>(p1);
    c2 = next2;
    c3 = static_cast<uint32_t>(p0);
    key0 += 0x9E3779B9u;
    key1 += 0xBB67AE85u;
  }
  return (uint64_t{c1} << 32) | c0;
}

}  // namespace

cudaError_t Axpby(cudaStream_t stream, double alpha, ConstMatrixView x, double beta, MatrixView y) {
  const float fa = static_cast<float>(alpha), fb = static_cast<float>(beta);
  const bool reads_x = alpha != 0.0, reads_y = beta != 0.0;
  return ForEach(stream, y.rows, y.cols, [=] __device__(int64_t i, int64_t j) {
    const float from_x = reads_x ? fa * x.at(i, j) : 0.0f;
    y.at(i, j) = reads_y ? fmaf(fb, y.at(i, j), from_x) : from_x;
  });
}

cudaError_t ScaleRows(cudaStream_t stream, const double* scales, ConstMatrixView x, MatrixView y) {
  return ForEach(stream, y.rows, y.cols,
                 [=] __device__(int64_t i, int64_t j) { y.at(i, j) = static_cast<float>(scales[i]) * x.at(i, j); });
}

cudaError_t ScaleColumns(cudaStream_t stream, const double* scales, ConstMatrixView x, MatrixView y) {
  return ForEach(stream, y.rows, y.cols,
                 [=] __device__(int64_t i, int64_t j) { y.at(i, j) = static_cast<float>(scales[j]) * x.at(i, j); });
}

cudaError_t ScaleBothSides(cudaStream_t stream, const double* scales, ConstMatrixView x, MatrixView y) {
  return ForEach(stream, y.rows, y.cols, [=] __device__(int64_t i, int64_t j) {
    y.at(i, j) = static_cast<float>(scales[i] * scales[j] * x.at(i, j));
  });
}

cudaError_t MultiplyElements(cudaStream_t stream, double alpha, ConstMatrixView x, ConstMatrixView y, double beta,
                             MatrixView z) {
  const float fa = static_cast<float>(alpha), fb = static_cast<float>(beta);
  const bool reads_z = beta != 0.0;
  return ForEach(stream, z.rows, z.cols, [=] __device__(int64_t i, int64_t j) {
    const float product = fa * x.at(i, j) * y.at(i, j);
    z.at(i, j) = reads_z ? fmaf(fb, z.at(i, j), product) : product;
  });
}

cudaError_t DivideByRoot(cudaStream_t stream, double alpha, ConstMatrixView x, ConstMatrixView v, double epsilon,
                         MatrixView y) {
  const float fa = static_cast<float>(alpha), fe = static_cast<float>(epsilon);
  return ForEach(stream, y.rows, y.cols,
                 [=] __device__(int64_t i, int64_t j) { y.at(i, j) = fa * x.at(i, j) / (sqrtf(v.at(i, j)) + fe); });
}

cudaError_t DivideByOuter(cudaStream_t stream, double alpha, const double* rows, const double* columns, double shift,
                          ConstMatrixView x, MatrixView y) {
  return ForEach(stream, y.rows, y.cols, [=] __device__(int64_t i, int64_t j) {
    y.at(i, j) = static_cast<float>(alpha / (rows[i] * columns[j] + shift)) * x.at(i, j);
  });
}

cudaError_t Gather(cudaStream_t stream, const int64_t* rows, const int64_t* columns, ConstMatrixView x, MatrixView y) {
  return ForEach(stream, y.rows, y.cols, [=] __device__(int64_t i, int64_t j) {
    y.at(i, j) = x.at(rows == nullptr ? i : rows[i], columns == nullptr ? j : columns[j]);
  });
}

cudaError_t AddDiagonal(cudaStream_t stream, double value, MatrixView a) {
  return ForEach(stream, 1, a.rows,
                 [=] __device__(int64_t, int64_t i) { a.at(i, i) = static_cast<float>(a.at(i, i) + value); });
}

cudaError_t Symmetrize(cudaStream_t stream, MatrixView a) {
  return CombineTriangles(stream, a, [] __device__(float below, float above) { return 0.5f * below + 0.5f * above; });
}

cudaError_t PackLower(cudaStream_t stream, ConstMatrixView x, MatrixView packed) {
  float* const out = packed.data;
  return ForEach(stream, x.rows, x.cols, [=] __device__(int64_t i, int64_t j) {
    if (j <= i) out[PackedIndex(i, j)] = x.at(i, j);
  });
}

cudaError_t UnpackLower(cudaStream_t stream, ConstMatrixView packed, MatrixView x) {
  const float* const in = packed.data;
  return ForEach(stream, x.rows, x.cols, [=] __device__(int64_t i, int64_t j) {
    x.at(i, j) = in[j <= i ? PackedIndex(i, j) : PackedIndex(j, i)];
  });
}

cudaError_t PackRow(cudaStream_t stream, ConstMatrixView x, int64_t row, MatrixView packed) {
  float* const out = packed.data;
  return ForEach(stream, 1, x.cols, [=] __device__(int64_t, int64_t j) {
    out[j <= row ? PackedIndex(row, j) : PackedIndex(j, row)] = x.data[j];
  });
}

cudaError_t FillNormal(cudaStream_t stream, uint32_t key0, uint32_t key1, uint64_t nonce, MatrixView x) {
  const int64_t cols = x.cols;
  return ForEach(stream, x.rows, x.cols, [=] __device__(int64_t i, int64_t j) {
    constexpr double kTwoPi = 6.283185307179586476925;
    const uint64_t number = static_cast<uint64_t>(i * cols + j);
    const uint64_t bits = PhiloxBits(key0, key1, nonce, number / 2);
    const double uniform = (static_cast<double>(bits >> 32) + 0.5) * 0x1p-32;
    const double angle = kTwoPi * 0x1p-32 * static_cast<double>(static_cast<uint32_t>(bits));
    const double radius = sqrt(-2.0 * log(uniform));
    x.at(i, j) = static_cast<float>(radius * (number % 2 == 0 ? cos(angle) : sin(angle)));
  });
}

cudaError_t WidenLower(cudaStream_t stream, ConstMatrixView a, double* out) {
  return ForEach(stream, a.rows, a.cols,
                 [=] __device__(int64_t i, int64_t j) { out[i * a.cols + j] = j <= i ? a.at(i, j) : a.at(j, i); });
}

cudaError_t Widen(cudaStream_t stream, ConstMatrixView a, double* out) {
  return ForEach(stream, a.rows, a.cols, [=] __device__(int64_t i, int64_t j) { out[i * a.cols + j] = a.at(i, j); });
}

cudaError_t Narrow(cudaStream_t stream, const double* in, MatrixView out) {
  return ForEach(stream, out.rows, out.cols,
                 [=] __device__(int64_t i, int64_t j) { out.at(i, j) = static_cast<float>(in[i * out.cols + j]); });
}

cudaError_t NarrowWithSigns(cudaStream_t stream, const double* in, const double* signs, int64_t step, MatrixView out) {
  return ForEach(stream, out.rows, out.cols, [=] __device__(int64_t i, int64_t j) {
    out.at(i, j) = static_cast<float>(signs[i * step] < 0 ? -in[i * out.cols + j] : in[i * out.cols + j]);
  });
}

cudaError_t NarrowLower(cudaStream_t stream, const double* in, MatrixView out) {
  return ForEach(stream, out.rows, out.cols, [=] __device__(int64_t i, int64_t j) {
    out.at(i, j) = static_cast<float>(j <= i ? in[i * out.cols + j] : in[j * out.cols + i]);
  });
}

cudaError_t RoundToBf16(cudaStream_t stream, ConstMatrixView x, __nv_bfloat16* out) {
  return ForEach(stream, x.rows, x.cols,
                 [=] __device__(int64_t i, int64_t j) { out[i * x.cols + j] = __float2bfloat16_rn(x.at(i, j)); });
}

}  // namespace precondor::cuda
