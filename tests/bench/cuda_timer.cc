// SPDX-License-Identifier: Apache-2.0
#include "tests/bench/cuda_timer.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <cuda_profiler_api.h>
#include <functional>
#include <limits>
#include <vector>

#include "kernels/base/random.h"
#include "kernels/base/status_macros.h"
#include "kernels/cuda/cuda_status.h"
#include "kernels/cuda/device.h"
#include "tests/support/test_backend.h"

namespace precondor {

using cuda::ToStatus;

absl::StatusOr<std::unique_ptr<DeviceTimer>> DeviceTimer::Make(cudaStream_t stream) {
  std::unique_ptr<DeviceTimer> timer(new DeviceTimer(stream));
  for (cudaEvent_t* const event : {&timer->begin_, &timer->end_}) {
    PRECONDOR_RETURN_IF_ERROR(ToStatus("event", cudaEventCreateWithFlags(event, cudaEventDefault)));
  }
  return timer;
}

DeviceTimer::~DeviceTimer() {
  for (const cudaEvent_t event : {begin_, end_}) {
    if (event != nullptr) (void)cudaEventDestroy(event);
  }
}

absl::Status DeviceTimer::Begin() { return ToStatus("cudaEventRecord", cudaEventRecord(begin_, stream_)); }

absl::StatusOr<double> DeviceTimer::End() {
  PRECONDOR_RETURN_IF_ERROR(ToStatus("cudaEventRecord", cudaEventRecord(end_, stream_)));
  PRECONDOR_RETURN_IF_ERROR(ToStatus("cudaEventSynchronize", cudaEventSynchronize(end_)));
  float milliseconds = 0;
  PRECONDOR_RETURN_IF_ERROR(ToStatus("cudaEventElapsedTime", cudaEventElapsedTime(&milliseconds, begin_, end_)));
  return 1e-3 * static_cast<double>(milliseconds);
}

absl::StatusOr<Summary> TimeCalls(cudaStream_t stream, BenchMode mode, const std::function<absl::Status()>& work) {
  PRECONDOR_ASSIGN_OR_RETURN(const std::unique_ptr<DeviceTimer> timer, DeviceTimer::Make(stream));
  const auto timed = [&](int64_t calls) -> absl::StatusOr<double> {
    PRECONDOR_RETURN_IF_ERROR(timer->Begin());
    for (int64_t call = 0; call < calls; ++call) PRECONDOR_RETURN_IF_ERROR(work());
    return timer->End();
  };
  PRECONDOR_RETURN_IF_ERROR(timed(1).status());
  if (mode.profile) {
    PRECONDOR_RETURN_IF_ERROR(ProfileOnce(stream, work));
    return Summary();
  }
  int64_t calls = 1;
  if (!mode.is_short) {
    PRECONDOR_ASSIGN_OR_RETURN(const double once, timed(1));
    calls = std::clamp<int64_t>(static_cast<int64_t>(.05 / std::max(once, 1e-7)), 1, 10000);
  }
  std::vector<double> seconds;
  for (int repetition = 0; repetition < (mode.is_short ? 2 : 9); ++repetition) {
    PRECONDOR_ASSIGN_OR_RETURN(const double time, timed(calls));
    seconds.push_back(time / static_cast<double>(calls));
  }
  return Summarize(std::move(seconds));
}

absl::Status ProfileOnce(cudaStream_t stream, const std::function<absl::Status()>& work) {
  PRECONDOR_RETURN_IF_ERROR(ToStatus("cudaStreamSynchronize", cudaStreamSynchronize(stream)));
  PRECONDOR_RETURN_IF_ERROR(ToStatus("cudaProfilerStart", cudaProfilerStart()));
  PRECONDOR_RETURN_IF_ERROR(work());
  PRECONDOR_RETURN_IF_ERROR(ToStatus("cudaStreamSynchronize", cudaStreamSynchronize(stream)));
  return ToStatus("cudaProfilerStop", cudaProfilerStop());
}

CudaLimits::CudaLimits(BenchMode mode) : mode_(mode), backend_(MakeTestBackend()) {}

absl::StatusOr<std::vector<BenchRow>> CudaLimits::Measure() {
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

absl::StatusOr<Summary> CudaLimits::Time(const std::function<absl::Status()>& work) const {
  return TimeCalls(static_cast<cudaStream_t>(backend_->stream()), mode_, work);
}

// The backend has no bf16 matrices: cuBLAS itself, on a stream of its own.
absl::StatusOr<Summary> CudaLimits::TimeBf16Gemm(int64_t n) const {
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

absl::StatusOr<DeviceMatrix> CudaLimits::Normal(int64_t rows, int64_t cols, uint64_t seed) const {
  PRECONDOR_ASSIGN_OR_RETURN(DeviceMatrix x, backend_->Allocate(rows, cols));
  PRECONDOR_RETURN_IF_ERROR(backend_->FillNormal(CounterRandom({seed}), x.view()));
  return x;
}

}  // namespace precondor
