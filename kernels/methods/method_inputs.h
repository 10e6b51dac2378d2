// SPDX-License-Identifier: Apache-2.0
// What methods share: checks of the statistics and gradients that they are given, and the making of states.
#pragma once

#include <memory>

#include "absl/container/inlined_vector.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

#include "kernels/backend.h"
#include "kernels/base/session_spec.h"
#include "kernels/base/status_macros.h"
#include "kernels/methods/method.h"

namespace precondor {

// One number for each vector of a step. A step usually has so few vectors that this needs no heap memory.
using PerVector = absl::InlinedVector<double, 16>;

// Checks that both sides are vectors, at least one each. Returns InvalidArgument with the layer and the actual counts.
// Does not check the vectors' length or elements.
absl::Status ExpectVectors(const LayerSpec& layer, const LayerStatistics& statistics);

// Checks that one side has exactly one of the two forms, of the right size and finite: `vectors` [k, d] with k >= 1, or
// `covariance` [1, d (d + 1) / 2]. Returns InvalidArgument with the layer and the side. Also returns the backend's
// errors.
absl::Status CheckEitherForm(const LayerSpec& layer, absl::string_view side, ConstMatrixView vectors,
                             ConstMatrixView covariance, int64_t d, Backend& backend);

// Returns |v|^2 of each vector of side `side` ("a", "g"). Returns InvalidArgument, with the layer and the side, if the
// vectors' length is not d or a vector is not finite. Also returns the backend's errors.
absl::StatusOr<PerVector> FiniteSquaredNorms(const LayerSpec& layer, absl::string_view side, ConstMatrixView vectors,
                                             int64_t d, Backend& backend);
// Returns |v|^2 of both sides' vectors, which the backend computes in one Batch. Errors: those of FiniteSquaredNorms
// for one side.
struct SquaredNorms {
  PerVector a, g;
};
absl::StatusOr<SquaredNorms> FiniteSquaredNorms(const LayerSpec& layer, const LayerStatistics& statistics,
                                                Backend& backend);

inline constexpr int64_t kElementBytes = sizeof(float);  // of a matrix on a device

// Returns `status` with the layer's name before its message.
absl::Status OfLayer(const LayerSpec& layer, const absl::Status& status);

// Returns a new state of the type, State(config, layer, backend), after its Init.
template <typename State, typename Config>
absl::StatusOr<std::unique_ptr<LayerState>> InitState(const Config& config, const LayerSpec& layer, Backend& backend) {
  auto state = std::make_unique<State>(config, layer, backend);
  PRECONDOR_RETURN_IF_ERROR(state->Init());
  return std::unique_ptr<LayerState>(std::move(state));
}

// Returns InvalidArgument, with the layer and the actual shape, if d is not [d_out, d_in]. Does not read the elements.
absl::Status ExpectGradient(const LayerSpec& layer, ConstMatrixView d);

// Returns InvalidArgument, with the layer, if d is not [d_out, d_in], not finite, or of a norm above
// kMaxLearntGradientNorm. Also returns the backend's errors.
absl::Status ExpectLearnableGradient(const LayerSpec& layer, ConstMatrixView d, Backend& backend);

// Returns InvalidArgument, with the layer, if |d|^2, which is `square`, is not finite or above
// kMaxLearntGradientNorm^2.
absl::Status ExpectLearnableNorm(const LayerSpec& layer, double square);

}  // namespace precondor
