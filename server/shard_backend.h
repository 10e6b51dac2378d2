// SPDX-License-Identifier: Apache-2.0
// Which device a shard computes on.
#pragma once

#include <memory>

#include "absl/status/statusor.h"

#include "kernels/backend.h"
#include "kernels/base/log.h"
#include "server/config.h"
#include "server/store/file_system.h"

namespace precondor {

// What config.backend asks for. With "auto" a CUDA device where one can be used, else the CPU, and the log says why.
// With "cuda" no device is an error: Unavailable, with CUDA's reason.
// A data directory remembers its backend, since what is replayed must give the numbers that were answered with: "auto"
// is that one from then on, or an error while there is no device for it; another one is FailedPrecondition. `fs` is
// where it lies.
absl::StatusOr<std::unique_ptr<Backend>> MakeShardBackend(const ServerConfig& config, store::FileSystem& fs,
                                                          Logger& logger);

// Threads for its arithmetic: config.threads, or what suits the backend and this machine.
int ShardThreads(const ServerConfig& config, const Backend& backend);

}  // namespace precondor
