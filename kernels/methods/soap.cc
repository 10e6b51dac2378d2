// SPDX-License-Identifier: Apache-2.0
#include "kernels/methods/soap.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"

#include "kernels/base/status_macros.h"
#include "kernels/methods/gradient.h"
#include "kernels/methods/soap_config.h"
#include "kernels/methods/soap_side.h"
#include "kernels/methods/state_codec.h"

namespace precondor {
namespace {

constexpr absl::string_view kName = "soap";
constexpr int64_t kElementBytes = sizeof(float);

// Answers depend on all of it.
std::string StateText(const SoapConfig& c) {
  return absl::StrFormat(
      "rule %d momentum %.17g second_moment_decay %.17g covariance_decay %.17g epsilon %.17g refresh_interval %d "
      "max_factor_dim %d",
      static_cast<int>(c.rule), c.momentum, c.second_moment_decay, c.covariance_decay, c.epsilon, c.refresh_interval,
      c.max_factor_dim);
}

class SoapState final : public LayerState {
 public:
  SoapState(const SoapConfig& config, const LayerSpec& layer, Backend& backend)
      : config_(config), layer_(layer), backend_(backend) {}

  absl::Status Init() {
    PRECONDOR_ASSIGN_OR_RETURN(held_, MakeParts());
    return absl::OkStatus();
  }

  absl::Status Update(const LayerStatistics&) override {
    return absl::InvalidArgumentError("method soap: expected no statistics");
  }

  absl::Status Precondition(ConstMatrixView d, MatrixView u) override {
    PRECONDOR_RETURN_IF_ERROR(ExpectFiniteGradient(layer_, d, backend_));
    // All aside, so that whatever fails leaves the state as it was. An empty matrix: the held one stays.
    Parts next;
    PRECONDOR_RETURN_IF_ERROR(config_.rule == SoapRule::kSoap ? SoapStep(d, next) : ShampooStep(d, next));
    PRECONDOR_RETURN_IF_ERROR(Answer(next, version_ + 1, u));
    Take(next.rows, held_.rows);
    Take(next.cols, held_.cols);
    Take(next.momentum, held_.momentum);
    Take(next.second, held_.second);
    ++version_;
    return absl::OkStatus();
  }

  absl::Status Repeat(MatrixView u) override {
    if (version_ == 0) {
      return absl::FailedPreconditionError(absl::StrCat("layer ", layer_.name, ": expected a gradient before"));
    }
    return Answer(Parts(), version_, u);
  }

  absl::StatusOr<std::string> Save() const override {
    StateWriter out(kName, static_cast<size_t>(bytes()));
    out.Text(StateText(config_));
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
    Summary summary;
    summary.input_representation = held_.cols.present() ? "dense" : "none";
    summary.output_representation = held_.rows.present() ? "dense" : "none";
    return summary;
  }

 private:
  struct Parts {
    SoapSide rows, cols;
    DeviceMatrix momentum;  // SOAP: in the eigenbasis
    DeviceMatrix second;    // SOAP: Adam's second moment, in the eigenbasis

    std::vector<const DeviceMatrix*> All() const {
      return {&rows.covariance, &rows.factor, &cols.covariance, &cols.factor, &momentum, &second};
    }
  };

  static void Take(DeviceMatrix& from, DeviceMatrix& to) {
    if (!from.empty()) to = std::move(from);
  }
  static void Take(SoapSide& from, SoapSide& to) {
    Take(from.covariance, to.covariance);
    Take(from.factor, to.factor);
  }
  // What will be held once `next` is taken.
  static const DeviceMatrix& Of(const DeviceMatrix& next, const DeviceMatrix& held) {
    return next.empty() ? held : next;
  }

  absl::StatusOr<Parts> MakeParts() const {
    const int64_t m = layer_.d_out, n = layer_.d_in;
    Parts parts;
    PRECONDOR_ASSIGN_OR_RETURN(parts.rows, MakeSoapSide(m, config_.HasFactor(m), backend_));
    PRECONDOR_ASSIGN_OR_RETURN(parts.cols, MakeSoapSide(n, config_.HasFactor(n), backend_));
    PRECONDOR_ASSIGN_OR_RETURN(parts.momentum, backend_.Allocate(m, n));
    if (config_.rule == SoapRule::kSoap) {
      PRECONDOR_ASSIGN_OR_RETURN(parts.second, backend_.Allocate(m, n));
    }
    return parts;
  }

  // The covariances with d in them.
  absl::Status TakeIn(ConstMatrixView d, Parts& next) const {
    const double decay = config_.covariance_decay;
    PRECONDOR_ASSIGN_OR_RETURN(next.rows.covariance, NextCovariance(held_.rows, From::kLeft, d, decay, backend_));
    PRECONDOR_ASSIGN_OR_RETURN(next.cols.covariance, NextCovariance(held_.cols, From::kRight, d, decay, backend_));
    return absl::OkStatus();
  }

