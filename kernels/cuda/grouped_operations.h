// SPDX-License-Identifier: Apache-2.0
// Operations of kernels/operation.h on a device: those of one kind take as few launches as their shapes allow, for all
// layers together. What each gives is to the bit what it gives alone.
//
// Spans are not empty. An error is that of all operations, of which some may have run, but for ResourceExhausted:
// memory is taken before the first launch.
#pragma once

#include <cstdint>

#include "absl/status/status.h"
#include "absl/types/span.h"

#include "kernels/cuda/device.h"
#include "kernels/operation.h"

namespace precondor::cuda {

// In stream order.
absl::Status RunElementwise(Device& device, absl::Span<const operation::Elementwise* const> operations);
// Whether it is worth a launch of cuBLAS' kernels.
bool IsLarge(const operation::Gemm& gemm);
absl::Status RunProducts(Device& device, absl::Span<const operation::Gemm* const> operations);
// When matrices have changed and their products did not come about, the device is lost.
absl::Status RunSymmetricUpdates(Device& device,
                                 absl::Span<const operation::SymmetricUpdateMultiply* const> operations);
// These wait for the device.
absl::Status RunRowSquaredNorms(Device& device, absl::Span<const operation::RowSquaredNorms* const> operations);
absl::Status RunColumnSquaredNorms(Device& device, absl::Span<const operation::ColumnSquaredNorms* const> operations);
absl::Status RunDots(Device& device, absl::Span<const operation::Dot* const> operations);
// Of at most kMostVectorsOfTerms vectors and kMostRowsOfTerms rows. statuses[i]: FailedPrecondition where a product is
// not finite.
absl::Status RunShermanMorrisonTerms(Device& device,
                                     absl::Span<const operation::ShermanMorrisonTerms* const> operations,
                                     absl::Span<absl::Status> statuses);
// What SpdInverse says where a decomposition of n rows left this info (kernels/cuda/spd_inverses.h).
absl::Status InverseStatus(int info, int64_t n);
// Of matrices of at most kMostRowsOfSpdInverse rows. statuses[i]: FailedPrecondition where there is no inverse.
absl::Status RunSpdInverses(Device& device, absl::Span<const operation::SpdInverse* const> operations,
                            absl::Span<absl::Status> statuses);
absl::Status RunLowRankCores(Device& device, absl::Span<const operation::LowRankCore* const> operations,
                             absl::Span<absl::Status> statuses);

}  // namespace precondor::cuda
