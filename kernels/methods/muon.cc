// SPDX-License-Identifier: Apache-2.0
#include "kernels/methods/muon.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"

#include "kernels/base/status_macros.h"
#include "kernels/methods/method.h"
#include "kernels/methods/method_inputs.h"
#include "kernels/methods/state_codec.h"

namespace precondor {
namespace {

int64_t Elements(const LayerSpec& layer) { return layer.d_out * layer.d_in; }
int64_t ShortSide(const LayerSpec& layer) { return std::min(layer.d_out, layer.d_in); }

// A factor takes in no gradient while the mean eigenvalue of its second moment is below this, so that no scale leaves
// f64. The squares of f32's least numbers are far above.
constexpr double kLeastMean = 1e-200;

// Answers depend on every option. The default precision is the backend's, and a state may move to another one. The
// options of a factor are omitted for a layer without one.
std::string StateText(const MuonConfig& c, const LayerSpec& layer) {
  std::string text = absl::StrFormat("momentum %.17g nesterov %d ns_steps %d scale %d epsilon %.17g%s", c.momentum,
                                     static_cast<int>(c.nesterov), c.ns_steps, static_cast<int>(c.scale), c.epsilon,
                                     c.precision ? absl::StrCat(" precision ", static_cast<int>(*c.precision)) : "");
  if (c.HasFactor(layer)) {
    absl::StrAppendFormat(&text, " input_factor damping %.17g covariance_decay %.17g refresh_interval %d", c.damping,
                          c.covariance_decay, c.refresh_interval);
  }
  return text;
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
    if (config_.HoldsDirection(layer_)) {
      PRECONDOR_ASSIGN_OR_RETURN(next.lookahead, backend_.AllocateScratch(d.rows, d.cols));
    }
    PRECONDOR_RETURN_IF_ERROR(config_.HasFactor(layer_) ? FactoredStep(d, next, u)
                                                        : Answer({.d = d,
                                                                  .momentum = held_.momentum.view(),
                                                                  .beta = config_.momentum,
                                                                  .next = next.momentum.view(),
                                                                  .lookahead = next.lookahead.view(),
                                                                  .u = u}));
    if (next.inverse.empty()) next.inverse = std::move(held_.inverse);
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
    out.Text(StateText(config_, layer_));
    out.Integer(version_);
    PRECONDOR_RETURN_IF_ERROR(out.Matrix(backend_, held_.momentum.view()));
    PRECONDOR_RETURN_IF_ERROR(out.Matrix(backend_, held_.lookahead.view()));
    if (config_.HasFactor(layer_)) {
      out.Number(held_.mean);
      PRECONDOR_RETURN_IF_ERROR(out.Matrix(backend_, held_.covariance.view()));
      PRECONDOR_RETURN_IF_ERROR(out.Matrix(backend_, held_.inverse.view()));
    }
    return out.Finish();
  }

  absl::Status Load(absl::string_view bytes) override { return OfLayer(layer_, ReplaceWith(bytes)); }

  bool ready() const override { return true; }
  uint64_t version() const override { return version_; }
  int64_t bytes() const override {
    return (held_.momentum.view().size() + held_.lookahead.view().size() + held_.covariance.view().size() +
            held_.inverse.view().size()) *
           kElementBytes;
  }
  Summary summary() const override {
    if (!config_.HasFactor(layer_)) return {};
    return {.input_representation = "dense", .input_damping = config_.damping * held_.mean};
  }

 private:
  struct Parts {
    DeviceMatrix momentum;   // B
    DeviceMatrix lookahead;  // the direction, which Repeat cannot compute without G; empty if it is B

    // The factor: C, the gradients' second moment divided by its mean eigenvalue, and (C + damping I)^-1.
    double mean = 0;
    DeviceMatrix covariance, inverse;
  };

