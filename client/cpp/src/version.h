// SPDX-License-Identifier: Apache-2.0
// Which releases of client and server understand each other.
#pragma once

#include "absl/status/status.h"
#include "absl/strings/string_view.h"

namespace precondor {

// Versions "major.minor.patch" go together when their majors are the same and, for major 0, their minors as well.
// FailedPrecondition, naming the server's address, both and what to do, for others and for a text of another form.
absl::Status CheckVersions(absl::string_view client, absl::string_view address, absl::string_view server);

}  // namespace precondor
