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
#include "kernels/operation.h"

namespace precondor::cuda {

// Runs in stream order.
absl::Status RunElementwise(Device& device, absl::Span<const operation::Elementwise* const> operations);
// Returns whether the product is large enough for a launch of cuBLAS.
bool IsLarge(const operation::Gemm& gemm);
absl::Status RunProducts(Device& device, absl::Span<const operation::Gemm* const> operations);
// If matrices have changed and the launch for their products fails, the device is lost.
absl::Status RunSymmetricUpdates(Device& device,
                                 absl::Span<const operation::SymmetricUpdateMultiply* const> operations);
// The functions below wait for the device.
absl::Status RunRowSquaredNorms(Device& device, absl::Span<const operation::RowSquaredNorms* const> operations);
absl::Status RunColumnSquaredNorms(Device& device, absl::Span<const operation::ColumnSquaredNorms* const> operations);
absl::Status RunDots(Device& device, absl::Span<const operation::Dot* const> operations);
absl::Status RunAbsoluteSums(Device& device, absl::Span<const operation::AbsoluteSum* const> operations);
absl::Status RunAbsoluteMaxima(Device& device, absl::Span<const operation::AbsoluteMaximum* const> operations);
// Precondition: each operation has at most kMostVectorsOfTerms vectors and kMostRowsOfTerms rows. Sets statuses[i] to
// FailedPrecondition if a product of operation i is not finite.
absl::Status RunShermanMorrisonTerms(Device& device,
                                     absl::Span<const operation::ShermanMorrisonTerms* const> operations,
                                     absl::Span<absl::Status> statuses);
// Converts the info of an inversion of n rows (kernels/cuda/spd_inverses.h) to the status of SpdInverse.
absl::Status InverseStatus(int info, int64_t n);
// Precondition: each matrix has at most kMostRowsOfSpdInverse rows. Sets statuses[i] to FailedPrecondition if matrix i
// has no inverse.
absl::Status RunSpdInverses(Device& device, absl::Span<const operation::SpdInverse* const> operations,
                            absl::Span<absl::Status> statuses);
absl::Status RunLowRankCores(Device& device, absl::Span<const operation::LowRankCore* const> operations,
                             absl::Span<absl::Status> statuses);

}  // namespace precondor::cuda
