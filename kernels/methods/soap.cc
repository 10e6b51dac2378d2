// SPDX-License-Identifier: Apache-2.0
#include "kernels/methods/soap.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"

#include "kernels/base/status_macros.h"
#include "kernels/methods/decomposition_scratch.h"
#include "kernels/methods/gradient.h"
#include "kernels/methods/soap_config.h"
#include "kernels/methods/soap_side.h"
#include "kernels/methods/state_codec.h"

namespace precondor {
namespace {

constexpr int64_t kElementBytes = sizeof(float);

// Text of the options, on all of which answers depend. The sides are omitted for a layer whose sides are d_out and
// d_in.
std::string StateText(const SoapConfig& c, const LayerSpec& layer, const SoapSides& sides) {
  const bool is_matrix = sides.sizes == std::vector<int64_t>{layer.d_out, layer.d_in};
  return absl::StrFormat(
      "%srule %d momentum %.17g second_moment_decay %.17g covariance_decay %.17g epsilon %.17g refresh_interval %d "
      "max_factor_dim %d",
      is_matrix ? "" : absl::StrCat("sides ", sides.Text(), " "), static_cast<int>(c.rule), c.momentum,
      c.second_moment_decay, c.covariance_decay, c.epsilon, c.refresh_interval, c.max_factor_dim);
}

class SoapState final : public LayerState {
 public:
  SoapState(const SoapConfig& config, const LayerSpec& layer, Backend& backend)
      : config_(config), layer_(layer), sides_(config.Sides(layer)), backend_(backend) {}

  absl::Status Init() {
    PRECONDOR_ASSIGN_OR_RETURN(held_, MakeParts());
    return absl::OkStatus();
  }

  absl::Status Update(const LayerStatistics&) override {
    return absl::InvalidArgumentError("method soap: expected no statistics");
  }

  absl::Status Precondition(ConstMatrixView d, MatrixView u) override {
    PRECONDOR_RETURN_IF_ERROR(ExpectLearnableGradient(layer_, d, backend_));
    PRECONDOR_ASSIGN_OR_RETURN(DeviceMatrix x, AllocateTensor());
    PRECONDOR_RETURN_IF_ERROR(backend_.Copy(d, AsMatrix(x)));
    // Works on copies, so that a failure leaves the state unchanged. An empty matrix in `next` stands for the held one.
    Parts next = Unchanged();
    PRECONDOR_RETURN_IF_ERROR(config_.rule == SoapRule::kSoap ? SoapStep(std::move(x), next)
                                                              : ShampooStep(std::move(x), next));
    PRECONDOR_RETURN_IF_ERROR(Answer(next, version_ + 1, u));
    for (size_t mode = 0; mode < next.sides.size(); ++mode) {
      Take(next.sides[mode].covariance, held_.sides[mode].covariance);
      Take(next.sides[mode].factor, held_.sides[mode].factor);
    }
    Take(next.momentum, held_.momentum);
    Take(next.second, held_.second);
    ++version_;
    return absl::OkStatus();
  }

  absl::Status Repeat(MatrixView u) override {
    if (version_ == 0) {
      return absl::FailedPreconditionError(absl::StrCat("layer ", layer_.name, ": expected a gradient before"));
    }
    return Answer(Unchanged(), version_, u);
  }

  absl::StatusOr<std::string> Save() const override {
    StateWriter out(kSoapTraits.name, static_cast<size_t>(bytes()));
    out.Text(StateText(config_, layer_, sides_));
    out.Integer(version_);
    for (const DeviceMatrix* matrix : held_.All()) PRECONDOR_RETURN_IF_ERROR(out.Matrix(backend_, matrix->view()));
    return out.Finish();
  }

  absl::Status Load(absl::string_view bytes) override {
    absl::Status status = TakeOver(bytes);
    if (status.ok()) return status;
    return absl::Status(status.code(), absl::StrCat("layer ", layer_.name, ": ", status.message()));
  }

  bool ready() const override { return true; }
  uint64_t version() const override { return version_; }
  int64_t bytes() const override {
    int64_t sum = 0;
    for (const DeviceMatrix* matrix : held_.All()) sum += matrix->view().size() * kElementBytes;
    return sum;
  }
  Summary summary() const override {
    const std::vector<bool>& dense = sides_.has_factor;
    Summary summary;
    summary.input_representation =
        std::find(dense.begin() + (dense.size() > 1 ? 1 : 0), dense.end(), true) != dense.end() ? "dense" : "none";
    summary.output_representation = dense.front() ? "dense" : "none";
    return summary;
  }

