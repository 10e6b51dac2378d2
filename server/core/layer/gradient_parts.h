// SPDX-License-Identifier: Apache-2.0
// Joins the parts of a gradient that ranks send in exchange SHARDED, and cuts the answer into the same parts. The
// elements of several parts follow each other, each part row by row.
#pragma once

#include <memory>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"

#include "kernels/base/mutex.h"
#include "kernels/base/session_spec.h"
#include "server/core/api/contribution.h"

namespace precondor {

// Writes the parts to `gradient` [d_out, d_in] and frees them. Returns FAILED_PRECONDITION unless they contain each
// element exactly once. Precondition: the contributions have passed CheckTensors and CheckGradient.
absl::Status JoinParts(const LayerSpec& layer, DType dtype, std::vector<StagedContribution>& contributions,
                       absl::Span<float> gradient);

// The parts of one answer. Ranks with equal parts, and repeated requests, share their bytes. Thread-safe.
class AnswerParts {
 public:
  // Returns the parts of the answer `whole` with tensor [d_out, d_in]; an answer without a tensor as it is. Returns
  // RESOURCE_EXHAUSTED (CAPACITY) if the system has no memory for them, and INVALID_ARGUMENT (SHAPE_MISMATCH) if parts
  // that differ have more than twice the answer's elements together. Every call is for the same answer.
  absl::StatusOr<GradientResult> Cut(const LayerSpec& layer, const std::vector<GradientPart>& parts,
                                     GradientResult whole);

 private:
  Mutex mu_;
  int64_t elements_ ABSL_GUARDED_BY(mu_) = 0;  // in bytes_
  absl::flat_hash_map<std::vector<GradientPart>, std::shared_ptr<const Payload>> bytes_ ABSL_GUARDED_BY(mu_);
};

}  // namespace precondor
