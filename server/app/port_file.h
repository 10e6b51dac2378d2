// SPDX-License-Identifier: Apache-2.0
// Tells other programs which port a server has.
#pragma once

#include <string>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"

namespace precondor {

// Writes `port` and a newline to `path`, atomically, so that a reader never sees part of a number. Does nothing if
// `path` is empty. Returns Unavailable if the file cannot be written.
absl::Status WritePortFile(const std::string& path, absl::string_view port);

}  // namespace precondor
