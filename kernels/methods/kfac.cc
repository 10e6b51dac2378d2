// SPDX-License-Identifier: Apache-2.0
#include "kernels/methods/kfac.h"

#include <algorithm>
#include <cmath>
#include <optional>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"

#include "kernels/base/random.h"
#include "kernels/base/status_macros.h"
#include "kernels/methods/gradient.h"
#include "kernels/methods/kfac_config.h"
#include "kernels/methods/kfac_side.h"
#include "kernels/methods/scaling.h"
#include "kernels/methods/state_codec.h"
#include "kernels/methods/statistics.h"

namespace precondor {
namespace {

constexpr absl::string_view kName = "kfac";
constexpr uint64_t kFailuresUntilReset = 3;

// Everything of a state but the matrices.
struct Progress {
  uint64_t version = 0;
  uint64_t pending = 0;  // statistics in the factors of an accumulation that is not complete
  double decay = 0;      // of that accumulation
  bool due = false;      // a decomposition that waits for the accumulation's end, or for a failed one's repetition
  bool ready = false;    // there is a decomposition
  double split = 1;      // pi, of the last decomposition
  double reciprocal_scale = 1;  // what prediv's matrix was multiplied by
  uint64_t failures = 0;        // in a row
  uint64_t failed = 0;          // in all
  uint64_t resets = 0;
};

class KfacState final : public LayerState {
 public:
  KfacState(const KfacConfig& config, const LayerSpec& layer, Backend& backend)
      : config_(config), layer_(layer), backend_(backend) {
    const std::vector<uint64_t> words(layer.name.begin(), layer.name.end());
    if (config.stagger) phase_ = CounterRandom(words).Bits(0);
  }

  absl::Status Init() {
    PRECONDOR_ASSIGN_OR_RETURN(in_, KfacSide::Make(config_.form, layer_.d_in, backend_));
    PRECONDOR_ASSIGN_OR_RETURN(out_, KfacSide::Make(config_.form, layer_.d_out, backend_));
    if (config_.prediv) {
      PRECONDOR_ASSIGN_OR_RETURN(reciprocals_, backend_.Allocate(layer_.d_out, layer_.d_in));
    }
    return absl::OkStatus();
  }

  absl::Status Update(const LayerStatistics& statistics) override {
    PRECONDOR_RETURN_IF_ERROR(
        CheckEitherForm(layer_, "a", statistics.a, statistics.a_covariance, layer_.d_in, backend_));
    PRECONDOR_RETURN_IF_ERROR(
        CheckEitherForm(layer_, "g", statistics.g, statistics.g_covariance, layer_.d_out, backend_));
    Progress next = progress_;
    absl::Status status = Prepare(statistics, next);
    if (status.ok()) {
      Commit(next);
    } else {
      Abandon();
    }
    return status;
  }

  absl::Status Precondition(ConstMatrixView d, MatrixView u) override {
    PRECONDOR_RETURN_IF_ERROR(ExpectGradient(layer_, d));
    if (!ready()) return backend_.Copy(d, u);
    double factor = 1.0 / (in_->scale() * out_->scale());
    if (config_.form == KfacForm::kInverse) {
      PRECONDOR_RETURN_IF_ERROR(backend_.DensePrecondition(out_->basis(), in_->basis(), d, u));
    } else {
      PRECONDOR_ASSIGN_OR_RETURN(factor, InEigenbasis(d, u));
    }
    const ScalingPolicy policy{.kind = config_.scaling, .clip = config_.scaling_clip.At(last_step())};
    return Rescale(policy, layer_, backend_, factor, d, u);
  }

  absl::StatusOr<std::string> Save() const override {
    StateWriter out(kName, static_cast<size_t>(bytes()));
    out.Text(config_.state_text);
    for (uint64_t number : {progress_.version, progress_.pending, uint64_t{progress_.due}, uint64_t{progress_.ready},
                            progress_.failures, progress_.failed, progress_.resets}) {
      out.Integer(number);
    }
    for (double number : {progress_.decay, progress_.split, progress_.reciprocal_scale}) out.Number(number);
    PRECONDOR_RETURN_IF_ERROR(in_->Save(out));
    PRECONDOR_RETURN_IF_ERROR(out_->Save(out));
    if (config_.prediv) PRECONDOR_RETURN_IF_ERROR(out.Matrix(backend_, reciprocals_.view()));
    return out.Finish();
  }

  absl::Status Load(absl::string_view bytes) override {
    Progress next;
    absl::Status status = PrepareLoad(bytes, next);
    if (status.ok()) {
      Commit(next);
      return status;
    }
    Abandon();
    return absl::Status(status.code(), absl::StrCat("layer ", layer_.name, ": ", status.message()));
  }