 private:
  struct Parts {
    std::vector<SoapSide> sides;
    DeviceMatrix momentum;  // SOAP: in the eigenbasis
    DeviceMatrix second;    // SOAP: Adam's second moment, in the eigenbasis

    std::vector<const DeviceMatrix*> All() const {
      std::vector<const DeviceMatrix*> all;
      for (const SoapSide& side : sides) all.insert(all.end(), {&side.covariance, &side.factor});
      all.insert(all.end(), {&momentum, &second});
      return all;
    }
  };

  Parts Unchanged() const {
    Parts parts;
    parts.sides.resize(sides_.sizes.size());
    return parts;
  }
  static void Take(DeviceMatrix& from, DeviceMatrix& to) {
    if (!from.empty()) to = std::move(from);
  }
  // Returns the matrix that is held once `next` is adopted.
  static const DeviceMatrix& Of(const DeviceMatrix& next, const DeviceMatrix& held) {
    return next.empty() ? held : next;
  }
  std::vector<ConstMatrixView> Factors(const Parts& next) const {
    std::vector<ConstMatrixView> factors;
    for (size_t mode = 0; mode < next.sides.size(); ++mode) {
      factors.push_back(Of(next.sides[mode].factor, held_.sides[mode].factor).view());
    }
    return factors;
  }

  absl::StatusOr<DeviceMatrix> AllocateTensor() const {
    return backend_.Allocate(sides_.sizes[0], sides_.elements() / sides_.sizes[0]);
  }
  MatrixView AsMatrix(DeviceMatrix& tensor) const { return MatrixView(tensor.view().data, layer_.d_out, layer_.d_in); }

  absl::StatusOr<Parts> MakeParts() const {
    Parts parts;
    for (size_t mode = 0; mode < sides_.sizes.size(); ++mode) {
      PRECONDOR_ASSIGN_OR_RETURN(parts.sides.emplace_back(),
                                 MakeSoapSide(sides_.sizes[mode], sides_.has_factor[mode], backend_));
    }
    PRECONDOR_ASSIGN_OR_RETURN(parts.momentum, AllocateTensor());
    if (config_.rule == SoapRule::kSoap) {
      PRECONDOR_ASSIGN_OR_RETURN(parts.second, AllocateTensor());
    }
    return parts;
  }

  // Computes the covariances that include the gradient x.
  absl::Status TakeIn(MatrixView x, Parts& next) const {
    for (size_t mode = 0; mode < next.sides.size(); ++mode) {
      const SoapSide& held = held_.sides[mode];
      if (!held.present()) continue;
      PRECONDOR_ASSIGN_OR_RETURN(ModeMatrix along, ModeMatrix::Of(sides_.sizes, mode, x, backend_));
      PRECONDOR_ASSIGN_OR_RETURN(next.sides[mode].covariance,
                                 NextCovariance(held, along, config_.covariance_decay, backend_));
    }
    return absl::OkStatus();
  }

  // The first gradient only makes the bases, so that no gradient is projected on a basis that it is part of. The
  // published code refreshes the bases after the step at which this is due. Here the refresh runs before the next step,
  // so that an answer is a function of the state that it leaves.
  absl::Status SoapStep(DeviceMatrix x, Parts& next) const {
    PRECONDOR_RETURN_IF_ERROR(TakeIn(x.view(), next));
    if (version_ == 0) {
      for (SoapSide& side : next.sides) {
        if (!side.present()) continue;
        PRECONDOR_ASSIGN_OR_RETURN(side.factor, Eigenbasis(side.covariance.view(), backend_));
      }
      return absl::OkStatus();
    }
    PRECONDOR_ASSIGN_OR_RETURN(next.momentum, CloneMatrix(held_.momentum.view(), backend_));
    PRECONDOR_ASSIGN_OR_RETURN(next.second, CloneMatrix(held_.second.view(), backend_));
    const uint64_t steps = version_ - 1;
    if (steps > 0 && steps % static_cast<uint64_t>(config_.refresh_interval) == 0)
      PRECONDOR_RETURN_IF_ERROR(Refresh(next));
    PRECONDOR_RETURN_IF_ERROR(ApplyFactors(sides_.sizes, Factors(next), Transpose::kNo, x, backend_));
    const double beta1 = config_.momentum, beta2 = config_.second_moment_decay;
    PRECONDOR_RETURN_IF_ERROR(backend_.Axpby(1 - beta1, x.view(), beta1, next.momentum.view()));
    return backend_.MultiplyElements(1 - beta2, x.view(), x.view(), beta2, next.second.view());
  }

