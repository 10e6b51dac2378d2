// SPDX-License-Identifier: Apache-2.0
#include "client/cpp/src/version.h"

#include <optional>
#include <utility>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"

namespace precondor {
namespace {

// Returns what must be equal: the major version and, before 1.0, the minor version (else 0).
std::optional<std::pair<int, int>> Series(absl::string_view version) {
  const std::vector<absl::string_view> parts = absl::StrSplit(version, '.');
  int major = 0, minor = 0, patch = 0;
  if (parts.size() != 3 || !absl::SimpleAtoi(parts[0], &major) || !absl::SimpleAtoi(parts[1], &minor) ||
      !absl::SimpleAtoi(parts[2], &patch)) {
    return std::nullopt;
  }
  return std::pair(major, major == 0 ? minor : 0);
}

}  // namespace

absl::Status CheckVersions(absl::string_view client, absl::string_view address, absl::string_view server) {
  const std::optional<std::pair<int, int>> wanted = Series(client), got = Series(server);
  if (wanted.has_value() && wanted == got) return absl::OkStatus();
  return absl::FailedPreconditionError(
      absl::StrCat("server ", address, ": version mismatch: this client is Precondor ", client, ", the server is ",
                   server.empty() ? "one that does not say its version" : absl::StrCat("Precondor ", server),
                   ": install the same release on both sides (what goes together: the same major version, and before "
                   "1.0 the same minor version)"));
}

}  // namespace precondor
