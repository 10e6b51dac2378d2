// SPDX-License-Identifier: Apache-2.0
// Updates of a dense factor by one vector, in tiles of f32 and of f16, on one thread. All of a size are measured in
// turns, each over so many factors that none is still in a cache when its turn comes again, as in a model's step. A
// row's limit is what this core's memory allows for the bytes that an update must move, measured in the same turns;
// what is measured was compared with the recursion in doubles first. Time is the thread's processor time, and a ratio
// the median of its turns' ratios: what else runs on the machine slows both sides of one, or neither.
#include <algorithm>
#include <cmath>
#include <functional>
#include <memory>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"

#include "kernels/base/check.h"
#include "kernels/cpu/cpu_backend.h"
#include "kernels/methods/deferred_factor.h"
#include "tests/bench/bench_rows.h"
#include "tests/bench/limits.h"

namespace precondor {
namespace {

constexpr int64_t kUpdates = DeferredFactor::kDeferred;  // of one turn: terms move in once

MkorConfig Config(SymmetricStorage storage) {
  MkorConfig config;
  config.rule = UpdateRule::kBlend;
  config.representation = Representation::kDense;
  config.storage = storage;
  return config;
}

// |G J - G J'| / |G J'| for a few Gaussian rows, after three times what may wait.
double RelativeError(int64_t d, SymmetricStorage storage, Backend& backend) {
  const std::unique_ptr<Factor> factor = MakeFactor(Config(storage), d, 0, backend).value();
  BlendRecursion recursion(Config(storage).gamma, Config(storage).damping);
  for (int64_t step = 0; step < 3 * kUpdates + 1; ++step) {
    const std::vector<float> vector = Gaussian(d, 100 + step);
    UpdateOnce(*factor, OneRow(backend, vector).view());
    recursion.Update(vector);
  }
  const FactorInverse inverse = factor->Inverse().value();
  double error = 0, size = 0;
  for (uint64_t probe = 0; probe < 2; ++probe) {
    const std::vector<float> g = Gaussian(d, 7 + probe);
    const std::vector<double> expected = recursion.Times(std::vector<double>(g.begin(), g.end()));
    const DeviceMatrix row = OneRow(backend, g);
    DeviceMatrix product = backend.Allocate(1, d).value();
    DeviceMatrix made;
    const ConstMatrixView matrix = Expanded(backend, inverse.form, made).value();
    PRECONDOR_CHECK(backend.Gemm(1, row.view(), Transpose::kNo, matrix, Transpose::kNo, 0, product.view()).ok());
    std::vector<float> got(d);
    PRECONDOR_CHECK(backend.Download(product.view(), MatrixView(got.data(), 1, d)).ok());
    for (int64_t i = 0; i < d; ++i) {
      error += std::pow(got[i] - expected[i], 2);
      size += std::pow(expected[i], 2);
    }
  }
  return std::sqrt(error / size);
}

class Bench {
 public:
  explicit Bench(bool is_short) : short_(is_short), backend_(MakeCpuBackend(CpuBackendOptions()).value()) {}

  void Size(int64_t d) {
    Check(d);
    // Beyond what caches of one socket usually hold.
    const int64_t pool_bytes = short_ ? int64_t{16} << 20 : int64_t{96} << 20;
    const int64_t tile_bytes = TileBytes(d, SymmetricStorage::kF32);
    const int64_t factors = std::max<int64_t>(1, pool_bytes / tile_bytes);
    DeviceMatrix stream = backend_->Allocate(factors, tile_bytes / 4).value();
    const DeviceMatrix vector = OneRow(*backend_, Gaussian(d, 3));
    std::vector<std::unique_ptr<Factor>> f32 = Pool(d, SymmetricStorage::kF32, factors);
    std::vector<std::unique_ptr<Factor>> f16 = Pool(d, SymmetricStorage::kF16, 2 * factors);
    std::vector<std::function<double()>> measured = {
        [&] {
          return Timed([&] { Repeat([&] { sink_ = ReadAll(stream.view().data, stream.view().size()); }); },
                       4 * factors);
        },
        [&] {
          return Timed([&] { Repeat([&] { ScaleAll(stream.view().data, stream.view().size()); }); }, 4 * factors);
        },
        [&] { return Timed([&] { UpdateAll(f32, vector.view()); }, factors * kUpdates); },
        [&] { return Timed([&] { UpdateAll(f16, vector.view()); }, 2 * factors * kUpdates); },
    };
    std::vector<std::vector<double>> seconds(measured.size());
    for (int turn = -1; turn < (short_ ? 1 : 11); ++turn) {  // the first warms up
      for (size_t i = 0; i < measured.size(); ++i) {
        const double time = measured[i]();
        if (turn >= 0) seconds[i].push_back(time);
      }
    }
    Report(d, seconds);
  }

