// SPDX-License-Identifier: Apache-2.0
// The secret of a session, and the rules for who is given it. Lists and errors show the names, ids and incarnations of
// sessions, so these give no access to a session.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"

namespace precondor {

// The caller of an operation on a session. The default is this process itself, which needs no secret.
struct SessionCaller {
  static SessionCaller Showing(absl::string_view secret) {
    return {.outside = true, .secret = std::string(secret), .tenants = {}};
  }

  bool outside = false;     // not this process itself: the other fields count
  std::string secret = {};  // that the caller shows; empty if none
  // Tenants that the access file gives the caller. nullopt means all tenants: the server has no access control.
  std::optional<std::vector<std::string>> tenants = {};
  bool is_worker = false;    // has the role, where there is access control
  bool is_operator = false;  // may close every session
  // ShardDataPlane::state_generation() when the caller's stream began; nullopt if it has none.
  std::optional<uint64_t> stream_generation = {};
};

struct SessionAccess {
  std::string secret;                // empty if the session is of an earlier release, which had no secrets
  std::vector<std::string> tenants;  // whose callers get the secret; empty means every caller

  // Returns the access of a session that `opener` opens. The secret is 128 random bits of the operating system.
  static SessionAccess Make(const SessionCaller& opener);

  // Returns true if the caller shows the secret or needs none. The time of the comparison tells nothing about the
  // secret.
  bool IsShownBy(const SessionCaller& caller) const;
  // Returns true if IsShownBy, or if the caller shows no secret and may be given it.
  bool Admits(const SessionCaller& caller) const;
  // Returns true if the caller may be given the secret.
  bool IsForTenantOf(const SessionCaller& caller) const;
  bool operator==(const SessionAccess&) const = default;
};

// Returns PERMISSION_DENIED. `which` is the session's quoted name, or its id, as the caller gave it.
inline absl::Status NotTheirs(const absl::AlphaNum& which) {
  return absl::PermissionDeniedError(
      absl::StrCat("session ", which, ": expected the session's secret, or a caller of the job that has opened it"));
}

}  // namespace precondor
