// SPDX-License-Identifier: Apache-2.0
#include "kernels/methods/kfac.h"

#include <algorithm>
#include <functional>
#include <optional>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"

#include "kernels/base/random.h"
#include "kernels/base/status_macros.h"
#include "kernels/methods/kfac_side.h"
#include "kernels/methods/method_inputs.h"
#include "kernels/methods/scaling.h"
#include "kernels/methods/state_codec.h"

namespace precondor {
namespace {

constexpr uint64_t kFailuresUntilReset = 3;

// The scalars of a state.
struct Progress {
  uint64_t version = 0;
  uint64_t pending = 0;  // statistics that an incomplete accumulation has added to the factors
  double decay = 0;      // decay of that accumulation
  // A decomposition is due. It waits for the end of an accumulation or of a deferred decomposition.
  bool due = false;
  bool ready = false;         // a decomposition exists
  uint64_t refreshed_at = 0;  // the statistic update whose factors the refresh decomposes
  uint64_t failures = 0;      // failures in a row
  uint64_t failed = 0;        // failures in total
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
    PRECONDOR_ASSIGN_OR_RETURN(in_, KfacSide::Make(layer_.d_in, backend_));
    PRECONDOR_ASSIGN_OR_RETURN(out_, KfacSide::Make(layer_.d_out, backend_));
    PRECONDOR_ASSIGN_OR_RETURN(decomposition_, KfacDecomposition::Allocate(config_, layer_, backend_));
    return absl::OkStatus();
  }

  absl::Status Update(const LayerStatistics& statistics) override {
    PRECONDOR_RETURN_IF_ERROR(
        CheckEitherForm(layer_, "a", statistics.a, statistics.a_covariance, layer_.d_in, backend_));
    PRECONDOR_RETURN_IF_ERROR(
        CheckEitherForm(layer_, "g", statistics.g, statistics.g_covariance, layer_.d_out, backend_));
    Change change{.progress = progress_};
    absl::Status status = Prepare(statistics, change);
    if (status.ok()) {
      Commit(std::move(change));
    } else {
      Abandon();
    }
    return status;
  }

  std::function<void()> TakeDeferredWork() override {
    if (untaken_.expired()) return nullptr;
    return [refresh = std::exchange(untaken_, {})] {
      // Update checks the result.
      if (const std::shared_ptr<KfacRefresh> wanted = refresh.lock()) wanted->Run().IgnoreError();
    };
  }

  absl::Status Precondition(ConstMatrixView d, MatrixView u) override {
    PRECONDOR_RETURN_IF_ERROR(ExpectGradient(layer_, d));
    if (!ready()) return backend_.Copy(d, u);
    double factor = 1.0 / (decomposition_.in.scale * decomposition_.out.scale);
    if (config_.form == KfacForm::kInverse) {
      PRECONDOR_RETURN_IF_ERROR(
          backend_.DensePrecondition(decomposition_.out.basis.view(), decomposition_.in.basis.view(), d, u));
    } else {
      PRECONDOR_ASSIGN_OR_RETURN(factor, InEigenbasis(d, u));
    }
    const ScalingPolicy policy{.kind = config_.scaling, .clip = config_.scaling_clip.At(last_step())};
    return Rescale(policy, layer_, backend_, factor, d, u);
  }

  absl::StatusOr<std::string> Save() const override {
    StateWriter out(kKfacTraits.name, static_cast<size_t>(bytes()));
    out.Text(config_.state_text);
    for (uint64_t number : {progress_.version, progress_.pending, uint64_t{progress_.due}, uint64_t{progress_.ready},
                            progress_.failures, progress_.failed, progress_.resets}) {
      out.Integer(number);
    }
    for (double number : {progress_.decay, decomposition_.split, decomposition_.reciprocal_scale}) out.Number(number);
    PRECONDOR_RETURN_IF_ERROR(SaveSide(*in_, layer_.d_in, decomposition_.in, out));
    PRECONDOR_RETURN_IF_ERROR(SaveSide(*out_, layer_.d_out, decomposition_.out, out));
    if (config_.prediv) PRECONDOR_RETURN_IF_ERROR(out.Matrix(backend_, decomposition_.reciprocals.view()));
    if (config_.refresh_lag > 0) PRECONDOR_RETURN_IF_ERROR(SaveRefresh(out));
    return out.Finish();
  }

