// SPDX-License-Identifier: Apache-2.0
#include "server/shard_backend.h"

#include <utility>

#include "kernels/base/status_macros.h"
#include "kernels/cpu/cpu_backend.h"
#include "kernels/cuda/cuda_module.h"

namespace precondor {
namespace {

absl::StatusOr<std::unique_ptr<Backend>> MakeCuda(const ServerConfig& config) {
  CudaBackendOptions options;
  options.device = static_cast<int>(config.cuda_device);
  return LoadCudaBackend(options);
}

// Asks for the driver first: without one, CUDA's libraries need not be loaded to learn that there is no device.
absl::StatusOr<std::unique_ptr<Backend>> FindCuda(const ServerConfig& config) {
  PRECONDOR_RETURN_IF_ERROR(FindCudaDriver());
  return MakeCuda(config);
}

}  // namespace

absl::StatusOr<std::unique_ptr<Backend>> MakeShardBackend(const ServerConfig& config, Logger& logger) {
  if (config.backend == "cuda") return MakeCuda(config);
  if (config.backend == "auto") {
    absl::StatusOr<std::unique_ptr<Backend>> cuda = FindCuda(config);
    if (cuda.ok()) {
      logger.Log(Severity::kInfo, "backend", {{"backend", "cuda"}, {"device", config.cuda_device}});
      return cuda;
    }
    logger.Log(Severity::kInfo, "backend", {{"backend", "cpu"}, {"reason", cuda.status().message()}});
  }
  return MakeCpuBackend(CpuBackendOptions());
}

}  // namespace precondor
