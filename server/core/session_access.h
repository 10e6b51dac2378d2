// SPDX-License-Identifier: Apache-2.0
// The secret of a session, and who is given it. Names, ids and incarnations of a session are in lists and in errors: a
// process that has those alone gets nothing of it.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"

namespace precondor {

// Who asks for something of a session. By default this process itself, which is asked for nothing.
struct SessionCaller {
  static SessionCaller Showing(absl::string_view secret) {
    return {.outside = true, .secret = std::string(secret), .tenants = {}};
  }

  bool outside = false;     // what follows counts
  std::string secret = {};  // that it shows; empty: none
  // Of an access file: those that it speaks for. nullopt: there is no access control, all.
  std::optional<std::vector<std::string>> tenants = {};
  bool is_operator = false;  // may close every session
};

struct SessionAccess {
  std::string secret;                // empty: of an earlier release, which asked for none
  std::vector<std::string> tenants;  // whose callers get the secret; empty: every worker

  // Of a session that `opener` opens: 128 random bits of the operating system.
  static SessionAccess Make(const SessionCaller& opener);

  // The caller shows the secret. Compares in a time that tells nothing of it.
  bool IsShownBy(const SessionCaller& caller) const;
  // The caller shows the secret; or shows none, and may be given it.
  bool Admits(const SessionCaller& caller) const;
  // The caller may be given the secret.
  bool IsForTenantOf(const SessionCaller& caller) const;
  bool operator==(const SessionAccess&) const = default;
};

// PermissionDenied. `which`: a quoted name, or an id, as the caller gave it.
inline absl::Status NotTheirs(const absl::AlphaNum& which) {
  return absl::PermissionDeniedError(
      absl::StrCat("session ", which, ": expected the session's secret, or a caller of the job that has opened it"));
}

}  // namespace precondor