  // Refreshes all bases. The momentum is transformed to the new bases; the second moment is only reordered, as in the
  // published code.
  absl::Status Refresh(Parts& next) const {
    std::vector<std::vector<int64_t>> orders(next.sides.size());
    for (size_t mode = 0; mode < next.sides.size(); ++mode) {
      if (!held_.sides[mode].present()) continue;
      PRECONDOR_ASSIGN_OR_RETURN(RefreshedBasis refreshed, RefreshBasis(held_.sides[mode], backend_));
      next.sides[mode].factor = std::move(refreshed.basis);
      orders[mode] = std::move(refreshed.order);
    }
    PRECONDOR_RETURN_IF_ERROR(
        ApplyFactors(sides_.sizes, Factors(Unchanged()), Transpose::kYes, next.momentum, backend_));
    PRECONDOR_RETURN_IF_ERROR(ApplyFactors(sides_.sizes, Factors(next), Transpose::kNo, next.momentum, backend_));
    return Reorder(sides_.sizes, orders, next.second, backend_);
  }

  absl::Status ShampooStep(DeviceMatrix x, Parts& next) const {
    PRECONDOR_RETURN_IF_ERROR(TakeIn(x.view(), next));
    PRECONDOR_ASSIGN_OR_RETURN(next.momentum, CloneMatrix(held_.momentum.view(), backend_));
    PRECONDOR_RETURN_IF_ERROR(backend_.Axpby(1 - config_.momentum, x.view(), config_.momentum, next.momentum.view()));
    if (version_ % static_cast<uint64_t>(config_.refresh_interval) != 0) return absl::OkStatus();
    const auto factors = static_cast<double>(std::count(sides_.has_factor.begin(), sides_.has_factor.end(), true));
    for (SoapSide& side : next.sides) {
      if (!side.present()) continue;
      PRECONDOR_ASSIGN_OR_RETURN(side.factor,
                                 InverseRoot(side.covariance.view(), 1 / Debias(config_.covariance_decay, version_ + 1),
                                             config_.epsilon, 1 / (2 * factors), backend_));
    }
    return absl::OkStatus();
  }

  static double Debias(double decay, uint64_t n) { return 1 - std::pow(decay, static_cast<double>(n)); }

  // Computes the answer to the n-th gradient from the state that `next` makes, which includes that gradient.
  absl::Status Answer(const Parts& next, uint64_t n, MatrixView u) const {
    const bool soap = config_.rule == SoapRule::kSoap;
    if (soap && n == 1) return backend_.Axpby(0.0, u, 0.0, u);
    const ConstMatrixView momentum = Of(next.momentum, held_.momentum).view();
    PRECONDOR_ASSIGN_OR_RETURN(DeviceMatrix x, AllocateTensor());
    if (soap) {
      const double scale = std::sqrt(Debias(config_.second_moment_decay, n - 1)) / Debias(config_.momentum, n - 1);
      PRECONDOR_RETURN_IF_ERROR(
          backend_.DivideByRoot(scale, momentum, Of(next.second, held_.second).view(), config_.epsilon, x.view()));
    } else {
      PRECONDOR_RETURN_IF_ERROR(backend_.Axpby(1 / Debias(config_.momentum, n), momentum, 0.0, x.view()));
    }
    const Transpose back = soap ? Transpose::kYes : Transpose::kNo;  // roots are symmetric
    PRECONDOR_RETURN_IF_ERROR(ApplyFactors(sides_.sizes, Factors(next), back, x, backend_));
    PRECONDOR_RETURN_IF_ERROR(backend_.Copy(AsMatrix(x), u));
    PRECONDOR_ASSIGN_OR_RETURN(const double square, backend_.Dot(u, u));
    if (std::isfinite(square)) return absl::OkStatus();
    return absl::FailedPreconditionError(
        absl::StrCat("layer ", layer_.name, ": expected |U| within f32, got NaN or infinity"));
  }

