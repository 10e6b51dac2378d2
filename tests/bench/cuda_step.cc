// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"

#include "kernels/base/check.h"
#include "kernels/base/random.h"
#include "kernels/cuda/device.h"
#include "kernels/cuda/launch_count.h"
#include "kernels/grouping/grouping_backend.h"
#include "kernels/methods/registry.h"
#include "tests/bench/cuda_timer.h"
#include "tests/support/task_group.h"
#include "tests/support/test_backend.h"

namespace precondor {
namespace {

constexpr double kGamma = 0.95, kDamping = 1.0, kBeta = 0.95;
constexpr double kFloat = sizeof(float);
constexpr int64_t kMostFactorSide = 2048;  // of soap, as step_peers.py has it, and of muon

// A step's method: mkor, where a rank of 0 stands for dense factors, or a method that learns from gradients; and its
// model.
struct Kind {
  int64_t rank = 0;
  std::string products;
  std::string method = "mkor";
  bool is_llama = false;    // the hidden layers of Llama 3.2 1B; otherwise BERT-Large's
  bool has_factor = false;  // muon with an input factor, the default of precondor.torch

  bool has_statistics() const { return method == "mkor"; }
  // Steps from one that refreshes to the next; 0: all steps are alike.
  int64_t interval() const { return method == "soap" || has_factor ? 10 : 0; }
};

std::vector<Kind> Kinds(bool is_short) {
  const Kind muon = {.products = "BF16", .method = "muon"}, soap = {.products = "TF32", .method = "soap"};
  const Kind of_llama = {.products = "BF16", .method = "muon", .is_llama = true};
  Kind with_factor = muon;
  with_factor.has_factor = true;
  if (is_short) return {{8, "F32"}, {8, "TF32"}, {0, "BF16"}, muon, with_factor, soap, of_llama};
  return {{64, "F32"}, {64, "TF32"}, {128, "F32"}, {128, "TF32"}, {0, "BF16"}, muon, with_factor, soap, of_llama};
}

// As models.py has them.
std::vector<LayerSpec> Layers(const Kind& kind, bool is_short) {
  const int64_t hidden = is_short ? 48 : (kind.is_llama ? 2048 : 1024), inner = is_short ? 80 : 4 * hidden;
  const int64_t keys = kind.is_llama ? hidden / 4 : hidden;
  const int blocks = is_short ? 1 : (kind.is_llama ? 16 : 24);
  std::vector<LayerSpec> layers;
  for (int block = 0; block < blocks; ++block) {
    const auto add = [&](const char* name, int64_t rows, int64_t cols) {
      layers.push_back({absl::StrCat("block", block, ".", name), rows, cols, false});
    };
    add("query", hidden, hidden);
    add("key", keys, hidden);
    add("value", keys, hidden);
    add("output", hidden, hidden);
    if (kind.is_llama) add("gate", inner, hidden);
    add("up", inner, hidden);
    add("down", hidden, inner);
  }
  return layers;
}

std::string NameOf(const Kind& kind) {
  if (!kind.has_statistics())
    return absl::StrCat("step/cuda/", kind.method, kind.is_llama ? "_llama_1b" : "", kind.has_factor ? "_factor" : "");
  const std::string factors = kind.rank == 0 ? "dense" : absl::StrCat("low_rank_", kind.rank);
  return absl::StrCat("step/cuda/", factors,
                      kind.products == "F32" ? "" : absl::StrCat("_", absl::AsciiStrToLower(kind.products)));
}

MethodConfig ConfigOf(const Kind& kind) {
  MethodConfig config{kind.method, {}};
  if (kind.has_factor) config.options["input_factor"] = true;
  if (kind.interval() > 0) config.options["max_factor_dim"] = static_cast<double>(kMostFactorSide);
  if (!kind.has_statistics()) return config;
  const int64_t rank = kind.rank;
  config.options["gamma"] = kGamma;
  config.options["damping"] = kDamping;
  config.options["scaling"] = std::string("NONE");
  config.options["products"] = kind.products;
  config.options["representation"] = std::string(rank == 0 ? "DENSE" : "LOW_RANK");
  if (rank == 0) {
    config.options["rule"] = std::string("BLEND");
  } else {
    config.options["rank"] = static_cast<double>(rank);
  }
  return config;
}

std::vector<float> ToHost(Backend& backend, ConstMatrixView x) {
  std::vector<float> host(x.size());
  PRECONDOR_CHECK(backend.Download(x, MatrixView(host.data(), x.rows, x.cols)).ok());
  return host;
}

std::vector<double> Times(const std::vector<float>& matrix, const std::vector<double>& x) {
  std::vector<double> y(matrix.size() / x.size());
  for (size_t i = 0; i < y.size(); ++i) {
    for (size_t j = 0; j < x.size(); ++j) y[i] += static_cast<double>(matrix[i * x.size() + j]) * x[j];
  }
  return y;
}

double RelativeError(const std::vector<double>& got, const std::vector<double>& expected) {
  double difference = 0, square = 0;
  for (size_t i = 0; i < got.size(); ++i) {
    difference += std::pow(got[i] - expected[i], 2);
    square += expected[i] * expected[i];
  }
  return std::sqrt(difference / square);
}

// A model's layers, a task each.
class Model {
 public:
  Model(const Kind& kind, std::vector<LayerSpec> specs, Backend& backend)
      : kind_(kind),
        backend_(backend),
        timer_(DeviceTimer::Make(static_cast<cudaStream_t>(backend.stream())).value()),
        method_(MakeMethod(ConfigOf(kind)).value()),
        tasks_(backend) {
    for (LayerSpec& spec : specs) {
      auto layer = std::make_unique<Layer>();
      layer->spec = std::move(spec);
      layer->state = method_->MakeState(layer->spec, backend).value();
      layer->gradient = Normal(layer->spec.d_out, layer->spec.d_in, 1);
      layer->answer = backend.Allocate(layer->spec.d_out, layer->spec.d_in).value();
      layers_.push_back(std::move(layer));
    }
  }

