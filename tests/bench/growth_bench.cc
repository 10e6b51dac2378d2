// SPDX-License-Identifier: Apache-2.0
// How the update of a low-rank factor grows with its dimension: one vector a step, r = 128, EXACT_DAMPED. All sizes are
// measured in turns, each over so many factors that none is still in a cache when its turn comes again, as in a model's
// step, with the window full. Time is the thread's processor time; the exponent is the median of the turns' exponents,
// so that what else runs on the machine slows all sizes of one. Before that an answer of each size is compared with the
// definition in doubles.
#include <algorithm>
#include <cmath>
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"

#include "kernels/base/check.h"
#include "kernels/cpu/cpu_backend.h"
#include "kernels/methods/factor.h"
#include "tests/bench/bench_rows.h"

namespace precondor {
namespace {

constexpr int64_t kRank = 128;
constexpr int64_t kSteps = kRank / 2;  // of a turn

MkorConfig Config() {
  MkorConfig config;
  config.representation = Representation::kLowRank;
  config.rank = kRank;
  return config;
}

class Size {
 public:
  Size(int64_t d, int64_t pool_bytes, Backend& backend)
      : d_(d), backend_(backend), vectors_(backend.Allocate(2 * kRank, d).value()) {
    for (int64_t i = 0; i < vectors_.rows(); ++i) {
      host_vectors_.push_back(Gaussian(d, 1 + i));
      std::copy(host_vectors_[i].begin(), host_vectors_[i].end(), vectors_.view().row(i));
    }
    error_ = RelativeError();
    const int64_t bytes = FactorStateBytes(Config(), d), before = backend.allocated_bytes();
    for (int64_t i = 0; i < std::max<int64_t>(1, pool_bytes / bytes); ++i) {
      factors_.push_back(MakeFactor(Config(), d, static_cast<uint64_t>(i), backend).value());
    }
    PRECONDOR_CHECK(backend.allocated_bytes() - before == bytes * static_cast<int64_t>(factors_.size()));
    memory_ = static_cast<double>(bytes) / (4.0 * static_cast<double>(d) * static_cast<double>(d));
    for (int64_t step = 0; step < 2 * kRank; ++step) Step();
  }

  double error() const { return error_; }
  double memory() const { return memory_; }  // of a full matrix in f32

  // Of one update of one factor.
  double Seconds() {
    const double begin = ThreadSeconds();
    for (int64_t step = 0; step < kSteps; ++step) Step();
    return (ThreadSeconds() - begin) / static_cast<double>(kSteps * static_cast<int64_t>(factors_.size()));
  }

 private:
  static void Update(Factor& factor, ConstMatrixView vector) {
    PRECONDOR_CHECK(factor.Prepare(vector).ok() && factor.Conclude().ok());
    factor.Commit();
  }
  void Step() {
    for (const std::unique_ptr<Factor>& factor : factors_) {
      Update(*factor, vectors_.view().RowRange(step_ % vectors_.rows(), 1));
    }
    ++step_;
  }

  // |g J A - g| / |g| for A in doubles, while all vectors fit the rank: J is then A's inverse.
  double RelativeError() {
    constexpr int64_t kChecked = kRank / 2;
    const std::unique_ptr<Factor> factor = MakeFactor(Config(), d_, 0, backend_).value();
    for (int64_t i = 0; i < kChecked; ++i) Update(*factor, vectors_.view().RowRange(i, 1));
    const FactorInverse inverse = factor->Inverse().value();
    const std::vector<float> g = Gaussian(d_, 1 << 20);
    DeviceMatrix in = backend_.Allocate(1, d_).value(), out = backend_.Allocate(1, d_).value();
    std::copy(g.begin(), g.end(), in.view().row(0));
    PRECONDOR_CHECK(backend_.LowRankPrecondition({}, inverse.low_rank, in.view(), out.view()).ok());
    std::vector<double> product(out.view().row(0), out.view().row(0) + d_);
    for (double& element : product) element *= inverse.c;
    const std::vector<std::vector<float>> fed(host_vectors_.begin(), host_vectors_.begin() + kChecked);
    const std::vector<double> back = DampedTimes(fed, Config().gamma, Config().damping, product);
    double error = 0, size = 0;
    for (int64_t i = 0; i < d_; ++i) {
      error += std::pow(back[i] - g[i], 2);
      size += std::pow(static_cast<double>(g[i]), 2);
    }
    return std::sqrt(error / size);
  }

  const int64_t d_;
  Backend& backend_;
  DeviceMatrix vectors_;
  std::vector<std::vector<float>> host_vectors_;
  std::vector<std::unique_ptr<Factor>> factors_;
  int64_t step_ = 0;
  double error_ = 0, memory_ = 0;
};

std::vector<BenchRow> Measure(bool is_short) {
  std::vector<double> sides = {256, 512, 1024, 2048, 4096, 8192};
  if (is_short) sides.resize(2);
  const int64_t pool_bytes = int64_t{is_short ? 2 : 96} << 20;
  const std::unique_ptr<Backend> backend = MakeCpuBackend(CpuBackendOptions()).value();
  std::vector<std::unique_ptr<Size>> sizes;
  std::vector<BenchRow> rows;
  for (const double d : sides) {
    sizes.push_back(std::make_unique<Size>(static_cast<int64_t>(d), pool_bytes, *backend));
    rows.push_back({absl::StrCat("update/low_rank_128_error/d:", d), sizes.back()->error(), "", 0, 1e-4, true});
    rows.push_back({absl::StrCat("update/low_rank_128_memory/d:", d), sizes.back()->memory(), "of full f32"});
  }
  std::vector<std::vector<double>> seconds(sizes.size());
  std::vector<double> exponents;
  for (int turn = -1; turn < (is_short ? 1 : 5); ++turn) {  // the first warms up
    std::vector<double> of_turn;
    for (const std::unique_ptr<Size>& size : sizes) of_turn.push_back(size->Seconds());
    if (turn < 0) continue;
    exponents.push_back(GrowthExponent(sides, of_turn));
    for (size_t i = 0; i < sizes.size(); ++i) seconds[i].push_back(of_turn[i]);
  }
  for (size_t i = 0; i < sizes.size(); ++i) {
    rows.push_back({absl::StrCat("update/low_rank_128_one/d:", sides[i]), Median(seconds[i]) * 1e6, "us"});
  }
  rows.push_back({"update/low_rank_128_growth", Median(exponents), "exponent", 0, 1.05, true});
  return rows;
}

}  // namespace
}  // namespace precondor

int main(int argc, char** argv) { return precondor::BenchMain(argc, argv, precondor::Measure); }
