// SPDX-License-Identifier: Apache-2.0
// Access control for RPC methods: the roles that each method requires, and the callers to which an access file gives
// roles.
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

// A set of roles, one bit each. A worker trains in sessions; an operator administers them; a coordinator controls
// shards.
using Roles = uint8_t;
inline constexpr Roles kWorker = 1;
inline constexpr Roles kOperator = 2;
inline constexpr Roles kCoordinator = 4;
inline constexpr Roles kAnyRole = kWorker | kOperator | kCoordinator;

struct MethodRoles {
  absl::string_view method;  // in gRPC's form: /package.Service/Method
  Roles roles;               // the caller needs any one of these; 0 means that every caller may call the method
};
// Returns all methods that a server has. A server refuses calls of any other method.
absl::Span<const MethodRoles> MethodTable();

struct Caller {
  std::optional<std::string> token;  // the call's bearer token
  std::vector<std::string> names;    // the certificate's alternative names, or its common name if it has none
};

// Decides whether a caller may call a method. Immutable after Parse, and therefore thread-safe.
class AccessList {
 public:
  // Parses an access file. Each line describes one caller: its roles, separated by commas; "token" or "name"; and the
  // token or the name in the certificate. `@TENANT` after the roles makes the caller speak for that tenant instead of
  // for itself. Empty lines and lines that begin with # are ignored. Returns INVALID_ARGUMENT with `source` and the
  // line's number, but no token, if a line has another form or no line describes a caller.
  static absl::StatusOr<AccessList> Parse(absl::string_view text, absl::string_view source);

  // Returns OK if the caller has a role that the method requires, or the method is open to every caller. Returns
  // UNAUTHENTICATED if the caller's token is not listed, or if the caller has neither a listed token nor a listed name.
  // Returns PERMISSION_DENIED if the caller only has other roles. No message contains a token.
  absl::Status Check(absl::string_view method, const Caller& caller) const;
  // The roles of a caller, and the tenants that it speaks for, in the order of the access file. A tenant's text does
  // not reveal a token.
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
    Digest digest = {};  // of the token, if `is_token`
    std::string name;    // in the certificate, if not `is_token`
    Roles roles = 0;
    std::string tenant;
  };
  std::vector<Entry> entries_;
};

}  // namespace precondor::rpc
