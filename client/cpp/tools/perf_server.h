// SPDX-License-Identifier: Apache-2.0
// The server under test: a child process on loopback, or one that is there.
#pragma once

#include <memory>
#include <string>

#include "absl/status/statusor.h"

#include "client/cpp/tools/perf_options.h"

namespace precondor {

// One thread at a time. The destructor ends a child and waits for it.
class PerfServer {
 public:
  // Unavailable when a child does not open its port within 30 s.
  static absl::StatusOr<std::unique_ptr<PerfServer>> Start(const PerfOptions& options);
  ~PerfServer();

  const std::string& address() const { return address_; }
  // Resident bytes of the child; 0 for a server that was not started here.
  int64_t resident_bytes() const;

 private:
  PerfServer() = default;
  std::string address_;
  std::string folder_;  // of the child's port file
  int pid_ = 0;
};

}  // namespace precondor