  absl::Status Load(absl::string_view bytes) override {
    Change change;
    absl::Status status = PrepareLoad(bytes, change);
    if (status.ok()) {
      Commit(std::move(change));
      return status;
    }
    Abandon();
    return OfLayer(layer_, status);
  }

  bool ready() const override { return progress_.ready; }
  uint64_t version() const override { return progress_.version; }
  int64_t bytes() const override {
    return KfacSide::StateBytes(layer_.d_in) + KfacSide::StateBytes(layer_.d_out) +
           KfacDecomposition::Bytes(config_, layer_) + (refresh_ == nullptr ? 0 : KfacRefresh::Bytes(config_, layer_));
  }

  Summary summary() const override {
    Summary summary;
    const bool eigen = config_.form == KfacForm::kEigen;
    summary.input_representation = summary.output_representation = eigen ? "eigen" : "inverse";
    const KfacDamping damping = SplitDamping(config_, config_.damping.At(last_step()), decomposition_.split);
    summary.input_damping = damping.in;
    summary.output_damping = damping.out;
    summary.failed_decompositions = static_cast<int64_t>(progress_.failed);
    summary.resets = static_cast<int64_t>(progress_.resets);
    return summary;
  }

 private:
  // The changes that an update or a load prepares, except those of the sides' factors.
  struct Change {
    Progress progress;
    bool ends_refresh = false;                            // ends the deferred refresh
    KfacDecomposition* refreshed = nullptr;               // result of the deferred refresh
    std::optional<KfacDecomposition> decomposition = {};  // computed immediately
    std::shared_ptr<KfacRefresh> refresh = {};            // new deferred refresh
  };

  // The statistic update on which answers are based.
  uint64_t last_step() const { return progress_.version == 0 ? 0 : progress_.version - 1; }

  absl::Status Prepare(const LayerStatistics& statistics, Change& change) {
    Progress& next = change.progress;
    const uint64_t t = next.version++;
    if (t % KfacConfig::Interval(config_.factor_update_steps, t) == 0) {
      PRECONDOR_RETURN_IF_ERROR(PrepareFactors(statistics, t, next));
    }
    if (refresh_ != nullptr && t - next.refreshed_at >= config_.refresh_lag) {
      PRECONDOR_RETURN_IF_ERROR(PrepareEndOfRefresh(change));
      if (!next.ready) return absl::OkStatus();
    }
    const uint64_t every = KfacConfig::Interval(config_.inv_update_steps, t);
    if (!next.ready || (t % every + phase_ % every) % every == 0) next.due = true;
    const bool deferred = refresh_ != nullptr && !change.ends_refresh;
    if (!next.due || next.pending != 0 || deferred) return absl::OkStatus();
    // The first decomposition is computed immediately, because answers wait for it.
    return config_.refresh_lag > 0 && next.ready ? PrepareRefresh(t, change) : PrepareDecomposition(t, change);
  }

