// SPDX-License-Identifier: Apache-2.0
// Runs operations of kernels/operation.h on a device in groups. The operations of one kind, of all layers together,
// take as few launches as their shapes allow. The result of each operation is bitwise equal to its result alone.
//
// Precondition: spans are not empty. A function that returns an error has failed for all operations, and some of them
// may have run. After ResourceExhausted none has run, because memory is allocated before the first launch.
#pragma once

#include <cstdint>

#include "absl/status/status.h"
#include "absl/types/span.h"

#include "kernels/cuda/device.h"
#include "kernels/cuda/symmetric_tiles.h"
#include "kernels/operation.h"

namespace precondor::cuda {

// Runs in stream order.
absl::Status RunTogether(Device& device, absl::Span<const operation::Elementwise* const> operations);
// Returns whether the product is large enough for a launch of cuBLAS.
bool IsLarge(const operation::Gemm& gemm);
absl::Status RunTogether(Device& device, absl::Span<const operation::Gemm* const> operations);
// If matrices have changed and the launch for their products fails, the device is lost.
absl::Status RunTogether(Device& device, absl::Span<const operation::SymmetricUpdateMultiply* const> operations);
// The functions below wait for the device.
absl::Status RunTogether(Device& device, absl::Span<const operation::RowSquaredNorms* const> operations);
absl::Status RunTogether(Device& device, absl::Span<const operation::ColumnSquaredNorms* const> operations);
absl::Status RunTogether(Device& device, absl::Span<const operation::Dot* const> operations);
absl::Status RunTogether(Device& device, absl::Span<const operation::AbsoluteSum* const> operations);
absl::Status RunTogether(Device& device, absl::Span<const operation::AbsoluteMaximum* const> operations);
// Precondition: each operation has at most kMostVectorsOfTerms vectors and kMostRowsOfTerms rows. Sets statuses[i] to
// FailedPrecondition if a product of operation i is not finite.
absl::Status RunSmall(Device& device, absl::Span<const operation::ShermanMorrisonTerms* const> operations,
                      absl::Span<absl::Status> statuses);
// Converts the info of an inversion of n rows (kernels/cuda/spd_inverses.h) to the status of SpdInverse.
absl::Status InverseStatus(int info, int64_t n);
// Precondition: each matrix has at most kMostRowsOfSpdInverse rows. Sets statuses[i] to FailedPrecondition if matrix i
// has no inverse.
absl::Status RunSmall(Device& device, absl::Span<const operation::SpdInverse* const> operations,
                      absl::Span<absl::Status> statuses);
absl::Status RunSmall(Device& device, absl::Span<const operation::LowRankCore* const> operations,
                      absl::Span<absl::Status> statuses);
// Inverts larger matrices by cuSOLVER and cuBLAS in f64, those of one size in calls with as many matrices as the size
// says (docs/develop/adr/0031-newton-schulz-in-batches.md): three calls for each. Matrices that take more than
// `most_scratch_bytes` are inverted in several parts, one after another, of two launches each.
absl::Status RunLarge(Device& device, absl::Span<const operation::SpdInverse* const> operations,
                      absl::Span<absl::Status> statuses, int64_t most_scratch_bytes = int64_t{256} << 20);

// Computes dense products l d r of many layers. One launch expands all factors that are stored in tiles. Then, for the
// layers of each shape, cuBLAS makes products l d, and then (l d) r, in FixedBatches, in bf16, TF32 or f32. In f32,
// products below 0.5 GFLOP use kernels/cuda/products.h instead. Runs in stream order. Waits for the device if an
// operation asks for squares.
absl::Status RunTogether(Device& device, absl::Span<const operation::DensePrecondition* const> operations);
// Returns the job that computes the matrix of `form`. `weights` holds the weights of the form in device memory.
SymmetricJob JobOfForm(const SymmetricForm& form, const double* weights);

// Updates all low-rank factors in one launch, in stream order.
absl::Status RunTogether(Device& device, absl::Span<const operation::LowRankAppend* const> operations);
// Large products are cuBLAS', in FixedBatches. Small ones of f32 are our own kernel's: for each precision four launches
// for all of these, two for the rest, and up to seven for each shape and batch. Waits for the device if an operation
// asks for squares.
absl::Status RunTogether(Device& device, absl::Span<const operation::LowRankPrecondition* const> operations);

// Runs operations NewtonSchulz of many layers. One launch adds all gradients to their momentum. Each iteration takes
// three calls of cuBLAS for a batch of layers of one shape, and one launch for all layers; one more launch writes the
// answers. Layers whose iterations take more than `most_scratch_bytes`, without what unused places of a batch share,
// run in several parts, one after another.
//
// A batch has as many products as BatchSize says, however many layers there are, and drops those that are unused. So
// the products of a layer are always part of a call that differs from other calls in addresses alone, and an answer has
// the same bits in any company if cuBLAS computes the products of a batch alike, wherever they stand in it
// (docs/develop/adr/0031-newton-schulz-in-batches.md). Waits for the device.
absl::Status RunTogether(Device& device, absl::Span<const operation::NewtonSchulz* const> operations,
                         int64_t most_scratch_bytes = int64_t{256} << 20);

// Runs operations OrthogonalIteration of many matrices by shifted CholeskyQR3 in f32: three times g = x x', g = l l',
// x = l^-1 x, from x = the rows of q a, sorted and of length 1. The first g gets a shift, because x is ill-conditioned
// if q is far from the eigenvectors (Fukaya et al., arXiv:1809.11085). All matrices of a size take ten calls of cuBLAS
// and cuSOLVER for a batch of fixed size (kernels/cuda/batched_products.h), or seven and three for each matrix where a
// batch has eight at most; and all sizes together five launches.
// Matrices that take more than `most_scratch_bytes` run in several parts, one after another.
//
// The last g shows whether a factorization has failed, or x has been too ill-conditioned for them: its distance from I,
// in Frobenius' norm, is then not below kLargestDistance, up to which the result is orthonormal to f32
// (docs/develop/adr/0032-soap-in-batches.md).
constexpr double kLargestDistance = 0.5;

// Waits for the device once. Sets done[i] to false if operation i has to be computed in another way: its outputs are
// unspecified then.
absl::Status RunOrthogonalIterations(Device& device, absl::Span<const operation::OrthogonalIteration* const> operations,
                                     absl::Span<bool> done, int64_t most_scratch_bytes = int64_t{256} << 20);

// Converts the info of a decomposition to the status of SymmetricEigen: OK for 0, FailedPrecondition for a negative
// info (an element is not finite) and for a positive one (no convergence).
absl::Status EigenStatus(int info);
// cuSOLVER's routine for one matrix is faster for larger ones.
constexpr int64_t kMostRowsOfSymmetricEigens = 512;
// Decomposes many small symmetric matrices by cuSOLVER's batched routine, those of one size in one call. Bits may
// depend on the other matrices (docs/develop/adr/0014-batched-eigendecompositions.md). Precondition: each matrix has at
// most kMostRowsOfSymmetricEigens rows. Waits for the device. Sets statuses[i] to FailedPrecondition if operation i has
// no decomposition.
absl::Status RunSmall(Device& device, absl::Span<const operation::SymmetricEigen* const> operations,
                      absl::Span<absl::Status> statuses);

}  // namespace precondor::cuda