  absl::StatusOr<Parts> MakeParts() const {
    Parts parts;
    PRECONDOR_ASSIGN_OR_RETURN(parts.momentum, backend_.Allocate(layer_.d_out, layer_.d_in));
    if (config_.HoldsDirection(layer_)) {
      PRECONDOR_ASSIGN_OR_RETURN(parts.lookahead, backend_.Allocate(layer_.d_out, layer_.d_in));
    }
    if (config_.HasFactor(layer_)) {
      PRECONDOR_ASSIGN_OR_RETURN(parts.covariance, backend_.Allocate(layer_.d_in, layer_.d_in));
      PRECONDOR_ASSIGN_OR_RETURN(parts.inverse, backend_.Allocate(layer_.d_in, layer_.d_in));
      PRECONDOR_RETURN_IF_ERROR(backend_.AddDiagonal(1.0, parts.inverse.view()));
    }
    return parts;
  }

  // The inverse by which this gradient's direction is multiplied is that of earlier gradients.
  absl::Status FactoredStep(ConstMatrixView d, Parts& next, MatrixView u) const {
    PRECONDOR_ASSIGN_OR_RETURN(const double square, backend_.Dot(d, d));
    PRECONDOR_RETURN_IF_ERROR(ExpectLearnableNorm(layer_, square));
    const MatrixView momentum = next.momentum.view();
    PRECONDOR_RETURN_IF_ERROR(backend_.Combine(1.0, d, config_.momentum, held_.momentum.view(), momentum));
    PRECONDOR_ASSIGN_OR_RETURN(DeviceMatrix work, backend_.AllocateScratch(d.rows, d.cols));
    if (config_.nesterov) PRECONDOR_RETURN_IF_ERROR(backend_.Combine(1.0, d, config_.momentum, momentum, work.view()));
    PRECONDOR_RETURN_IF_ERROR(backend_.Gemm(1.0, config_.nesterov ? work.view() : momentum, Transpose::kNo,
                                            held_.inverse.view(), Transpose::kNo, 0.0, next.lookahead.view(),
                                            config_.FactorPrecisionOn(backend_)));
    PRECONDOR_RETURN_IF_ERROR(Answer({.d = next.lookahead.view(), .u = u}));
    return Learn(d, square, work.view(), next);
  }