  absl::Status PrepareFactors(const LayerStatistics& statistics, uint64_t t, Progress& next) {
    const bool first = next.pending == 0;
    if (first) next.decay = config_.factor_decay.At(t);
    const double keep = first ? next.decay : 1.0;
    const double add = (1.0 - next.decay) / static_cast<double>(config_.accumulation_steps);
    absl::Status status = in_->PrepareFactor(statistics.a, statistics.a_covariance, keep, add);
    if (!status.ok()) return Named("a", status);
    // The g that workers send is row_scale times the g of the formulas.
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

  absl::Status PrepareDecomposition(uint64_t t, Change& change) {
    PRECONDOR_ASSIGN_OR_RETURN(change.decomposition, KfacDecomposition::Allocate(config_, layer_, backend_));
    absl::Status status =
        change.decomposition->Decompose(config_, config_.damping.At(t), in_->factor(), out_->factor(), backend_);
    if (absl::IsFailedPrecondition(status)) {
      change.decomposition.reset();
      return AfterAFailure(change.progress);
    }
    PRECONDOR_RETURN_IF_ERROR(status);
    Succeed(change.progress);
    change.progress.due = false;
    return absl::OkStatus();
  }

  // Defers the decomposition of the prepared factors.
  absl::Status PrepareRefresh(uint64_t t, Change& change) {
    PRECONDOR_ASSIGN_OR_RETURN(change.refresh, KfacRefresh::Make(config_, layer_, config_.damping.At(t), backend_));
    PRECONDOR_RETURN_IF_ERROR(backend_.Copy(in_->factor(), change.refresh->in_factor()));
    PRECONDOR_RETURN_IF_ERROR(backend_.Copy(out_->factor(), change.refresh->out_factor()));
    change.progress.refreshed_at = t;
    change.progress.due = false;
    return absl::OkStatus();
  }

  absl::Status PrepareEndOfRefresh(Change& change) {
    const absl::Status status = refresh_->Run();
    change.ends_refresh = true;
    if (absl::IsFailedPrecondition(status)) {
      change.progress.due = true;
      return AfterAFailure(change.progress);
    }
    PRECONDOR_RETURN_IF_ERROR(status);
    change.refreshed = &refresh_->made();
    Succeed(change.progress);
    return absl::OkStatus();
  }

  static void Succeed(Progress& next) {
    next.ready = true;
    next.failures = 0;
  }

  // Keeps the last good decomposition in use; the next statistics try again. The third failure in a row resets the
  // factors.
  absl::Status AfterAFailure(Progress& next) {
    ++next.failed;
    if (++next.failures < kFailuresUntilReset) return absl::OkStatus();
    PRECONDOR_RETURN_IF_ERROR(in_->PrepareReset());
    PRECONDOR_RETURN_IF_ERROR(out_->PrepareReset());
    next.pending = 0;  // the reset discards the accumulation
    next.failures = 0;
    next.ready = false;
    ++next.resets;
    return absl::OkStatus();
  }

  // Computes u = U / factor and returns the factor. The smallest divisor is factored out, so that no element exceeds
  // f32.
  absl::StatusOr<double> InEigenbasis(ConstMatrixView d, MatrixView u) {
    const ConstMatrixView in = decomposition_.in.basis.view(), out = decomposition_.out.basis.view();
    PRECONDOR_ASSIGN_OR_RETURN(DeviceMatrix one, backend_.Allocate(d.rows, d.cols));
    PRECONDOR_ASSIGN_OR_RETURN(DeviceMatrix two, backend_.Allocate(d.rows, d.cols));
    const MatrixView x = one.view(), y = two.view();
    PRECONDOR_RETURN_IF_ERROR(backend_.Gemm(1.0, out, Transpose::kNo, d, Transpose::kNo, 0.0, x));
    PRECONDOR_RETURN_IF_ERROR(backend_.Gemm(1.0, x, Transpose::kNo, in, Transpose::kYes, 0.0, y));
    double smallest = decomposition_.reciprocal_scale;
    if (config_.prediv) {
      PRECONDOR_RETURN_IF_ERROR(backend_.MultiplyElements(1.0, y, decomposition_.reciprocals.view(), 0.0, y));
    } else {
      smallest = divisors_.smallest();
      PRECONDOR_RETURN_IF_ERROR(
          backend_.DivideByOuter(smallest, divisors_.rows, divisors_.columns, divisors_.shift, y, y));
    }
    PRECONDOR_RETURN_IF_ERROR(backend_.Gemm(1.0, out, Transpose::kYes, y, Transpose::kNo, 0.0, x));
    PRECONDOR_RETURN_IF_ERROR(backend_.Gemm(1.0, x, Transpose::kNo, in, Transpose::kNo, 0.0, u));
    return 1.0 / smallest;
  }

  absl::Status SaveSide(const KfacSide& side, int64_t d, const KfacDecomposition::Side& decomposed,
                        StateWriter& out) const {
    out.Integer(static_cast<uint64_t>(d));
    out.Number(decomposed.scale);
    out.Numbers(decomposed.values);
    PRECONDOR_RETURN_IF_ERROR(side.Save(out));
    return out.Matrix(backend_, decomposed.basis.view());
  }

  // Saves the refresh without its result. The result is a function of what is saved, and without it the bytes depend on
  // the updates alone.
  absl::Status SaveRefresh(StateWriter& out) const {
    out.Integer(refresh_ != nullptr ? 1 : 0);
    if (refresh_ == nullptr) return absl::OkStatus();
    out.Integer(progress_.refreshed_at);
    PRECONDOR_RETURN_IF_ERROR(out.Matrix(backend_, refresh_->in_factor()));
    return out.Matrix(backend_, refresh_->out_factor());
  }

  absl::Status PrepareLoad(absl::string_view bytes, Change& change) {
    Progress& next = change.progress;
    StateReader in(bytes);
    PRECONDOR_RETURN_IF_ERROR(in.Begin(kKfacTraits.name));
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
    PRECONDOR_ASSIGN_OR_RETURN(change.decomposition, KfacDecomposition::Allocate(config_, layer_, backend_));
    KfacDecomposition& decomposition = *change.decomposition;
    PRECONDOR_ASSIGN_OR_RETURN(next.decay, in.Number("decay"));
    PRECONDOR_ASSIGN_OR_RETURN(decomposition.split, in.Number("split"));
    PRECONDOR_ASSIGN_OR_RETURN(decomposition.reciprocal_scale, in.Number("reciprocal scale"));
    PRECONDOR_RETURN_IF_ERROR(PrepareLoad(*in_, layer_.d_in, decomposition.in, in));
    PRECONDOR_RETURN_IF_ERROR(PrepareLoad(*out_, layer_.d_out, decomposition.out, in));
    const bool decomposed = !decomposition.in.values.empty() && !decomposition.out.values.empty();
    if (next.ready && config_.form != KfacForm::kInverse && !decomposed) {
      return absl::DataLossError("layer state: eigenvalues: expected those of both sides, got none");
    }
    if (config_.prediv) {
      PRECONDOR_RETURN_IF_ERROR(in.Matrix("reciprocals", backend_, decomposition.reciprocals.view()));
    }
    change.ends_refresh = true;
    if (config_.refresh_lag > 0) PRECONDOR_RETURN_IF_ERROR(PrepareLoadOfRefresh(in, change));
    return in.Finish();
  }

  absl::Status PrepareLoad(KfacSide& side, int64_t d, KfacDecomposition::Side& decomposed, StateReader& in) {
    PRECONDOR_RETURN_IF_ERROR(in.ExpectInteger("dimension", static_cast<uint64_t>(d)));
    PRECONDOR_ASSIGN_OR_RETURN(decomposed.scale, in.Number("scale"));
    PRECONDOR_ASSIGN_OR_RETURN(decomposed.values, in.Numbers("eigenvalues"));
    const size_t count = decomposed.values.size();
    if (count != 0 && count != static_cast<size_t>(d)) {
      return absl::DataLossError(absl::StrCat("eigenvalues: expected 0 or ", d, ", got ", count));
    }
    PRECONDOR_RETURN_IF_ERROR(side.PrepareLoad(in));
    return in.Matrix("basis", backend_, decomposed.basis.view());
  }

  absl::Status PrepareLoadOfRefresh(StateReader& in, Change& change) {
    PRECONDOR_ASSIGN_OR_RETURN(const uint64_t deferred, in.Integer("refresh"));
    if (deferred == 0) return absl::OkStatus();
    uint64_t& at = change.progress.refreshed_at;
    PRECONDOR_ASSIGN_OR_RETURN(at, in.Integer("refreshed at"));
    if (at >= change.progress.version) {
      return absl::DataLossError(
          absl::StrCat("refreshed at: expected less than version ", change.progress.version, ", got ", at));
    }
    PRECONDOR_ASSIGN_OR_RETURN(change.refresh, KfacRefresh::Make(config_, layer_, config_.damping.At(at), backend_));
    PRECONDOR_RETURN_IF_ERROR(in.Matrix("refreshed input factor", backend_, change.refresh->in_factor()));
    return in.Matrix("refreshed output factor", backend_, change.refresh->out_factor());
  }

  void Commit(Change change) {
    progress_ = change.progress;
    in_->Commit();
    out_->Commit();
    if (change.refreshed != nullptr) decomposition_ = std::move(*change.refreshed);
    if (change.decomposition.has_value()) decomposition_ = *std::move(change.decomposition);
    if (change.ends_refresh) refresh_ = nullptr;
    if (change.refresh != nullptr) untaken_ = refresh_ = std::move(change.refresh);
    if (!config_.prediv) divisors_.Assign(config_, decomposition_, config_.damping.At(last_step()));
  }

  void Abandon() {
    in_->Abandon();
    out_->Abandon();
  }

  const KfacConfig config_;
  const LayerSpec layer_;
  Backend& backend_;
  uint64_t phase_ = 0;
  std::optional<KfacSide> in_;
  std::optional<KfacSide> out_;
  KfacDecomposition decomposition_;
  KfacDivisors divisors_;  // without prediv: for the damping of the last update
  // The deferred refresh. It outlives the state while a thread runs it.
  std::shared_ptr<KfacRefresh> refresh_;
  std::weak_ptr<KfacRefresh> untaken_;  // refresh_, until TakeDeferredWork returns it
  Progress progress_;
};

class Kfac final : public Method {
 public:
  explicit Kfac(const KfacConfig& config) : config_(config) {}
  const MethodTraits& traits() const override { return kKfacTraits; }
  bool needs_global_scale() const override { return config_.scaling == Scaling::kKlClip; }

