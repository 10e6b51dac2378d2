// SPDX-License-Identifier: Apache-2.0
// The low-rank form's update, and its precondition beside the dense one, on one thread. Compared rows take turns;
// what is measured was compared with doubles before. Time is the thread's processor time, and a ratio the median of its
// turns' ratios.
#include <cmath>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"

#include "kernels/backend.h"
#include "kernels/base/check.h"
#include "kernels/base/process_setup.h"
#include "kernels/cpu/cpu_backend.h"
#include "kernels/methods/method.h"
#include "kernels/methods/mkor.h"
#include "kernels/methods/registry.h"
#include "tests/bench/bench_rows.h"
#include "tests/bench/limits.h"

namespace precondor {
namespace {

constexpr double kGamma = 0.95;
constexpr double kDamping = 1.0;

// A layer's state on the CPU backend, with what it has been fed, so that its answer can be checked by definition.
// Method mkor, EXACT_DAMPED, NORM_RESCALE. One thread. It aborts where the backend refuses.
class BenchLayer {
 public:
  static constexpr int64_t kVectors = 16;  // of a statistic step: 4 workers x 4 sketches

  // `representation` as in docs/use/methods/mkor.md; rank 0: the method's default.
  BenchLayer(int64_t d_out, int64_t d_in, const std::string& representation, int64_t rank);

  void Feed(uint64_t seed);  // Gaussian vectors
  void Precondition();

  // Columns in use of both factors together: what a precondition really multiplies with.
  int64_t ranks() const { return state_->summary().input_rank + state_->summary().output_rank; }

  // |A U B w - D w| / |D w| in double, with U = A^-1 D B^-1 as computed, w random, and A and B the damped averages of
  // all that was fed, written from the definition. Both are scaled to length 1, and |U| is compared with |D| too. Valid
  // while the rank suffices for all vectors fed.
  double RelativeError();

 private:
  std::vector<double> Times(const std::vector<float>& matrix, const std::vector<double>& x) const;

  int64_t d_out_ = 0, d_in_ = 0;
  std::unique_ptr<Backend> backend_;
  std::unique_ptr<LayerState> state_;
  DeviceMatrix d_, u_, a_, g_;
  std::vector<float> host_d_;
  std::vector<std::vector<float>> fed_a_, fed_g_;  // one entry a step, vectors as rows
};

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

MkorConfig LowRank(int64_t rank) {
  MkorConfig config;
  config.representation = Representation::kLowRank;
  config.rank = rank;
  return config;
}

// Vectors of a layer's kind: their second moment has the eigenvalues d / (i H), i = 1 ... d, H = 1 + 1/2 + ... + 1/d,
// in a basis that is not the coordinates' own.
class Spectrum {
 public:
  explicit Spectrum(int64_t d) : d_(d) {
    for (uint64_t i = 0; i < 3; ++i) mirrors_.push_back(Gaussian(d, 9000 + i));
    double sum = 0;
    for (int64_t i = 0; i < d; ++i) sum += std::pow(i + 1, -2);
    scale_ = std::sqrt(static_cast<double>(d) / sum);
  }
  std::vector<float> Draw(uint64_t seed) const {
    std::vector<float> v = Gaussian(d_, seed);
    for (int64_t i = 0; i < d_; ++i) v[i] *= static_cast<float>(scale_ / static_cast<double>(i + 1));
    for (const std::vector<float>& mirror : mirrors_) {
      double product = 0, square = 0;
      for (int64_t i = 0; i < d_; ++i) {
        product += static_cast<double>(mirror[i]) * v[i];
        square += static_cast<double>(mirror[i]) * mirror[i];
      }
      for (int64_t i = 0; i < d_; ++i) v[i] -= static_cast<float>(2 * product / square * mirror[i]);
    }
    return v;
  }