  // The first gradient makes the bases and nothing else: none is ever projected on a basis that it is part of. The
  // refresh that the published code makes after the step that is due comes before the next one here, so that an answer
  // is a function of the state that it leaves.
  absl::Status SoapStep(ConstMatrixView d, Parts& next) const {
    if (version_ == 0) {
      PRECONDOR_RETURN_IF_ERROR(TakeIn(d, next));
      for (SoapSide* side : {&next.rows, &next.cols}) {
        if (!side->present()) continue;
        PRECONDOR_ASSIGN_OR_RETURN(side->factor, Eigenbasis(side->covariance.view(), backend_));
      }
      return absl::OkStatus();
    }
    PRECONDOR_ASSIGN_OR_RETURN(next.momentum, CloneMatrix(held_.momentum.view(), backend_));
    PRECONDOR_ASSIGN_OR_RETURN(next.second, CloneMatrix(held_.second.view(), backend_));
    const auto steps = static_cast<int64_t>(version_) - 1;
    if (steps > 0 && steps % config_.refresh_interval == 0) PRECONDOR_RETURN_IF_ERROR(Refresh(next));
    PRECONDOR_ASSIGN_OR_RETURN(DeviceMatrix projected, backend_.Allocate(d.rows, d.cols));
    const MatrixView x = projected.view();
    PRECONDOR_RETURN_IF_ERROR(ApplySides(Of(next.rows.factor, held_.rows.factor).view(),
                                         Of(next.cols.factor, held_.cols.factor).view(), Transpose::kNo, d, x,
                                         backend_));
    const double beta1 = config_.momentum, beta2 = config_.second_moment_decay;
    PRECONDOR_RETURN_IF_ERROR(backend_.Axpby(1 - beta1, x, beta1, next.momentum.view()));
    PRECONDOR_RETURN_IF_ERROR(backend_.MultiplyElements(1 - beta2, x, x, beta2, next.second.view()));
    return TakeIn(d, next);
  }

  // Both bases one step on; the momentum comes along, of the second moment the order alone, as published.
  absl::Status Refresh(Parts& next) const {
    std::vector<int64_t> row_order, col_order;
    if (held_.rows.present()) {
      PRECONDOR_ASSIGN_OR_RETURN(RefreshedBasis rows, RefreshBasis(held_.rows, backend_));
      next.rows.factor = std::move(rows.basis);
      row_order = std::move(rows.order);
    }
    if (held_.cols.present()) {
      PRECONDOR_ASSIGN_OR_RETURN(RefreshedBasis cols, RefreshBasis(held_.cols, backend_));
      next.cols.factor = std::move(cols.basis);
      col_order = std::move(cols.order);
    }
    PRECONDOR_ASSIGN_OR_RETURN(DeviceMatrix plain, backend_.Allocate(layer_.d_out, layer_.d_in));
    PRECONDOR_RETURN_IF_ERROR(ApplySides(held_.rows.factor.view(), held_.cols.factor.view(), Transpose::kYes,
                                         held_.momentum.view(), plain.view(), backend_));
    PRECONDOR_RETURN_IF_ERROR(ApplySides(next.rows.factor.view(), next.cols.factor.view(), Transpose::kNo, plain.view(),
                                         next.momentum.view(), backend_));
    return backend_.Gather(row_order, col_order, held_.second.view(), next.second.view());
  }

  absl::Status ShampooStep(ConstMatrixView d, Parts& next) const {
    PRECONDOR_ASSIGN_OR_RETURN(next.momentum, CloneMatrix(held_.momentum.view(), backend_));
    PRECONDOR_RETURN_IF_ERROR(backend_.Axpby(1 - config_.momentum, d, config_.momentum, next.momentum.view()));
    PRECONDOR_RETURN_IF_ERROR(TakeIn(d, next));
    if (version_ % static_cast<uint64_t>(config_.refresh_interval) != 0) return absl::OkStatus();
    const double sides = (held_.rows.present() ? 1 : 0) + (held_.cols.present() ? 1 : 0);
    for (SoapSide* side : {&next.rows, &next.cols}) {
      if (!side->present()) continue;
      PRECONDOR_ASSIGN_OR_RETURN(
          side->factor, InverseRoot(side->covariance.view(), 1 / Debias(config_.covariance_decay, version_ + 1),
                                    config_.epsilon, 1 / (2 * sides), backend_));
    }
    return absl::OkStatus();
  }

  static double Debias(double decay, uint64_t n) { return 1 - std::pow(decay, static_cast<double>(n)); }

