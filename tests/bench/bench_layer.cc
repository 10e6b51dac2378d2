// SPDX-License-Identifier: Apache-2.0
#include "tests/bench/bench_layer.h"

#include <cmath>
#include <random>
#include <tuple>
#include <utility>

#include "kernels/cpu/cpu_backend.h"
#include "kernels/methods/registry.h"

namespace precondor {
namespace {

constexpr double kGamma = 0.95;
constexpr double kDamping = 1.0;

std::vector<float> Gaussian(int64_t count, uint32_t seed) {
  std::mt19937 engine(seed);
  std::normal_distribution<float> normal;
  std::vector<float> values(static_cast<size_t>(count));
  for (float& value : values) value = normal(engine);
  return values;
}

template <typename Elements>
double Norm(const Elements& x) {
  double sum = 0;
  for (const double element : x) sum += element * element;
  return std::sqrt(sum);
}

// (L / (1 - gamma^t) + damping tr(L / (1 - gamma^t)) / d I) x, for L the decayed average of the steps' (1/k) sum v v'.
std::vector<double> Damped(const std::vector<std::vector<float>>& steps, const std::vector<double>& x) {
  const size_t d = x.size();
  const double t = static_cast<double>(steps.size());
  std::vector<double> y(d);
  double trace = 0;
  for (size_t s = 0; s < steps.size(); ++s) {
    const double age = t - 1 - static_cast<double>(s);
    const double weight = std::pow(kGamma, age) * (1 - kGamma) / (1 - std::pow(kGamma, t)) / BenchLayer::kVectors;
    for (size_t v = 0; v < BenchLayer::kVectors; ++v) {
      const float* vector = steps[s].data() + v * d;
      double dot = 0, squared = 0;
      for (size_t i = 0; i < d; ++i) {
        dot += vector[i] * x[i];
        squared += static_cast<double>(vector[i]) * vector[i];
      }
      for (size_t i = 0; i < d; ++i) y[i] += weight * dot * vector[i];
      trace += weight * squared;
    }
  }
  for (size_t i = 0; i < d; ++i) y[i] += kDamping * trace / static_cast<double>(d) * x[i];
  return y;
}

}  // namespace

absl::StatusOr<std::unique_ptr<BenchLayer>> BenchLayer::Make(int64_t d_out, int64_t d_in,
                                                             const std::string& representation, int64_t rank,
                                                             const std::string& scaling, const std::string& products) {
  MethodConfig config;
  config.options["representation"] = representation;
  if (rank > 0) config.options["rank"] = static_cast<double>(rank);
  config.options["scaling"] = scaling;
  config.options["products"] = products;
  config.options["gamma"] = kGamma;
  config.options["damping"] = kDamping;
  auto layer = std::make_unique<BenchLayer>();
  layer->d_out_ = d_out;
  layer->d_in_ = d_in;
  layer->rescaled_ = scaling == "NORM_RESCALE";
  auto backend = MakeCpuBackend({});
  if (!backend.ok()) return backend.status();
  layer->backend_ = *std::move(backend);
  auto method = MakeMethod(config);
  if (!method.ok()) return method.status();
  auto state = (*method)->MakeState({"bench", d_out, d_in, false}, *layer->backend_);
  if (!state.ok()) return state.status();
  layer->state_ = *std::move(state);
  for (auto [matrix, rows, cols] : {std::tuple{&layer->d_, d_out, d_in}, std::tuple{&layer->u_, d_out, d_in},
                                    std::tuple{&layer->a_, kVectors, d_in}, std::tuple{&layer->g_, kVectors, d_out}}) {
    auto allocated = layer->backend_->Allocate(rows, cols);
    if (!allocated.ok()) return allocated.status();
    *matrix = *std::move(allocated);
  }
  layer->host_d_ = Gaussian(d_out * d_in, 7);
  absl::Status uploaded = layer->backend_->Upload({layer->host_d_.data(), d_out, d_in}, layer->d_.view());
  if (!uploaded.ok()) return uploaded;
  return layer;
}

absl::Status BenchLayer::Feed(uint32_t seed) {
  fed_a_.push_back(Gaussian(kVectors * d_in_, 2 * seed));
  fed_g_.push_back(Gaussian(kVectors * d_out_, 2 * seed + 1));
  absl::Status status = backend_->Upload({fed_a_.back().data(), kVectors, d_in_}, a_.view());
  status.Update(backend_->Upload({fed_g_.back().data(), kVectors, d_out_}, g_.view()));
  if (status.ok()) status = Update();
  return status;
}

absl::StatusOr<std::vector<float>> BenchLayer::Answer() {
  std::vector<float> u(host_d_.size());
  absl::Status status = Precondition();
  if (status.ok()) status = backend_->Download(u_.view(), {u.data(), d_out_, d_in_});
  if (!status.ok()) return status;
  return u;
}

absl::StatusOr<double> BenchLayer::RelativeError() {
  const absl::StatusOr<std::vector<float>> answer = Answer();
  if (!answer.ok()) return answer.status();
  const std::vector<float>& u = *answer;
  const std::vector<float> random = Gaussian(d_in_, 3);
  const std::vector<double> w(random.begin(), random.end());
  const std::vector<double> got = Damped(fed_g_, Times(u, Damped(fed_a_, w)));
  const std::vector<double> want = Times(host_d_, w);
  const double got_scale = rescaled_ ? 1 / Norm(got) : 1, want_scale = rescaled_ ? 1 / Norm(want) : 1;
  double error = 0;
  for (size_t i = 0; i < want.size(); ++i) error += std::pow(got_scale * got[i] - want_scale * want[i], 2);
  error = std::sqrt(error) / (want_scale * Norm(want));
  return rescaled_ ? error + std::abs(Norm(u) / Norm(host_d_) - 1) : error;
}

std::vector<double> BenchLayer::Times(const std::vector<float>& matrix, const std::vector<double>& x) const {
  std::vector<double> y(static_cast<size_t>(d_out_));
  for (size_t i = 0; i < y.size(); ++i) {
    for (size_t j = 0; j < x.size(); ++j) y[i] += static_cast<double>(matrix[i * x.size() + j]) * x[j];
  }
  return y;
}

}  // namespace precondor
