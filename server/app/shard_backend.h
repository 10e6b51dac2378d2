// SPDX-License-Identifier: Apache-2.0
// Selects the device on which a shard computes.
#pragma once

#include <memory>
#include <string>

#include "absl/status/statusor.h"

#include "kernels/backend.h"
#include "kernels/base/log.h"
#include "server/app/config.h"
#include "server/store/file_system.h"

namespace precondor {

struct DeviceBackend {
  std::string name;  // "cuda:0"
  std::unique_ptr<Backend> backend;
};

// Returns the backend that config.backend asks for. "auto" means the CUDA device if it can be used, and otherwise the
// CPU; the log has the reason. "cuda" returns Unavailable with CUDA's reason if there is no device.
// A data directory records its backend, because replay must reproduce the numbers of earlier answers. With a recorded
// backend, "auto" means that one, or an error if it has no device. Another backend is FailedPrecondition. `fs` is used
// for the data directory.
absl::StatusOr<DeviceBackend> MakeShardBackend(const ServerConfig& config, store::FileSystem& fs, Logger& logger);

// Returns the bytes that sessions may reserve: config.memory_limit_bytes, or less if the device has less memory; then a
// warning is logged.
int64_t SessionCapacity(const ServerConfig& config, const DeviceBackend& device, Logger& logger);

// Parallelism of the arithmetic.
struct DeviceParallelism {
  int threads = 1;
  // Number of layers whose work may be in progress at one time, each on a fiber (ThreadPoolExecutor). 0 means one per
  // thread, without fibers.
  int layers = 0;
};

// Returns the parallelism that config.threads asks for, or a default for the backend and this machine. On a CUDA device
// config.threads bounds both numbers.
DeviceParallelism ParallelismOf(const ServerConfig& config, const DeviceBackend& device);

}  // namespace precondor
