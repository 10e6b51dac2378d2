// SPDX-License-Identifier: Apache-2.0
// One server process: configuration to running services and back down. Runs in tests as it does in main.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"

#include "kernels/base/log.h"
#include "server/config.h"

namespace precondor {

// Thread-safe. Threads: gRPC's, a pool for arithmetic, a pool for control calls, the metrics port's
// (docs/threading.md).
class App {
 public:
  // Serves when it returns. `logger` outlives the app. Unavailable: a port is taken, or no such device; AlreadyExists:
  // a socket's path is taken.
  static absl::StatusOr<std::unique_ptr<App>> Start(const ServerConfig& config, Logger& logger);
  // Ends at once, without a drain, if Wait has not returned.
  virtual ~App() = default;

  virtual int port() const = 0;  // the first of gRPC; 0: none
  // Of each of the configuration's `listen`, what its processes on this host dial.
  virtual const std::vector<std::string>& addresses() const = 0;
  virtual int metrics_port() const = 0;  // 0: none
  virtual std::string metrics_text() const = 0;

  // Begins to drain: not ready, no new sessions. `deadline` zero means the configuration's. The first call counts.
  virtual void RequestDrain(absl::Duration deadline) = 0;
  // Blocks until a drain is requested and done: work in flight finished or the deadline passed, services down.
  virtual void Wait() = 0;
  virtual bool draining() const = 0;
};

}  // namespace precondor