  struct Cost {
    double seconds = 0;  // of the device, from the step's first operation to its last
    int64_t launches = 0;
  };
  // One step of all layers.
  Cost Step() {
    MakeInput();
    const int64_t launches = cuda::launch_count;
    PRECONDOR_CHECK(timer_->Begin().ok());
    RunStep();
    const double seconds = timer_->End().value();
    return {seconds, cuda::launch_count - launches};
  }
  // As Step for a profiler, which sees the step alone. Steps before it, which a profiler makes slow, are few: one
  // fills the windows.
  absl::Status Profile() {
    MakeInput(std::max<int64_t>(kind_.rank, 1));
    RunStep();
    for (int step = 0; step < 2; ++step) Step();
    MakeInput();
    return ProfileOnce(static_cast<cudaStream_t>(backend_.stream()), [this] {
      RunStep();
      return absl::OkStatus();
    });
  }

  // How far the first layer's answer to random gradients is from the length that it should have, by its logarithm.
  double LengthError() const {
    const Layer& layer = *layers_[0];
    double square = 0;
    for (const float element : ToHost(backend_, layer.answer.view())) square += double{element} * element;
    const auto elements = static_cast<double>(layer.answer.view().size());
    // muon: .2 sqrt(d) for singular values of 1. soap: the root mean square of Adam's steps by gradients without a
    // mean.
    double expected = 0.04;
    if (kind_.method == "soap") {
      const auto steps = static_cast<double>(step_ - 1);  // the first gradient makes the bases
      expected = (1 - kBeta) / (1 + kBeta) * (1 - std::pow(kBeta, 2 * steps)) / std::pow(1 - std::pow(kBeta, steps), 2);
    }
    return std::abs(std::log(square / elements / expected)) / 2;
  }
  // The error of the first layer's answer U, times a random w, after all that it has been fed. Low rank: A_out U A_in w
  // beside D w, for the damped averages A. Dense: U w beside J_out D J_in w.
  double Error() const {
    const Layer& layer = *layers_[0];
    std::vector<std::vector<float>> fed_a, fed_g;
    BlendRecursion in(kGamma, kDamping), out(kGamma, kDamping);
    for (uint64_t step = 0; step < step_; ++step) {
      fed_a.push_back(ToHost(backend_, Normal(1, layer.spec.d_in, 100 + 2 * step).view()));
      fed_g.push_back(ToHost(backend_, Normal(1, layer.spec.d_out, 101 + 2 * step).view()));
      in.Update(fed_a.back());
      out.Update(fed_g.back());
    }
    const std::vector<float> probe = Gaussian(layer.spec.d_in, 5);
    const std::vector<double> w(probe.begin(), probe.end());
    const std::vector<float> gradient = ToHost(backend_, layer.gradient.view());
    const std::vector<float> answer = ToHost(backend_, layer.answer.view());
    if (kind_.rank == 0) return RelativeError(Times(answer, w), out.Times(Times(gradient, in.Times(w))));
    const std::vector<double> back = Times(answer, DampedTimes(fed_a, kGamma, kDamping, w));
    return RelativeError(DampedTimes(fed_g, kGamma, kDamping, back), Times(gradient, w));
  }