 private:
  const int64_t d_;
  double scale_ = 1;
  std::vector<std::vector<float>> mirrors_;
};

double Dot(const std::vector<double>& x, const std::vector<double>& y) {
  double sum = 0;
  for (size_t i = 0; i < x.size(); ++i) sum += x[i] * y[i];
  return sum;
}

// The product of EXACT_DAMPED's inverse by conjugate gradients on the definition, in doubles, to rounding.
std::vector<double> DampedSolve(const std::vector<std::vector<float>>& vectors, const MkorConfig& config,
                                const std::vector<double>& b) {
  std::vector<double> x(b.size()), r = b, p = b;
  double rr = Dot(r, r);
  const double enough = 1e-24 * rr;
  for (size_t step = 0; step < 2 * vectors.size() && rr > enough; ++step) {
    const std::vector<double> ap = DampedTimes(vectors, config.gamma, config.damping, p);
    const double alpha = rr / Dot(p, ap);
    for (size_t i = 0; i < x.size(); ++i) x[i] += alpha * p[i];
    for (size_t i = 0; i < x.size(); ++i) r[i] -= alpha * ap[i];
    const double before = std::exchange(rr, Dot(r, r));
    for (size_t i = 0; i < x.size(); ++i) p[i] = r[i] + rr / before * p[i];
  }
  return x;
}

class Bench {
 public:
  explicit Bench(bool is_short) : short_(is_short), backend_(MakeCpuBackend(CpuBackendOptions()).value()) {}

  void Update(int64_t d, int64_t rank) {
    const Spectrum spectrum(d);
    const double error = UpdateError(d, rank, spectrum);
    // Beyond what caches of one socket usually hold: in a model's step a factor comes from memory.
    const int64_t pool_bytes = short_ ? int64_t{8} << 20 : int64_t{96} << 20;
    const int64_t count = std::max<int64_t>(1, pool_bytes / (4 * rank * d));
    DeviceMatrix stream = backend_->Allocate(count * rank, d).value();
    DeviceMatrix vectors = backend_->Allocate(kVectors, d).value();
    for (int64_t i = 0; i < kVectors; ++i) {
      const std::vector<float> drawn = spectrum.Draw(static_cast<uint64_t>(i));
      std::copy(drawn.begin(), drawn.end(), vectors.view().row(i));
    }
    int64_t step = 0;
    const auto vector = [&] { return ConstMatrixView(vectors.view()).RowRange(step++ % kVectors, 1); };
    std::vector<std::unique_ptr<Factor>> pool;
    for (int64_t i = 0; i < count; ++i) {
      pool.push_back(MakeFactor(LowRank(rank), d, static_cast<uint64_t>(i), *backend_).value());
      for (int64_t warm = 0; warm < rank + 10; ++warm) UpdateOnce(*pool.back(), vector());
    }
    constexpr int kPasses = 16;
    const auto passes = [&](const std::function<void()>& pass) {
      const double seconds = Timed([&] {
        for (int i = 0; i < kPasses; ++i) pass();
      });
      return seconds / static_cast<double>(kPasses * count);
    };
    const auto update_all = [&] {
      for (auto& factor : pool) UpdateOnce(*factor, vector());
    };
    const auto seconds =
        TakeTurns({[&] { return passes([&] { sink_ = ReadAll(stream.view().data, stream.view().size()); }); },
                   [&] { return passes(update_all); }},
                  short_ ? 1 : 9);
    const std::string name = absl::StrCat("low_rank_r", rank), of = absl::StrCat("/d:", d);
    const double us = Median(seconds[1]) * 1e6;
    rows_.push_back({absl::StrCat("update/", name, "_error", of), error, "", 0, rank == 128 ? 2e-3 : 0, true});
    rows_.push_back(
        {absl::StrCat("update/", name, "_one_vector", of), us, "us", us * MedianRatio(seconds[0], seconds[1])});
  }

