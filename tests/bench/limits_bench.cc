// SPDX-License-Identifier: Apache-2.0
// What one core of this machine can do: rows are given as fractions of it. Linked into each program that needs it, so
// that limit and value are measured in the same run, interleaved.
#include <benchmark/benchmark.h>
#include <cstdint>
#include <vector>

#include "tests/bench/fma_limit.h"

namespace {

void FmaPeak(benchmark::State& state) {
  double flops = 0;
  for (auto _ : state) flops = precondor::RunFmas();
  state.counters["flops"] = flops;
}
BENCHMARK(FmaPeak)->Name("limit/fma_f32");

#if defined(__x86_64__)
__attribute__((target_clones("avx512f", "avx2", "default")))
#endif
void Scale(float* values, size_t count) {
  for (size_t i = 0; i < count; ++i) values[i] = values[i] * 0.95f + 0.05f;
}

// Reads and writes in place, as a factor update does.
void Stream(benchmark::State& state) {
  std::vector<float> data(static_cast<size_t>(state.range(0)) * 1024 / sizeof(float), 1.0f);
  for (auto _ : state) {
    Scale(data.data(), data.size());
    benchmark::ClobberMemory();
  }
  state.counters["bytes"] = 2.0 * static_cast<double>(data.size() * sizeof(float));
  state.counters["working_set"] = static_cast<double>(data.size() * sizeof(float));
}
BENCHMARK(Stream)->Name("limit/stream")->ArgName("kib")->Arg(256)->Arg(4096)->Arg(131072);

}  // namespace