 private:
  struct Layer {
    LayerSpec spec;
    std::unique_ptr<LayerState> state;
    DeviceMatrix gradient, answer, a, g;
  };

  DeviceMatrix Normal(int64_t rows, int64_t cols, uint64_t seed) const {
    DeviceMatrix x = backend_.Allocate(rows, cols).value();
    PRECONDOR_CHECK(backend_.FillNormal(CounterRandom({seed}), x.view()).ok());
    return x;
  }

  void MakeInput(int64_t vectors = 1) {
    for (const auto& layer : layers_) {
      if (kind_.has_statistics()) {
        layer->a = Normal(vectors, layer->spec.d_in, 100 + 2 * step_);
        layer->g = Normal(vectors, layer->spec.d_out, 101 + 2 * step_);
      } else {
        layer->gradient = Normal(layer->spec.d_out, layer->spec.d_in, 100 + step_);
      }
    }
    ++step_;
    (void)ToHost(backend_, Normal(1, 1, 0).view());  // after all that came before
  }
  void RunStep() {
    tasks_.Run(static_cast<int>(layers_.size()), [this](int layer) { Step(*layers_[static_cast<size_t>(layer)]); });
  }
  void Step(Layer& layer) const {
    if (kind_.has_statistics()) PRECONDOR_CHECK(layer.state->Update({layer.a.view(), layer.g.view()}).ok());
    PRECONDOR_CHECK(layer.state->Precondition(layer.gradient.view(), layer.answer.view()).ok());
  }