  // Computes the next C, and its inverse if that is due. `scaled` is memory for a gradient.
  absl::Status Learn(ConstMatrixView d, double square, MatrixView scaled, Parts& next) const {
    const double decay = config_.covariance_decay;
    next.mean = decay * held_.mean + (1 - decay) * square / static_cast<double>(d.cols);
    PRECONDOR_ASSIGN_OR_RETURN(next.covariance, backend_.AllocateScratch(d.cols, d.cols));
    PRECONDOR_RETURN_IF_ERROR(backend_.Copy(held_.covariance.view(), next.covariance.view()));
    if (next.mean < kLeastMean) return absl::OkStatus();
    PRECONDOR_RETURN_IF_ERROR(backend_.ScaleBy(std::sqrt((1 - decay) / next.mean), d, scaled));
    PRECONDOR_RETURN_IF_ERROR(backend_.SymmetricGemm(1.0, scaled, Transpose::kYes, scaled, Transpose::kNo,
                                                     decay * held_.mean / next.mean, next.covariance.view(),
                                                     config_.FactorPrecisionOn(backend_)));
    if (version_ % static_cast<uint64_t>(config_.refresh_interval) != 0) return absl::OkStatus();
    PRECONDOR_ASSIGN_OR_RETURN(next.inverse, backend_.AllocateScratch(d.cols, d.cols));
    const MatrixView inverse = next.inverse.view();
    PRECONDOR_RETURN_IF_ERROR(backend_.Copy(next.covariance.view(), inverse));
    PRECONDOR_RETURN_IF_ERROR(backend_.AddDiagonal(config_.damping, inverse));
    return backend_.SpdInverse(inverse, inverse);
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
    PRECONDOR_RETURN_IF_ERROR(in.ExpectText("configuration", StateText(config_, layer_)));
    PRECONDOR_ASSIGN_OR_RETURN(const uint64_t version, in.Integer("version"));
    PRECONDOR_ASSIGN_OR_RETURN(Parts parts, MakeParts());
    PRECONDOR_RETURN_IF_ERROR(in.Matrix("momentum", backend_, parts.momentum.view()));
    PRECONDOR_RETURN_IF_ERROR(in.Matrix("lookahead", backend_, parts.lookahead.view()));
    if (config_.HasFactor(layer_)) {
      PRECONDOR_ASSIGN_OR_RETURN(parts.mean, in.Number("mean"));
      PRECONDOR_RETURN_IF_ERROR(in.Matrix("covariance", backend_, parts.covariance.view()));
      PRECONDOR_RETURN_IF_ERROR(in.Matrix("inverse", backend_, parts.inverse.view()));
    }
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

  int64_t StateBytes(const LayerSpec& layer) const override {
    const int64_t matrices = config_.HoldsDirection(layer) ? 2 : 1;
    return (matrices * Elements(layer) + 2 * FactorElements(layer)) * kElementBytes;
  }

  // The next state, and either the iteration's second matrix and two or four square ones of the short side, or in
  // batches (RunTogether) two of each and one more that unused places of a batch share, with padding. With a factor,
  // one more matrix; then, one after the other, the iterations, a batch of products (FixedBatches), and the inverse.
  int64_t ScratchBytes(const LayerSpec& layer, int64_t) const override {
    const int64_t k = ShortSide(layer);
    const int64_t of_row = 7, of_matrix = 127;  // elements of padding
    const int64_t batched = 3 * (layer.d_out * (layer.d_in + of_row) + k * (k + of_row) + 2 * of_matrix);
    const bool bf16 = config_.precision.value_or(ProductPrecision::kBf16) == ProductPrecision::kBf16;
    const int64_t squares = operation::OnGram(layer.d_out, layer.d_in, config_.ns_steps) ? 4 : 2;
    const int64_t scratch = std::max(Elements(layer) + squares * k * k, bf16 ? batched / 2 : batched);
    const int64_t square = FactorElements(layer);
    if (square == 0) return StateBytes(layer) + scratch * kElementBytes;
    const int64_t products = std::max(Elements(layer), square);
    return StateBytes(layer) + Elements(layer) * kElementBytes +
           std::max(std::max(scratch, products) * kElementBytes, SpdInverseScratchBytes(layer.d_in));
  }

  // Without operation::OnGram, which takes less. Per iteration: X X' and P X take 2 k m n each, A A takes 2 k^3. A
  // factor takes two products, and an inverse where that is due.
  double StepFlops(const LayerSpec& layer, int64_t) const override {
    const auto k = static_cast<double>(ShortSide(layer)), elements = static_cast<double>(Elements(layer));
    const auto square = static_cast<double>(FactorElements(layer)), d_in = static_cast<double>(layer.d_in);
    return 8 * elements + static_cast<double>(config_.ns_steps) * (4 * k * elements + 2 * k * k * k) +
           square * (4 * static_cast<double>(layer.d_out) + d_in / static_cast<double>(config_.refresh_interval));
  }

  absl::StatusOr<std::unique_ptr<LayerState>> MakeState(const LayerSpec& layer, Backend& backend) const override {
    return InitState<MuonState>(config_, layer, backend);
  }

 private:
  // Elements of one of its two matrices.
  int64_t FactorElements(const LayerSpec& layer) const {
    return config_.HasFactor(layer) ? layer.d_in * layer.d_in : 0;
  }

  const MuonConfig config_;
};

}  // namespace

double MuonConfig::ScaleOf(const LayerSpec& layer) const {
  const auto d_out = static_cast<double>(layer.d_out), d_in = static_cast<double>(layer.d_in);
  if (scale == MuonScale::kOriginal) return std::sqrt(std::max(1.0, d_out / d_in));
  return 0.2 * std::sqrt(std::max(d_out, d_in));
}

absl::StatusOr<std::unique_ptr<Method>> MakeMuon(const MethodConfig& config) {
  PRECONDOR_ASSIGN_OR_RETURN(const MuonConfig parsed, ParseOptions(config, ReadMuonConfig));
  return std::unique_ptr<Method>(std::make_unique<Muon>(parsed));
}

}  // namespace precondor
