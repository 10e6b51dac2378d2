// SPDX-License-Identifier: Apache-2.0
// Who may call which method: the roles that methods require, and the callers that an access file gives roles.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"

namespace precondor::rpc {

// Sets of roles. A worker trains in sessions; an operator administers them; a coordinator controls shards.
using Roles = uint8_t;
inline constexpr Roles kWorker = 1;
inline constexpr Roles kOperator = 2;
inline constexpr Roles kCoordinator = 4;
inline constexpr Roles kAnyRole = kWorker | kOperator | kCoordinator;

struct MethodRoles {
  absl::string_view method;  // as gRPC writes it: /package.Service/Method
  Roles roles;               // any one of them suffices; none: the method is open to every caller
};
// Every method that a server has. A method that is not here is refused to every caller.
absl::Span<const MethodRoles> MethodTable();

struct Caller {
  std::optional<std::string> token;  // the bearer token that came with the call
  std::vector<std::string> names;    // of its certificate: alternative names, or if it has none the common name
};

// Immutable, and so thread-safe.
class AccessList {
 public:
  // One line a caller: roles with commas between, "token" or "name", and the token or the certificate's name. `@TENANT`
  // after the roles: the caller speaks for this tenant, and otherwise for itself. Empty lines and lines that begin with
  // # count for nothing. InvalidArgument names `source` and the line, and no token.
  static absl::StatusOr<AccessList> Parse(absl::string_view text, absl::string_view source);

  // OK: the caller has a role that the method requires. Unauthenticated: the caller's token is not listed, or the
  // caller has neither a listed token nor a listed name. PermissionDenied: it has other roles. Messages hold no token.
  absl::Status Check(absl::string_view method, const Caller& caller) const;
  // The caller's roles, and in the order of the file the tenants that it speaks for, in a form that tells no token.
  struct Rights {
    Roles roles = 0;
    std::vector<std::string> tenants;
  };
  Rights RightsOf(const Caller& caller) const;

 private:
  using Digest = std::array<uint8_t, 32>;  // SHA-256
  static Digest DigestOf(absl::string_view token);
  struct Entry {
    bool is_token = false;
    Digest digest = {};  // of a token
    std::string name;    // otherwise
    Roles roles = 0;
    std::string tenant;
  };
  std::vector<Entry> entries_;
};

}  // namespace precondor::rpc
