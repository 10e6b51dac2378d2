// SPDX-License-Identifier: Apache-2.0
// The server under test: a child process on loopback, or one that is already running.
#pragma once

#include <memory>
#include <string>

#include "absl/status/statusor.h"

#include "client/cpp/tools/perf_options.h"

namespace precondor {

// Owns the server under test. Not thread-safe. The destructor stops a child and waits for its end.
class PerfServer {
 public:
  // Starts options.server_binary, or takes the running server at options.server. Returns NotFound if the child cannot
  // be started, and Unavailable if it does not open its port within 30 s.
  static absl::StatusOr<std::unique_ptr<PerfServer>> Start(const PerfOptions& options);
  ~PerfServer();

  const std::string& address() const { return address_; }
  // Returns the child's resident memory in bytes; 0 for a server that was not started here.
  int64_t resident_bytes() const;
  // Returns the processor time in seconds that the child has used, in user and system mode; 0 likewise.
  double processor_seconds() const;

 private:
  PerfServer() = default;
  std::string address_;
  std::string folder_;  // folder of the child's port file
  int pid_ = 0;
};

}  // namespace precondor
