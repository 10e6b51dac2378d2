// SPDX-License-Identifier: Apache-2.0
// Implements precondorctl snapshot restore: restores a session from the data directories of shards, which may have been
// moved, as a new session.
#pragma once

#include "absl/status/statusor.h"

#include "client/cpp/tools/ctl_options.h"
#include "client/cpp/tools/ctl_output.h"

namespace precondor {

// Reads and checks everything that it will send before it sends the first request. Returns DataLoss with the name of a
// damaged file, another error of FindStoredSession, or a server's error.
absl::StatusOr<CtlOutput> RunRestore(const CtlOptions& options);

}  // namespace precondor