  const std::vector<BenchRow>& rows() const { return rows_; }

 private:
  static double Timed(const std::function<void()>& work, int64_t count) {
    const double begin = ThreadSeconds();
    work();
    return (ThreadSeconds() - begin) / static_cast<double>(count);
  }
  static void Repeat(const std::function<void()>& work) {
    for (int i = 0; i < 4; ++i) work();
  }

  void Check(int64_t d) {
    for (const auto& [storage, name] : {std::pair(SymmetricStorage::kF32, "f32"), {SymmetricStorage::kF16, "f16"}}) {
      const double bound = storage == SymmetricStorage::kF32 ? 5e-6 : 1e-4;
      rows_.push_back({absl::StrCat("update/tiles_", name, "_error/d:", d), RelativeError(d, storage, *backend_), "", 0,
                       bound, true});
      const int64_t before = backend_->allocated_bytes();
      const std::unique_ptr<Factor> factor = MakeFactor(Config(storage), d, 0, *backend_).value();
      PRECONDOR_CHECK(backend_->allocated_bytes() - before == FactorStateBytes(Config(storage), d));
    }
  }

  // The seconds that memory needs for the bytes of one update, on the average of kUpdates, when reading the tiles of an
  // f32 factor takes `read` and reading and writing them `read_write`: the tiles, written once; the terms that wait,
  // half of them on average, and the new one; and the diagonal in f64, which is made anew beside the old one.
  static double LimitSeconds(int64_t d, SymmetricStorage storage, double read, double read_write) {
    const double tiles = static_cast<double>(TileBytes(d, storage)), side = static_cast<double>(d);
    const double updates = static_cast<double>(kUpdates);
    const double read_bytes = tiles * (updates - 1) / updates + 4 * side * (updates - 1) / 2 + 8 * side;
    const double read_write_bytes = tiles / updates + (4 + 8) * side;
    return (read_bytes * read + read_write_bytes * read_write) /
           static_cast<double>(TileBytes(d, SymmetricStorage::kF32));
  }

  // seconds: of each turn, to read, to read and write, and of an update in f32 and f16.
  void Report(int64_t d, const std::vector<std::vector<double>>& seconds) {
    const size_t turns = seconds[0].size();
    const auto quotient = [&](auto above, size_t below) {
      std::vector<double> quotients;
      for (size_t turn = 0; turn < turns; ++turn) quotients.push_back(above(turn) / seconds[below][turn]);
      return Median(quotients);
    };
    const auto f32_limit = [&](size_t turn) {
      return LimitSeconds(d, SymmetricStorage::kF32, seconds[0][turn], seconds[1][turn]);
    };
    const auto f16_limit = [&](size_t turn) {
      return LimitSeconds(d, SymmetricStorage::kF16, seconds[0][turn], seconds[1][turn]);
    };
    const double f32 = Median(seconds[2]), f16 = Median(seconds[3]);
    const bool large = d >= 1024;
    const auto name = [d](absl::string_view what) { return absl::StrCat(what, "/d:", d); };
    rows_.push_back({name("update/tiles_f32"), f32 * 1e6, "us", f32 * quotient(f32_limit, 2) * 1e6, large ? 0.8 : 0});
    rows_.push_back({name("update/tiles_f16"), f16 * 1e6, "us", f16 * quotient(f16_limit, 3) * 1e6, large ? 0.7 : 0});
  }

  std::vector<std::unique_ptr<Factor>> Pool(int64_t d, SymmetricStorage storage, int64_t count) {
    std::vector<std::unique_ptr<Factor>> pool;
    for (int64_t i = 0; i < count; ++i) pool.push_back(MakeFactor(Config(storage), d, 0, *backend_).value());
    return pool;
  }

  // Each factor in its turn, kUpdates times round. The vectors are one: what is in them costs nothing.
  static void UpdateAll(const std::vector<std::unique_ptr<Factor>>& pool, ConstMatrixView vector) {
    for (int64_t i = 0; i < kUpdates; ++i) {
      for (const std::unique_ptr<Factor>& factor : pool) UpdateOnce(*factor, vector);
    }
  }

  const bool short_;
  const std::unique_ptr<Backend> backend_;
  std::vector<BenchRow> rows_;
  volatile float sink_ = 0;
};

std::vector<BenchRow> Measure(bool is_short) {
  Bench bench(is_short);
  for (const int64_t d : {256, 1024, 4096, 8192}) {
    if (!is_short || d == 256) bench.Size(d);
  }
  return bench.rows();
}

}  // namespace
}  // namespace precondor

int main(int argc, char** argv) { return precondor::BenchMain(argc, argv, precondor::Measure); }
