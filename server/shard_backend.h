// SPDX-License-Identifier: Apache-2.0
// Which devices a shard computes on.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"

#include "kernels/backend.h"
#include "kernels/base/log.h"
#include "kernels/device_group.h"
#include "server/config.h"
#include "server/store/file_system.h"

namespace precondor {

struct DeviceBackend {
  std::string name;  // "cuda:0"
  std::unique_ptr<Backend> backend;
  int cuda_device = -1;  // as CUDA counts; -1: it is none
};

// What config.backend asks for, one a device: at least one, all of a kind. With "auto" CUDA devices where those asked
// for can be used, else the CPU, and the log says why.
// With "cuda" no device is an error: Unavailable, with CUDA's reason.
// A data directory remembers its backend, since what is replayed must give the numbers that were answered with: "auto"
// is that one from then on, or an error while there is no device for it; another one is FailedPrecondition. `fs` is
// where it lies.
absl::StatusOr<std::vector<DeviceBackend>> MakeShardBackends(const ServerConfig& config, store::FileSystem& fs,
                                                             Logger& logger);

// What the devices have layers together by that split; null where there is one device. CUDA devices are connected by
// NCCL where it is there, and through the host's memory where it is not, or once it has failed to connect them; the log
// says which. The backends and `logger` have to outlive it.
absl::StatusOr<std::unique_ptr<DeviceGroup>> MakeDeviceGroup(const std::vector<DeviceBackend>& devices, Logger& logger);

// Bytes that sessions may reserve on each device: config.memory_limit_bytes, or where a device has less for them, what
// that one has; the log says so.
int64_t SessionCapacity(const ServerConfig& config, const std::vector<DeviceBackend>& devices, Logger& logger);

// For the arithmetic of each device.
struct DeviceParallelism {
  int threads = 1;
  // Layers whose work may be under way at a time, each on a fiber (ThreadPoolExecutor); 0: one a thread, without
  // fibers.
  int layers = 0;
};

// What config.threads asks for, or what suits the backends and this machine. On CUDA devices config.threads bounds both
// numbers.
DeviceParallelism ParallelismOf(const ServerConfig& config, const std::vector<DeviceBackend>& devices);

}  // namespace precondor
