// SPDX-License-Identifier: Apache-2.0
// Times work on a CUDA stream with a pair of events, so that a result is the device's time and not the host's.
#pragma once

#include <cuda_runtime_api.h>
#include <functional>
#include <memory>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

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

}  // namespace precondor
