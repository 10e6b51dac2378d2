// SPDX-License-Identifier: Apache-2.0
// Operations element by element: one thread an element, no sums, so that any grid gives the same bits.
//
// Views are of device memory, row-major f32; so are spans (scales, indices), given by pointer. What each computes, and
// which operands may alias, is Backend's contract (kernels/backend.h). Each is one launch on `stream` and returns the
// launch's error. No output is without elements.
#pragma once

#include <cstdint>
#include <cuda_runtime_api.h>

#include "kernels/base/elementwise_kind.h"
#include "kernels/base/matrix_view.h"

namespace precondor::cuda {

// One of the operations that run together, as kernels/operation.h has it.
struct ElementwiseJob {
  ElementwiseKind kind = ElementwiseKind::kAxpby;
  double alpha = 0;
  double beta = 0;
  const double* scales = nullptr;
  int64_t row = 0;
  ConstMatrixView x;
  MatrixView y;
  int64_t first = 0;  // blocks of all jobs before this one
};
int64_t ElementwiseBlocks(const ElementwiseJob& job);
// `job` is in host memory; `jobs` [count], of `blocks` blocks in all, in device memory.
cudaError_t Elementwise(cudaStream_t stream, const ElementwiseJob& job);
cudaError_t Elementwise(cudaStream_t stream, const ElementwiseJob* jobs, int count, int64_t blocks);

cudaError_t MultiplyElements(cudaStream_t stream, double alpha, ConstMatrixView x, ConstMatrixView y, double beta,
                             MatrixView z);
cudaError_t DivideByRoot(cudaStream_t stream, double alpha, ConstMatrixView x, ConstMatrixView v, double epsilon,
                         MatrixView y);
cudaError_t DivideByOuter(cudaStream_t stream, double alpha, const double* rows, const double* columns, double shift,
                          ConstMatrixView x, MatrixView y);
// nullptr stands for all rows or columns in their order.
cudaError_t Gather(cudaStream_t stream, const int64_t* rows, const int64_t* columns, ConstMatrixView x, MatrixView y);
// The state of kernels/base/random.h's CounterRandom.
cudaError_t FillNormal(cudaStream_t stream, uint32_t key0, uint32_t key1, uint64_t nonce, MatrixView x);

// Between f32 views and the dense f64 matrices that decompositions work on, [rows, cols] contiguous.
// A symmetric matrix from a's lower triangle.
cudaError_t WidenLower(cudaStream_t stream, ConstMatrixView a, double* out);
cudaError_t Widen(cudaStream_t stream, ConstMatrixView a, double* out);
cudaError_t Narrow(cudaStream_t stream, const double* in, MatrixView out);
// out_ij = in_ij * (signs_i < 0 ? -1 : 1); signs are `step` elements apart.
cudaError_t NarrowWithSigns(cudaStream_t stream, const double* in, const double* signs, int64_t step, MatrixView out);
// Both triangles from in[i, j], j <= i.
cudaError_t NarrowLower(cudaStream_t stream, const double* in, MatrixView out);

}  // namespace precondor::cuda
