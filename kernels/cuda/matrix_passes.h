// SPDX-License-Identifier: Apache-2.0
// Passes over matrices of many callers, each in one launch: scaled copies, also between f32 and bf16, and momentum.
// Sums are made in parts whose number and order depend on the shape alone.
#pragma once

#include <cstdint>
#include <cuda_bf16.h>
#include <cuda_runtime_api.h>

#include "kernels/base/matrix_view.h"

namespace precondor::cuda {

// A sum over a matrix, in device memory: `partials` has room for one number of each block and sum, and `arrived` is a
// counter that is 0 before the launch.
struct SumOfParts {
  double* totals = nullptr;
  double* partials = nullptr;
  unsigned* arrived = nullptr;
};

// to = factor from + shift I, computed in f64. Elements of `from` that do not exist, because `to` is larger, are 0.
// Pointers are to device memory.
template <typename From, typename To>
struct ScaledCopyJob {
  BasicMatrixView<const From> from;
  BasicMatrixView<To> to;
  double factor = 1, shift = 0;
  // If not null, the factor is divided by sqrt(*norm) + epsilon, and is 0 if *norm is 0.
  const double* norm = nullptr;
  double epsilon = 0;
  SumOfParts square = {};  // unless `totals` is null, receives |to|^2 before `to` is rounded
  int64_t first = 0;       // blocks of all jobs before this one
};
// Returns the number of blocks of a job by the shape of `to`.
int64_t ScaledCopyBlocks(int64_t rows, int64_t cols);

// Runs `jobs` [count], in device memory, of `blocks` blocks in all. Defined for f32 and bf16.
template <typename From, typename To>
cudaError_t ScaledCopies(cudaStream_t stream, const ScaledCopyJob<From, To>* jobs, int count, int64_t blocks);

// Adds a gradient to its momentum, and computes norms in the same pass: next = alpha d + beta momentum; direction = d +
// beta next, or `next` if `lookahead` has no elements; `lookahead` receives the direction. If `momentum` has no
// elements, the direction is d, and nothing is written. `next` may be `momentum`.
struct MomentumJob {
  float alpha = 1;
  ConstMatrixView d;
  ConstMatrixView momentum;
  float beta = 0;
  MatrixView next;
  MatrixView lookahead = {};
  SumOfParts squares = {};  // receive |d|^2 and |direction|^2
  int64_t first = 0;        // blocks of all jobs before this one
};
// Runs `jobs` [count], in device memory, of `blocks` blocks in all; a job has ScaledCopyBlocks of its shape.
cudaError_t AddMomentum(cudaStream_t stream, const MomentumJob* jobs, int count, int64_t blocks);

}  // namespace precondor::cuda
