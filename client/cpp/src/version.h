// SPDX-License-Identifier: Apache-2.0
// Checks that client and server are of compatible releases.
#pragma once

#include "absl/status/status.h"
#include "absl/strings/string_view.h"

namespace precondor {

// Compares two versions "major.minor.patch". They are compatible if their majors are equal and, for major 0, their
// minors too. Returns FAILED_PRECONDITION otherwise, and for text of another form. The message has the server's
// address, both versions and what to do.
absl::Status CheckVersions(absl::string_view client, absl::string_view address, absl::string_view server);

}  // namespace precondor