  void Precondition(int64_t m, int64_t n, const std::vector<int64_t>& ranks) {
    const std::string of = absl::StrCat("/m:", m, "/n:", n);
    const double flops = 2.0 * static_cast<double>(m) * static_cast<double>(n) * static_cast<double>(m + n);
    const int64_t repeat = std::max<int64_t>(1, static_cast<int64_t>(2e9 / flops));
    std::vector<std::unique_ptr<BenchLayer>> layers;
    layers.push_back(CheckedLayer(m, n, "DENSE", 0, 1));
    for (const int64_t rank : ranks)
      layers.push_back(CheckedLayer(m, n, "LOW_RANK", rank, rank / BenchLayer::kVectors));
    std::vector<std::function<double()>> measured = {[] {
      double done = 0;
      const double seconds = Timed([&done] {
        for (int i = 0; i < 200; ++i) done += RunFmas();
      });
      return seconds / done;
    }};
    for (const auto& layer : layers) {
      measured.push_back([&layer, repeat] {
        return Timed([&] {
                 for (int64_t i = 0; i < repeat; ++i) layer->Precondition();
               }) /
               static_cast<double>(repeat);
      });
    }
    const auto seconds = TakeTurns(measured, short_ ? 1 : 9);
    const double dense_ms = Median(seconds[1]) * 1e3;
    rows_.push_back({absl::StrCat("precondition/dense_f32", of), dense_ms, "ms",
                     dense_ms * flops * MedianRatio(seconds[0], seconds[1]), std::min(m, n) >= 512 ? 0.88 : 0});
    for (size_t i = 0; i < ranks.size(); ++i) {
      const double ideal = static_cast<double>(m + n) / static_cast<double>(4 * ranks[i]);
      rows_.push_back(
          {absl::StrCat("precondition/low_rank_r", ranks[i], "_full", of), Median(seconds[i + 2]) * 1e3, "ms"});
      rows_.push_back({absl::StrCat("precondition/dense_to_low_rank_r", ranks[i], "_of_ideal", of),
                       MedianRatio(seconds[1], seconds[i + 2]) / ideal, "of ideal", 0,
                       std::min(m, n) >= 512 ? 0.75 : 0});
    }
  }

  const std::vector<BenchRow>& rows() const { return rows_; }

 private:
  // |J g - G^-1 g| / |G^-1 g| for Gaussian vectors g, after the window has been filled twice, and 20 updates.
  double UpdateError(int64_t d, int64_t rank, const Spectrum& spectrum) {
    const MkorConfig config = LowRank(rank);
    const std::unique_ptr<Factor> factor = MakeFactor(config, d, 0, *backend_).value();
    std::vector<std::vector<float>> vectors;
    for (int64_t step = 0; step < 2 * rank + 20; ++step) {
      vectors.push_back(spectrum.Draw(100 + static_cast<uint64_t>(step)));
      UpdateOnce(*factor, OneRow(*backend_, vectors.back()).view());
    }
    FactorInverse inverse = factor->Inverse().value();
    double error = 0, size = 0;
    for (uint64_t probe = 0; probe < 2; ++probe) {
      const std::vector<float> g = Gaussian(d, 7 + probe);
      const std::vector<double> expected = DampedSolve(vectors, config, std::vector<double>(g.begin(), g.end()));
      const DeviceMatrix row = OneRow(*backend_, g);
      DeviceMatrix product = backend_->Allocate(1, d).value();
      PRECONDOR_CHECK(backend_->LowRankPrecondition({}, inverse.low_rank, row.view(), product.view()).ok());
      std::vector<float> got(d);
      PRECONDOR_CHECK(backend_->Download(product.view(), MatrixView(got.data(), 1, d)).ok());
      for (int64_t i = 0; i < d; ++i) {
        error += std::pow(inverse.c * got[i] - expected[i], 2);
        size += std::pow(expected[i], 2);
      }
    }
    return std::sqrt(error / size);
  }

  // Its window just filled, where it is low-rank, and its answer right.
  static std::unique_ptr<BenchLayer> CheckedLayer(int64_t m, int64_t n, const std::string& representation, int64_t rank,
                                                  int64_t steps) {
    auto layer = std::make_unique<BenchLayer>(m, n, representation, rank);
    for (int64_t step = 0; step < steps; ++step) layer->Feed(11 + static_cast<uint64_t>(step));
    PRECONDOR_CHECK(rank == 0 || layer->ranks() == 2 * rank);
    PRECONDOR_CHECK(layer->RelativeError() < 1e-3);
    return layer;
  }

  static constexpr int64_t kVectors = 256;  // more than any window holds

  const bool short_;
  const std::unique_ptr<Backend> backend_;
  std::vector<BenchRow> rows_;
  volatile float sink_ = 0;
};

std::vector<BenchRow> Measure(bool is_short) {
  KeepLargeBlocks();
  Bench bench(is_short);
  if (is_short) {
    bench.Update(256, 64);
    bench.Precondition(256, 256, {64});
  } else {
    for (const int64_t d : {1024, 4096}) {
      for (const int64_t rank : {64, 128}) bench.Update(d, rank);
    }
    bench.Precondition(1024, 1024, {64, 128});
    bench.Precondition(1024, 4096, {64, 128});
  }
  return bench.rows();
}

}  // namespace
}  // namespace precondor

int main(int argc, char** argv) { return precondor::BenchMain(argc, argv, precondor::Measure); }
