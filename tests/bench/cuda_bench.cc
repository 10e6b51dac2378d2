// SPDX-License-Identifier: Apache-2.0
// The CUDA backend's hot operations beside what the same device does in the same run: memory moved by a copy, products
// by cuBLAS alone. Time is the host's from the first call to the end of the last on the device, over so many calls that
// waiting for it is small, in turns. Each operation's result is compared first with doubles; a wrong one aborts.
// Programs get the device's backend or what tests/support/cuda_host makes of one.
#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <limits>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/types/span.h"

#include "kernels/base/check.h"
#include "kernels/base/random.h"
#include "kernels/cuda/device.h"
#include "tests/bench/bench_rows.h"
#include "tests/bench/cuda_step.h"
#include "tests/support/test_backend.h"

namespace precondor {
namespace {

constexpr int64_t kTerms = 8;  // as many rows as a deferred factor moves in at once

DeviceMatrix Normal(Backend& backend, int64_t rows, int64_t cols, uint64_t seed) {
  DeviceMatrix x = backend.Allocate(rows, cols).value();
  PRECONDOR_CHECK(backend.FillNormal(CounterRandom({seed}), x.view()).ok());
  return x;
}

std::vector<float> ToHost(Backend& backend, ConstMatrixView x) {
  std::vector<float> host(x.size());
  PRECONDOR_CHECK(backend.Download(x, MatrixView(host.data(), x.rows, x.cols)).ok());
  return host;
}

double Length(const std::vector<double>& x) {
  double square = 0;
  for (const double element : x) square += element * element;
  return std::sqrt(square);
}

// |got - expected| / |expected|; NaN where `got` holds one.
double RelativeError(const std::vector<double>& got, const std::vector<double>& expected) {
  std::vector<double> difference = expected;
  for (size_t i = 0; i < got.size(); ++i) difference[i] -= got[i];
  return Length(difference) / Length(expected);
}

// x [rows, cols] times v.
std::vector<double> Times(const std::vector<float>& x, const std::vector<double>& v) {
  const int64_t cols = static_cast<int64_t>(v.size()), rows = static_cast<int64_t>(x.size()) / cols;
  std::vector<double> out(rows);
  for (int64_t i = 0; i < rows; ++i) {
    for (int64_t j = 0; j < cols; ++j) out[i] += static_cast<double>(x[i * cols + j]) * v[j];
  }
  return out;
}

// A symmetric matrix as a multiple of I and terms, so that it may be large: what updates should have made of zeros.
class SymmetricTerms {
 public:
  explicit SymmetricTerms(int64_t n) : n_(n) {}
  void Update(double scale, double shift, const std::vector<double>& weights, const std::vector<float>& rows) {
    identity_ = scale * identity_ + shift;
    for (auto& [weight, row] : terms_) weight *= scale;
    for (size_t i = 0; i < weights.size(); ++i) {
      const auto begin = rows.begin() + static_cast<int64_t>(i) * n_;
      terms_.emplace_back(weights[i], std::vector<double>(begin, begin + n_));
    }
  }
  std::vector<double> Times(const std::vector<float>& v) const {
    std::vector<double> out(v.begin(), v.end());
    for (double& element : out) element *= identity_;
    for (const auto& [weight, row] : terms_) {
      double product = 0;
      for (int64_t i = 0; i < n_; ++i) product += row[i] * v[i];
      for (int64_t i = 0; i < n_; ++i) out[i] += weight * product * row[i];
    }
    return out;
  }

 private:
  const int64_t n_;
  double identity_ = 0;
  std::vector<std::pair<double, std::vector<double>>> terms_;
};

class Bench {
 public:
  explicit Bench(bool is_short)
      : short_(is_short), backend_(MakeTestBackend()), mark_(backend_->Allocate(1, 1).value()) {}

  // What the device allows; first, for the other rows are held against these.
  void Limits() {
    const int64_t side = short_ ? 128 : 16384;  // 1 GiB each way
    const DeviceMatrix from = Normal(*backend_, side, side, 1);
    DeviceMatrix to = backend_->Allocate(side, side).value();
    const double copy = Seconds([&] { return backend_->Copy(from.view(), to.view()); });
    copied_per_second_ = 2.0 * 4.0 * static_cast<double>(side * side) / copy;
    rows_.push_back({"limit/cuda/copy", copied_per_second_ / 1e9, "GB/s"});

    const int64_t n = short_ ? 64 : 8192;
    const double flops = 2.0 * std::pow(static_cast<double>(n), 3);
    const DeviceMatrix a = Normal(*backend_, n, n, 2), b = Normal(*backend_, n, n, 3);
    DeviceMatrix c = backend_->Allocate(n, n).value();
    const double f32 =
        Seconds([&] { return backend_->Gemm(1, a.view(), Transpose::kNo, b.view(), Transpose::kNo, 0, c.view()); });
    f32_per_second_ = flops / f32;
    rows_.push_back({"limit/cuda/gemm_f32", f32_per_second_ / 1e12, "TFLOP/s"});
    bf16_per_second_ = flops / Bf16GemmSeconds(n);
    rows_.push_back({"limit/cuda/gemm_bf16", bf16_per_second_ / 1e12, "TFLOP/s"});
  }

