// SPDX-License-Identifier: Apache-2.0
// OpenBLAS beside oneDNN by shape, in turns, on one thread: where the table of kernels/cpu/gemm.cc comes from. A row is
// the time of what the table does not choose by the time of what it chooses: below 1 it chooses the slower one. For
// another instruction set ask both for it: ONEDNN_MAX_CPU_ISA=AVX2 OPENBLAS_CORETYPE=Haswell gemm_bench --json=FILE.
#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"

#include "kernels/base/check.h"
#include "kernels/base/process_setup.h"
#include "kernels/cpu/cpu_backend.h"
#include "kernels/cpu/gemm.h"
#include "tests/bench/bench_rows.h"

namespace precondor {
namespace {

using cpu::GemmLibrary;

struct Shape {
  int64_t m, n, inner;
};

constexpr Shape kShapes[] = {
    {16, 16, 16},     {32, 32, 32},      {64, 64, 64},                                              // tiny
    {1, 1024, 1024},  {1024, 1, 1024},                                                              // vector
    {16, 128, 1024},  {64, 64, 1024},    {128, 128, 1024},  {128, 128, 128},                        // small result
    {4, 1024, 1024},  {16, 1024, 1024},  {64, 1024, 1024},  {128, 1024, 1024},  {128, 4096, 1024},  // few rows
    {1024, 16, 1024}, {1024, 64, 1024},  {1024, 128, 1024}, {1024, 128, 4096},  {1024, 128, 128},   // few columns
    {1024, 1024, 16}, {1024, 1024, 128}, {1024, 4096, 128},                                         // short inner
    {256, 256, 256},  {512, 512, 512},   {1024, 1024, 256}, {1024, 1024, 1024}, {1024, 4096, 1024}  // bulk
};

void Fill(MatrixView x) {
  for (int64_t i = 0; i < x.rows; ++i) {
    for (int64_t j = 0; j < x.cols; ++j) x.at(i, j) = static_cast<float>((i * 7 + j * 3) % 11) / 11;
  }
}

void Measure(Backend& backend, const Shape& shape, bool ta, bool tb, bool is_short, std::vector<BenchRow>& rows) {
  const Transpose transpose_a = static_cast<Transpose>(ta), transpose_b = static_cast<Transpose>(tb);
  const auto [m, n, inner] = shape;
  DeviceMatrix a = backend.Allocate(ta ? inner : m, ta ? m : inner).value();
  DeviceMatrix b = backend.Allocate(tb ? n : inner, tb ? inner : n).value();
  DeviceMatrix c = backend.Allocate(m, n).value();
  Fill(a.view());
  Fill(b.view());
  const double flops = 2.0 * static_cast<double>(m * n) * static_cast<double>(inner);
  const int repeat = std::clamp(static_cast<int>((is_short ? 1e6 : 1e8) / flops), 1, 5000);
  const auto by = [&](GemmLibrary library) {
    return Timed([&] {
      for (int i = 0; i < repeat; ++i) {
        PRECONDOR_CHECK(cpu::GemmBy(library, 1, a.view(), transpose_a, b.view(), transpose_b, 0, c.view()));
      }
    });
  };
  const auto seconds =
      TakeTurns({[&] { return by(GemmLibrary::kBlas); }, [&] { return by(GemmLibrary::kOneDnn); }}, is_short ? 1 : 9);
  const bool one_dnn = cpu::ChooseGemm(m, n, inner, transpose_a, transpose_b) == GemmLibrary::kOneDnn;
  const std::string name = absl::StrCat("gemm/", ta ? "T" : "N", tb ? "T" : "N", "/m:", m, "/n:", n, "/inner:", inner,
                                        one_dnn ? "/onednn" : "/blas");
  rows.push_back({name, MedianRatio(seconds[one_dnn ? 0 : 1], seconds[one_dnn ? 1 : 0]), "x"});
}

std::vector<BenchRow> MeasureAll(bool is_short) {
  KeepLargeBlocks();
  const std::unique_ptr<Backend> backend = MakeCpuBackend(CpuBackendOptions()).value();
  std::vector<BenchRow> rows;
  DeviceMatrix one = backend->Allocate(8, 8).value(), two = backend->Allocate(8, 8).value();
  if (!cpu::GemmBy(GemmLibrary::kOneDnn, 1, one.view(), Transpose::kNo, one.view(), Transpose::kNo, 0, two.view())) {
    rows.push_back({"gemm/without_onednn", 1, "x"});
  } else {
    for (const Shape& shape : kShapes) {
      for (const bool ta : {false, true}) {
        for (const bool tb : {false, true}) Measure(*backend, shape, ta, tb, is_short, rows);
      }
    }
  }
  return rows;
}

}  // namespace
}  // namespace precondor

int main(int argc, char** argv) { return precondor::BenchMain(argc, argv, precondor::MeasureAll); }
