// SPDX-License-Identifier: Apache-2.0
// Update and precondition of one layer, on one thread of the CPU backend, through the methods as the server calls them.
// Counters of each row: flops and bytes of one iteration, from which rows.py takes the machine's limit.
#include <benchmark/benchmark.h>
#include <cblas.h>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"

#include "tests/bench/bench_layer.h"

namespace precondor {
namespace {

// A layer that has taken in two steps (no more than the smallest rank here holds exactly), with its result checked.
std::unique_ptr<BenchLayer> CheckedLayer(benchmark::State& state, int64_t d_out, int64_t d_in,
                                         const std::string& representation, int64_t rank) {
  auto layer = BenchLayer::Make(d_out, d_in, representation, rank);
  absl::Status status = layer.status();
  if (status.ok()) status.Update((*layer)->Feed(11));
  if (status.ok()) status.Update((*layer)->Feed(12));
  if (!status.ok()) {
    state.SkipWithError(status.ToString().c_str());
    return nullptr;
  }
  const absl::StatusOr<double> error = (*layer)->RelativeError();
  if (!error.ok() || !(*error < 1e-3)) {
    state.SkipWithError(error.ok() ? absl::StrCat("wrong result: relative error ", *error).c_str()
                                   : error.status().ToString().c_str());
    return nullptr;
  }
  state.counters["relative_error"] = *error;
  return *std::move(layer);
}

template <typename Operation>
void Measure(benchmark::State& state, Operation operation) {
  for (auto _ : state) {
    if (absl::Status status = operation(); !status.ok()) {
      state.SkipWithError(status.ToString().c_str());
      break;
    }
  }
}

void MeasureUpdates(benchmark::State& state, BenchLayer& layer) {
  for (int warm = 0; warm < 24; ++warm) {  // fill the window, so that recompressions are in the average
    if (absl::Status status = layer.Update(); !status.ok()) return state.SkipWithError(status.ToString().c_str());
  }
  Measure(state, [&] { return layer.Update(); });
}

// Both factors of a d x d layer. Bytes: the window is read once and its new columns are written. FLOP: the new columns'
// products with the window, and every r/2 columns the eigenvectors of the Gram matrix times the window.
void UpdateLowRank(benchmark::State& state) {
  const int64_t d = state.range(0), r = state.range(1);
  auto layer = CheckedLayer(state, d, d, "LOW_RANK", r);
  if (layer == nullptr) return;
  MeasureUpdates(state, *layer);
  const double columns = static_cast<double>(d), rank = static_cast<double>(r), k = BenchLayer::kVectors;
  state.counters["flops"] = 2 * (2 * k * rank * columns + 2 * rank * rank * columns * k / (rank / 2));
  state.counters["bytes"] = 2 * 4 * columns * (rank + k);
  state.counters["working_set"] = 2 * 4 * columns * rank;
}
BENCHMARK(UpdateLowRank)
    ->Name("update/low_rank")
    ->ArgNames({"d", "r"})
    ->Args({256, 64})
    ->Args({1024, 64})
    ->Args({1024, 128})
    ->Args({4096, 64})
    ->Args({4096, 128});

// Both factors of a d x d layer in the dense form: rank-k product and Cholesky inverse, 2 d^2 k + 2 d^3 FLOP each.
void UpdateDense(benchmark::State& state) {
  const int64_t d = state.range(0);
  auto layer = CheckedLayer(state, d, d, "DENSE", 0);
  if (layer == nullptr) return;
  MeasureUpdates(state, *layer);
  const double n = static_cast<double>(d);
  state.counters["flops"] = 2 * (2 * n * n * BenchLayer::kVectors + 2 * n * n * n);
}
BENCHMARK(UpdateDense)->Name("update/dense")->ArgNames({"d"})->Arg(256)->Arg(1024);

// 4 (p + q) m n FLOP for the columns p and q that the factors have in use, which may be fewer than r.
void PreconditionLowRank(benchmark::State& state) {
  const int64_t m = state.range(0), n = state.range(1), r = state.range(2);
  auto layer = CheckedLayer(state, m, n, "LOW_RANK", r);
  if (layer == nullptr) return;
  for (int64_t fed = 0; fed < 2 * r; fed += BenchLayer::kVectors) {  // the window at its fullest
    if (absl::Status status = layer->Feed(100 + static_cast<uint32_t>(fed)); !status.ok()) {
      return state.SkipWithError(status.ToString().c_str());
    }
  }
  Measure(state, [&] { return layer->Precondition(); });
  state.counters["columns"] = static_cast<double>(layer->ranks());
  state.counters["flops"] = 4.0 * static_cast<double>(layer->ranks()) * static_cast<double>(m) * static_cast<double>(n);
  state.counters["bytes"] = 4.0 * 2 * static_cast<double>(m) * static_cast<double>(n);
  state.counters["working_set"] = 4.0 * 2 * static_cast<double>(m) * static_cast<double>(n);
}
BENCHMARK(PreconditionLowRank)
    ->Name("precondition/low_rank")
    ->ArgNames({"m", "n", "r"})
    ->Args({256, 256, 64})
    ->Args({1024, 1024, 64})
    ->Args({1024, 1024, 128})
    ->Args({1024, 4096, 64})
    ->Args({1024, 4096, 128});

void PreconditionDense(benchmark::State& state) {
  const int64_t m = state.range(0), n = state.range(1);
  auto layer = CheckedLayer(state, m, n, "DENSE", 0);
  if (layer == nullptr) return;
  Measure(state, [&] { return layer->Precondition(); });
  state.counters["flops"] = 2.0 * static_cast<double>(m) * static_cast<double>(n) * static_cast<double>(m + n);
}
BENCHMARK(PreconditionDense)->Name("precondition/dense")->ArgNames({"m", "n"})->Args({256, 256})->Args({1024, 1024});

// What a plain implementation does for one vector and one dense factor, for comparison: gemv, scal, ger and the
// maximum.
void NaiveRankOne(benchmark::State& state) {
  const int d = static_cast<int>(state.range(0));
  const size_t n = static_cast<size_t>(d);
  std::vector<float> inverse(n * n, 1e-3f), vector(n, 0.1f), product(n);
  for (auto _ : state) {
    cblas_sgemv(CblasRowMajor, CblasNoTrans, d, d, 1, inverse.data(), d, vector.data(), 1, 0, product.data(), 1);
    cblas_sscal(d * d, 0.95f, inverse.data(), 1);
    cblas_sger(CblasRowMajor, d, d, 1e-6f, product.data(), 1, product.data(), 1, inverse.data(), d);
    benchmark::DoNotOptimize(cblas_isamax(d * d, inverse.data(), 1));
  }
}
BENCHMARK(NaiveRankOne)->Name("baseline/rank_one_blas")->ArgNames({"d"})->Arg(256)->Arg(1024)->Arg(4096);

}  // namespace
}  // namespace precondor

BENCHMARK_MAIN();
