// SPDX-License-Identifier: Apache-2.0
// What precondorctl does, apart from the terminal.
#pragma once

#include <string>

#include "absl/status/statusor.h"

#include "client/cpp/tools/ctl_options.h"

namespace precondor {

struct CtlOutput {
  std::string text;  // for standard output
  bool ok = true;    // false: the answer itself is bad news (not serving, a shard that does not answer)
};

// Runs `options.command`. Errors: the server's, or Unavailable naming its address.
absl::StatusOr<CtlOutput> RunCtlCommand(const CtlOptions& options);

}  // namespace precondor
