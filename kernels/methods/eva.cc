// SPDX-License-Identifier: Apache-2.0
#include "kernels/methods/eva.h"

#include <cmath>
#include <utility>

#include "absl/container/inlined_vector.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"

#include "kernels/base/status_macros.h"
#include "kernels/methods/method_inputs.h"
#include "kernels/methods/scaling.h"
#include "kernels/methods/state_codec.h"

namespace precondor {
namespace {

struct EvaConfig {
  double mu = 0.03;
  double weight = 0.95;  // weight of the new vector
  double row_scale = 1.0;
  ScalingPolicy scaling;
};

EvaConfig ReadEvaConfig(OptionReader& reader) {
  constexpr double kHuge = 1e9;
  EvaConfig out;
  out.mu = reader.OpenNumber("mu", out.mu, 0, kHuge);
  out.weight = reader.Number("weight", out.weight, 1e-6, 1);
  out.row_scale = reader.OpenNumber("row_scale", out.row_scale, 0, kHuge);
  out.scaling = ReadScaling(reader, kEvaTraits.default_scaling);
  return out;
}

// A running mean and its squared length.
struct RunningMean {
  DeviceMatrix vector;  // [1, d]
  double square = 0;
};

class EvaState final : public LayerState {
 public:
  EvaState(const EvaConfig& config, const LayerSpec& layer, Backend& backend)
      : config_(config), layer_(layer), backend_(backend) {}

  absl::Status Init() {
    PRECONDOR_ASSIGN_OR_RETURN(a_.vector, backend_.Allocate(1, layer_.d_in));
    PRECONDOR_ASSIGN_OR_RETURN(g_.vector, backend_.Allocate(1, layer_.d_out));
    return absl::OkStatus();
  }

  absl::Status Update(const LayerStatistics& statistics) override {
    PRECONDOR_RETURN_IF_ERROR(ExpectVectors(layer_, statistics));
    PRECONDOR_ASSIGN_OR_RETURN(RunningMean a, Next("a", statistics.a, a_));
    PRECONDOR_ASSIGN_OR_RETURN(RunningMean g, Next("g", statistics.g, g_));
    Commit(std::move(a), std::move(g), version_ + 1);
    return absl::OkStatus();
  }

  absl::Status Precondition(ConstMatrixView d, MatrixView u) override {
    PRECONDOR_RETURN_IF_ERROR(ExpectGradient(layer_, d));
    PRECONDOR_RETURN_IF_ERROR(backend_.Copy(d, u));
    if (!ready()) return absl::OkStatus();
    PRECONDOR_RETURN_IF_ERROR(Project(d, u));
    return Rescale(config_.scaling, layer_, backend_, 1.0 / config_.mu, d, u);
  }

  absl::StatusOr<std::string> Save() const override {
    StateWriter out(kEvaTraits.name, static_cast<size_t>(bytes()));
    out.Text(StateText());
    out.Integer(version_);
    PRECONDOR_RETURN_IF_ERROR(out.Matrix(backend_, a_.vector.view()));
    PRECONDOR_RETURN_IF_ERROR(out.Matrix(backend_, g_.vector.view()));
    return out.Finish();
  }

  absl::Status Load(absl::string_view bytes) override { return OfLayer(layer_, LoadParts(bytes)); }

  bool ready() const override { return version_ > 0; }
  uint64_t version() const override { return version_; }
  int64_t bytes() const override { return (a_.vector.cols() + g_.vector.cols()) * static_cast<int64_t>(sizeof(float)); }
  Summary summary() const override {
    return {.input_representation = "mean",
            .output_representation = "mean",
            .input_rank = 1,
            .output_rank = 1,
            .input_damping = config_.mu,
            .output_damping = config_.mu};
  }

 private:
  std::string StateText() const { return absl::StrFormat("weight %.17g", config_.weight); }

  void Commit(RunningMean a, RunningMean g, uint64_t version) {
    a_ = std::move(a);
    g_ = std::move(g);
    version_ = version;
  }

  // Returns (1 - weight) m + weight mean(v). The first mean has weight 1.
  absl::StatusOr<RunningMean> Next(absl::string_view side, ConstMatrixView vectors, const RunningMean& mean) {
    PRECONDOR_RETURN_IF_ERROR(FiniteSquaredNorms(layer_, side, vectors, mean.vector.cols(), backend_).status());
    const double weight = ready() ? config_.weight : 1.0;
    const absl::InlinedVector<float, 16> ones(vectors.rows, 1.0f);
    PRECONDOR_ASSIGN_OR_RETURN(DeviceMatrix sum, backend_.Allocate(1, vectors.rows));
    PRECONDOR_RETURN_IF_ERROR(backend_.Upload(ConstMatrixView(ones.data(), 1, vectors.rows), sum.view()));
    RunningMean next;
    PRECONDOR_ASSIGN_OR_RETURN(next.vector, backend_.Allocate(1, mean.vector.cols()));
    PRECONDOR_RETURN_IF_ERROR(backend_.Copy(mean.vector.view(), next.vector.view()));
    PRECONDOR_RETURN_IF_ERROR(backend_.Gemm(weight / static_cast<double>(vectors.rows), sum.view(), Transpose::kNo,
                                            vectors, Transpose::kNo, 1.0 - weight, next.vector.view()));
    PRECONDOR_RETURN_IF_ERROR(Measure(side, next));
    return next;
  }

  absl::Status Measure(absl::string_view side, RunningMean& mean) {
    PRECONDOR_ASSIGN_OR_RETURN(mean.square, backend_.Dot(mean.vector.view(), mean.vector.view()));
    if (std::isfinite(mean.square)) return absl::OkStatus();
    return absl::InvalidArgumentError(absl::StrCat("layer ", layer_.name, ": statistics ", side,
                                                   ": expected a mean within f32, got NaN or infinity"));
  }

