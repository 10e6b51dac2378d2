// SPDX-License-Identifier: Apache-2.0
// The parts of cuda_bench: times on a device's stream, the device's limits, and the rows of a step.
#pragma once

#include <cuda_runtime_api.h>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

#include "kernels/backend.h"
#include "tests/bench/bench_rows.h"

namespace precondor {

// The stream's device must be the current one of the calling thread. Threads: one caller at a time.
class DeviceTimer {
 public:
  static absl::StatusOr<std::unique_ptr<DeviceTimer>> Make(cudaStream_t stream);
  ~DeviceTimer();
  DeviceTimer(const DeviceTimer&) = delete;
  DeviceTimer& operator=(const DeviceTimer&) = delete;

  // Puts the first event on the stream.
  absl::Status Begin();
  // Puts the second event on the stream and waits until the device has reached it. The seconds between the two.
  absl::StatusOr<double> End();

 private:
  explicit DeviceTimer(cudaStream_t stream) : stream_(stream) {}
  const cudaStream_t stream_;
  cudaEvent_t begin_ = nullptr, end_ = nullptr;
};

struct BenchMode {
  // Every step of the measurement once or twice, on small inputs: shows that it runs and is right.
  bool is_short = false;
  // One call after warming up, between cudaProfilerStart and cudaProfilerStop, for a profiler; untimed.
  bool profile = false;
};

// The seconds of one call of `work`, which puts work on `stream`: over 9 repetitions of as many calls as take about
// 50 ms, after one call that warms up.
absl::StatusOr<Summary> TimeCalls(cudaStream_t stream, BenchMode mode, const std::function<absl::Status()>& work);

// Runs `work` for a profiler that was started with "profile from start off", and waits for the stream.
absl::Status ProfileOnce(cudaStream_t stream, const std::function<absl::Status()>& work);

// The device's rates a second, as this process has measured them; 0: not measured.
struct DeviceLimits {
  double bytes = 0;       // of a copy, read and written
  double f32_flops = 0;   // of products in f32
  double bf16_flops = 0;  // of products in bf16, on tensor cores
};

class CudaLimits {
 public:
  explicit CudaLimits(BenchMode mode);

  // The rows of "limit/cuda/". Other rows have a limit only once this has succeeded.
  absl::StatusOr<std::vector<BenchRow>> Measure();

  DeviceLimits found() const { return {copied_per_second_, f32_per_second_, bf16_per_second_}; }
  absl::Status fault() const { return backend_->fault(); }

 private:
  absl::StatusOr<Summary> Time(const std::function<absl::Status()>& work) const;
  absl::StatusOr<Summary> TimeBf16Gemm(int64_t n) const;
  absl::StatusOr<DeviceMatrix> Normal(int64_t rows, int64_t cols, uint64_t seed) const;

  const BenchMode mode_;
  const std::unique_ptr<Backend> backend_;
  double copied_per_second_ = 0, f32_per_second_ = 0, bf16_per_second_ = 0;
};

// The steps there are, each the name of its first row: "step/cuda/low_rank_64".
std::vector<std::string> CudaStepNames(BenchMode mode);

// The rows of one of them. Answers are compared with the definition in doubles first; a wrong one aborts. None when a
// profiler measures.
std::vector<BenchRow> MeasureCudaStep(const std::string& name, BenchMode mode, const DeviceLimits& limits);

}  // namespace precondor
