// SPDX-License-Identifier: Apache-2.0
#include "kernels/methods/muon.h"

#include <algorithm>
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
// The published coefficients: the polynomial's slope at 0 is as large as it can be while singular values end near 1.
constexpr double kLinear = 3.4445, kCubic = -4.7750, kQuintic = 2.0315;

int64_t Elements(const LayerSpec& layer) { return layer.d_out * layer.d_in; }
int64_t ShortSide(const LayerSpec& layer) { return std::min(layer.d_out, layer.d_in); }

// Answers depend on every option.
std::string StateText(const MuonConfig& c) {
  return absl::StrFormat("momentum %.17g nesterov %d ns_steps %d scale %d epsilon %.17g", c.momentum,
                         static_cast<int>(c.nesterov), c.ns_steps, static_cast<int>(c.scale), c.epsilon);
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
    PRECONDOR_RETURN_IF_ERROR(ExpectLearnableGradient(layer_, d, backend_));
    // Makes the next state in new memory, so that a failure leaves the state unchanged.
    Parts next;
    PRECONDOR_ASSIGN_OR_RETURN(next.momentum, backend_.AllocateScratch(d.rows, d.cols));
    PRECONDOR_RETURN_IF_ERROR(backend_.Copy(held_.momentum.view(), next.momentum.view()));
    PRECONDOR_RETURN_IF_ERROR(backend_.Axpby(1.0, d, config_.momentum, next.momentum.view()));
    if (config_.nesterov) {
      PRECONDOR_ASSIGN_OR_RETURN(next.lookahead, backend_.AllocateScratch(d.rows, d.cols));
      PRECONDOR_RETURN_IF_ERROR(backend_.Copy(d, next.lookahead.view()));
      PRECONDOR_RETURN_IF_ERROR(backend_.Axpby(config_.momentum, next.momentum.view(), 1.0, next.lookahead.view()));
    }
    PRECONDOR_RETURN_IF_ERROR(Answer(next, u));
    held_ = std::move(next);
    ++version_;
    return absl::OkStatus();
  }

  absl::Status Repeat(MatrixView u) override {
    if (version_ == 0) {
      return absl::FailedPreconditionError(absl::StrCat("layer ", layer_.name, ": expected a gradient before"));
    }
    return Answer(held_, u);
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

    const DeviceMatrix& direction() const { return lookahead.empty() ? momentum : lookahead; }
  };

  absl::StatusOr<Parts> MakeParts() const {
    Parts parts;
    PRECONDOR_ASSIGN_OR_RETURN(parts.momentum, backend_.Allocate(layer_.d_out, layer_.d_in));
    if (config_.nesterov) {
      PRECONDOR_ASSIGN_OR_RETURN(parts.lookahead, backend_.Allocate(layer_.d_out, layer_.d_in));
    }
    return parts;
  }

  // Computes the answer of `parts` into u. It depends on `parts` alone, so that Repeat is bitwise.
  absl::Status Answer(const Parts& parts, MatrixView u) const {
    const ConstMatrixView direction = parts.direction().view();
    PRECONDOR_ASSIGN_OR_RETURN(const double square, backend_.Dot(direction, direction));
    if (!std::isfinite(square)) {
      return absl::FailedPreconditionError(
          absl::StrCat("layer ", layer_.name, ": expected a momentum within f32, got NaN or infinity"));
    }
    if (square == 0) return backend_.Axpby(0.0, u, 0.0, u);
    PRECONDOR_ASSIGN_OR_RETURN(DeviceMatrix other, backend_.AllocateScratch(u.rows, u.cols));
    // The iterations alternate between two matrices. The last one writes to u.
    MatrixView x = u, y = other.view();
    if (config_.ns_steps % 2 != 0) std::swap(x, y);
    PRECONDOR_RETURN_IF_ERROR(backend_.Copy(direction, x));
    PRECONDOR_RETURN_IF_ERROR(backend_.ScaleBy(1 / (std::sqrt(square) + config_.epsilon), x));
    PRECONDOR_RETURN_IF_ERROR(Orthogonalize(x, y));
    PRECONDOR_ASSIGN_OR_RETURN(const double length, backend_.Dot(u, u));
    if (std::isfinite(length)) return absl::OkStatus();
    return absl::FailedPreconditionError(
        absl::StrCat("layer ", layer_.name, ": expected |U| within f32, got NaN or infinity"));
  }

  // Runs ns_steps Newton-Schulz iterations from x, and scales the result, which is in y for an odd number of iterations
  // and in x otherwise. If x is tall, the polynomial of X'X from the right is used, the transpose of the published one
  // from the left.
  absl::Status Orthogonalize(MatrixView x, MatrixView y) const {
    const int64_t k = std::min(x.rows, x.cols);
    const bool wide = x.rows <= x.cols;
    PRECONDOR_ASSIGN_OR_RETURN(DeviceMatrix gram, backend_.AllocateScratch(k, k));
    PRECONDOR_ASSIGN_OR_RETURN(DeviceMatrix polynomial, backend_.AllocateScratch(k, k));
    const MatrixView a = gram.view(), p = polynomial.view();
    for (int64_t step = 1; step <= config_.ns_steps; ++step) {
      const double scale = step == config_.ns_steps ? config_.ScaleOf(layer_) : 1.0;
      PRECONDOR_RETURN_IF_ERROR(backend_.Gemm(1.0, x, Transpose(!wide), x, Transpose(wide), 0.0, a));
      PRECONDOR_RETURN_IF_ERROR(backend_.Copy(a, p));
      PRECONDOR_RETURN_IF_ERROR(backend_.Gemm(kQuintic, a, Transpose::kNo, a, Transpose::kNo, kCubic, p));
      PRECONDOR_RETURN_IF_ERROR(backend_.AddDiagonal(kLinear, p));
      PRECONDOR_RETURN_IF_ERROR(wide ? backend_.Gemm(scale, p, Transpose::kNo, x, Transpose::kNo, 0.0, y)
                                     : backend_.Gemm(scale, x, Transpose::kNo, p, Transpose::kNo, 0.0, y));
      std::swap(x, y);
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

  // The next state, the iteration's second matrix, and two square matrices of the short side.
  int64_t ScratchBytes(const LayerSpec& layer, int64_t) const override {
    const int64_t k = ShortSide(layer);
    return ((Matrices() + 1) * Elements(layer) + 2 * k * k) * kElementBytes;
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
