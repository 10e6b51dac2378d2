// SPDX-License-Identifier: Apache-2.0
// precondorctl snapshot restore: from the data directories of shards, wherever they are by now, to a new session.
#pragma once

#include "absl/status/statusor.h"

#include "client/cpp/tools/ctl_commands.h"
#include "client/cpp/tools/ctl_options.h"

namespace precondor {

// Everything that is sent has been read and checked before the server is asked for anything. DataLoss names a damaged
// file; otherwise the errors of FindStoredSession and the servers'.
absl::StatusOr<CtlOutput> RunRestore(const CtlOptions& options);

}  // namespace precondor
