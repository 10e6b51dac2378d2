// SPDX-License-Identifier: Apache-2.0
#include "tests/bench/cuda_step.h"

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
#include "tests/support/task_group.h"
#include "tests/support/test_backend.h"

namespace precondor {
namespace {

constexpr double kGamma = 0.95, kDamping = 1.0;
constexpr double kFloat = sizeof(float);

std::vector<LayerSpec> Layers(bool is_short) {
  const int64_t hidden = is_short ? 48 : 1024, inner = is_short ? 80 : 4096;
  std::vector<LayerSpec> layers;
  for (int block = 0; block < (is_short ? 1 : 24); ++block) {
    for (const char* name : {"query", "key", "value", "output"}) {
      layers.push_back({absl::StrCat("block", block, ".", name), hidden, hidden, false});
    }
    layers.push_back({absl::StrCat("block", block, ".up"), inner, hidden, false});
    layers.push_back({absl::StrCat("block", block, ".down"), hidden, inner, false});
  }
  return layers;
}

// What a step is made with; a rank of 0 stands for dense factors.
struct Kind {
  int64_t rank = 0;
  std::string products;
};

std::vector<Kind> Kinds(bool is_short) {
  if (is_short) return {{8, "F32"}, {8, "TF32"}, {0, "BF16"}};
  return {{64, "F32"}, {64, "TF32"}, {128, "F32"}, {128, "TF32"}, {0, "BF16"}};
}

std::string NameOf(const Kind& kind) {
  const std::string factors = kind.rank == 0 ? "dense" : absl::StrCat("low_rank_", kind.rank);
  return absl::StrCat("step/cuda/", factors,
                      kind.products == "F32" ? "" : absl::StrCat("_", absl::AsciiStrToLower(kind.products)));
}

MethodConfig ConfigOf(const Kind& kind) {
  const int64_t rank = kind.rank;
  MethodConfig config{"mkor", {{"gamma", kGamma}, {"damping", kDamping}}};
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
      : rank_(kind.rank),
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
    MakeStatistics();
    const int64_t launches = cuda::launch_count;
    PRECONDOR_CHECK(timer_->Begin().ok());
    RunStep();
    const double seconds = timer_->End().value();
    return {seconds, cuda::launch_count - launches};
  }
  // As Step for a profiler, which sees the step alone. Steps before it, which a profiler makes slow, are few: one
  // fills the windows.
  absl::Status Profile() {
    MakeStatistics(std::max<int64_t>(rank_, 1));
    RunStep();
    for (int step = 0; step < 2; ++step) Step();
    MakeStatistics();
    return ProfileOnce(static_cast<cudaStream_t>(backend_.stream()), [this] {
      RunStep();
      return absl::OkStatus();
    });
  }

  // Of the first layer's answer U, times a random w, after all that it has been fed. Low rank: A_out U A_in w beside
  // D w, for the damped averages A. Dense: U w beside J_out D J_in w.
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
    if (rank_ == 0) return RelativeError(Times(answer, w), out.Times(Times(gradient, in.Times(w))));
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

  void MakeStatistics(int64_t vectors = 1) {
    for (const auto& layer : layers_) {
      layer->a = Normal(vectors, layer->spec.d_in, 100 + 2 * step_);
      layer->g = Normal(vectors, layer->spec.d_out, 101 + 2 * step_);
    }
    ++step_;
    (void)ToHost(backend_, layers_[0]->a.view());  // after all that came before
  }
  void RunStep() {
    tasks_.Run(static_cast<int>(layers_.size()), [this](int layer) { Step(*layers_[static_cast<size_t>(layer)]); });
  }
  void Step(Layer& layer) const {
    PRECONDOR_CHECK(layer.state->Update({layer.a.view(), layer.g.view()}).ok());
    PRECONDOR_CHECK(layer.state->Precondition(layer.gradient.view(), layer.answer.view()).ok());
  }

  const int64_t rank_;
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

// What a step has to take: its bytes, or its FLOP. 0 where the device's limits are not known.
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
    if (kind.rank == 0) {
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
  const std::vector<LayerSpec> layers = Layers(is_short);
  Model model(*kind, layers, *backend);
  for (int step = 0; step < 3; ++step) model.Step();
  PRECONDOR_CHECK(model.Error() < (kind->products == "F32" ? 1e-3 : 2e-2));  // bf16's four roundings, each 2^-9 at most
  if (mode.profile) {
    PRECONDOR_CHECK(model.Profile().ok());
    return {};
  }
  // Until windows are full and slide, or terms that waited have moved in.
  for (int64_t step = 3; step < (is_short ? 4 : std::max<int64_t>(2 * kind->rank, 32)); ++step) model.Step();
  const double free_before = FreeMiB();
  std::vector<double> seconds, launches;
  for (int step = 0; step < (is_short ? 2 : 20); ++step) {
    const auto cost = model.Step();
    seconds.push_back(cost.seconds);
    launches.push_back(static_cast<double>(cost.launches));
  }
  const Summary time = Scaled(Summarize(seconds), 1e3), launched = Summarize(launches);
  const double limit = LimitSeconds(layers, *kind, limits) * 1e3;
  return {{.name = name,
           .value = time.median,
           .unit = "ms",
           .limit = limit,
           .target = limit > 0 ? 1 / 1.2 : 0,
           .spread = time},
          {.name = name + "/launches",
           .value = launched.median,
           .unit = "",
           .target = 10,
           .at_most = true,
           .spread = launched},
          // What steady steps take of the device beyond what its pool has; less than any piece that a pool grows by.
          {.name = name + "/growth", .value = free_before - FreeMiB(), .unit = "MiB", .target = 1, .at_most = true}};
}

}  // namespace precondor