  // The answer to the n-th gradient, which the state that `next` makes has taken in.
  absl::Status Answer(const Parts& next, uint64_t n, MatrixView u) const {
    const ConstMatrixView rows = Of(next.rows.factor, held_.rows.factor).view();
    const ConstMatrixView cols = Of(next.cols.factor, held_.cols.factor).view();
    const ConstMatrixView momentum = Of(next.momentum, held_.momentum).view();
    if (config_.rule == SoapRule::kSoap && n == 1) return backend_.Axpby(0.0, u, 0.0, u);
    PRECONDOR_ASSIGN_OR_RETURN(DeviceMatrix scaled, backend_.Allocate(u.rows, u.cols));
    if (config_.rule == SoapRule::kSoap) {
      const double scale = std::sqrt(Debias(config_.second_moment_decay, n - 1)) / Debias(config_.momentum, n - 1);
      PRECONDOR_RETURN_IF_ERROR(
          backend_.DivideByRoot(scale, momentum, Of(next.second, held_.second).view(), config_.epsilon, scaled.view()));
      PRECONDOR_RETURN_IF_ERROR(ApplySides(rows, cols, Transpose::kYes, scaled.view(), u, backend_));
    } else {
      PRECONDOR_RETURN_IF_ERROR(backend_.Axpby(1 / Debias(config_.momentum, n), momentum, 0.0, scaled.view()));
      PRECONDOR_RETURN_IF_ERROR(ApplySides(rows, cols, Transpose::kNo, scaled.view(), u, backend_));
    }
    PRECONDOR_ASSIGN_OR_RETURN(const double square, backend_.Dot(u, u));
    if (std::isfinite(square)) return absl::OkStatus();
    return absl::FailedPreconditionError(
        absl::StrCat("layer ", layer_.name, ": expected |U| within f32, got NaN or infinity"));
  }

  absl::Status TakeOver(absl::string_view bytes) {
    StateReader in(bytes);
    PRECONDOR_RETURN_IF_ERROR(in.Begin(kName));
    PRECONDOR_RETURN_IF_ERROR(in.ExpectText("configuration", StateText(config_)));
    PRECONDOR_ASSIGN_OR_RETURN(const uint64_t version, in.Integer("version"));
    PRECONDOR_ASSIGN_OR_RETURN(Parts parts, MakeParts());
    PRECONDOR_RETURN_IF_ERROR(in.Matrix("row covariance", backend_, parts.rows.covariance.view()));
    PRECONDOR_RETURN_IF_ERROR(in.Matrix("row factor", backend_, parts.rows.factor.view()));
    PRECONDOR_RETURN_IF_ERROR(in.Matrix("column covariance", backend_, parts.cols.covariance.view()));
    PRECONDOR_RETURN_IF_ERROR(in.Matrix("column factor", backend_, parts.cols.factor.view()));
    PRECONDOR_RETURN_IF_ERROR(in.Matrix("momentum", backend_, parts.momentum.view()));
    PRECONDOR_RETURN_IF_ERROR(in.Matrix("second moment", backend_, parts.second.view()));
    PRECONDOR_RETURN_IF_ERROR(in.Finish());
    held_ = std::move(parts);
    version_ = version;
    return absl::OkStatus();
  }

  const SoapConfig config_;
  const LayerSpec layer_;
  Backend& backend_;
  Parts held_;
  uint64_t version_ = 0;  // gradients taken in
};

class Soap final : public Method {
 public:
  explicit Soap(const SoapConfig& config) : config_(config) {}
  absl::string_view name() const override { return kName; }
  StatisticsForm statistics_form() const override { return StatisticsForm::kNone; }
  bool needs_global_scale() const override { return false; }

  int64_t StateBytes(const LayerSpec& layer) const override {
    const int64_t moments = config_.rule == SoapRule::kSoap ? 2 : 1;
    return (moments * layer.d_out * layer.d_in + 2 * FactorElements(layer)) * kElementBytes;
  }

  // Moments, covariances and factors aside, the projected gradient, what is between two products, and two matrices of a
  // refresh.
  int64_t ScratchBytes(const LayerSpec& layer, int64_t) const override {
    const int64_t m = config_.HasFactor(layer.d_out) ? layer.d_out : 0;
    const int64_t n = config_.HasFactor(layer.d_in) ? layer.d_in : 0;
    const int64_t longest = std::max(m, n);
    return (4 * layer.d_out * layer.d_in + 2 * FactorElements(layer) + 2 * longest * longest) * kElementBytes;
  }

  // Two products a side and gradient, two covariances, and the refresh's share of three products and a decomposition of
  // about nine.
  double StepFlops(const LayerSpec& layer, int64_t) const override {
    const double elements = static_cast<double>(layer.d_out) * static_cast<double>(layer.d_in);
    double flops = 8 * elements;
    for (const int64_t size : {layer.d_out, layer.d_in}) {
      if (!config_.HasFactor(size)) continue;
      const auto d = static_cast<double>(size);
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
  int64_t FactorElements(const LayerSpec& layer) const {
    int64_t sum = 0;
    for (const int64_t size : {layer.d_out, layer.d_in}) sum += config_.HasFactor(size) ? size * size : 0;
    return sum;
  }

  const SoapConfig config_;
};

}  // namespace

absl::StatusOr<std::unique_ptr<Method>> MakeSoap(const MethodConfig& config) {
  PRECONDOR_ASSIGN_OR_RETURN(const SoapConfig parsed, ParseSoapConfig(config));
  return std::unique_ptr<Method>(std::make_unique<Soap>(parsed));
}

}  // namespace precondor