  int64_t StateBytes(const LayerSpec& layer) const override {
    return FactorBytes(layer) + KfacDecomposition::Bytes(config_, layer) +
           (config_.refresh_lag > 0 ? KfacRefresh::Bytes(config_, layer) : 0);
  }

  // An update holds the prepared changes and one work matrix; preconditioning holds two matrices of D's size.
  int64_t ScratchBytes(const LayerSpec& layer, int64_t) const override {
    const int64_t refreshed =
        config_.refresh_lag > 0 ? KfacRefresh::Bytes(config_, layer) : KfacDecomposition::Bytes(config_, layer);
    const int64_t update = FactorBytes(layer) + refreshed + KfacDecomposition::ScratchBytes(layer);
    return std::max(update, 2 * layer.d_in * layer.d_out * static_cast<int64_t>(sizeof(float)));
  }
  int64_t DeferredScratchBytes(const LayerSpec& layer) const override {
    return config_.refresh_lag > 0 ? KfacDecomposition::ScratchBytes(layer) : 0;
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
    return InitState<KfacState>(config_, layer, backend);
  }

 private:
  static int64_t FactorBytes(const LayerSpec& layer) {
    return KfacSide::StateBytes(layer.d_in) + KfacSide::StateBytes(layer.d_out);
  }

  const KfacConfig config_;
};

}  // namespace

absl::StatusOr<std::unique_ptr<Method>> MakeKfac(const MethodConfig& config) {
  PRECONDOR_ASSIGN_OR_RETURN(const KfacConfig parsed, ParseKfacConfig(config));
  return std::unique_ptr<Method>(std::make_unique<Kfac>(parsed));
}

}  // namespace precondor
