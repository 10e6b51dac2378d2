// SPDX-License-Identifier: Apache-2.0
#include "server/core/api/session_access.h"

#include <algorithm>
#include <unistd.h>

#include "kernels/base/check.h"

namespace precondor {
namespace {

constexpr size_t kSecretBytes = 16;

}  // namespace

SessionAccess SessionAccess::Make(const SessionCaller& opener) {
  SessionAccess access{.secret = std::string(kSecretBytes, '\0'), .tenants = {}};
  PRECONDOR_CHECK(getentropy(access.secret.data(), kSecretBytes) == 0);
  if (opener.tenants.has_value()) access.tenants = *opener.tenants;
  return access;
}

bool SessionAccess::IsShownBy(const SessionCaller& caller) const {
  if (!caller.outside || secret.empty()) return true;
  if (caller.secret.size() != secret.size()) return false;
  // Compares all bytes, also after one that differs.
  volatile unsigned difference = 0;
  for (size_t i = 0; i < secret.size(); ++i) {
    difference = difference | (static_cast<unsigned char>(secret[i]) ^ static_cast<unsigned char>(caller.secret[i]));
  }
  return difference == 0;
}

bool SessionAccess::Admits(const SessionCaller& caller) const {
  return IsShownBy(caller) || (caller.secret.empty() && IsForTenantOf(caller));
}

bool SessionAccess::IsForTenantOf(const SessionCaller& caller) const {
  if (!caller.outside || !caller.tenants.has_value() || tenants.empty()) return true;
  return std::find_first_of(tenants.begin(), tenants.end(), caller.tenants->begin(), caller.tenants->end()) !=
         tenants.end();
}

}  // namespace precondor
