// SPDX-License-Identifier: Apache-2.0
// What methods ask of the statistics that an update brings.
#pragma once

#include "absl/container/inlined_vector.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

#include "kernels/base/session_spec.h"
#include "kernels/methods/method.h"

namespace precondor {

// A number for each of a step's vectors, which are few enough, as a rule, to need no memory of their own.
using PerVector = absl::InlinedVector<double, 16>;

// Both sides as vectors, at least one each. InvalidArgument names the layer and what came; neither the vectors' length
// nor their elements are looked at.
absl::Status ExpectVectors(const LayerSpec& layer, const LayerStatistics& statistics);

// One side in one of its forms, of the right size and finite: `vectors` [k, d] with k >= 1, or `covariance`
// [1, d (d + 1) / 2]. InvalidArgument names the layer and the side. Errors of the backend.
absl::Status CheckEitherForm(const LayerSpec& layer, absl::string_view side, ConstMatrixView vectors,
                             ConstMatrixView covariance, int64_t d, Backend& backend);

// |v|^2 of each vector of side `side` ("a", "g"), whose length has to be d. InvalidArgument names the layer and the
// side where it is not, and where a vector is not finite. Errors of the backend.
absl::StatusOr<PerVector> FiniteSquaredNorms(const LayerSpec& layer, absl::string_view side, ConstMatrixView vectors,
                                             int64_t d, Backend& backend);
// The same of both sides' vectors, which the backend is asked for together.
struct SquaredNorms {
  PerVector a, g;
};
absl::StatusOr<SquaredNorms> FiniteSquaredNorms(const LayerSpec& layer, const LayerStatistics& statistics,
                                                Backend& backend);

}  // namespace precondor