  bool ready() const override { return progress_.ready; }
  uint64_t version() const override { return progress_.version; }
  int64_t bytes() const override {
    return in_->bytes() + out_->bytes() + reciprocals_.view().size() * static_cast<int64_t>(sizeof(float));
  }

  Summary summary() const override {
    Summary summary;
    const bool eigen = config_.form == KfacForm::kEigen;
    summary.input_representation = summary.output_representation = eigen ? "eigen" : "inverse";
    const Damping damping = SideDamping(config_.damping.At(last_step()), progress_.split);
    summary.input_damping = damping.in;
    summary.output_damping = damping.out;
    summary.failed_decompositions = static_cast<int64_t>(progress_.failed);
    summary.resets = static_cast<int64_t>(progress_.resets);
    return summary;
  }

 private:
  struct Damping {
    double in = 0;
    double out = 0;
  };

  // The statistic update that the answers stand on.
  uint64_t last_step() const { return progress_.version == 0 ? 0 : progress_.version - 1; }

  // INVERSE without the split damps each side by all of it, EIGEN their product.
  Damping SideDamping(double damping, double split) const {
    if (!config_.pi_split) return {damping, damping};
    return {std::sqrt(damping) * split, std::sqrt(damping) / split};
  }

  absl::Status Prepare(const LayerStatistics& statistics, Progress& next) {
    const uint64_t t = progress_.version;
    ++next.version;
    if (t % KfacConfig::Interval(config_.factor_update_steps, t) == 0) {
      PRECONDOR_RETURN_IF_ERROR(PrepareFactors(statistics, t, next));
    }
    const uint64_t every = KfacConfig::Interval(config_.inv_update_steps, t);
    if (!next.ready || (t % every + phase_ % every) % every == 0) next.due = true;
    if (!next.due || next.pending != 0) return absl::OkStatus();
    absl::Status status = PrepareDecompositions(config_.damping.At(t), next);
    if (status.ok()) {
      next.due = false;
      next.ready = true;
      next.failures = 0;
      return status;
    }
    if (!absl::IsFailedPrecondition(status)) return status;
    return AfterAFailure(next);
  }

  absl::Status PrepareFactors(const LayerStatistics& statistics, uint64_t t, Progress& next) {
    const bool first = next.pending == 0;
    if (first) next.decay = config_.factor_decay.At(t);
    const double keep = first ? next.decay : 1.0;
    const double add = (1.0 - next.decay) / static_cast<double>(config_.accumulation_steps);
    absl::Status status = in_->PrepareFactor(statistics.a, statistics.a_covariance, keep, add);
    if (!status.ok()) return Named("a", status);
    // The senders' g is row_scale times the one that is meant.
    status =
        out_->PrepareFactor(statistics.g, statistics.g_covariance, keep, add / (config_.row_scale * config_.row_scale));
    if (!status.ok()) return Named("g", status);
    next.pending = (next.pending + 1) % static_cast<uint64_t>(config_.accumulation_steps);
    return status;
  }

  absl::Status Named(absl::string_view side, const absl::Status& status) const {
    return absl::Status(status.code(),
                        absl::StrCat("layer ", layer_.name, ": statistics ", side, ": ", status.message()));
  }

  absl::Status PrepareDecompositions(double damping, Progress& next) {
    if (config_.pi_split) {
      PRECONDOR_ASSIGN_OR_RETURN(const double in, in_->MeanDiagonal());
      PRECONDOR_ASSIGN_OR_RETURN(const double out, out_->MeanDiagonal());
      next.split = in > 0 && out > 0 ? std::sqrt(in / out) : 1.0;
    }
    const Damping sides = SideDamping(damping, next.split);
    PRECONDOR_RETURN_IF_ERROR(in_->PrepareDecomposition(sides.in));
    PRECONDOR_RETURN_IF_ERROR(out_->PrepareDecomposition(sides.out));
    return config_.prediv ? PrepareReciprocals(damping, next) : absl::OkStatus();
  }

  // The last good decomposition stays in use and the next statistics try again; the third failure in a row gives the
  // factors up.
  absl::Status AfterAFailure(Progress& next) {
    in_->AbandonDecomposition();
    out_->AbandonDecomposition();
    next_reciprocals_ = DeviceMatrix();
    next.split = progress_.split;
    ++next.failed;
    if (++next.failures < kFailuresUntilReset) return absl::OkStatus();
    PRECONDOR_RETURN_IF_ERROR(in_->PrepareReset());
    PRECONDOR_RETURN_IF_ERROR(out_->PrepareReset());
    next.failures = 0;
    next.ready = false;
    ++next.resets;
    return absl::OkStatus();
  }

