// SPDX-License-Identifier: Apache-2.0
#include "tests/bench/cuda_kernels.h"

#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <limits>
#include <utility>

#include "absl/strings/str_cat.h"

#include "kernels/base/random.h"
#include "kernels/base/status_macros.h"
#include "kernels/cuda/device.h"
#include "tests/support/test_backend.h"

namespace precondor {
namespace {

constexpr int64_t kTerms = 8;  // as many rows as a deferred factor moves in at once

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

absl::Status ExpectError(double error, double at_most) {
  if (error < at_most) return absl::OkStatus();
  return absl::InternalError(absl::StrCat("wrong result: expected an error below ", at_most, ", got ", error));
}

}  // namespace

CudaKernels::CudaKernels(BenchMode mode) : mode_(mode), backend_(MakeTestBackend()) {}

absl::StatusOr<std::vector<BenchRow>> CudaKernels::MeasureLimits() {
  const bool is_short = mode_.is_short;
  const int64_t side = is_short ? 128 : 16384;  // 1 GiB each way
  std::vector<BenchRow> rows;
  const auto add = [&](const std::string& name, double amount, const Summary& seconds, double scale,
                       const std::string& unit) {
    const Summary rate = Scaled(RateOf(amount, seconds), 1 / scale);
    rows.push_back({.name = name, .value = rate.median, .unit = unit, .spread = rate});
    return amount / seconds.median;
  };
  {
    PRECONDOR_ASSIGN_OR_RETURN(const DeviceMatrix from, Normal(side, side, 1));
    PRECONDOR_ASSIGN_OR_RETURN(DeviceMatrix to, backend_->Allocate(side, side));
    PRECONDOR_ASSIGN_OR_RETURN(const Summary copy, Time([&] { return backend_->Copy(from.view(), to.view()); }));
    copied_per_second_ = add("limit/cuda/copy", 8.0 * static_cast<double>(side * side), copy, 1e9, "GB/s");
  }
  const int64_t n = is_short ? 64 : 8192;
  const double flops = 2.0 * std::pow(static_cast<double>(n), 3);
  {
    PRECONDOR_ASSIGN_OR_RETURN(const DeviceMatrix a, Normal(n, n, 2));
    PRECONDOR_ASSIGN_OR_RETURN(const DeviceMatrix b, Normal(n, n, 3));
    PRECONDOR_ASSIGN_OR_RETURN(DeviceMatrix c, backend_->Allocate(n, n));
    PRECONDOR_ASSIGN_OR_RETURN(
        const Summary f32,
        Time([&] { return backend_->Gemm(1, a.view(), Transpose::kNo, b.view(), Transpose::kNo, 0, c.view()); }));
    f32_per_second_ = add("limit/cuda/gemm_f32", flops, f32, 1e12, "TFLOP/s");
  }
  PRECONDOR_ASSIGN_OR_RETURN(const Summary bf16, TimeBf16Gemm(n));
  bf16_per_second_ = add("limit/cuda/gemm_bf16", flops, bf16, 1e12, "TFLOP/s");
  return rows;
}

std::string CudaKernels::NameOfUpdate(int64_t n, SymmetricStorage storage) {
  return absl::StrCat("update/cuda/", storage == SymmetricStorage::kF16 ? "f16" : "f32", "/d:", n);
}

absl::StatusOr<BenchRow> CudaKernels::SymmetricUpdate(int64_t n, SymmetricStorage storage) {
  PRECONDOR_RETURN_IF_ERROR(CheckSymmetricUpdate(n, storage));
  // Beyond any device's cache, so that each update reads and writes memory, as in a model's step.
  const int64_t pool_bytes = mode_.is_short ? int64_t{1} << 20 : int64_t{1} << 30;
  std::vector<SymmetricMatrix> pool;
  do {
    PRECONDOR_ASSIGN_OR_RETURN(SymmetricMatrix matrix, backend_->AllocateSymmetric(n, storage));
    pool.push_back(std::move(matrix));
  } while (static_cast<int64_t>(pool.size()) * TileBytes(n, storage) < pool_bytes);
  PRECONDOR_ASSIGN_OR_RETURN(const DeviceMatrix rows, Normal(kTerms, n, 4));
  PRECONDOR_ASSIGN_OR_RETURN(const DeviceMatrix v, Normal(1, n, 5));
  PRECONDOR_ASSIGN_OR_RETURN(DeviceMatrix y, backend_->Allocate(1, n));
  const std::vector<double> weights(kTerms, .01);
  size_t next = 0;
  PRECONDOR_ASSIGN_OR_RETURN(const Summary seconds, Time([&] {
                               next = (next + 1) % pool.size();
                               return backend_->SymmetricUpdateMultiply(.9, .1, weights, rows.view(), pool[next],
                                                                        v.view(), y.view());
                             }));
  const Summary time = Scaled(seconds, 1e6);
  const double bytes = 2.0 * static_cast<double>(TileBytes(n, storage)) + 4.0 * static_cast<double>((kTerms + 2) * n);
  const double limit = copied_per_second_ > 0 ? bytes / copied_per_second_ * 1e6 : 0;
  return BenchRow{.name = NameOfUpdate(n, storage),
                  .value = time.median,
                  .unit = "us",
                  .limit = limit,
                  .target = limit > 0 ? .8 : 0,
                  .spread = time};
}

std::string CudaKernels::NameOfPrecondition(int64_t n, ProductPrecision precision) {
  const char* const name = precision == ProductPrecision::kBf16   ? "bf16"
                           : precision == ProductPrecision::kTf32 ? "tf32"
                                                                  : "f32";
  return absl::StrCat("precondition/cuda/dense_", name, "/d:", n);
}

absl::StatusOr<BenchRow> CudaKernels::DensePrecondition(int64_t n, ProductPrecision precision) {
  PRECONDOR_ASSIGN_OR_RETURN(const DeviceMatrix l, Symmetric(n, 6));
  PRECONDOR_ASSIGN_OR_RETURN(const DeviceMatrix r, Symmetric(n, 7));
  PRECONDOR_ASSIGN_OR_RETURN(const DeviceMatrix d, Normal(n, n, 8));
  PRECONDOR_ASSIGN_OR_RETURN(DeviceMatrix u, backend_->Allocate(n, n));
  const auto work = [&] { return backend_->DensePrecondition(l.view(), r.view(), d.view(), u.view(), precision); };
  PRECONDOR_RETURN_IF_ERROR(work());
  const bool bf16 = precision == ProductPrecision::kBf16, tf32 = precision == ProductPrecision::kTf32;
  const std::vector<float> probe = Gaussian(n, 9);
  const std::vector<double> x(probe.begin(), probe.end());
  PRECONDOR_ASSIGN_OR_RETURN(const std::vector<float> left, ToHost(l.view()));
  PRECONDOR_ASSIGN_OR_RETURN(const std::vector<float> gradient, ToHost(d.view()));
  PRECONDOR_ASSIGN_OR_RETURN(const std::vector<float> right, ToHost(r.view()));
  PRECONDOR_ASSIGN_OR_RETURN(const std::vector<float> answer, ToHost(u.view()));
  const std::vector<double> expected = Times(left, Times(gradient, Times(right, x)));
  // Five roundings to bf16, each 2^-9 of an element at most, independent, or four to TF32, of 2^-10; TF32 in place of
  // f32 would show.
  PRECONDOR_RETURN_IF_ERROR(ExpectError(RelativeError(Times(answer, x), expected), bf16 ? 1e-2 : tf32 ? 3e-3 : 5e-5));
  PRECONDOR_ASSIGN_OR_RETURN(const Summary seconds, Time(work));
  const Summary time = Scaled(seconds, 1e6);
  const double flops = 4.0 * std::pow(static_cast<double>(n), 3);
  // Tensor cores do products of TF32 at half the speed of bf16's.
  const double per_second = bf16 ? bf16_per_second_ : tf32 ? bf16_per_second_ / 2 : f32_per_second_;
  return BenchRow{.name = NameOfPrecondition(n, precision),
                  .value = time.median,
                  .unit = "us",
                  .limit = per_second > 0 ? flops / per_second * 1e6 : 0,
                  .spread = time};
}

absl::StatusOr<Summary> CudaKernels::Time(const std::function<absl::Status()>& work) const {
  return TimeCalls(static_cast<cudaStream_t>(backend_->stream()), mode_, work);
}

// The backend has no bf16 matrices: cuBLAS itself, on a stream of its own.
absl::StatusOr<Summary> CudaKernels::TimeBf16Gemm(int64_t n) const {
  const std::vector<float> block = Gaussian(int64_t{1} << 12, 10);
  std::vector<uint16_t> elements(n * n);
  for (size_t i = 0; i < elements.size(); ++i) {
    uint32_t bits;
    std::memcpy(&bits, &block[i % block.size()], sizeof(bits));
    elements[i] = static_cast<uint16_t>(bits >> 16);
  }
  PRECONDOR_ASSIGN_OR_RETURN(const std::unique_ptr<cuda::Device> device,
                             cuda::Device::Make(0, std::numeric_limits<int64_t>::max()));
  PRECONDOR_ASSIGN_OR_RETURN(const auto a, device->Send<uint16_t>(elements));
  PRECONDOR_ASSIGN_OR_RETURN(const auto b, device->Send<uint16_t>(elements));
  PRECONDOR_ASSIGN_OR_RETURN(const auto c, device->Array<float>(n * n));
  const float one = 1, zero = 0;
  return TimeCalls(device->stream(), mode_, [&] {
    return device->RunBlas("Gemm", [&](cublasHandle_t blas) {
      return cublasGemmEx_64(blas, CUBLAS_OP_N, CUBLAS_OP_N, n, n, n, &one, b.data(), CUDA_R_16BF, n, a.data(),
                             CUDA_R_16BF, n, &zero, c.data(), CUDA_R_32F, n, CUBLAS_COMPUTE_32F, CUBLAS_GEMM_DEFAULT);
    });
  });
}

absl::StatusOr<DeviceMatrix> CudaKernels::Normal(int64_t rows, int64_t cols, uint64_t seed) const {
  PRECONDOR_ASSIGN_OR_RETURN(DeviceMatrix x, backend_->Allocate(rows, cols));
  PRECONDOR_RETURN_IF_ERROR(backend_->FillNormal(CounterRandom({seed}), x.view()));
  return x;
}

absl::StatusOr<DeviceMatrix> CudaKernels::Symmetric(int64_t n, uint64_t seed) const {
  PRECONDOR_ASSIGN_OR_RETURN(DeviceMatrix x, Normal(n, n, seed));
  PRECONDOR_RETURN_IF_ERROR(backend_->Symmetrize(x.view()));
  return x;
}

absl::StatusOr<std::vector<float>> CudaKernels::ToHost(ConstMatrixView x) const {
  std::vector<float> host(x.size());
  PRECONDOR_RETURN_IF_ERROR(backend_->Download(x, MatrixView(host.data(), x.rows, x.cols)));
  return host;
}

absl::Status CudaKernels::CheckSymmetricUpdate(int64_t n, SymmetricStorage storage) const {
  PRECONDOR_ASSIGN_OR_RETURN(SymmetricMatrix m, backend_->AllocateSymmetric(n, storage));
  SymmetricTerms expected(n);
  PRECONDOR_ASSIGN_OR_RETURN(const DeviceMatrix v, Normal(1, n, 11));
  PRECONDOR_ASSIGN_OR_RETURN(DeviceMatrix y, backend_->Allocate(1, n));
  for (uint64_t step = 0; step < 3; ++step) {
    std::vector<double> weights(kTerms);
    for (size_t i = 0; i < weights.size(); ++i) weights[i] = .01 * (static_cast<double>(i) - 2);
    PRECONDOR_ASSIGN_OR_RETURN(const DeviceMatrix rows, Normal(kTerms, n, 12 + step));
    PRECONDOR_RETURN_IF_ERROR(backend_->SymmetricUpdateMultiply(.9, .1, weights, rows.view(), m, v.view(), y.view()));
    PRECONDOR_ASSIGN_OR_RETURN(const std::vector<float> terms, ToHost(rows.view()));
    expected.Update(.9, .1, weights, terms);
  }
  PRECONDOR_ASSIGN_OR_RETURN(const std::vector<float> got, ToHost(y.view()));
  PRECONDOR_ASSIGN_OR_RETURN(const std::vector<float> probe, ToHost(v.view()));
  // Three roundings of what is stored, 2^-11 and 2^-24 of an element; one tile left out is 1e-2 at n = 8192.
  return ExpectError(RelativeError(std::vector<double>(got.begin(), got.end()), expected.Times(probe)),
                     storage == SymmetricStorage::kF16 ? 2e-3 : 1e-5);
}

}  // namespace precondor
