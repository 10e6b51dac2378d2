// SPDX-License-Identifier: Apache-2.0
#include "server/rpc/access_list.h"

#include <algorithm>
#include <openssl/crypto.h>
#include <openssl/sha.h>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"

#include "kernels/base/status_macros.h"

namespace precondor::rpc {
namespace {

constexpr size_t kLeastTokenBytes = 16;

constexpr std::array<std::pair<absl::string_view, Roles>, 3> kRoleNames = {
    {{"worker", kWorker}, {"operator", kOperator}, {"coordinator", kCoordinator}}};

constexpr MethodRoles kMethods[] = {
    {"/precondor.v1.SessionService/OpenSession", kWorker},
    {"/precondor.v1.SessionService/JoinSession", kWorker},
    {"/precondor.v1.SessionService/ReportStep", kWorker},
    {"/precondor.v1.SessionService/LeaveSession", kWorker},
    {"/precondor.v1.SessionService/CloseSession", kWorker | kOperator},  // a job closes its own at its end
    {"/precondor.v1.PreconditionService/Exchange", kWorker},
    {"/precondor.v1.PreconditionService/Precondition", kWorker},
    {"/precondor.v1.PreconditionService/JoinPlane", kWorker},
    {"/precondor.v1.AdminService/GetServerInfo", kAnyRole},  // each client's first call
    {"/precondor.v1.AdminService/ListSessions", kOperator},
    {"/precondor.v1.AdminService/GetLayerStats", kOperator},
    {"/precondor.v1.AdminService/GetMode", kOperator},
    {"/precondor.v1.AdminService/SetMode", kOperator},
    {"/precondor.v1.AdminService/ListQuarantinedSessions", kOperator},
    {"/precondor.v1.AdminService/AdoptSession", kOperator},
    {"/precondor.v1.AdminService/DeleteQuarantinedSession", kOperator},
    {"/precondor.v1.AdminService/Drain", kOperator},
    {"/precondor.v1.SnapshotService/CreateSnapshot", kOperator},
    {"/precondor.v1.SnapshotService/ListSnapshots", kOperator},
    {"/precondor.v1.SnapshotService/VerifySnapshot", kOperator},
    {"/precondor.v1.SnapshotService/RestoreSession", kOperator},
    {"/precondor.v1.SnapshotService/RestoreLayer", kOperator},
    {"/precondor.v1.ShardService/DescribeShard", kCoordinator},
    {"/precondor.v1.ShardService/InstallSession", kCoordinator},
    {"/precondor.v1.ShardService/FenceSession", kCoordinator},
    {"/precondor.v1.ShardService/HoldFactors", kCoordinator},
    {"/precondor.v1.ShardService/TakeSnapshot", kCoordinator},
    {"/precondor.v1.ShardService/RemoveSession", kCoordinator},
    {"/precondor.v1.ShardService/QuarantineSession", kCoordinator},
    {"/precondor.v1.ShardService/ListQuarantined", kCoordinator},
    {"/grpc.health.v1.Health/Check", 0},  // probes have no credentials
    {"/grpc.health.v1.Health/Watch", 0},
    {"/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo", kAnyRole},
};

std::string RoleText(Roles roles, absl::string_view separator) {
  std::vector<absl::string_view> names;
  for (const auto& [name, role] : kRoleNames) {
    if ((roles & role) != 0) names.push_back(name);
  }
  return absl::StrJoin(names, separator);
}

// 0 when one of them is unknown.
Roles ParseRoles(absl::string_view text) {
  Roles roles = 0;
  for (const absl::string_view part : absl::StrSplit(text, ',')) {
    const auto found =
        std::find_if(kRoleNames.begin(), kRoleNames.end(), [&](const auto& r) { return r.first == part; });
    if (found == kRoleNames.end()) return 0;
    roles |= found->second;
  }
  return roles;
}

}  // namespace

absl::Span<const MethodRoles> MethodTable() { return kMethods; }

AccessList::Digest AccessList::DigestOf(absl::string_view token) {
  Digest digest;
  SHA256(reinterpret_cast<const uint8_t*>(token.data()), token.size(), digest.data());
  return digest;
}

absl::StatusOr<AccessList> AccessList::Parse(absl::string_view text, absl::string_view source) {
  AccessList list;
  int number = 0;
  for (absl::string_view line : absl::StrSplit(text, '\n')) {
    ++number;
    line = absl::StripAsciiWhitespace(line);
    if (line.empty() || line.front() == '#') continue;
    const std::vector<absl::string_view> words = absl::StrSplit(line, absl::ByAnyChar(" \t"), absl::SkipEmpty());
    const Roles roles = ParseRoles(words[0]);
    const bool token = words.size() == 3 && words[1] == "token";
    const bool name = words.size() == 3 && words[1] == "name";
    if (roles == 0 || !(token || name)) {
      return absl::InvalidArgumentError(absl::StrCat(
          source, " line ", number,
          ": expected ROLES token TOKEN or ROLES name NAME, with worker, operator and coordinator as roles"));
    }
    if (name) {
      list.names_[std::string(words[2])] |= roles;
      continue;
    }
    if (words[2].size() < kLeastTokenBytes) {
      return absl::InvalidArgumentError(absl::StrCat(source, " line ", number, ": expected a token of at least ",
                                                     kLeastTokenBytes, " characters, got ", words[2].size()));
    }
    list.tokens_.emplace_back(DigestOf(words[2]), roles);
  }
  if (!list.tokens_.empty() || !list.names_.empty()) return list;
  return absl::InvalidArgumentError(absl::StrCat(source, ": expected at least one caller, got none"));
}

// Compares digests, and with all of them, so that the time tells nothing of a listed token.
Roles AccessList::RolesOfToken(absl::string_view token) const {
  const Digest digest = DigestOf(token);
  Roles roles = 0;
  for (const auto& [listed, listed_roles] : tokens_) {
    if (CRYPTO_memcmp(listed.data(), digest.data(), digest.size()) == 0) roles |= listed_roles;
  }
  return roles;
}

absl::Status AccessList::Check(absl::string_view method, const Caller& caller) const {
  const auto* const row = std::find_if(std::begin(kMethods), std::end(kMethods),
                                       [&](const MethodRoles& known) { return known.method == method; });
  const Roles required = row == std::end(kMethods) ? Roles{0} : row->roles;
  if (row != std::end(kMethods) && required == 0) return absl::OkStatus();
  const std::string expected =
      required == 0 ? absl::StrCat(method, ": expected a method that some role may call")
                    : absl::StrCat(method, ": expected a caller with the role ", RoleText(required, " or "));
  Roles roles = 0;
  for (const std::string& name : caller.names) {
    if (const auto found = names_.find(name); found != names_.end()) roles |= found->second;
  }
  if (caller.token.has_value()) {
    const Roles of_token = RolesOfToken(*caller.token);
    if (of_token == 0) return absl::UnauthenticatedError(absl::StrCat(expected, ", got a token that is not listed"));
    roles |= of_token;
  }
  if (roles == 0) {
    return absl::UnauthenticatedError(
        absl::StrCat(expected, ", got no token and ", caller.names.empty() ? "no certificate" : "a certificate of ",
                     absl::StrJoin(caller.names, ", "), caller.names.empty() ? "" : ", which is not listed"));
  }
  if ((roles & required) != 0) return absl::OkStatus();
  return absl::PermissionDeniedError(absl::StrCat(expected, ", got ", RoleText(roles, ", ")));
}

}  // namespace precondor::rpc