  // Divisors of the gradient's elements in the eigenbasis: rows[i] columns[j] + shift.
  struct Divisors {
    std::vector<double> rows;
    std::vector<double> columns;
    double shift = 0;
    double smallest() const { return rows.front() * columns.front() + shift; }
  };
  Divisors MakeDivisors(const std::vector<double>& out, const std::vector<double>& in, double damping,
                        double split) const {
    Divisors divisors{out, in, damping};
    if (!config_.pi_split) return divisors;
    const Damping sides = SideDamping(damping, split);
    for (double& value : divisors.rows) value += sides.out;
    for (double& value : divisors.columns) value += sides.in;
    divisors.shift = 0;
    return divisors;
  }

  absl::Status PrepareReciprocals(double damping, Progress& next) {
    const Divisors divisors = MakeDivisors(out_->next_values(), in_->next_values(), damping, next.split);
    PRECONDOR_ASSIGN_OR_RETURN(next_reciprocals_, backend_.Allocate(layer_.d_out, layer_.d_in));
    const MatrixView all = next_reciprocals_.view();
    const std::vector<float> ones(std::max(layer_.d_out, layer_.d_in), 1.0f);
    PRECONDOR_ASSIGN_OR_RETURN(DeviceMatrix down, backend_.Allocate(layer_.d_out, 1));
    PRECONDOR_ASSIGN_OR_RETURN(DeviceMatrix across, backend_.Allocate(1, layer_.d_in));
    PRECONDOR_RETURN_IF_ERROR(backend_.Upload(ConstMatrixView(ones.data(), layer_.d_out, 1), down.view()));
    PRECONDOR_RETURN_IF_ERROR(backend_.Upload(ConstMatrixView(ones.data(), 1, layer_.d_in), across.view()));
    PRECONDOR_RETURN_IF_ERROR(backend_.Gemm(1.0, down.view(), Transpose::kNo, across.view(), Transpose::kNo, 0.0, all));
    next.reciprocal_scale = divisors.smallest();
    return backend_.DivideByOuter(divisors.smallest(), divisors.rows, divisors.columns, divisors.shift, all, all);
  }

  // u = U / (what is returned). The smallest divisor is taken out, so that no element grows beyond f32.
  absl::StatusOr<double> InEigenbasis(ConstMatrixView d, MatrixView u) {
    PRECONDOR_ASSIGN_OR_RETURN(DeviceMatrix one, backend_.Allocate(d.rows, d.cols));
    PRECONDOR_ASSIGN_OR_RETURN(DeviceMatrix two, backend_.Allocate(d.rows, d.cols));
    const MatrixView x = one.view(), y = two.view();
    PRECONDOR_RETURN_IF_ERROR(backend_.Gemm(1.0, out_->basis(), Transpose::kNo, d, Transpose::kNo, 0.0, x));
    PRECONDOR_RETURN_IF_ERROR(backend_.Gemm(1.0, x, Transpose::kNo, in_->basis(), Transpose::kYes, 0.0, y));
    double smallest = progress_.reciprocal_scale;
    if (config_.prediv) {
      PRECONDOR_RETURN_IF_ERROR(backend_.MultiplyElements(1.0, y, reciprocals_.view(), 0.0, y));
    } else {
      const Divisors divisors =
          MakeDivisors(out_->values(), in_->values(), config_.damping.At(last_step()), progress_.split);
      smallest = divisors.smallest();
      PRECONDOR_RETURN_IF_ERROR(
          backend_.DivideByOuter(smallest, divisors.rows, divisors.columns, divisors.shift, y, y));
    }
    PRECONDOR_RETURN_IF_ERROR(backend_.Gemm(1.0, out_->basis(), Transpose::kYes, y, Transpose::kNo, 0.0, x));
    PRECONDOR_RETURN_IF_ERROR(backend_.Gemm(1.0, x, Transpose::kNo, in_->basis(), Transpose::kNo, 0.0, u));
    return 1.0 / smallest;
  }

