// SPDX-License-Identifier: Apache-2.0
#include "tests/bench/bench_layer.h"

#include <cmath>
#include <tuple>

#include "kernels/base/check.h"
#include "kernels/cpu/cpu_backend.h"
#include "kernels/methods/registry.h"
#include "tests/bench/bench_rows.h"

namespace precondor {
namespace {

constexpr double kGamma = 0.95;
constexpr double kDamping = 1.0;

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

BenchLayer::BenchLayer(int64_t d_out, int64_t d_in, const std::string& representation, int64_t rank)
    : d_out_(d_out), d_in_(d_in), backend_(MakeCpuBackend({}).value()) {
  MethodConfig config;
  config.options["representation"] = representation;
  if (rank > 0) config.options["rank"] = static_cast<double>(rank);
  config.options["scaling"] = std::string("NORM_RESCALE");
  config.options["gamma"] = kGamma;
  config.options["damping"] = kDamping;
  state_ = MakeMethod(config).value()->MakeState({"bench", d_out, d_in, false}, *backend_).value();
  for (auto [matrix, rows, cols] : {std::tuple{&d_, d_out, d_in}, std::tuple{&u_, d_out, d_in},
                                    std::tuple{&a_, kVectors, d_in}, std::tuple{&g_, kVectors, d_out}}) {
    *matrix = backend_->Allocate(rows, cols).value();
  }
  host_d_ = Gaussian(d_out * d_in, 7);
  PRECONDOR_CHECK(backend_->Upload({host_d_.data(), d_out, d_in}, d_.view()).ok());
}

void BenchLayer::Feed(uint64_t seed) {
  fed_a_.push_back(Gaussian(kVectors * d_in_, 2 * seed));
  fed_g_.push_back(Gaussian(kVectors * d_out_, 2 * seed + 1));
  PRECONDOR_CHECK(backend_->Upload({fed_a_.back().data(), kVectors, d_in_}, a_.view()).ok());
  PRECONDOR_CHECK(backend_->Upload({fed_g_.back().data(), kVectors, d_out_}, g_.view()).ok());
  PRECONDOR_CHECK(state_->Update({a_.view(), g_.view()}).ok());
}

void BenchLayer::Precondition() { PRECONDOR_CHECK(state_->Precondition(d_.view(), u_.view()).ok()); }

double BenchLayer::RelativeError() {
  std::vector<float> u(host_d_.size());
  Precondition();
  PRECONDOR_CHECK(backend_->Download(u_.view(), {u.data(), d_out_, d_in_}).ok());
  const std::vector<float> random = Gaussian(d_in_, 3);
  const std::vector<double> w(random.begin(), random.end());
  const std::vector<double> got = Damped(fed_g_, Times(u, Damped(fed_a_, w)));
  const std::vector<double> want = Times(host_d_, w);
  const double got_norm = Norm(got), want_norm = Norm(want);
  double error = 0;
  for (size_t i = 0; i < want.size(); ++i) error += std::pow(got[i] / got_norm - want[i] / want_norm, 2);
  return std::sqrt(error) + std::abs(Norm(u) / Norm(host_d_) - 1);
}

std::vector<double> BenchLayer::Times(const std::vector<float>& matrix, const std::vector<double>& x) const {
  std::vector<double> y(static_cast<size_t>(d_out_));
  for (size_t i = 0; i < y.size(); ++i) {
    for (size_t j = 0; j < x.size(); ++j) y[i] += static_cast<double>(matrix[i * x.size() + j]) * x[j];
  }
  return y;
}

}  // namespace precondor
