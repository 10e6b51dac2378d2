// SPDX-License-Identifier: Apache-2.0
#include "tests/bench/cuda_timer.h"

#include <algorithm>
#include <cstdint>
#include <cuda_profiler_api.h>
#include <vector>

#include "kernels/base/status_macros.h"
#include "kernels/cuda/cuda_status.h"

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

}  // namespace precondor
