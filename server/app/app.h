// SPDX-License-Identifier: Apache-2.0
// Runs one server process: makes the services that a configuration asks for, and shuts them down. main and tests use
// it.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"

#include "kernels/base/log.h"
#include "server/app/config.h"

namespace precondor {

// A running server. Thread-safe. Threads: gRPC's, a pool for arithmetic, a pool for control calls and those of the
// metrics port (docs/develop/threading.md).
class App {
 public:
  // Starts a server, which serves when this returns. `logger` must outlive the app. Returns Unavailable if a port is
  // taken or a device does not exist, and AlreadyExists if a socket's path is taken.
  static absl::StatusOr<std::unique_ptr<App>> Start(const ServerConfig& config, Logger& logger);
  // Stops the server without a drain unless Wait has returned.
  virtual ~App() = default;

  virtual int port() const = 0;  // first TCP port of gRPC; 0 means none
  // For each address of the configuration's `listen`, the address that processes on this host connect to.
  virtual const std::vector<std::string>& addresses() const = 0;
  virtual int metrics_port() const = 0;  // 0 means none
  virtual std::string metrics_text() const = 0;

  // Begins a drain: the server reports not ready and refuses new sessions. A `deadline` of zero means the
  // configuration's. Later calls have no effect.
  virtual void RequestDrain(absl::Duration deadline) = 0;
  // Blocks until a drain was requested and is complete: work in flight has finished or three quarters of the deadline
  // have passed, the services are shut down, and each layer's factors are in the data directory. Returns
  // DEADLINE_EXCEEDED with the names of the sessions that a restart cannot bring back as they are.
  virtual absl::Status Wait() = 0;
  virtual bool draining() const = 0;
};

}  // namespace precondor
