// SPDX-License-Identifier: Apache-2.0
// Operations element by element. One thread computes an element and nothing is summed, so every grid gives the same
// bits.
//
// Views are of device memory, row-major f32. Spans (scales, indices) are pointers to device memory. Backend's contract
// (kernels/backend.h) says what each operation computes and which operands may alias. Each function is one launch on
// `stream` and returns the launch's error. Precondition: outputs have elements.
#pragma once

#include <cstdint>
#include <cuda_runtime_api.h>

#include "kernels/base/matrix_view.h"
#include "kernels/base/operation_kinds.h"

namespace precondor::cuda {

// One operation::Elementwise (kernels/operation.h), with its spans on the device. One launch can run many of them.
struct ElementwiseJob {
  ElementwiseKind kind = ElementwiseKind::kAxpby;
  double alpha = 0;
  double beta = 0;
  const double *scales = nullptr, *column_scales = nullptr;
  const int64_t *rows = nullptr, *columns = nullptr;  // null for all in their order
  int64_t row = 0;
  ConstMatrixView x;
  ConstMatrixView v;
  MatrixView y;
  int64_t first = 0;  // blocks of all jobs before this one
};
// Returns the number of blocks of `job`.
int64_t ElementwiseBlocks(const ElementwiseJob& job);
// Run one job, in host memory, or `count` jobs in device memory, of `blocks` blocks in all.
cudaError_t Elementwise(cudaStream_t stream, const ElementwiseJob& job);
cudaError_t Elementwise(cudaStream_t stream, const ElementwiseJob* jobs, int count, int64_t blocks);

// key0, key1 and nonce are the state of a CounterRandom (kernels/base/random.h).
cudaError_t FillNormal(cudaStream_t stream, uint32_t key0, uint32_t key1, uint64_t nonce, MatrixView x);

// The functions below convert between f32 views and the dense f64 matrices, [rows, cols] contiguous, that
// decompositions work on.
// WidenLower sets both triangles of `out` from the lower triangle of a.
cudaError_t WidenLower(cudaStream_t stream, ConstMatrixView a, double* out);
cudaError_t Widen(cudaStream_t stream, ConstMatrixView a, double* out);
cudaError_t Narrow(cudaStream_t stream, const double* in, MatrixView out);
// out_ij = in_ij * (signs_i < 0 ? -1 : 1). Elements of `signs` are `step` apart.
cudaError_t NarrowWithSigns(cudaStream_t stream, const double* in, const double* signs, int64_t step, MatrixView out);

}  // namespace precondor::cuda
