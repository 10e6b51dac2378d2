// SPDX-License-Identifier: Apache-2.0
#include "kernels/methods/muon.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"

#include "kernels/base/status_macros.h"
#include "kernels/methods/gradient.h"
#include "kernels/methods/muon_config.h"
#include "kernels/methods/state_codec.h"

namespace precondor {
namespace {

constexpr int64_t kElementBytes = sizeof(float);
int64_t Elements(const LayerSpec& layer) { return layer.d_out * layer.d_in; }
int64_t ShortSide(const LayerSpec& layer) { return std::min(layer.d_out, layer.d_in); }

// Answers depend on every option. The default precision is the backend's, and a state may move to another one.
std::string StateText(const MuonConfig& c) {
  return absl::StrFormat("momentum %.17g nesterov %d ns_steps %d scale %d epsilon %.17g%s", c.momentum,
                         static_cast<int>(c.nesterov), c.ns_steps, static_cast<int>(c.scale), c.epsilon,
                         c.precision ? absl::StrCat(" precision ", static_cast<int>(*c.precision)) : "");
}

class MuonState final : public LayerState {
 public:
  MuonState(const MuonConfig& config, const LayerSpec& layer, Backend& backend)
      : config_(config), layer_(layer), backend_(backend) {}

  absl::Status Init() {
    PRECONDOR_ASSIGN_OR_RETURN(held_, MakeParts());
    return absl::OkStatus();
  }

  absl::Status Update(const LayerStatistics&) override {
    return absl::InvalidArgumentError("method muon: expected no statistics");
  }

  absl::Status Precondition(ConstMatrixView d, MatrixView u) override {
    PRECONDOR_RETURN_IF_ERROR(ExpectGradient(layer_, d));
    // Makes the next state in new memory, so that a failure leaves the state unchanged.
    Parts next;
    PRECONDOR_ASSIGN_OR_RETURN(next.momentum, backend_.AllocateScratch(d.rows, d.cols));
    if (config_.nesterov) {
      PRECONDOR_ASSIGN_OR_RETURN(next.lookahead, backend_.AllocateScratch(d.rows, d.cols));
    }
    PRECONDOR_RETURN_IF_ERROR(Answer({.d = d,
                                      .momentum = held_.momentum.view(),
                                      .beta = config_.momentum,
                                      .next = next.momentum.view(),
                                      .lookahead = next.lookahead.view(),
                                      .u = u}));
    held_ = std::move(next);
    ++version_;
    return absl::OkStatus();
  }

  absl::Status Repeat(MatrixView u) override {
    if (version_ == 0) {
      return absl::FailedPreconditionError(absl::StrCat("layer ", layer_.name, ": expected a gradient before"));
    }
    return Answer({.d = held_.lookahead.empty() ? held_.momentum.view() : held_.lookahead.view(), .u = u});
  }

  absl::StatusOr<std::string> Save() const override {
    StateWriter out(kMuonTraits.name, static_cast<size_t>(bytes()));
    out.Text(StateText(config_));
    out.Integer(version_);
    PRECONDOR_RETURN_IF_ERROR(out.Matrix(backend_, held_.momentum.view()));
    PRECONDOR_RETURN_IF_ERROR(out.Matrix(backend_, held_.lookahead.view()));
    return out.Finish();
  }

  absl::Status Load(absl::string_view bytes) override {
    absl::Status status = ReplaceWith(bytes);
    if (status.ok()) return status;
    return absl::Status(status.code(), absl::StrCat("layer ", layer_.name, ": ", status.message()));
  }

  bool ready() const override { return true; }
  uint64_t version() const override { return version_; }
  int64_t bytes() const override {
    return (held_.momentum.view().size() + held_.lookahead.view().size()) * kElementBytes;
  }
  Summary summary() const override { return {}; }

 private:
  struct Parts {
    DeviceMatrix momentum;   // B
    DeviceMatrix lookahead;  // G + beta B, which Repeat cannot compute without G; empty without nesterov
  };

  absl::StatusOr<Parts> MakeParts() const {
    Parts parts;
    PRECONDOR_ASSIGN_OR_RETURN(parts.momentum, backend_.Allocate(layer_.d_out, layer_.d_in));
    if (config_.nesterov) {
      PRECONDOR_ASSIGN_OR_RETURN(parts.lookahead, backend_.Allocate(layer_.d_out, layer_.d_in));
    }
    return parts;
  }