  const Kind kind_;
  Backend& backend_;
  const std::unique_ptr<DeviceTimer> timer_;
  const std::unique_ptr<Method> method_;
  std::vector<std::unique_ptr<Layer>> layers_;
  TaskGroup tasks_;
  uint64_t step_ = 0;
};

double FreeMiB() {
  size_t free_bytes = 0, total_bytes = 0;
  PRECONDOR_CHECK(cudaMemGetInfo(&free_bytes, &total_bytes) == cudaSuccess);
  return static_cast<double>(free_bytes) / (1 << 20);
}

// The least seconds of a step, by its bytes or its FLOP. 0 where the device's limits are not known.
double LimitSeconds(const std::vector<LayerSpec>& layers, const Kind& kind, const DeviceLimits& limits) {
  // Tensor cores do products of TF32 at half the speed of bf16's.
  const double flops_per_second = kind.products == "F32"    ? limits.f32_flops
                                  : kind.products == "TF32" ? limits.bf16_flops / 2
                                                            : limits.bf16_flops;
  if (limits.bytes <= 0 || flops_per_second <= 0) return 0;
  double bytes = 0, flops = 0;
  for (const LayerSpec& layer : layers) {
    const double m = static_cast<double>(layer.d_out), n = static_cast<double>(layer.d_in);
    const double r = static_cast<double>(kind.rank);
    bytes += kFloat * 2 * m * n;  // the gradient read, the answer written
    if (kind.method == "muon") {
      const double k = std::min(m, n);
      flops += 5 * (4 * k * k * std::max(m, n) + 2 * k * k * k);
      if (kind.has_factor && n <= kMostFactorSide) flops += 2 * 4 * m * n * n;  // in TF32
    } else if (kind.method == "soap") {  // to the basis, back, and the covariance
      for (const double side : {m, n}) flops += side <= kMostFactorSide ? 6 * m * n * side : 0;
    } else if (kind.rank == 0) {
      bytes += kFloat * (m * m + n * n) / 2;  // a triangle of each factor read
      flops += 2 * m * n * (m + n);
    } else {
      bytes += kFloat * r * (m + n);  // the windows read
      flops += 8 * r * m * n;
    }
  }
  return std::max(bytes / limits.bytes, flops / flops_per_second);
}

}  // namespace

std::vector<std::string> CudaStepNames(BenchMode mode) {
  std::vector<std::string> names;
  for (const Kind& kind : Kinds(mode.is_short)) names.push_back(NameOf(kind));
  return names;
}

std::vector<BenchRow> MeasureCudaStep(const std::string& name, BenchMode mode, const DeviceLimits& limits) {
  const bool is_short = mode.is_short;
  const std::vector<Kind> kinds = Kinds(is_short);
  const auto kind = std::find_if(kinds.begin(), kinds.end(), [&](const Kind& each) { return NameOf(each) == name; });
  PRECONDOR_CHECK(kind != kinds.end());
  const std::unique_ptr<Backend> backend =
      MakeGroupingBackend(MakeTestBackend(), {.threads = 8});  // as a server of 8 cores
  const std::vector<LayerSpec> layers = Layers(*kind, is_short);
  Model model(*kind, layers, *backend);
  for (int step = 0; step < 3; ++step) model.Step();
  if (kind->has_statistics()) {
    PRECONDOR_CHECK(model.Error() < (kind->products == "F32" ? 1e-3 : 2e-2));  // bf16's four roundings, 2^-9 at most
  } else {
    PRECONDOR_CHECK(model.LengthError() < 0.3);
  }
  if (mode.profile) {
    PRECONDOR_CHECK(model.Profile().ok());
    return {};
  }
  // Until windows are full and slide, or terms that waited have moved in.
  const int64_t warm_up = kind->has_statistics() ? std::max<int64_t>(2 * kind->rank, 32) : 5;
  for (int64_t step = 3; step < (is_short ? 4 : warm_up); ++step) model.Step();
  const double free_before = FreeMiB();
  std::vector<Model::Cost> costs;
  for (int step = 0; step < (is_short ? 2 : 20); ++step) costs.push_back(model.Step());
  std::sort(costs.begin(), costs.end(), [](const auto& a, const auto& b) { return a.seconds < b.seconds; });
  std::vector<BenchRow> rows;
  const auto add = [&](const std::string& row, size_t begin, size_t end, double limit) {
    std::vector<double> seconds, launches;
    for (size_t i = begin; i < end; ++i) {
      seconds.push_back(costs[i].seconds);
      launches.push_back(static_cast<double>(costs[i].launches));
    }
    const Summary time = Scaled(Summarize(seconds), 1e3), launched = Summarize(launches);
    rows.push_back({.name = row,
                    .value = time.median,
                    .unit = "ms",
                    .limit = limit,
                    .target = limit > 0 ? 1 / 1.2 : 0,
                    .spread = time});
    rows.push_back({.name = row + "/launches",
                    .value = launched.median,
                    .unit = "",
                    .target = kind->has_statistics() && kind->rank == 0 ? 10.0 : 0.0,
                    .at_most = true,
                    .spread = launched});
  };
  // Steps that refresh take longest.
  const size_t refreshes = kind->interval() == 0 ? 0 : costs.size() / static_cast<size_t>(kind->interval());
  add(name, 0, costs.size() - refreshes, LimitSeconds(layers, *kind, limits) * 1e3);
  if (refreshes > 0) add(name + "/refresh", costs.size() - refreshes, costs.size(), 0);
  // Steady steps may take this much of the device beyond its pool; it is less than any piece that a pool grows by.
  rows.push_back(
      {.name = name + "/growth", .value = free_before - FreeMiB(), .unit = "MiB", .target = 1, .at_most = true});
  return rows;
}

}  // namespace precondor