  absl::Status PrepareLoad(absl::string_view bytes, Progress& next) {
    StateReader in(bytes);
    PRECONDOR_RETURN_IF_ERROR(in.Begin(kName));
    PRECONDOR_RETURN_IF_ERROR(in.ExpectText("configuration", config_.state_text));
    uint64_t due = 0, ready = 0;
    for (const auto& [field, number] :
         std::initializer_list<std::pair<absl::string_view, uint64_t*>>{{"version", &next.version},
                                                                        {"pending", &next.pending},
                                                                        {"due", &due},
                                                                        {"ready", &ready},
                                                                        {"failures", &next.failures},
                                                                        {"failed", &next.failed},
                                                                        {"resets", &next.resets}}) {
      PRECONDOR_ASSIGN_OR_RETURN(*number, in.Integer(field));
    }
    next.due = due != 0;
    next.ready = ready != 0;
    PRECONDOR_ASSIGN_OR_RETURN(next.decay, in.Number("decay"));
    PRECONDOR_ASSIGN_OR_RETURN(next.split, in.Number("split"));
    PRECONDOR_ASSIGN_OR_RETURN(next.reciprocal_scale, in.Number("reciprocal scale"));
    PRECONDOR_RETURN_IF_ERROR(in_->PrepareLoad(in));
    PRECONDOR_RETURN_IF_ERROR(out_->PrepareLoad(in));
    if (config_.prediv) {
      PRECONDOR_ASSIGN_OR_RETURN(next_reciprocals_, backend_.Allocate(layer_.d_out, layer_.d_in));
      PRECONDOR_RETURN_IF_ERROR(in.Matrix("reciprocals", backend_, next_reciprocals_.view()));
    }
    return in.Finish();
  }

  void Commit(const Progress& next) {
    progress_ = next;
    in_->Commit();
    out_->Commit();
    if (!next_reciprocals_.empty()) reciprocals_ = std::exchange(next_reciprocals_, DeviceMatrix());
  }

  void Abandon() {
    in_->Abandon();
    out_->Abandon();
    next_reciprocals_ = DeviceMatrix();
  }

  const KfacConfig config_;
  const LayerSpec layer_;
  Backend& backend_;
  uint64_t phase_ = 0;
  std::optional<KfacSide> in_;
  std::optional<KfacSide> out_;
  DeviceMatrix reciprocals_;  // prediv: reciprocal_scale over the divisors
  DeviceMatrix next_reciprocals_;
  Progress progress_;
};

class Kfac final : public Method {
 public:
  explicit Kfac(const KfacConfig& config) : config_(config) {}
  absl::string_view name() const override { return kName; }
  StatisticsForm statistics_form() const override { return StatisticsForm::kCovariances; }
  bool needs_global_scale() const override { return config_.scaling == Scaling::kKlClip; }

  int64_t StateBytes(const LayerSpec& layer) const override {
    return KfacSide::StateBytes(layer.d_in) + KfacSide::StateBytes(layer.d_out) + PredivBytes(layer);
  }

  // An update holds what both sides have prepared and one work matrix; a precondition two matrices of D's size.
  int64_t ScratchBytes(const LayerSpec& layer, int64_t) const override {
    const int64_t update = KfacSide::ScratchBytes(layer.d_in) + KfacSide::ScratchBytes(layer.d_out) +
                           PredivBytes(layer) + (layer.d_in + layer.d_out) * static_cast<int64_t>(sizeof(float));
    return std::max(update, 2 * layer.d_in * layer.d_out * static_cast<int64_t>(sizeof(float)));
  }

  double StepFlops(const LayerSpec& layer, int64_t vectors_per_step) const override {
    const double m = static_cast<double>(layer.d_out), n = static_cast<double>(layer.d_in);
    const bool eigen = config_.form == KfacForm::kEigen;
    // LAPACK's counts: 9 d^3 with eigenvectors, 2 d^3 for an inverse.
    const double decomposition = (eigen ? 9.0 : 2.0) * (m * m * m + n * n * n) /
                                 static_cast<double>(KfacConfig::Interval(config_.inv_update_steps, 0));
    return (eigen ? 4 : 2) * m * n * (m + n) + 2 * static_cast<double>(vectors_per_step) * (m * m + n * n) +
           decomposition;
  }

  std::vector<std::string> Warnings(int64_t vectors_per_step) const override {
    std::vector<std::string> warnings;
    if (vectors_per_step == 1) {
      warnings.push_back(
          "kfac of one vector a step sees little of the curvature: use statistics SIGNED with several sketches");
    }
    return warnings;
  }

  absl::StatusOr<std::unique_ptr<LayerState>> MakeState(const LayerSpec& layer, Backend& backend) const override {
    auto state = std::make_unique<KfacState>(config_, layer, backend);
    PRECONDOR_RETURN_IF_ERROR(state->Init());
    return std::unique_ptr<LayerState>(std::move(state));
  }

 private:
  int64_t PredivBytes(const LayerSpec& layer) const {
    return config_.prediv ? layer.d_in * layer.d_out * static_cast<int64_t>(sizeof(float)) : 0;
  }

  const KfacConfig config_;
};

}  // namespace

absl::StatusOr<std::unique_ptr<Method>> MakeKfac(const MethodConfig& config) {
  PRECONDOR_ASSIGN_OR_RETURN(const KfacConfig parsed, ParseKfacConfig(config));
  return std::unique_ptr<Method>(std::make_unique<Kfac>(parsed));
}

}  // namespace precondor
