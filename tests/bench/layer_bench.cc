// SPDX-License-Identifier: Apache-2.0
// The low-rank form's update and precondition beside what they replace, on one thread: gemv + scal + ger + amax of a
// dense inverse, and the dense precondition. What is compared takes turns; what is measured was compared with doubles
// before. Time is the thread's processor time, and a ratio the median of its turns' ratios.
#include <cmath>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"

#include "kernels/base/check.h"
#include "kernels/base/process_setup.h"
#include "kernels/cpu/cpu_backend.h"
#include "kernels/methods/mkor.h"
#include "tests/bench/bench_layer.h"
#include "tests/bench/bench_rows.h"
#include "tests/bench/fma_limit.h"
#include "tests/bench/naive_update.h"
#include "tests/bench/stream_limits.h"

namespace precondor {
namespace {

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
    const double error = UpdateError(d, rank, [&](uint64_t seed) { return spectrum.Draw(seed); });
    const double white_error = UpdateError(d, rank, [&](uint64_t seed) { return Gaussian(d, seed); });
    // Beyond what caches of one socket usually hold: in a model's step a factor comes from memory.
    const int64_t pool_bytes = short_ ? int64_t{8} << 20 : int64_t{96} << 20;
    const int64_t count = std::max<int64_t>(1, pool_bytes / (4 * rank * d)),
                  full = std::max<int64_t>(1, pool_bytes / (4 * d * d));
    DeviceMatrix naive = backend_->Allocate(full * d, d).value(), stream = backend_->Allocate(count * rank, d).value();
    for (int64_t i = 0; i < full * d; ++i) std::fill_n(naive.view().row(i), d, 1e-3f);
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
    const auto passes = [&](const std::function<void()>& pass, int64_t updates) {
      const double seconds = Timed([&] {
        for (int i = 0; i < kPasses; ++i) pass();
      });
      return seconds / static_cast<double>(kPasses * updates);
    };
    const auto seconds = TakeTurns(
        {
            [&] { return passes([&] { sink_ = ReadAll(stream.view().data, stream.view().size()); }, count); },
            [&] {
              return passes(
                  [&] {
                    for (auto& factor : pool) UpdateOnce(*factor, vector());
                  },
                  count);
            },
            [&] { return Timed([&] { sink_ = NaiveUpdates(d, naive.view(), vector()); }) / static_cast<double>(full); },
        },
        short_ ? 1 : 9);
    const std::string name = absl::StrCat("low_rank_r", rank), of = absl::StrCat("/d:", d);
    const double us = Median(seconds[1]) * 1e6;
    rows_.push_back({absl::StrCat("update/", name, "_error", of), error, "", 0, rank == 128 ? 2e-3 : 0, true});
    rows_.push_back(
        {absl::StrCat("update/", name, "_one_vector", of), us, "us", us * MedianRatio(seconds[0], seconds[1])});
    rows_.push_back({absl::StrCat("update/", name, "_error_of_white", of), white_error, ""});
    const double target = rank != 128 ? 0 : d == 1024 ? 12 : d == 4096 ? 60 : 0;
    rows_.push_back({absl::StrCat("update/blas_to_", name, of), MedianRatio(seconds[2], seconds[1]), "x", 0, target});
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
    rows_.push_back({absl::StrCat("limit/layer_fma", of), 1e-9 / Median(seconds[0]), "GFLOP/s"});
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
  double UpdateError(int64_t d, int64_t rank, const std::function<std::vector<float>(uint64_t)>& draw) {
    const MkorConfig config = LowRank(rank);
    const std::unique_ptr<Factor> factor = MakeFactor(config, d, 0, *backend_).value();
    std::vector<std::vector<float>> vectors;
    for (int64_t step = 0; step < 2 * rank + 20; ++step) {
      vectors.push_back(draw(100 + static_cast<uint64_t>(step)));
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
    bench.Precondition(512, 512, {64});
    bench.Precondition(1024, 1024, {64, 128});
    bench.Precondition(1024, 4096, {64, 128});
  }
  return bench.rows();
}

}  // namespace
}  // namespace precondor

int main(int argc, char** argv) { return precondor::BenchMain(argc, argv, precondor::Measure); }