  void SymmetricUpdate(int64_t n, SymmetricStorage storage) {
    CheckSymmetricUpdate(n, storage);
    // Beyond any device's cache, so that each update reads and writes memory, as in a model's step.
    const int64_t pool_bytes = short_ ? int64_t{1} << 20 : int64_t{1} << 30;
    std::vector<SymmetricMatrix> pool;
    do {
      pool.push_back(backend_->AllocateSymmetric(n, storage).value());
    } while (static_cast<int64_t>(pool.size()) * TileBytes(n, storage) < pool_bytes);
    const DeviceMatrix rows = Normal(*backend_, kTerms, n, 4), v = Normal(*backend_, 1, n, 5);
    DeviceMatrix y = backend_->Allocate(1, n).value();
    const std::vector<double> weights(kTerms, .01);
    size_t next = 0;
    const double seconds = Seconds([&] {
      next = (next + 1) % pool.size();
      return backend_->SymmetricUpdateMultiply(.9, .1, weights, rows.view(), pool[next], v.view(), y.view());
    });
    const double bytes = 2.0 * static_cast<double>(TileBytes(n, storage)) + 4.0 * static_cast<double>((kTerms + 2) * n);
    rows_.push_back({absl::StrCat("update/cuda/", storage == SymmetricStorage::kF16 ? "f16" : "f32", "/d:", n),
                     seconds * 1e6, "us", bytes / copied_per_second_ * 1e6, .8});
  }

  void DensePrecondition(int64_t n, ProductPrecision precision) {
    const DeviceMatrix l = Symmetric(n, 6), r = Symmetric(n, 7), d = Normal(*backend_, n, n, 8);
    DeviceMatrix u = backend_->Allocate(n, n).value();
    const auto work = [&] { return backend_->DensePrecondition(l.view(), r.view(), d.view(), u.view(), precision); };
    PRECONDOR_CHECK(work().ok());
    const bool bf16 = precision == ProductPrecision::kBf16, tf32 = precision == ProductPrecision::kTf32;
    const std::vector<float> probe = Gaussian(n, 9);
    const std::vector<double> x(probe.begin(), probe.end());
    const std::vector<double> expected =
        Times(ToHost(*backend_, l.view()), Times(ToHost(*backend_, d.view()), Times(ToHost(*backend_, r.view()), x)));
    // Five roundings to bf16, each 2^-9 of an element at most, independent, or four to TF32, of 2^-10; TF32 in place of
    // f32 would show.
    PRECONDOR_CHECK(RelativeError(Times(ToHost(*backend_, u.view()), x), expected) < (bf16   ? 1e-2
                                                                                      : tf32 ? 3e-3
                                                                                             : 5e-5));
    const double flops = 4.0 * std::pow(static_cast<double>(n), 3);
    // Tensor cores do products of TF32 at half the speed of bf16's.
    const double per_second = bf16 ? bf16_per_second_ : tf32 ? bf16_per_second_ / 2 : f32_per_second_;
    rows_.push_back({absl::StrCat("precondition/cuda/dense_",
                                  bf16   ? "bf16"
                                  : tf32 ? "tf32"
                                         : "f32",
                                  "/d:", n),
                     Seconds(work) * 1e6, "us", flops / per_second * 1e6});
  }

  DeviceLimits limits() const { return {copied_per_second_, bf16_per_second_}; }
  const std::vector<BenchRow>& rows() const { return rows_; }

 private:
  double Seconds(const std::function<absl::Status()>& work) const {
    return Seconds(work, [this] { ToHost(*backend_, mark_.view()); });  // after all that came before
  }
  // Of one call: the median over turns.
  double Seconds(const std::function<absl::Status()>& work, const std::function<void()>& wait) const {
    const auto timed = [&](int64_t calls) {
      const auto begin = std::chrono::steady_clock::now();
      for (int64_t call = 0; call < calls; ++call) PRECONDOR_CHECK(work().ok());
      wait();
      return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
    };
    timed(1);  // warms up
    const int64_t calls = short_ ? 1 : std::clamp<int64_t>(static_cast<int64_t>(.05 / timed(1)), 1, 10000);
    std::vector<double> seconds(short_ ? 1 : 9);
    for (double& turn : seconds) turn = timed(calls) / static_cast<double>(calls);
    return Median(seconds);
  }

