// SPDX-License-Identifier: Apache-2.0
// The output of a command of precondorctl.
#pragma once

#include <string>

namespace precondor {

struct CtlOutput {
  std::string text;  // for standard output
  // False if the answer reports a problem: a service that is not serving, a shard that does not answer, a damaged
  // snapshot, a plan that does not fit.
  bool ok = true;
};

}  // namespace precondor
