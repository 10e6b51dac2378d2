// SPDX-License-Identifier: Apache-2.0
// Selects the devices on which a shard computes.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"

#include "kernels/backend.h"
#include "kernels/base/log.h"
#include "server/app/config.h"
#include "server/store/file_system.h"

namespace precondor {

struct DeviceBackend {
  std::string name;  // "cuda:0"
  std::unique_ptr<Backend> backend;
  int cuda_device = -1;  // CUDA's device number; -1 for a CPU
};

// Returns the backends that config.backend asks for: at least one, one per device, all of one kind. "auto" means CUDA
// devices if the configured ones can be used, and otherwise the CPU; the log has the reason. "cuda" returns Unavailable
// with CUDA's reason if there is no device.
// A data directory records its backend, because replay must reproduce the numbers of earlier answers. With a recorded
// backend, "auto" means that one, or an error if it has no device. Another backend is FailedPrecondition. `fs` is used
// for the data directory.
absl::StatusOr<std::vector<DeviceBackend>> MakeShardBackends(const ServerConfig& config, store::FileSystem& fs,
                                                             Logger& logger);

// Returns the bytes that sessions may reserve on each device: config.memory_limit_bytes, or less if some device has
// less memory; then a warning is logged.
int64_t SessionCapacity(const ServerConfig& config, const std::vector<DeviceBackend>& devices, Logger& logger);

// Parallelism of the arithmetic on one device.
struct DeviceParallelism {
  int threads = 1;
  // Number of layers whose work may be in progress at one time, each on a fiber (ThreadPoolExecutor). 0 means one per
  // thread, without fibers.
  int layers = 0;
};

// Returns the parallelism that config.threads asks for, or a default for the backends and this machine. On CUDA devices
// config.threads bounds both numbers.
DeviceParallelism ParallelismOf(const ServerConfig& config, const std::vector<DeviceBackend>& devices);

}  // namespace precondor