  // The seam has no bf16 matrices: cuBLAS itself, on a stream of its own.
  double Bf16GemmSeconds(int64_t n) const {
    const std::vector<float> block = Gaussian(int64_t{1} << 12, 10);
    std::vector<uint16_t> elements(n * n);
    for (size_t i = 0; i < elements.size(); ++i) {
      uint32_t bits;
      std::memcpy(&bits, &block[i % block.size()], sizeof(bits));
      elements[i] = static_cast<uint16_t>(bits >> 16);
    }
    const std::unique_ptr<cuda::Device> device = cuda::Device::Make(0, std::numeric_limits<int64_t>::max()).value();
    const auto a = device->Send<uint16_t>(elements).value(), b = device->Send<uint16_t>(elements).value();
    const auto c = device->Array<float>(n * n).value();
    const float one = 1, zero = 0;
    const auto work = [&] {
      return device->RunBlas("Gemm", [&](cublasHandle_t blas) {
        return cublasGemmEx_64(blas, CUBLAS_OP_N, CUBLAS_OP_N, n, n, n, &one, b.data(), CUDA_R_16BF, n, a.data(),
                               CUDA_R_16BF, n, &zero, c.data(), CUDA_R_32F, n, CUBLAS_COMPUTE_32F, CUBLAS_GEMM_DEFAULT);
      });
    };
    float last;
    return Seconds(work, [&] { PRECONDOR_CHECK(device->Receive(c, absl::MakeSpan(&last, 1)).ok()); });
  }

  DeviceMatrix Symmetric(int64_t n, uint64_t seed) {
    DeviceMatrix x = Normal(*backend_, n, n, seed);
    PRECONDOR_CHECK(backend_->Symmetrize(x.view()).ok());
    return x;
  }

  void CheckSymmetricUpdate(int64_t n, SymmetricStorage storage) {
    SymmetricMatrix m = backend_->AllocateSymmetric(n, storage).value();
    SymmetricTerms expected(n);
    const DeviceMatrix v = Normal(*backend_, 1, n, 11);
    DeviceMatrix y = backend_->Allocate(1, n).value();
    for (uint64_t step = 0; step < 3; ++step) {
      std::vector<double> weights(kTerms);
      for (size_t i = 0; i < weights.size(); ++i) weights[i] = .01 * (static_cast<double>(i) - 2);
      const DeviceMatrix rows = Normal(*backend_, kTerms, n, 12 + step);
      PRECONDOR_CHECK(backend_->SymmetricUpdateMultiply(.9, .1, weights, rows.view(), m, v.view(), y.view()).ok());
      expected.Update(.9, .1, weights, ToHost(*backend_, rows.view()));
    }
    const std::vector<float> got = ToHost(*backend_, y.view());
    // Three roundings of what is stored, 2^-11 and 2^-24 of an element; one tile left out is 1e-2 at n = 8192.
    PRECONDOR_CHECK(
        RelativeError(std::vector<double>(got.begin(), got.end()), expected.Times(ToHost(*backend_, v.view()))) <
        (storage == SymmetricStorage::kF16 ? 2e-3 : 1e-5));
  }

  const bool short_;
  const std::unique_ptr<Backend> backend_;
  const DeviceMatrix mark_;
  double copied_per_second_ = 0, f32_per_second_ = 0, bf16_per_second_ = 0;
  std::vector<BenchRow> rows_;
};

std::vector<BenchRow> MeasureAll(bool is_short) {
  Bench bench(is_short);
  bench.Limits();
  for (const SymmetricStorage storage : {SymmetricStorage::kF32, SymmetricStorage::kF16}) {
    for (const int64_t n : is_short ? std::vector<int64_t>{150} : std::vector<int64_t>{1024, 2048, 4096, 8192}) {
      bench.SymmetricUpdate(n, storage);
    }
  }
  for (const ProductPrecision precision : {ProductPrecision::kF32, ProductPrecision::kTf32, ProductPrecision::kBf16}) {
    for (const int64_t n : is_short ? std::vector<int64_t>{64} : std::vector<int64_t>{1024, 2048, 4096}) {
      bench.DensePrecondition(n, precision);
    }
  }
  std::vector<BenchRow> rows = bench.rows();
  for (BenchRow& row : MeasureCudaSteps(is_short, bench.limits())) rows.push_back(std::move(row));
  return rows;
}

}  // namespace
}  // namespace precondor

int main(int argc, char** argv) { return precondor::BenchMain(argc, argv, precondor::MeasureAll); }
