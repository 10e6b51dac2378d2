// SPDX-License-Identifier: Apache-2.0
// Runs the commands of precondorctl. Does no terminal I/O.
#pragma once

#include "absl/status/statusor.h"

#include "client/cpp/tools/ctl_options.h"
#include "client/cpp/tools/ctl_output.h"

namespace precondor {

// Runs `options.command`. Returns the server's error, or Unavailable with the server's address.
absl::StatusOr<CtlOutput> RunCtlCommand(const CtlOptions& options);

}  // namespace precondor
