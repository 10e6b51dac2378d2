// SPDX-License-Identifier: Apache-2.0
// gRPC's own log lines. It would write them to standard error, and wait for the reader.
#pragma once

#include "kernels/base/log.h"

namespace precondor::rpc {

// While it exists, gRPC's lines go to the logger. From then on they are dropped. One for a process.
class LibraryLog {
 public:
  // Lifetime: `logger` outlives this object.
  explicit LibraryLog(Logger& logger);
  ~LibraryLog();
  LibraryLog(const LibraryLog&) = delete;
  LibraryLog& operator=(const LibraryLog&) = delete;
};

}  // namespace precondor::rpc
