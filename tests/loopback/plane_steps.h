// SPDX-License-Identifier: Apache-2.0
// Steps of a session with data_plane COLLECTIVE, as a test's threads and processes take them.
#pragma once

#include <cstdint>
#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"

#include "kernels/base/status_macros.h"
#include "precondor/client.h"
#include "tests/support/normal_floats.h"

namespace precondor {

// One of the layers has more elements than LocalCollective adds up at once.
inline SessionSpec PlaneSpec(int32_t world_size, const std::string& method = "identity") {
  SessionSpec spec;
  spec.name = "job";
  spec.world_size = world_size;
  spec.data_plane = DataPlane::kCollective;
  spec.sketches = 2;
  spec.inv_freq = 2;
  spec.warmup_steps = 2;
  spec.method.name = method;
  for (const auto& [d_out, d_in] : std::vector<std::pair<int64_t, int64_t>>{{5, 7}, {300, 250}, {1, 1}, {16, 3}}) {
    spec.layers.push_back({absl::StrCat("layer", spec.layers.size()), d_out, d_in, false});
  }
  return spec;
}

inline uint64_t PlaneSamples(uint32_t rank) { return 3 + 4 * rank; }

inline std::vector<float> PlaneGradient(const LayerSpec& layer, uint64_t step, uint32_t rank) {
  return Normal(layer.d_out * layer.d_in, step * 1000 + static_cast<uint64_t>(layer.d_out) * 10 + rank);
}

struct PlaneAnswer {
  std::vector<float> values;
  Decision decision = Decision::kSkip;
  uint64_t factor_version = 0;
  std::string reason;
};

// Statistics and gradients of one step; the answers replace the gradients. Every other layer is answered in place.
class PlaneStep {
 public:
  PlaneStep(Worker& worker, uint64_t step) : worker_(worker), step_(step), answers_(worker.spec().layers.size()) {
    for (size_t layer = 0; layer < answers_.size(); ++layer) {
      gradients_.push_back(PlaneGradient(worker.spec().layers[layer], step, worker.rank()));
      answers_[layer].values.resize(gradients_.back().size());
    }
    futures_.resize(answers_.size());
  }
  std::vector<float>& gradient(size_t layer) { return gradients_[layer]; }

  absl::Status Send(size_t layer) {
    const SessionSpec& spec = worker_.spec();
    const LayerSpec& shape = spec.layers[layer];
    const auto index = static_cast<int64_t>(layer);
    if (worker_.NeedsStatistics(step_, index)) {
      const int64_t k = VectorsPerWorker(spec, index);
      const uint64_t seed = step_ * 1000 + layer * 10 + worker_.rank();
      const std::vector<float> a = Normal(k * shape.d_in, seed), g = Normal(k * shape.d_out, seed + 500);
      PRECONDOR_RETURN_IF_ERROR(worker_.SendStatistics(step_, index, ConstMatrixView(a.data(), k, shape.d_in),
                                                       ConstMatrixView(g.data(), k, shape.d_out), 5));
    }
    std::vector<float>& out = layer % 2 == 0 ? gradients_[layer] : answers_[layer].values;
    futures_[layer] =
        worker_.Precondition(step_, index, ConstMatrixView(gradients_[layer].data(), shape.d_out, shape.d_in),
                             MatrixView(out.data(), shape.d_out, shape.d_in), PlaneSamples(worker_.rank()));
    return absl::OkStatus();
  }
  absl::Status SendAll() {
    for (size_t layer = 0; layer < answers_.size(); ++layer) PRECONDOR_RETURN_IF_ERROR(Send(layer));
    return absl::OkStatus();
  }
  absl::Status Abstain(size_t layer) {
    futures_[layer] = worker_.AbstainGradient(step_, static_cast<int64_t>(layer));
    return absl::OkStatus();
  }
  absl::Status Wait(size_t layer) {
    PRECONDOR_ASSIGN_OR_RETURN(const Preconditioned outcome, futures_[layer].Wait());
    if (layer % 2 == 0) answers_[layer].values = gradients_[layer];
    answers_[layer].decision = outcome.decision;
    answers_[layer].factor_version = outcome.factor_version;
    answers_[layer].reason = outcome.reason;
    return absl::OkStatus();
  }
  bool ready(size_t layer) const { return futures_[layer].ready(); }
  // And reports the step.
  absl::StatusOr<std::vector<PlaneAnswer>> Finish() {
    for (size_t layer = 0; layer < answers_.size(); ++layer) PRECONDOR_RETURN_IF_ERROR(Wait(layer));
    PRECONDOR_RETURN_IF_ERROR(worker_.ReportStep(step_, 1.0, 10, true, 0.1).status());
    return answers_;
  }

 private:
  Worker& worker_;
  const uint64_t step_;
  std::vector<std::vector<float>> gradients_;
  std::vector<PlaneAnswer> answers_;
  std::vector<PreconditionFuture> futures_;
};

inline absl::StatusOr<std::vector<PlaneAnswer>> RunPlaneStep(Worker& worker, uint64_t step) {
  PlaneStep taken(worker, step);
  PRECONDOR_RETURN_IF_ERROR(taken.SendAll());
  return taken.Finish();
}

// FNV-1a over the answers' bits.
inline uint64_t PlaneChecksum(const std::vector<PlaneAnswer>& answers) {
  uint64_t sum = 14695981039346656037u;
  for (const PlaneAnswer& answer : answers) {
    for (const float value : answer.values) {
      uint32_t bits = 0;
      std::memcpy(&bits, &value, sizeof(bits));
      sum = (sum ^ bits) * 1099511628211u;
    }
    sum = (sum ^ static_cast<uint64_t>(answer.decision)) * 1099511628211u;
  }
  return sum;
}

}  // namespace precondor