  absl::Status TakeOver(absl::string_view bytes) {
    StateReader in(bytes);
    PRECONDOR_RETURN_IF_ERROR(in.Begin(kSoapTraits.name));
    PRECONDOR_RETURN_IF_ERROR(in.ExpectText("configuration", StateText(config_, layer_, sides_)));
    PRECONDOR_ASSIGN_OR_RETURN(const uint64_t version, in.Integer("version"));
    PRECONDOR_ASSIGN_OR_RETURN(Parts parts, MakeParts());
    for (size_t mode = 0; mode < parts.sides.size(); ++mode) {
      SoapSide& side = parts.sides[mode];
      PRECONDOR_RETURN_IF_ERROR(in.Matrix(absl::StrCat("covariance ", mode), backend_, side.covariance.view()));
      PRECONDOR_RETURN_IF_ERROR(in.Matrix(absl::StrCat("factor ", mode), backend_, side.factor.view()));
    }
    PRECONDOR_RETURN_IF_ERROR(in.Matrix("momentum", backend_, parts.momentum.view()));
    PRECONDOR_RETURN_IF_ERROR(in.Matrix("second moment", backend_, parts.second.view()));
    PRECONDOR_RETURN_IF_ERROR(in.Finish());
    held_ = std::move(parts);
    version_ = version;
    return absl::OkStatus();
  }

  const SoapConfig config_;
  const LayerSpec layer_;
  const SoapSides sides_;
  Backend& backend_;
  Parts held_;
  uint64_t version_ = 0;  // gradients that have updated the state
};

class Soap final : public Method {
 public:
  explicit Soap(const SoapConfig& config) : config_(config) {}
  const MethodTraits& traits() const override { return kSoapTraits; }
  bool needs_global_scale() const override { return false; }

  int64_t StateBytes(const LayerSpec& layer) const override {
    const SoapSides sides = config_.Sides(layer);
    return (Moments() * sides.elements() + 2 * sides.FactorElements()) * kElementBytes;
  }

  // Copies of moments, covariances and factors; the gradient or the answer as a tensor; the scratch of its products;
  // two matrices of a refresh.
  int64_t ScratchBytes(const LayerSpec& layer, int64_t) const override {
    const SoapSides sides = config_.Sides(layer);
    int64_t longest = 0;
    for (size_t mode = 0; mode < sides.sizes.size(); ++mode) {
      if (sides.has_factor[mode]) longest = std::max(longest, sides.sizes[mode]);
    }
    return ((Moments() + 1) * sides.elements() + ModeScratchElements(sides.sizes) + 2 * sides.FactorElements() +
            2 * longest * longest) *
               kElementBytes +
           SymmetricEigenScratchBytes(longest);
  }

  // Per gradient two products per side and two covariances, and a share of the refresh: three products, and a
  // decomposition that costs about nine.
  double StepFlops(const LayerSpec& layer, int64_t) const override {
    const SoapSides sides = config_.Sides(layer);
    const auto elements = static_cast<double>(sides.elements());
    double flops = 8 * elements;
    for (size_t mode = 0; mode < sides.sizes.size(); ++mode) {
      if (!sides.has_factor[mode]) continue;
      const auto d = static_cast<double>(sides.sizes[mode]);
      flops += (config_.rule == SoapRule::kSoap ? 6 : 4) * elements * d +
               12 * d * d * d / static_cast<double>(config_.refresh_interval);
    }
    return flops;
  }

  std::vector<std::string> Warnings(int64_t) const override { return {}; }

  absl::StatusOr<std::unique_ptr<LayerState>> MakeState(const LayerSpec& layer, Backend& backend) const override {
    auto state = std::make_unique<SoapState>(config_, layer, backend);
    PRECONDOR_RETURN_IF_ERROR(state->Init());
    return std::unique_ptr<LayerState>(std::move(state));
  }

 private:
  int64_t Moments() const { return config_.rule == SoapRule::kSoap ? 2 : 1; }

  const SoapConfig config_;
};

}  // namespace

absl::StatusOr<std::unique_ptr<Method>> MakeSoap(const MethodConfig& config) {
  PRECONDOR_ASSIGN_OR_RETURN(const SoapConfig parsed, ParseSoapConfig(config));
  return std::unique_ptr<Method>(std::make_unique<Soap>(parsed));
}

}  // namespace precondor
