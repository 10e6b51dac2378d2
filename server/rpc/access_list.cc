// SPDX-License-Identifier: Apache-2.0
#include "server/rpc/access_list.h"

#include <algorithm>
#include <openssl/crypto.h>
#include <openssl/sha.h>
#include <utility>

#include "absl/algorithm/container.h"
#include "absl/strings/ascii.h"
#include "absl/strings/escaping.h"
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
    {"/precondor.v1.SessionService/CloseSession", kWorker | kOperator},  // a job closes its session when it ends
    {"/precondor.v1.PreconditionService/Exchange", kWorker},
    {"/precondor.v1.PreconditionService/ListMissingRanks", kWorker},
    {"/precondor.v1.AdminService/GetServerInfo", kAnyRole},  // each client's first call
    {"/precondor.v1.AdminService/ListSessions", kOperator},
    {"/precondor.v1.AdminService/GetLayerStats", kOperator},
    {"/precondor.v1.AdminService/GetMode", kOperator},
    {"/precondor.v1.AdminService/SetMode", kOperator},
    {"/precondor.v1.AdminService/Drain", kOperator},
    {"/precondor.v1.SnapshotService/CreateSnapshot", kOperator},
    {"/precondor.v1.SnapshotService/ListSnapshots", kOperator},
    {"/precondor.v1.SnapshotService/VerifySnapshot", kOperator},
    {"/precondor.v1.SnapshotService/RestoreSession", kWorker | kOperator},  // a job restores its own checkpoint
    {"/precondor.v1.SnapshotService/RestoreLayer", kWorker | kOperator},
    {"/precondor.v1.ShardService/DescribeShard", kCoordinator},
    {"/precondor.v1.ShardService/InstallSession", kCoordinator},
    {"/precondor.v1.ShardService/FenceSession", kCoordinator},
    {"/precondor.v1.ShardService/TakeSnapshot", kCoordinator},
    {"/precondor.v1.ShardService/RemoveSession", kCoordinator},
    {"/precondor.v1.ShardService/QuarantineSession", kCoordinator},
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

// Returns 0 if a role in `text` is unknown.
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
    const std::vector<absl::string_view> first = absl::StrSplit(words[0], absl::MaxSplits('@', 1));
    const bool labelled = first.size() == 2;
    Entry entry;
    entry.roles = ParseRoles(first[0]);
    entry.is_token = words.size() == 3 && words[1] == "token";
    const bool name = words.size() == 3 && words[1] == "name";
    if (entry.roles == 0 || !(entry.is_token || name) || (labelled && first[1].empty())) {
      return absl::InvalidArgumentError(absl::StrCat(source, " line ", number,
                                                     ": expected ROLES token TOKEN or ROLES name NAME, with worker, "
                                                     "operator and coordinator as roles, and after them @TENANT or "
                                                     "nothing"));
    }
    if (entry.is_token && words[2].size() < kLeastTokenBytes) {
      return absl::InvalidArgumentError(absl::StrCat(source, " line ", number, ": expected a token of at least ",
                                                     kLeastTokenBytes, " characters, got ", words[2].size()));
    }
    if (entry.is_token) {
      entry.digest = DigestOf(words[2]);
      const absl::string_view digest(reinterpret_cast<const char*>(entry.digest.data()), entry.digest.size());
      entry.tenant = absl::StrCat("token ", absl::BytesToHexString(digest));
    } else {
      entry.name = std::string(words[2]);
      entry.tenant = absl::StrCat("name ", words[2]);
    }
    if (labelled) entry.tenant = absl::StrCat("tenant ", first[1]);
    list.entries_.push_back(std::move(entry));
  }
  if (!list.entries_.empty()) return list;
  return absl::InvalidArgumentError(absl::StrCat(source, ": expected at least one caller, got none"));
}

// Compares digests in constant time, and checks all entries: the run time then reveals nothing about a listed token.
AccessList::Rights AccessList::RightsOf(const Caller& caller) const {
  const Digest digest = DigestOf(caller.token.value_or(""));
  Rights rights;
  for (const Entry& entry : entries_) {
    const bool matches = entry.is_token ? CRYPTO_memcmp(entry.digest.data(), digest.data(), digest.size()) == 0
                                        : absl::c_linear_search(caller.names, entry.name);
    if (!matches) continue;
    rights.roles |= entry.roles;
    rights.tenants.push_back(entry.tenant);
  }
  return rights;
}

absl::Status AccessList::Check(absl::string_view method, const Caller& caller) const {
  const auto* const row = std::find_if(std::begin(kMethods), std::end(kMethods),
                                       [&](const MethodRoles& known) { return known.method == method; });
  const Roles required = row == std::end(kMethods) ? Roles{0} : row->roles;
  if (row != std::end(kMethods) && required == 0) return absl::OkStatus();
  const std::string expected =
      required == 0 ? absl::StrCat(method, ": expected a method that some role may call")
                    : absl::StrCat(method, ": expected a caller with the role ", RoleText(required, " or "));
  const Roles roles = RightsOf(caller).roles;
  if (caller.token.has_value() && RightsOf({.token = caller.token, .names = {}}).roles == 0) {
    return absl::UnauthenticatedError(absl::StrCat(expected, ", got a token that is not listed"));
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
