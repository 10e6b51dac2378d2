// SPDX-License-Identifier: Apache-2.0
// Runs the commands of precondorctl. Does no terminal I/O.
#pragma once

#include <string>

#include "absl/status/statusor.h"

#include "client/cpp/tools/ctl_options.h"

namespace precondor {

struct CtlOutput {
  std::string text;  // for standard output
  // False if the answer reports a problem: a service that is not serving, a shard that does not answer, a damaged
  // snapshot, a plan that does not fit.
  bool ok = true;
};

// Runs `options.command`. Returns the server's error, or Unavailable with the server's address.
absl::StatusOr<CtlOutput> RunCtlCommand(const CtlOptions& options);

}  // namespace precondor