  absl::Status LoadParts(absl::string_view bytes) {
    StateReader in(bytes);
    PRECONDOR_RETURN_IF_ERROR(in.Begin(kEvaTraits.name));
    PRECONDOR_RETURN_IF_ERROR(in.ExpectText("configuration", StateText()));
    PRECONDOR_ASSIGN_OR_RETURN(const uint64_t version, in.Integer("version"));
    RunningMean a, g;
    PRECONDOR_ASSIGN_OR_RETURN(a.vector, backend_.Allocate(1, layer_.d_in));
    PRECONDOR_ASSIGN_OR_RETURN(g.vector, backend_.Allocate(1, layer_.d_out));
    PRECONDOR_RETURN_IF_ERROR(in.Matrix("input mean", backend_, a.vector.view()));
    PRECONDOR_RETURN_IF_ERROR(in.Matrix("output mean", backend_, g.vector.view()));
    PRECONDOR_RETURN_IF_ERROR(in.Finish());
    PRECONDOR_RETURN_IF_ERROR(Measure("a", a));
    PRECONDOR_RETURN_IF_ERROR(Measure("g", g));
    Commit(std::move(a), std::move(g), version);
    return absl::OkStatus();
  }

  // Computes u = mu U from u = D: D - x/(x + mu) p g a', where p = g'D a and x is the product of the squared lengths. a
  // and g are normalised so that nothing leaves f32's range.
  absl::Status Project(ConstMatrixView d, MatrixView u) {
    constexpr double kTiny = 1e-60;  // too short to be normalised in f32
    if (a_.square < kTiny || g_.square < kTiny) return absl::OkStatus();
    const double x = a_.square * (g_.square / (config_.row_scale * config_.row_scale));
    const double kept = config_.mu / (x + config_.mu);
    PRECONDOR_ASSIGN_OR_RETURN(DeviceMatrix a, backend_.Allocate(1, layer_.d_in));
    PRECONDOR_ASSIGN_OR_RETURN(DeviceMatrix g, backend_.Allocate(1, layer_.d_out));
    PRECONDOR_ASSIGN_OR_RETURN(DeviceMatrix product, backend_.Allocate(1, layer_.d_out));
    PRECONDOR_RETURN_IF_ERROR(backend_.Axpby(1.0 / std::sqrt(a_.square), a_.vector.view(), 0.0, a.view()));
    PRECONDOR_RETURN_IF_ERROR(backend_.Axpby(1.0 / std::sqrt(g_.square), g_.vector.view(), 0.0, g.view()));
    const auto along = [&](ConstMatrixView of) -> absl::StatusOr<double> {
      PRECONDOR_RETURN_IF_ERROR(backend_.Gemm(1.0, a.view(), Transpose::kNo, of, Transpose::kYes, 0.0, product.view()));
      return backend_.Dot(g.view(), product.view());
    };
    const auto subtract = [&](double p) {
      return backend_.Gemm(-p, g.view(), Transpose::kYes, a.view(), Transpose::kNo, 1.0, u);
    };
    PRECONDOR_ASSIGN_OR_RETURN(const double p, along(d));
    // If little of that direction remains, the difference would have a rounding error as large as the remainder. So
    // remove the direction completely, measure what rounding has left of it, and add back what the formula keeps.
    constexpr double kSmall = 1e-3;
    if (kept > kSmall) return subtract((1.0 - kept) * p);
    PRECONDOR_RETURN_IF_ERROR(subtract(p));
    PRECONDOR_ASSIGN_OR_RETURN(const double rest, along(u));
    return subtract(rest - kept * p);
  }

  const EvaConfig config_;
  const LayerSpec layer_;
  Backend& backend_;
  RunningMean a_;
  RunningMean g_;
  uint64_t version_ = 0;
};

class Eva final : public Method {
 public:
  explicit Eva(const EvaConfig& config) : config_(config) {}
  const MethodTraits& traits() const override { return kEvaTraits; }
  bool needs_global_scale() const override { return config_.scaling.kind == Scaling::kKlClip; }
  int64_t StateBytes(const LayerSpec& layer) const override {
    return (layer.d_in + layer.d_out) * static_cast<int64_t>(sizeof(float));
  }
  int64_t ScratchBytes(const LayerSpec& layer, int64_t vectors_per_step) const override {
    return (layer.d_in + 2 * layer.d_out + vectors_per_step) * static_cast<int64_t>(sizeof(float));
  }
  double StepFlops(const LayerSpec& layer, int64_t vectors_per_step) const override {
    const double m = static_cast<double>(layer.d_out), n = static_cast<double>(layer.d_in);
    return 4 * m * n + 2 * static_cast<double>(vectors_per_step) * (m + n);
  }
  std::vector<std::string> Warnings(int64_t vectors_per_step) const override {
    std::vector<std::string> warnings;
    if (vectors_per_step > 1) {
      warnings.push_back(
          "eva takes the mean of a step's vectors: use statistics MEAN; that of SIGNED sketches is noise");
    }
    return warnings;
  }
  absl::StatusOr<std::unique_ptr<LayerState>> MakeState(const LayerSpec& layer, Backend& backend) const override {
    return InitState<EvaState>(config_, layer, backend);
  }

 private:
  const EvaConfig config_;
};

}  // namespace

void ReadEvaOptions(OptionReader& reader) { ReadEvaConfig(reader); }

absl::StatusOr<std::unique_ptr<Method>> MakeEva(const MethodConfig& config) {
  PRECONDOR_ASSIGN_OR_RETURN(const EvaConfig parsed, ParseOptions(config, ReadEvaConfig));
  return std::unique_ptr<Method>(std::make_unique<Eva>(parsed));
}

}  // namespace precondor