  // Computes the answer. It depends on the direction alone, so that Repeat is bitwise.
  absl::Status Answer(operation::NewtonSchulz step) const {
    std::array<double, 3> squares = {};
    step.steps = config_.ns_steps;
    step.epsilon = config_.epsilon;
    step.scale = config_.ScaleOf(layer_);
    step.precision = config_.PrecisionOn(backend_);
    step.squares = absl::MakeSpan(squares);
    PRECONDOR_RETURN_IF_ERROR(backend_.NewtonSchulz(step));
    if (step.momentum.size() > 0) PRECONDOR_RETURN_IF_ERROR(ExpectLearnableNorm(layer_, squares[0]));
    for (const auto& [square, what] : {std::pair(squares[1], "a momentum"), std::pair(squares[2], "|U|")}) {
      if (std::isfinite(square)) continue;
      return absl::FailedPreconditionError(
          absl::StrCat("layer ", layer_.name, ": expected ", what, " within f32, got NaN or infinity"));
    }
    return absl::OkStatus();
  }

  absl::Status ReplaceWith(absl::string_view bytes) {
    StateReader in(bytes);
    PRECONDOR_RETURN_IF_ERROR(in.Begin(kMuonTraits.name));
    PRECONDOR_RETURN_IF_ERROR(in.ExpectText("configuration", StateText(config_)));
    PRECONDOR_ASSIGN_OR_RETURN(const uint64_t version, in.Integer("version"));
    PRECONDOR_ASSIGN_OR_RETURN(Parts parts, MakeParts());
    PRECONDOR_RETURN_IF_ERROR(in.Matrix("momentum", backend_, parts.momentum.view()));
    PRECONDOR_RETURN_IF_ERROR(in.Matrix("lookahead", backend_, parts.lookahead.view()));
    PRECONDOR_RETURN_IF_ERROR(in.Finish());
    held_ = std::move(parts);
    version_ = version;
    return absl::OkStatus();
  }

  const MuonConfig config_;
  const LayerSpec layer_;
  Backend& backend_;
  Parts held_;
  uint64_t version_ = 0;  // gradients that are part of the momentum
};

class Muon final : public Method {
 public:
  explicit Muon(const MuonConfig& config) : config_(config) {}
  const MethodTraits& traits() const override { return kMuonTraits; }
  bool needs_global_scale() const override { return false; }

  int64_t StateBytes(const LayerSpec& layer) const override { return Matrices() * Elements(layer) * kElementBytes; }

  // The next state, and either the iteration's second matrix and two square matrices of the short side, or in batches
  // (kernels/cuda/newton_schulz.h) two of each and one more that unused places of a batch share, with padding.
  int64_t ScratchBytes(const LayerSpec& layer, int64_t) const override {
    const int64_t k = ShortSide(layer);
    const int64_t of_row = 7, of_matrix = 127;  // elements of padding
    const int64_t batched = 3 * (layer.d_out * (layer.d_in + of_row) + k * (k + of_row) + 2 * of_matrix);
    const bool bf16 = config_.precision.value_or(ProductPrecision::kBf16) == ProductPrecision::kBf16;
    const int64_t scratch = std::max(Elements(layer) + 2 * k * k, bf16 ? batched / 2 : batched);
    return (Matrices() * Elements(layer) + scratch) * kElementBytes;
  }

  // Per iteration: X X' and P X take 2 k m n each, A A takes 2 k^3.
  double StepFlops(const LayerSpec& layer, int64_t) const override {
    const auto k = static_cast<double>(ShortSide(layer)), elements = static_cast<double>(Elements(layer));
    return 8 * elements + static_cast<double>(config_.ns_steps) * (4 * k * elements + 2 * k * k * k);
  }

  std::vector<std::string> Warnings(int64_t) const override { return {}; }

  absl::StatusOr<std::unique_ptr<LayerState>> MakeState(const LayerSpec& layer, Backend& backend) const override {
    auto state = std::make_unique<MuonState>(config_, layer, backend);
    PRECONDOR_RETURN_IF_ERROR(state->Init());
    return std::unique_ptr<LayerState>(std::move(state));
  }

 private:
  // Number of matrices in a state.
  int64_t Matrices() const { return config_.nesterov ? 2 : 1; }

  const MuonConfig config_;
};

}  // namespace

absl::StatusOr<std::unique_ptr<Method>> MakeMuon(const MethodConfig& config) {
  PRECONDOR_ASSIGN_OR_RETURN(const MuonConfig parsed, ParseMuonConfig(config));
  return std::unique_ptr<Method>(std::make_unique<Muon>(parsed));
}

}  // namespace precondor
